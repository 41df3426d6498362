"""
The objects that Python's garbage collector tracks, by their class.

`gc.get_objects` takes a reference to each. A thread that makes a tuple of a generator has it tracked before it is whole, and fails with
"SystemError: bad argument to internal function" if another reference is there when it cuts it to its length (`_PyTuple_Resize`). So the
references are taken and given back inside one call into C, in which no other thread runs, except those to the objects that are asked for.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from typing import Any


def objects_of_classes(classes: Iterable[type]) -> list[Any]:
    """Return the objects whose class is one of *classes* itself. A million objects take no second, and none is asked what it is."""
    identities = frozenset(map(id, classes))
    every = itertools.chain.from_iterable(map(gc.get_objects, (None,)))
    twice = itertools.chain.from_iterable(map(itertools.repeat, every, itertools.repeat(2)))  # one to take, one to know its class by
    was_enabled = gc.isenabled()
    gc.disable()  # what a collection ends may run Python code, and let other threads run
    try:
        return list(itertools.compress(twice, map(identities.__contains__, map(id, map(type, twice)))))
    finally:
        if was_enabled:
            gc.enable()

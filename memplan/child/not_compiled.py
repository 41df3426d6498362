"""
Functions that torch.compile leaves alone.

A compiled program calls the recorder in the middle of what Dynamo follows: where it reads a value, Dynamo would go on into the recorder,
warn of what it finds there, and use up the recompilations that the program has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_SKIPPED = "<frozen importlib._memplan>"
"""Named as the file of a function that Dynamo skips (SKIP_DIRS in its trace_rules.py; in 2.1 skipfiles.py)."""


def not_followed(function: Any) -> Any:
    """Have Dynamo skip *function*, a closure of the recorder's own; what it calls may be compiled."""
    function.__code__ = function.__code__.replace(co_filename=_SKIPPED)
    return function


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return *function* as one that Dynamo leaves alone with all that it calls. Dynamo need not be imported for that."""
    set_callback: Any = torch._C._dynamo.eval_frame.set_eval_frame

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        before = set_callback(None)
        try:
            return function(*arguments, **keywords)
        finally:
            set_callback(before)

    return not_followed(call)

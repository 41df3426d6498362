"""The objects of a process can be looked through while other threads make theirs."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from memplan.child.tracked_objects import objects_of_classes
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.standin.build import build
from memplan.standin.launch import environment_for
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

ON_THE_SIMULATED_GPU = """
from memplan.child import tracked_objects
from tests.child import test_tracked_objects as tests

assert tracked_objects._of_the_simulated_gpu() is not None
tests.test_the_objects_of_a_class_are_found_and_no_others()
tests.test_looking_through_objects_leaves_the_collector_as_it_was()
tests.test_a_thread_can_make_tuples_of_generators_meanwhile()
kinds = {type(each) for each in tracked_objects.gc.get_objects()}
for few in (kinds, set(), {type}, {dict}):
    identities = frozenset(map(id, few))
    found = tracked_objects._of_the_simulated_gpu()(identities)
    there = {id(each) for each in tracked_objects._by_itertools(identities)}
    assert len(found) > 1000 or few != kinds
    assert {id(each) for each in found} - {id(found)} <= there, few
    assert len(there) - len(found) < 10, few
"""


class Kind:
    """A class to be found."""


class DerivedKind(Kind):
    """Derived from one that is looked for."""


class Pretender:
    """What says that it is of another class."""

    __class__ = Kind  # type: ignore[assignment]


def test_the_objects_of_a_class_are_found_and_no_others():
    """An object counts by its own class: not by what it derives from, nor by what it says of itself."""
    kept = [Kind(), DerivedKind(), Pretender(), Kind()]

    assert {*map(id, objects_of_classes([Kind]))} == {id(kept[0]), id(kept[3])}
    assert len(objects_of_classes([Kind, DerivedKind])) == 3


def test_looking_through_objects_leaves_the_collector_as_it_was():
    """Collections go on afterwards, and stay off where the program has switched them off."""
    objects_of_classes([Kind])
    assert gc.isenabled()

    gc.disable()
    try:
        objects_of_classes([Kind])
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_thread_can_make_tuples_of_generators_meanwhile():
    """A tuple that is not whole yet has one reference, its maker's, whenever that runs: another would be a SystemError there."""
    errors: list[BaseException] = []
    has_ended = threading.Event()

    def items() -> Iterator[int]:
        for number in range(30):  # more than the ten that Python makes room for at first: the tuple is resized twice
            yield sum(range(200)) + number

    def make_tuples() -> None:
        try:
            while not has_ended.is_set():
                assert len(tuple(items())) == 30
        except BaseException as error:
            errors.append(error)

    makers = [threading.Thread(target=make_tuples) for _ in range(2)]
    for maker in makers:
        maker.start()
    for _ in range(20):
        objects_of_classes([Kind])
    has_ended.set()
    for maker in makers:
        maker.join()

    assert errors == []


def test_what_the_simulated_gpu_has_for_it_does_the_same(torch_build: TorchBuild):
    """In a process with the simulated GPU a function in C looks through the objects: it finds those, and keeps to the same rules."""
    environment = environment_for([find_gpu("t4")], build(torch_build), context_bytes=0, inherited={})

    done = subprocess.run(
        [sys.executable, "-c", ON_THE_SIMULATED_GPU],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")

"""The objects of a process can be looked through while other threads make theirs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

from memplan.child.tracked_objects import objects_of_classes


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

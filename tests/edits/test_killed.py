"""Killed at any step, an apply or undo leaves files that are old or new, and undo puts every one back.

Real processes and a real SIGKILL. The steps are those of `Files`: before each write, in the middle of each, before each rename.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from memplan.edits.apply import apply, prepare, undo
from memplan.edits.backups import read_journals
from memplan.errors import ConfigError, UsageError
from tests.edits.conftest import NEW, OLD, Victims, edits_in, moment, write_old
from tests.edits.faults import configs, leftovers

IN_PLACE = "sub/b.yaml"
"""Has a second name where files are to be written in place."""

both_roads = pytest.mark.parametrize("in_place", [False, True], ids=["renamed", "in place"])


def fresh(parent: Path, number: int, *, in_place: bool) -> Path:
    """Return a new folder with the old files."""
    folder = write_old(parent / str(number))
    if in_place:
        (parent / f"{number}.second-name").hardlink_to(folder / IN_PLACE)
    return folder


def applied(parent: Path, number: int, *, in_place: bool) -> Path:
    """Return a new folder where the edits have been applied."""
    folder = fresh(parent, number, in_place=in_place)
    apply(prepare(edits_in(folder)), root=folder, now=moment())
    return folder


def kills(victims: Victims, action: str, folders: Iterator[Path]) -> Iterator[Path]:
    """Kill *action* at every step, each in a folder of its own; yield the folders until it survives."""
    for number, folder in enumerate(folders):
        if not victims.run(action, folder, kill_at=number):
            assert number > 10  # the loop has killed something
            return
        yield folder
        shutil.rmtree(folder)


def assert_each_is_old_or_new(folder: Path, *, in_place: bool) -> None:
    """A kill can tear a file only where it is written in place, and undo knows of that."""
    found = configs(folder)
    assert found.keys() == OLD.keys()
    for name, data in found.items():
        if not (in_place and name == IN_PLACE):
            assert data in (OLD[name], NEW[name]), name


def assert_refuses_to_apply(folder: Path) -> None:
    """While a journal says that files may be half done, an apply asks for an undo first, and writes nothing."""
    before = configs(folder)
    change = prepare(edits_in(write_old(folder.with_name("other"))))
    with pytest.raises(ConfigError, match="interrupted") as caught:
        apply(change, root=folder, now=moment())
    assert "memplan undo" in (caught.value.hint or "")
    assert configs(folder) == before


def assert_undone(folder: Path) -> None:
    """Undo where there is something to undo: then every file is old."""
    if any(journal.state != "undone" for _, journal in read_journals(folder)):
        undo(folder)
    assert configs(folder) == OLD
    assert not list(folder.rglob(".*.memplan-new"))
    with pytest.raises(UsageError, match="nothing to undo"):
        undo(folder)


def assert_can_apply(folder: Path) -> None:
    """A new apply works as if nothing had been, and can be undone."""
    apply(prepare(edits_in(folder)), root=folder, now=moment())
    assert configs(folder) == NEW
    undo(folder)
    assert configs(folder) == OLD


@both_roads
def test_a_killed_apply_can_be_undone_and_made_again(fast_disk: Path, victims: Victims, in_place: bool):
    """Each file is old or new after the kill (one written in place: after the undo), and nothing is lost."""
    num_interrupted = 0
    for folder in kills(victims, "apply", (fresh(fast_disk, number, in_place=in_place) for number in count())):
        assert_each_is_old_or_new(folder, in_place=in_place)
        if read_journals(folder):
            num_interrupted += 1
            assert_refuses_to_apply(folder)
        assert_undone(folder)
        assert_can_apply(folder)

    assert num_interrupted > 10


@pytest.mark.heavy
@both_roads
def test_a_killed_undo_can_be_finished(fast_disk: Path, victims: Victims, in_place: bool):
    """A second undo goes on where the killed one stopped."""
    for folder in kills(victims, "undo", (applied(fast_disk, number, in_place=in_place) for number in count())):
        assert_each_is_old_or_new(folder, in_place=in_place)
        assert_undone(folder)
        assert_can_apply(folder)


@pytest.mark.heavy
@both_roads
def test_a_killed_undo_of_a_killed_apply_can_be_finished(fast_disk: Path, victims: Victims, in_place: bool):
    """Killed twice: for each step of the apply, at one step of the undo."""
    num_killed_twice = 0
    for number, folder in enumerate(kills(victims, "apply", (fresh(fast_disk, number, in_place=in_place) for number in count()))):
        if read_journals(folder):
            num_killed_twice += victims.run("undo", folder, kill_at=number * 5 % 13)
            assert_each_is_old_or_new(folder, in_place=in_place)
            assert_undone(folder)

    assert num_killed_twice > 5


@pytest.mark.heavy
def test_the_apply_after_a_kill_clears_up(fast_disk: Path, victims: Victims):
    """A half-made copy of a killed process does not stay beside the user's files for ever."""
    for folder in kills(victims, "apply", (fresh(fast_disk, number, in_place=False) for number in count())):
        assert_undone(folder)
        assert_can_apply(folder)

        assert [name for name in leftovers(folder) if not name.startswith(".memplan/")] == []

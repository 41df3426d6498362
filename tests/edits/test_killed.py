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

Folder = Path


def fresh(parent: Path, number: int, *, in_place: bool) -> Path:
    """Return a new folder with the old files."""
    folder = write_old(parent / str(number))
    if in_place:
        (parent / f"{number}.second-name").hardlink_to(folder / IN_PLACE)
    return folder


def kills(victims: Victims, action: str, folders: Iterator[Path]) -> Iterator[Path]:
    """Kill *action* at every step, each in a folder of its own; yield the folders until it survives."""
    for number, folder in zip(count(), folders, strict=False):
        if not victims.run(action, folder, kill_at=number):
            assert number > 10  # the loop has killed something
            return
        yield folder
        shutil.rmtree(folder)


def assert_each_is_old_or_new(folder: Path, *, in_place: bool) -> None:
    for name, data in configs(folder).items():
        if not (in_place and name == IN_PLACE):
            assert data in (OLD[name], NEW[name]), name


def assert_undone(folder: Path) -> None:
    """Undo until nothing is left: every file is old."""
    if any(journal.state != "undone" for _, journal in read_journals(folder)):
        undo(folder)
    assert configs(folder) == OLD
    assert not list(folder.rglob(".*.memplan-new"))
    with pytest.raises(UsageError, match="nothing to undo"):
        undo(folder)


def assert_can_apply(folder: Path) -> None:
    """A new apply works and clears up what the killed one left."""
    apply(prepare(edits_in(folder)), root=folder, now=moment())
    assert configs(folder) == NEW
    assert not [name for name in leftovers(folder) if ".memplan/" not in name]
    undo(folder)
    assert configs(folder) == OLD


@pytest.mark.parametrize("in_place", [False, True], ids=["renamed", "in place"])
def test_a_killed_apply_can_be_undone_and_made_again(tmp_path: Path, victims: Victims, in_place: bool):
    """Each file is old or new after the kill (one written in place: after the undo), and nothing is lost."""
    folders = (fresh(tmp_path, number, in_place=in_place) for number in count())
    for folder in kills(victims, "apply", folders):
        assert_each_is_old_or_new(folder, in_place=in_place)
        assert_undone(folder)
        assert_can_apply(folder)


@pytest.mark.parametrize("in_place", [False, True], ids=["renamed", "in place"])
def test_nothing_is_applied_over_a_killed_apply(tmp_path: Path, victims: Victims, in_place: bool):
    """Where a journal says that files may be half done, the next apply asks for an undo first."""
    refused = 0
    folders = (fresh(tmp_path, number, in_place=in_place) for number in count())
    for folder in kills(victims, "apply", folders):
        if not read_journals(folder):
            continue
        before = configs(folder)
        with pytest.raises(ConfigError, match="interrupted"):
            apply(prepare([edit for edit in edits_in(write_old(tmp_path / "other"))]), root=folder, now=moment())
        assert configs(folder) == before
        refused += 1

    assert refused > 10


@pytest.mark.parametrize("in_place", [False, True], ids=["renamed", "in place"])
def test_a_killed_undo_can_be_finished(tmp_path: Path, victims: Victims, in_place: bool):
    """A second undo goes on where the killed one stopped."""

    def applied() -> Iterator[Path]:
        for number in count():
            folder = fresh(tmp_path, number, in_place=in_place)
            apply(prepare(edits_in(folder)), root=folder, now=moment())
            yield folder

    for folder in kills(victims, "undo", applied()):
        assert_each_is_old_or_new(folder, in_place=in_place)
        assert_undone(folder)
        assert_can_apply(folder)


@pytest.mark.parametrize("in_place", [False, True], ids=["renamed", "in place"])
def test_a_killed_undo_of_a_killed_apply_can_be_finished(tmp_path: Path, victims: Victims, in_place: bool):
    """Two kills, at every pair of steps where the first left something to undo."""
    for first in count():
        survived = False
        for second in count():
            folder = fresh(tmp_path, first * 1000 + second, in_place=in_place)
            survived = not victims.run("apply", folder, kill_at=first)
            if survived or not read_journals(folder) or not victims.run("undo", folder, kill_at=second):
                break
            assert_each_is_old_or_new(folder, in_place=in_place)
            assert_undone(folder)
            shutil.rmtree(folder)
        if survived:
            break

"""Edits of JSON files on a system where any one call fails: every file is old or new, and can be put back."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from memplan.edits.apply import apply, prepare, undo
from memplan.edits.backups import read_journals
from memplan.edits.edit import Edit
from memplan.errors import ConfigError
from tests.edits.conftest import moment
from tests.edits.faults import Snapshot, answer_or_error, configs
from tests.edits.system_calls import FailingCalls

OLD: Snapshot = {
    "ds.json": b'{\r\n\t"train_micro_batch_size_per_gpu": 4,\r\n\t"fp16": {"enabled": true}\r\n}',
    "sub/bom.json": b'\xef\xbb\xbf{\n  "batch": [1, 4]\n}\n',
}
"""Tabs and CRLF without a last newline, as DeepSpeed's examples have them; a byte order mark."""
NEW: Snapshot = {name: data.replace(b"4", b"16") for name, data in OLD.items()}


def fresh(parent: Path, number: int) -> Path:
    """Return a new folder with the old files, of which one has a second name and is written in place."""
    folder = parent / str(number) / "conf"
    for name, data in OLD.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    folder.with_name("second-name").hardlink_to(folder / "sub/bom.json")
    return folder


def change(folder: Path, *, minutes: int = 0) -> None:
    edits = [Edit(folder / "ds.json", ("train_micro_batch_size_per_gpu",), 16), Edit(folder / "sub/bom.json", ("batch", "1"), 16)]
    apply(prepare(edits), root=folder, now=moment(minutes))


def each_call(parent: Path, *, code: int, act: Callable[[Path], object], begin: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """Let every system call of *act* fail once, each in a folder of its own; yield the folders. Only errors for users come out."""
    for number in count():
        folder = fresh(parent, number)
        if begin is not None:
            begin(folder)
        calls = FailingCalls(number, code)
        with calls.at_work():
            answer_or_error(lambda folder=folder: act(folder))  # type: ignore[misc]
        yield folder
        if number >= len(calls.made):
            assert number > 60
            return


def put_back(folder: Path) -> None:
    """Undo where something is to be undone."""
    if any(journal.state != "undone" for _, journal in read_journals(folder)):
        undo(folder)


@pytest.mark.heavy
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_whichever_call_of_an_apply_fails_the_files_can_be_put_back(fast_disk: Path, code: int) -> None:
    """No file is half done once undone, none is lost, no traceback, and a further apply and undo work."""
    for folder in each_call(fast_disk, code=code, act=change):
        for data in configs(folder).values():
            json.loads(data.decode("utf-8-sig"))
        put_back(folder)
        assert configs(folder) == OLD

        change(folder, minutes=1)
        assert configs(folder) == NEW
        undo(folder)
        assert configs(folder) == OLD


@pytest.mark.heavy
def test_whichever_call_of_an_undo_fails_the_next_one_finishes(fast_disk: Path) -> None:
    """Each file is then the old one."""
    for folder in each_call(fast_disk, code=errno.EIO, act=undo, begin=change):
        put_back(folder)

        assert configs(folder) == OLD


def test_a_call_that_fails_is_the_one_that_was_chosen(fast_disk: Path) -> None:
    """The harness itself: the first write of a run fails, the calls before it are those of a run without faults, and the files are old."""
    change(fresh(fast_disk, 2))  # imports what is imported late
    undisturbed, folder = FailingCalls(None), fresh(fast_disk, 0)
    with undisturbed.at_work():
        change(folder)
    first_write = undisturbed.made.index("write")
    calls = FailingCalls(first_write, errno.ENOSPC)
    folder = fresh(fast_disk, 1)

    with pytest.raises(ConfigError, match="No space left on device"), calls.at_work():
        change(folder)

    assert calls.made[: first_write + 1] == undisturbed.made[: first_write + 1]
    assert {"open", "read", "write", "fsync", "close", "stat", "unlink", "link", "flock"} <= set(undisturbed.made)
    assert configs(folder) == OLD

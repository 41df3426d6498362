"""The cache of rehearsals: what is kept, what goes, and several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memplan.estimators.rehearsal_cache import RehearsalCache, write_whole
from memplan.execution.rehearsal import Rehearsal
from tests.conftest import RehearserOf

STEPS = Path(__file__).parents[1] / "child" / "steps.py"


@pytest.fixture(scope="module")
def rehearsal(rehearser_of: RehearserOf) -> Rehearsal:
    """A real one, with its trace."""
    return rehearser_of(f"{STEPS}:mlp").rehearse(gpu="t4")


def bytes_of(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def age(path: Path, written: float) -> None:
    """Let *path* and all in it have been written at that time."""
    for each in (*path.rglob("*"), path):
        os.utime(each, (written, written))


def test_what_is_put_can_be_had(tmp_path: Path, rehearsal: Rehearsal) -> None:
    """The rehearsal, its trace and what was worked out of it; put once more, it takes the place of the first."""
    kept = RehearsalCache(tmp_path)

    assert kept.put("family", 1, rehearsal)
    assert kept.put("family", 1, rehearsal)
    kept.put_answers("family", 1, {"how much?": {"bytes": 1}})

    assert kept.get("family", 1) == rehearsal.model_copy(update={"trace": None, "read_files": (), "first_dimensions": ()})
    assert kept.get_trace("family", 1) == rehearsal.trace
    assert kept.get_answers("family", 1) == {"how much?": {"bytes": 1}}
    assert [path.name for path in (tmp_path / "rehearsals" / "family").iterdir()] == ["1"]


def test_answers_are_kept_only_beside_their_rehearsal(tmp_path: Path, rehearsal: Rehearsal) -> None:
    """Another process may have removed it; the cache is written to all the same."""
    kept = RehearsalCache(tmp_path)

    kept.put_answers("family", 1, {"how much?": {"bytes": 1}})

    assert kept.get_answers("family", 1) == {}
    assert kept.put("family", 1, rehearsal)


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearsal: Rehearsal) -> None:
    """Whole: the rehearsal with its trace and its answers; files of an earlier memplan as well."""
    kept, folder = RehearsalCache(tmp_path), tmp_path / "rehearsals" / "family"
    for size in range(1, 5):
        kept.put("family", size, rehearsal)
        kept.put_answers("family", size, {"how much?": {"bytes": 1}})
        age(folder / str(size), written=size)
    (folder / "7.trace").write_bytes(b"of an earlier memplan")
    age(folder / "7.trace", written=0.5)
    monkeypatch.setattr("memplan.estimators.rehearsal_cache.MOST_BYTES", 2 * bytes_of(folder / "1"))

    kept.put("other", 1, rehearsal)

    assert [path.name for path in folder.iterdir()] == ["4"]
    assert kept.get("family", 4) is not None
    assert kept.get("other", 1) is not None


def test_what_a_killed_process_left_goes_with_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearsal: Rehearsal) -> None:
    """Half a rehearsal of two hours ago; one of now is being written by another process."""
    kept, folder = RehearsalCache(tmp_path), tmp_path / "rehearsals" / "family"
    for name in (".new-left", ".new-now"):
        (folder / name).mkdir(parents=True)
        (folder / name / "trace").write_bytes(b"half of it")
    age(folder / ".new-left", written=time.time() - 7200)
    monkeypatch.setattr("memplan.estimators.rehearsal_cache.MOST_BYTES", 1)

    assert kept.put("family", 1, rehearsal)

    assert [path.name for path in folder.iterdir()] == [".new-now"]


SEVERAL = """
import random, sys
from pathlib import Path
from memplan.estimators import rehearsal_cache
from tests.conftest import RehearserOf

folder, most_bytes, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
source = rehearsal_cache.RehearsalCache(folder / "source")
rehearsal = source.get("family", 1).model_copy(update={"trace": source.get_trace("family", 1)})
rehearsal_cache.MOST_BYTES = most_bytes
cache, chance = rehearsal_cache.RehearsalCache(folder / "cache"), random.Random(seed)
for number in range(60):
    family, size = f"family {chance.randrange(3)}", chance.randrange(1, 6)
    assert cache.put(family, size, rehearsal), f"not put: {number}"
    found, trace = cache.get(family, size), cache.get_trace(family, size)
    assert found in (None, rehearsal.model_copy(update={"trace": None})), "half a rehearsal"
    assert trace in (None, rehearsal.trace), "half a trace"
    cache.put_answers(family, size, {"question": {"seed": seed}})
"""


def test_several_processes_put_and_clean_up_at_once(tmp_path: Path, rehearsal: Rehearsal) -> None:
    """
    Four processes, the same fifteen rehearsals, room for four of them.

    None finds the cache not writable, none reads half of anything, and what is left are whole rehearsals within the room.
    """
    RehearsalCache(tmp_path / "source").put("family", 1, rehearsal)
    most_bytes = 4 * bytes_of(tmp_path / "source") + 1000  # and their answers

    running = [
        subprocess.Popen([sys.executable, "-c", SEVERAL, str(tmp_path), str(most_bytes), str(seed)], stderr=subprocess.PIPE, text=True)
        for seed in range(4)
    ]
    problems = [process.communicate(timeout=120)[1] for process in running]

    assert problems == [""] * 4
    left = list((tmp_path / "cache" / "rehearsals").glob("*/*"))
    assert left
    assert all({"rehearsal.json", "trace"} <= {file.name for file in path.iterdir()} for path in left)
    assert sum(map(bytes_of, left)) <= most_bytes


def test_a_file_that_cannot_be_written_whole_leaves_nothing(tmp_path: Path) -> None:
    """A folder lies in its place."""
    (tmp_path / "file" / "something").mkdir(parents=True)

    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "file", b"content")

    assert [path.name for path in tmp_path.iterdir()] == ["file"]

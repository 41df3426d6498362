"""The runs of one program: where it chooses by time, the run with the other choices begins beside the first."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.units import MIB
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

CHOOSER = """
import torch

def is_large_faster():
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    torch.ones(2**10, device="cuda")
    events[1].record()
    torch.ones(2**22, device="cuda")
    events[2].record()
    return events[0].elapsed_time(events[1]) > events[1].elapsed_time(events[2])
"""
"""It asks which of two pieces of work takes less time. Whatever stands in a folder of that name, as Inductor does, is taken to choose."""

TRAINING = """
import os, socket, sys
is_warm = "torch" in sys.modules
import torch
sys.path.insert(0, "torch/_inductor")
from chooser import is_large_faster

torch.ones(1, device="cuda")
is_large = is_large_faster()
others = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
others.sendall(f"{os.getpid()} {'warm' if is_warm else 'cold'} {'large' if is_large else 'small'}\\n".encode())
others.recv(1)
WHAT_ELSE
torch.ones(256 if is_large else 64, 2**20, dtype=torch.uint8, device="cuda")
"""
"""64 MiB, or 256 at the other end, when it has met whom it is to meet."""


class End(NamedTuple):
    """A run, as it says itself."""

    pid: int
    begin: str
    size: str


class Meeting:
    """Where runs of a program say who they are; each goes on when *size* of them are there at once."""

    def __init__(self, folder: Path) -> None:
        self.ends: list[End] = []
        self._folder = folder
        self._listening = socket.create_server(("127.0.0.1", 0))

    def rehearse(self, what_else: str = "", *, size: int = 2, **options: Any) -> Rehearsal:
        """Rehearse the program, which does *what_else* behind the meeting."""
        (self._folder / "train.py").write_text(TRAINING.replace("WHAT_ELSE", what_else))
        threading.Thread(target=self._receive, args=(size,), daemon=True).start()
        port = str(self._listening.getsockname()[1])
        return rehearse_script(["train.py", port], gpu=find_gpu("t4"), timeout_seconds=60, **options)

    def close(self) -> None:
        """Receive nobody any more."""
        self._listening.close()

    def _receive(self, size: int) -> None:
        there: list[socket.socket] = []
        while True:
            try:
                there.append(self._listening.accept()[0])
            except OSError:  # the test is over
                return
            pid, begin, end = there[-1].makefile().readline().split()
            self.ends.append(End(int(pid), begin, end))
            if len(there) >= size or begin == "warm":
                for one in there:
                    one.close()
                there.clear()


@pytest.fixture
def meeting(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    """A folder with a program that chooses."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "torch" / "_inductor"
    folder.mkdir(parents=True)
    (folder / "chooser.py").write_text(CHOOSER)
    made = Meeting(tmp_path)
    yield made
    made.close()


@pytest.mark.heavy
def test_both_ends_of_what_is_chosen_by_time_run_at_once(meeting: Meeting) -> None:
    """They meet, and the larger one is told."""
    seen = meeting.rehearse()

    assert sorted(end[1:] for end in meeting.ends) == [("cold", "large"), ("cold", "small")]
    assert [finding.kind for finding in seen.findings] == ["chosen_by_time"]
    assert seen.assumed_range is not None
    assert seen.assumed_range.high_bytes - seen.assumed_range.low_bytes == (256 - 64) * MIB


@pytest.mark.heavy
def test_a_run_that_fails_beside_the_first_is_run_again_by_itself(meeting: Meeting) -> None:
    """It may have been in the way: a port that is taken, a file that is locked."""
    seen = meeting.rehearse("assert is_warm or not is_large, 'somebody else is here'")

    assert meeting.ends[-1][1:] == ("warm", "large")
    assert seen.failure is None
    assert seen.peak_allocated_bytes >= 256 * MIB


@pytest.mark.heavy
def test_a_run_that_nobody_needs_is_ended(meeting: Meeting) -> None:
    """The first one fails while the other still runs: there is no second end to tell."""
    seen = meeting.rehearse("import time; time.sleep(50 if is_large else 0); raise ValueError('no data')")

    assert seen.failure is not None
    assert seen.failure.message.endswith("no data")
    (other,) = (end for end in meeting.ends if end.size == "large")
    with pytest.raises(ProcessLookupError):
        os.kill(other.pid, 0)


@pytest.mark.heavy
def test_a_run_without_an_end_beside_the_first_costs_no_report(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program waits for ever where the compiler chooses the other way."""
    monkeypatch.setattr("memplan.execution.program_runs.most_seconds", lambda first: first + 2)

    seen = meeting.rehearse("import time; time.sleep(50 if is_large else 0)")

    assert seen.verdict == "fits"
    assert [finding.message.rpartition("; ")[2][:15] for finding in seen.findings] == ["one end was run"]


@pytest.mark.heavy
def test_programs_that_may_write_run_one_after_the_other(meeting: Meeting) -> None:
    """Both would write the same files."""
    seen = meeting.rehearse(size=1, allow_writes=True)

    assert [end[1:] for end in meeting.ends] == [("cold", "small"), ("warm", "large")]
    assert seen.peak_allocated_bytes >= 256 * MIB


SHOWS_CACHES = """
import os, torch, triton
from torch._inductor.runtime.cache_dir_utils import cache_dir
torch.ones(1, device="cuda")
for path in (cache_dir(), triton.knobs.cache.dir, os.environ["PYTORCH_KERNEL_CACHE_PATH"]):
    print(path, *os.listdir(path))
"""


@pytest.mark.heavy
def test_what_is_compiled_is_kept_in_folders_of_the_run(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cold, where the user's own are warm: they are empty, and go when the rehearsal has ended."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "PYTORCH_KERNEL_CACHE_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "train.py").write_text(SHOWS_CACHES)

    rehearse_script([str(tmp_path / "train.py")], gpu=find_gpu("t4"), timeout_seconds=60)

    told = [line.split(" ") for line in capfd.readouterr().out.splitlines()]
    assert [(Path(path).name, files) for path, *files in told] == [("inductor", []), ("triton", []), ("kernels", [])]
    folders = {Path(path).parents[1] for path, *_ in told}
    assert [folder.name.startswith("memplan-rehearsal-") for folder in folders] == [True]
    assert not any(folder.exists() for folder in folders)


NAMES_CACHES = """
import os
warm, new = os.path.abspath("warm"), os.path.abspath("new")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = warm
import torch, triton
from torch._inductor.runtime.cache_dir_utils import cache_dir
from triton.runtime.cache import get_cache_manager

def folders():
    return cache_dir(), os.path.dirname(get_cache_manager("ab").cache_dir)

torch.ones(1, device="cuda")
first = folders()
assert first == folders()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = new
for folder in (*first, *folders()):
    print(folder in (warm, new), "compiled" in os.listdir(folder))
print(len({*first, *folders()}))
"""
"""It says where compiled code is kept: in a folder that has some, and later in one that is not there yet."""


@pytest.mark.heavy
def test_caches_that_a_program_names_are_cold_too(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of them is another folder, of the rehearsal's own, whatever is in the one that was named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "compiled").touch()
    (tmp_path / "train.py").write_text(NAMES_CACHES)

    rehearsal = rehearse_script(["train.py"], gpu=find_gpu("t4"), timeout_seconds=60, allow_writes=True)

    assert rehearsal.exit_code == 0
    assert capfd.readouterr().out == "False False\n" * 4 + "4\n"
    assert not (tmp_path / "new").exists()

"""What a person sees while rehearsals run."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from memplan.cli.progress import program_progress, rehearsal_progress
from memplan.estimators.workload_steps import step_of
from memplan.execution.program_runs import ProgramProgress
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.workload.workload import Workload
from tests.estimators.test_rehearsed import small_workload
from tests.standin.conftest import torch_build

__all__ = ["small_workload", "torch_build"]


@pytest.mark.heavy
def test_a_terminal_shows_which_step_runs_and_keeps_nothing_of_it(torch_build: TorchBuild, tmp_path: Path, small_workload: Path) -> None:
    """One line, which is wiped at the end; the second plan runs nothing and shows nothing."""
    command = [sys.executable, "-m", "memplan", "--gpu", "t4", "--config-path", str(small_workload), "--target-effective-batch", "4"]
    environment = os.environ | {"MEMPLAN_METHOD": "rehearsed", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shown = []
    for _ in range(2):
        ours, theirs = pty.openpty()
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=theirs, check=True, timeout=120)
            os.close(theirs)
            try:
                shown.append(terminal.read(100_000).decode())
            except OSError:  # a terminal whose other end is closed, with nothing left in it
                shown.append("")

    assert "rehearsal 1 (" in shown[0]
    assert "micro-batch 4 on Tesla T4" in shown[0]
    assert shown[0].split("\r")[-1] == ""
    assert shown[0].split("\r")[-2].strip() == ""
    assert shown[1] == ""


def test_a_log_has_a_line_from_time_to_time(built_in: Workload, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of a plan that takes seconds; then a whole line every half a minute, whatever the number of rehearsals."""
    step = step_of(built_in.model_copy(update={"stages": ()}), find_gpu("t4"), None)
    seconds = 0.0

    with rehearsal_progress(lambda: seconds) as show:
        for seconds in range(0, 70, 5):
            show(step if seconds < 60 else step._replace(num_likely=2))

    assert capsys.readouterr().err.splitlines() == [
        "memplan: rehearsal 7 (30 s): micro-batch 4 on Tesla T4",
        "memplan: rehearsal 13 (60 s): micro-batch 4 on Tesla T4, perhaps 2 more",
    ]


def test_a_log_has_lines_while_one_rehearsal_takes_minutes(built_in: Workload, capsys: pytest.CaptureFixture[str]) -> None:
    """The first run of a slow program is told as often as many short ones; what is done before it says nothing."""
    step = step_of(built_in.model_copy(update={"stages": ()}), find_gpu("t4"), None)
    seconds = iter([0.0, 20.0, *range(25, 100, 5)])
    is_told = threading.Event()

    def clock() -> float:
        now = next(seconds, 99.0)
        if now >= 95:
            is_told.set()
        return now

    with rehearsal_progress(clock, told_every_seconds=0.001) as show:
        time.sleep(0.01)
        show(step)
        assert is_told.wait(10)

    assert capsys.readouterr().err.splitlines() == [
        "memplan: rehearsal 1 (30 s): micro-batch 4 on Tesla T4",
        "memplan: rehearsal 1 (60 s): micro-batch 4 on Tesla T4",
        "memplan: rehearsal 1 (90 s): micro-batch 4 on Tesla T4",
    ]


def test_a_program_that_does_not_train_yet_is_told_with_its_line(built_in: Workload, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no rehearsal more; what may help is said once."""
    step = step_of(built_in.model_copy(update={"stages": ()}), find_gpu("t4"), None)
    seconds = 0.0

    with rehearsal_progress(lambda: seconds) as show:
        where = "no optimizer step yet, at train.py:12, in `generate` of transformers/generation/utils.py:2500"
        for seconds, told in ((0.0, None), (35.0, where), (65.0, where), (95.0, "")):  # noqa: B007  (the clock reads them)
            show(step._replace(where=told))

    advice = "(an evaluation can be left out of rehearsals: by `--short 'KEY=VALUE'`, or by an argument in the command)"
    waiting = f"micro-batch 4, {where}"
    assert capsys.readouterr().err.splitlines() == [
        f"memplan: rehearsal 1 (35 s): {waiting} {advice}",
        f"memplan: rehearsal 1 (65 s): {waiting}",
        "memplan: rehearsal 1 (95 s): micro-batch 4 on Tesla T4",
    ]


MASKED = """
import time, torch
model = torch.nn.Linear(64, 64).cuda()
kept = (torch.arange(1024) % 4 == 0).cuda()
for number in range(6):
    model(torch.randn(1024, 64, device="cuda")[kept]).sum().backward()
    time.sleep(0.25)
print("trained")
"""


@pytest.mark.heavy
def test_a_terminal_shows_how_far_a_program_is_whose_runs_are_not_heard(torch_build: TorchBuild, tmp_path: Path) -> None:
    """The first run speaks for itself; what is shown of the others is wiped before the report."""
    (tmp_path / "train.py").write_text(MASKED)
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--", "train.py"]
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        result = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, text=True, check=True, timeout=120)
        os.close(theirs)
        shown = terminal.read(100_000).decode()

    assert result.stdout.count("trained") == 1
    assert "run 2, for the values that decide sizes (" in shown
    assert "MiB reserved at the peak so far" in shown
    before = shown.partition("run 2,")[0]  # a line every ten seconds of the first run, where the machine is busy
    assert before.strip().splitlines()[-1].startswith("memplan: running the program again with integers and masks")
    assert shown.rpartition("so far")[2].split("\r")[1].strip() == ""


def test_the_first_line_about_a_long_program_says_how_to_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most trainings take days; the lines after it only say how far it is."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs, "w") as shown:
        monkeypatch.setattr(sys, "stderr", shown)
        monkeypatch.setattr("memplan.cli.progress.LINE_EVERY_SECONDS", 0.01)
        with program_progress() as show:
            assert show is not None
            for number in (1, 2):
                time.sleep(0.02)
                show(ProgramProgress(1, number, 2**20))
        shown.flush()
        text = ""
        while "2 steps" not in text and select.select([terminal], [], [], 10)[0]:  # a terminal hands out line by line, or several at once
            text += terminal.read(100_000).decode()
        lines = text.splitlines()

    assert lines == [
        "memplan: 1 step, 1.0 MiB reserved at the peak so far (Ctrl-C ends the program and reports what was seen; "
        "`--steps 3` ends it by itself)",
        "memplan: 2 steps, 1.0 MiB reserved at the peak so far",
    ]


@pytest.mark.heavy
def test_each_further_run_of_a_program_is_told(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Its own output is that of the first run; the report is of the last."""
    (tmp_path / "train.py").write_text(MASKED.replace("time.sleep(0.25)", ""))
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--format", "json", "--", "train.py"]

    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)

    assert result.stderr.splitlines() == [
        "trained",
        "memplan: running the program again with integers and masks computed on the host, and everything passing where the model decides",
        "memplan: running the program again with the values that were found",
    ]


FAILS_ON_ZEROS = """
import torch
lengths = torch.tensor([3, 5]).cuda()
layer = torch.nn.LSTM(4, 4, batch_first=True).cuda()
update = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(2):
    rows = torch.randn(2, int(lengths.max()), 4, device="cuda")
    layer(rows)[0].mean().backward()
    update.step()
"""


@pytest.mark.heavy
def test_an_error_of_the_run_without_values_is_told_as_that(torch_build: TorchBuild, tmp_path: Path) -> None:
    """A person sees its traceback, and nothing has failed."""
    (tmp_path / "train.py").write_text(FAILS_ON_ZEROS)
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--", "train.py"]

    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)

    told = [line for line in result.stderr.splitlines() if line.startswith("memplan: running")]
    assert (result.returncode, result.stdout.splitlines()[0][:16]) == (0, "Fits on Tesla T4")
    assert "Traceback" in result.stderr
    assert [line.endswith("; the error above is of the run without them") for line in told] == [True, False]


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["pipe", "file"])
def test_each_run_of_a_program_finds_the_same_standard_input(torch_build: TorchBuild, tmp_path: Path, how: str) -> None:
    """It asks which model is trained, and is not asked by a person again."""
    (tmp_path / "train.py").write_text(f"assert input('which? ') == '1'\n{FAILS_ON_ZEROS}")
    (tmp_path / "answers.txt").write_text("1\n")
    words = f"{sys.executable} -m memplan rehearse --gpu t4 -- train.py"
    command = f"echo 1 | {words}" if how == "pipe" else f"{words} < answers.txt"

    result = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)

    assert (result.returncode, "Fits on Tesla T4" in result.stdout) == (0, True)

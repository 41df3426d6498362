"""`memplan monitor` on machines that are not there, beside programs that run on them."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import memplan
from memplan.errors import UsageError
from memplan.hardware.torch_install import TorchBuild
from memplan.reports.html import page
from tests.conftest import Run
from tests.hardware.nvml_driver import GB10, GIB, MIB, MIG, T4, Driver, no_driver
from tests.standin.conftest import torch_build
from tests.standin.machine import CONTEXT_BYTES, machine

__all__ = ["torch_build"]

HOLDS = """
import sys, torch
kept = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("holds", flush=True)
sys.stdin.read()
"""


@contextmanager
def a_program_that_holds(bytes_: int, environment: dict[str, str]) -> Iterator[int]:
    """A program that holds memory of the GPU while the block runs; its number."""
    command = [sys.executable, "-c", HOLDS, str(bytes_)]
    with subprocess.Popen(command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "holds\n"
        yield program.pid
        program.communicate(timeout=60)


@pytest.mark.heavy
def test_one_look_tells_everything(run_memplan: Run, torch_build: TorchBuild, driver: Driver) -> None:
    """What a running program holds, its context included, by number and name; what that is of the GPU; the host."""
    here = machine(torch_build, driver, "t4", utilization=55)
    with a_program_that_holds(2 * GIB, here) as pid:
        line = run_memplan("monitor", "--once", **here)
        told = json.loads(run_memplan("monitor", "--once", "--format", "json", **here).stdout)

    (gpu,) = told["gpus"]
    (process,) = gpu["processes"]
    held = 2 * GIB + CONTEXT_BYTES
    assert line.returncode == 0, line.stderr
    assert f"GPU 0 Tesla T4  {held / GIB:.2f} GiB of 14.75 GiB (16%)" in line.stdout
    assert "busy 55%" in line.stdout
    assert (gpu["used_bytes"], process["pid"], process["used_bytes"]) == (held, pid, held)
    assert process["name"].startswith("python")
    assert told["peaks"] == {gpu["uuid"]: held}
    assert told["ram_total_bytes"] > told["ram_used_bytes"] > 0
    assert "a larger micro-batch would fit" in line.stderr


RANK_HOLDS = """
import os, sys, time, torch
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
kept = torch.empty((rank + 1) * 2**30, dtype=torch.uint8, device="cuda")
open(f"{rank}.holds", "w").close()
while not os.path.exists("seen"):
    time.sleep(0.05)
"""


@pytest.mark.heavy
def test_all_ranks_of_this_machine_are_watched(run_memplan: Run, torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """Each on the GPU that it runs on, with its process."""
    here = machine(torch_build, driver, "a100-80", "a100-80")
    (tmp_path / "train.py").write_text(RANK_HOLDS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    with subprocess.Popen(torchrun, env=os.environ | here, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as training:
        begin = time.monotonic()
        while len(list(tmp_path.glob("*.holds"))) < 2 and training.poll() is None and time.monotonic() - begin < 120:
            time.sleep(0.05)
        told = json.loads(run_memplan("monitor", "--once", "--format", "json", **here).stdout)
        (tmp_path / "seen").touch()
        assert training.wait(timeout=60) == 0

    assert [gpu["used_bytes"] for gpu in told["gpus"]] == [GIB + CONTEXT_BYTES, 2 * GIB + CONTEXT_BYTES]
    assert [len(gpu["processes"]) for gpu in told["gpus"]] == [1, 1]


@pytest.mark.heavy
def test_a_plan_is_compared_with(run_memplan: Run, torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """The plan's own JSON; a file that is none is named."""
    here = machine(torch_build, driver, "t4", busy={0: 13 * GIB})
    plan = run_memplan("--gpu", "t4", "--format", "json").stdout
    (tmp_path / "plan.json").write_text(plan)
    (tmp_path / "none.json").write_text("[]")
    planned = json.loads(plan)["stages"][0]["estimate"]["device_used"]["expected_bytes"]

    result = run_memplan("monitor", "--once", "--plan", "plan.json", **here)
    wrong = run_memplan("monitor", "--once", "--plan", "none.json", **here)

    assert f"{13 * GIB / planned:.0%} of the plan" in result.stdout
    assert "more than planned" in result.stderr
    assert (wrong.returncode, "none.json: not a memplan plan" in wrong.stderr) == (2, True)


def test_samples_are_logged_and_drawn(run_memplan: Run, torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """One line of JSON for each look; a page that needs no network, and a picture."""
    here = machine(torch_build, driver, "a100-80", "t4", busy={1: GIB})

    first = run_memplan("monitor", "--samples", "3", "--interval", "0.1", "--log", "run.jsonl", "--plot", "run.html", **here)
    second = run_memplan("monitor", "--samples", "2", "--interval", "0.1", "--log", "run.jsonl", "--plot", "run.png", **here)

    logged = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    drawn = (tmp_path / "run.html").read_text()
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert [[gpu["used_bytes"] for gpu in sample["gpus"]] for sample in logged] == [[0, GIB]] * 5
    assert drawn.count("<svg") == 2
    assert "http" not in drawn
    assert "memplan --auto" in drawn  # what helps, as it is typed on the command line, not in Python
    assert "memplan.plan()" not in drawn
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert len(first.stdout.splitlines()) == 6


def test_ctrl_c_ends_it_and_the_page_is_written(torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """On a terminal the table stays where it was; the exit code is 0: that is how it is ended."""
    here = os.environ | machine(torch_build, driver, "t4", busy={0: 15 * GIB // 2})
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "memplan", "monitor", "--interval", "0.1", "--plot", "run.html"]
    with subprocess.Popen(command, env=here, cwd=tmp_path, stdout=theirs, stderr=subprocess.PIPE) as running:
        os.close(theirs)
        shown = b""
        begin = time.monotonic()
        while shown.count(b"Tesla T4") < 3 and time.monotonic() - begin < 60:
            shown += os.read(ours, 4096)
        running.send_signal(signal.SIGINT)
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
        assert running.stderr is not None
        said = running.stderr.read().decode()
        assert running.wait(timeout=60) == 0, said
    os.close(ours)

    assert b"7.50 GiB" in shown
    assert "Wrote run.html." in said
    assert "Traceback" not in said
    assert "7.50 GiB" in (tmp_path / "run.html").read_text()


REFUSED = [
    "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMigMode", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetHandleByUUID",
    "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetHandleByIndex_v2",
    "nvmlShutdown",
]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("code", [3, 4, 15, 999])
def test_each_figure_can_be_refused_alone(driver: Driver, code: int) -> None:
    """Not supported, no permission, lost, unknown: a question mark, and never a crash. One process asks of one machine after the other."""
    machines = [driver.environment(f"driver 580\ncuda 13000\nrefuse {call} {code}\n{T4}")["NVML_MACHINE"] for call in REFUSED]
    script = (
        "import os, sys\nfrom memplan.cli.app import run\n"
        "for machine in sys.argv[1:]:\n    os.environ['NVML_MACHINE'] = machine\n    print(run(['monitor', '--once']))\n"
    )

    done = driver.run("-c", script, *machines)

    lines = done.stdout.splitlines()
    assert lines[1::2] == ["0"] * len(REFUSED), done.stderr
    assert all("  GPU 0 " in line for line in lines[::2])
    assert "Traceback" not in done.stderr


ODD = {
    "MIG": (MIG, ["GPU 0 NVIDIA A100-SXM4-80GB MIG 3g.40gb  5.00 GiB of", "GPU 1 NVIDIA A100-SXM4-80GB MIG 1g.10gb  0 B of"]),
    "unified memory": (GB10, ["GPU 0 NVIDIA GB10  "]),
    "WSL": (
        "refuse nvmlDeviceGetMemoryInfo_v2 999\n" + T4.replace("106127360 0", f"106127360 {GIB}") + "process 999999999 -\n",
        ["1.25 GiB of", "process (999999999)"],
    ),
}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ODD)
def test_odd_machines_are_watched_as_well(run_memplan: Run, driver: Driver, kind: str) -> None:
    """Instances as GPUs, the host's memory where it is shared, processes without their bytes."""
    text, shown = ODD[kind]
    result = run_memplan("monitor", "--once", **driver.environment(text))

    assert result.returncode == 0, result.stderr
    assert all(part in result.stdout for part in shown), result.stdout


def test_a_gpu_that_falls_off_is_shown_as_lost(driver: Driver, tmp_path: Path) -> None:
    """It keeps its number, the other is watched on; a driver that goes altogether is told as well."""
    whole = T4 + T4.replace("7474aaaa", "7474bbbb")
    environment = driver.environment(whole)
    program = Path(environment["NVML_MACHINE"])
    command = [sys.executable, "-m", "memplan", "monitor", "--interval", "0.05"]
    with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for change, expected in (
            (None, "GPU 0 Tesla T4  0 B"),
            (f"refuse nvmlDeviceGetHandleByIndex_v2 15 0\n{whole}", "GPU 0 lost (handle: GPU is lost)"),
            ("refuse nvmlInitWithFlags 9\n", "no NVIDIA driver answers"),
            (whole, "GPU 0 Tesla T4  0 B"),
        ):
            if change is not None:
                (tmp_path / "next").write_text(change)
                (tmp_path / "next").replace(program)
            begin = time.monotonic()
            for line in running.stdout:
                if expected in line:
                    break
                assert time.monotonic() - begin < 60, line
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)

    assert running.returncode == 0, said
    assert "Traceback" not in said


def test_without_a_gpu_there_is_nothing_to_watch(run_memplan: Run, tmp_path: Path) -> None:
    """Exit code 3."""
    result = run_memplan("monitor", "--once", **no_driver(tmp_path).environment())

    assert (result.returncode, result.stdout) == (3, "")
    assert "no NVIDIA driver answers" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--plot", "run.gif"], "neither HTML nor PNG"),
        (["--log", "nowhere/run.jsonl"], "no such folder"),
        (["--log", "."], "s a directory"),
        (["--log", "/proc/run.jsonl"], "/proc/run.jsonl: "),
        (["--plot", "/proc/run.html"], "/proc/run.html: "),
        (["--samples", "2"], "leave one of them out"),
        (["--interval", "inf"], "is not a valid number"),
        (["--plan", "nowhere.json"], "nowhere.json: No such file"),
    ],
)
def test_files_that_cannot_be_are_said_first(run_memplan: Run, driver: Driver, arguments: list[str], problem: str) -> None:
    """And not when the run is over."""
    result = run_memplan("monitor", "--once", *arguments, **driver.environment(T4))

    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr


def test_a_training_watches_itself(torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """memplan.Monitor: PyTorch's own peak counts, which was over before any sample was taken."""
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch, memplan\n"
        "with memplan.Monitor(interval=0.05, log='run.jsonl') as monitor:\n"
        "    large = torch.empty(2**30, dtype=torch.uint8, device='cuda')\n    del large\n    torch.cuda.empty_cache()\n"
        "    time.sleep(0.3)\n"
        "print(*monitor.peaks.values(), len(monitor.samples))\n"
    )
    environment = os.environ | machine(torch_build, driver, "t4")

    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == 0, done.stderr
    peak, count = map(int, done.stdout.split())
    logged = (tmp_path / "run.jsonl").read_text().splitlines()
    assert peak >= GIB
    assert count == len(logged) >= 3
    assert json.loads(logged[-1])["torch_peak_reserved_bytes"] == GIB
    assert json.loads(logged[-1])["gpus"][0]["used_bytes"] < GIB // 2 + MIB


@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf"), "a"])
def test_an_interval_is_a_time(interval: float) -> None:
    """Else it would watch without a pause, or never."""
    with pytest.raises(UsageError, match="is not a time between two samples"):
        memplan.Monitor(interval=interval)


def test_a_log_never_disturbs_a_training(driver: Driver, tmp_path: Path) -> None:
    """One that cannot be written is said when the block begins; one that cannot be written any more is warned of."""
    script = (
        "import os, shutil, time, memplan\nos.mkdir('logs')\n"
        "try:\n    with memplan.Monitor(interval=0.05, log='logs/run.jsonl'):\n        time.sleep(0.2)\n        shutil.rmtree('logs')\n"
        "        time.sleep(0.2)\n        raise ValueError('of the training')\nexcept ValueError as error:\n    print(error)\n"
        "try:\n    memplan.Monitor(log='nowhere/run.jsonl').__enter__()\nexcept Exception as error:\n    print(type(error).__name__)\n"
    )

    environment = os.environ | driver.environment(T4)
    command = [sys.executable, "-c", script]

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert done.stdout.splitlines() == ["of the training", "UsageError"], done.stderr
    assert done.stderr.count("nothing more is written there") == 1


def test_a_page_is_whole_and_escaped() -> None:
    """What stands in it may come from a file."""
    made = page("a < b", ["<h1>x</h1>"], "as <told>")

    assert made.startswith("<!doctype html>")
    assert "<title>a &lt; b</title>" in made
    assert "as &lt;told&gt;" in made

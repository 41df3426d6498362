"""`memplan --profile` and `--method measured` on machines that are not there: CUDA, NVML and what others hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from memplan.api.loading import step_rate_in
from memplan.hardware.torch_install import TorchBuild
from tests.conftest import Run, content
from tests.estimators.test_rehearsed import small_workload
from tests.hardware.nvml_driver import A100, GIB, Driver, no_driver
from tests.standin.conftest import torch_build
from tests.standin.machine import CONTEXT_BYTES, machine

__all__ = ["small_workload", "torch_build"]

LAYERS = """
import sys, torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.randn(int(sys.argv[1]), 512, 1024, device="cuda")).sum().backward()
    update.step()
    update.zero_grad()
"""
T4_BYTES = 15_835_660_288


def words(text: str) -> str:
    return " ".join(text.split())


def profile_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.heavy
def test_a_profile_stands_beside_the_plan(
    run_memplan: Run, torch_build: TorchBuild, driver: Driver, small_workload: Path, tmp_path: Path
) -> None:
    """Every category in bytes and percent, each step's peaks, the driver's figure; what was learnt serves the next plan."""
    here = machine(torch_build, driver, "t4") | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "MEMPLAN_METHOD": "rehearsed"}
    arguments = ["--config-path", small_workload, "--target-effective-batch", "4"]

    text = run_memplan("--profile", *arguments, **here)
    told = profile_of(run_memplan("--auto", "--profile", *arguments, "--format", "json", **here))
    after = profile_of(run_memplan("--auto", *arguments, "--format", "json", **here))

    (stage,) = told["profile"]["stages"]
    rows = {row["name"]: row for row in stage["comparison"]}
    assert text.returncode == 0, text.stderr
    assert all(
        said in words(text.stdout) for said in ("on the GPU itself, Tesla T4, and as planned (rehearsed)", "the plan holds", "equal")
    )
    assert "plans for this GPU use it from now on" in words(text.stdout)
    assert (rows["peak allocated"]["difference_bytes"], rows["peak allocated"]["percent"]) == (0, 0)
    assert rows["peak reserved"]["difference_bytes"] == 0
    assert stage["measured"]["context_bytes"] == CONTEXT_BYTES
    assert stage["measured"]["device_bytes"] == stage["measured"]["peak_reserved_bytes"] + CONTEXT_BYTES
    assert len(stage["measured"]["steps"]) == len(stage["measured"]["step_seconds"]) >= 3
    (tmp_path / "profile.json").write_text(json.dumps(told))
    assert step_rate_in(tmp_path / "profile.json").samples_per_second > 0
    assert told["profile"]["contradiction"] is None
    assert after["gpu"]["context_bytes"] == CONTEXT_BYTES
    assert after["stages"][0]["estimate"]["device_used"]["expected_bytes"] == stage["measured"]["device_bytes"]


@pytest.mark.heavy
def test_a_profile_that_contradicts_the_plan_stops_the_apply(run_memplan: Run, torch_build: TorchBuild, driver: Driver, tree: Path) -> None:
    """NVML tells no memory, so that the plan takes the GPU for empty; somebody holds most of it. Nothing is written."""
    silent = "refuse nvmlDeviceGetMemoryInfo 4\nrefuse nvmlDeviceGetMemoryInfo_v2 4\n"
    here = machine(torch_build, driver, "rtx4090", busy={0: 20 * GIB}, refused=silent)
    before = content(tree)

    result = run_memplan("--auto", "--profile", "--apply", "--config-path", tree, **here)

    assert result.returncode == 1, result.stderr
    assert "Does not fit on NVIDIA GeForce RTX 4090: the GPU itself contradicts the plan" in result.stdout
    assert "memory ran out in step 1, forward" in words(result.stdout)
    assert "Nothing was written, since the profile contradicts the plan." in result.stderr
    assert content(tree) == before


@pytest.mark.heavy
def test_a_profile_that_agrees_is_applied(run_memplan: Run, torch_build: TorchBuild, driver: Driver, tree: Path) -> None:
    """The same without anybody else."""
    result = run_memplan("--auto", "--profile", "--apply", "--config-path", tree, **machine(torch_build, driver, "rtx4090"))

    assert result.returncode == 0, result.stderr
    assert "Wrote 1 file;" in result.stderr
    assert words(result.stdout).count("the plan holds") == 4  # each stage has other negatives


@pytest.mark.heavy
def test_of_two_unlike_cards_the_one_that_is_planned_for_is_profiled(
    run_memplan: Run, torch_build: TorchBuild, driver: Driver, small_workload: Path
) -> None:
    """The smaller, which is CUDA's second."""
    result = run_memplan(
        "--profile", "--config-path", small_workload, "--target-effective-batch", "4", "--format", "json",
        **machine(torch_build, driver, "t4", "a100-80"),
    )  # fmt: skip

    (stage,) = profile_of(result)["profile"]["stages"]
    assert stage["measured"]["gpu_name"] == "Tesla T4"


REFUSED_CALLS = [
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetHandleByUUID",
]
"""What a profile asks; the refusal of every call is for tests/hardware and `memplan monitor`."""


@pytest.mark.heavy
@pytest.mark.parametrize("call", REFUSED_CALLS)
def test_a_card_is_profiled_whatever_nvml_refuses(
    run_memplan: Run, torch_build: TorchBuild, driver: Driver, small_workload: Path, call: str
) -> None:
    """Not permitted: what PyTorch's allocator did is known all the same."""
    here = machine(torch_build, driver, "t4", refused=f"refuse {call} 4\n")

    told = profile_of(
        run_memplan("--profile", "--config-path", small_workload, "--target-effective-batch", "2", "--format", "json", **here)
    )

    (stage,) = told["profile"]["stages"]
    assert stage["contradiction"] is None
    assert stage["measured"]["peak_allocated_bytes"] > 0


@pytest.mark.heavy
def test_measured_plans_by_trial(run_memplan: Run, torch_build: TorchBuild, driver: Driver, small_workload: Path) -> None:
    """On a GPU of which others leave little: the largest that ran, and the next does not."""
    here = machine(torch_build, driver, "t4", busy={0: T4_BYTES - 2 * GIB})
    arguments = ["--auto", "--method", "measured", "--config-path", small_workload, "--format", "json"]

    plan = profile_of(run_memplan(*arguments, "--target-effective-batch", "4096", **here))
    micro = plan["after"]["training"]["micro_batch_size"]
    pinned = run_memplan(*arguments, "--pin", f"micro_batch_size={2 * micro}", **here)

    assert plan["method"] == "measured"
    assert plan["stages"][0]["estimate"]["device_used"]["high_bytes"] <= plan["budget_bytes"]
    assert pinned.returncode == 1, pinned.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu", "t4", "--method", "measured"], "--method measured runs steps on this machine's GPU"),
        (["--profile", "--method", "guide"], "does not go with --method guide"),
    ],
)
def test_what_contradicts_itself_is_said(run_memplan: Run, arguments: list[str], problem: str) -> None:
    """Before anything runs."""
    result = run_memplan(*arguments)

    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr


def test_without_a_gpu_a_profile_says_what_to_type(run_memplan: Run, tmp_path: Path) -> None:
    """Exit code 3."""
    result = run_memplan("--profile", "--target-effective-batch", "512", **no_driver(tmp_path).environment())

    assert (result.returncode, result.stdout) == (3, "")
    assert "--gpu-memory 24" in result.stderr


@pytest.mark.heavy
def test_under_torchrun_the_rank_that_takes_most_is_told(torch_build: TorchBuild, driver: Driver, small_workload: Path) -> None:
    """Two ranks on two unlike GPUs; rank 0 reports, once, and the plan is for the smaller."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "memplan",
    ]
    arguments = ["--auto", "--profile", "--config-path", str(small_workload), "--target-effective-batch", "2", "--format", "json"]

    done = subprocess.run(
        [*command, *arguments],
        env=os.environ | machine(torch_build, driver, "t4", "a100-80"),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (stage,) = told["profile"]["stages"]
    assert done.stdout.count('"schema_version": 1,\n  "fits"') == 1
    assert (told["gpu"]["name"], told["profile"]["num_ranks"]) == ("Tesla T4", 2)
    assert (stage["rank"], stage["measured"]["gpu_name"]) in [(0, "NVIDIA A100-SXM4-80GB"), (1, "Tesla T4")]


def test_under_torchrun_one_rank_plans_and_writes(driver: Driver, tree: Path) -> None:
    """The others leave it to rank 0. A --grow-negatives gives rank 0 something to write."""
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1"}
    environment = torchrun | driver.environment(A100)

    other = driver.run("-m", "memplan", "--auto", "--apply", "--grow-negatives", "--config-path", str(tree), machine=A100, **environment)
    first = driver.run(
        "-m", "memplan", "--auto", "--apply", "--grow-negatives", "--config-path", str(tree), machine=A100, **environment | {"RANK": "0"}
    )

    assert (other.returncode, other.stdout, other.stderr) == (0, "", "")
    assert first.returncode == 0, first.stderr
    assert "Wrote" in first.stderr


@pytest.mark.heavy
def test_a_planned_program_is_run_on_the_gpu_itself(run_memplan: Run, torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """Its own command with the planned values: what the GPU shows is what was rehearsed."""
    (tmp_path / "train.py").write_text(LAYERS)
    here = machine(torch_build, driver, "t4")
    wanted = ("--profile", "--target-effective-batch", "4", "--format", "json")

    with tempfile.NamedTemporaryFile(dir="/dev/shm") as account:  # what a program writes elsewhere is held back
        shutil.copyfile(here["MEMPLAN_ACCOUNT"], account.name)
        here["MEMPLAN_ACCOUNT"] = account.name
        told = profile_of(run_memplan(*wanted, "--", "train.py", "{micro_batch_size}", cwd=tmp_path, **here))

    (stage,) = told["profile"]["stages"]
    rows = {row["name"]: row for row in stage["comparison"]}
    assert told["stages"][0]["planned"]["micro_batch_size"] == 4
    assert {name for name, row in rows.items() if row["difference_bytes"]} <= {"CUDA context", "peak of the device"}
    assert stage["measured"]["context_bytes"] == CONTEXT_BYTES
    assert told["profile"]["contradiction"] is None

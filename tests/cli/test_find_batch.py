"""`memplan find-batch` and `memplan.find_batch` on machines that are not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from memplan.hardware.torch_install import TorchBuild
from tests.cli.test_profile import LAYERS, REFUSED_CALLS
from tests.conftest import Run, content
from tests.estimators.test_rehearsed import small_workload
from tests.hardware.nvml_driver import GIB, MIB, Driver, no_driver
from tests.standin.conftest import torch_build
from tests.standin.machine import CONTEXT_BYTES, machine

__all__ = ["small_workload", "torch_build"]

STEPS = Path(__file__).parents[1] / "child" / "steps.py"
OWN_PROGRAM = Path(__file__).parents[1] / "trees" / "own_program"
COMMAND = ("train.py", "config.yaml")
T4_BYTES = 15_835_660_288


def found(run: Any) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


@pytest.mark.heavy
def test_the_rehearsal_is_right_at_once(run_memplan: Run, torch_build: TorchBuild, driver: Driver) -> None:
    """What a rehearsal foresees runs, and the next size does not: two trials, when the context has been measured."""
    here = machine(torch_build, driver, "t4", busy={0: T4_BYTES - GIB})
    arguments = ["find-batch", f"{STEPS}:mlp", "--set", "width=512", "--format", "json"]

    first, second = found(run_memplan(*arguments, **here)), found(run_memplan(*arguments, **here))

    assert first["size"] == second["size"] == second["start"]
    assert [(trial["size"], trial["problem"] is None) for trial in second["trials"]] == [
        (second["size"], True),
        (second["size"] + 1, False),
    ]
    assert (first["name"], first["ended"], first["gpu_name"]) == ("batch", "found", "Tesla T4")
    fitting = second["trials"][0]["device_used_bytes"]
    assert fitting <= second["budget_bytes"] == int(GIB * 0.95)
    assert fitting > second["budget_bytes"] - 50 * MIB


@pytest.mark.heavy
def test_a_person_reads_how_each_trial_went(run_memplan: Run, torch_build: TorchBuild, driver: Driver) -> None:
    """The answer on standard output, the way on standard error; out of tries, it says that a larger one may fit."""
    result = run_memplan("find-batch", f"{STEPS}:mlp", "--start", "8", "--tries", "1", **machine(torch_build, driver, "t4"))

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("batch 8 on Tesla T4: ")
    assert "  8: runs, " in result.stderr
    assert "ran out of tries: a larger one may fit" in result.stderr


@pytest.mark.heavy
def test_of_two_unlike_cards_the_smaller_is_searched(run_memplan: Run, torch_build: TorchBuild, driver: Driver) -> None:
    """As `--auto` plans for it; CUDA_VISIBLE_DEVICES chooses another."""
    here = machine(torch_build, driver, "t4", "a100-80")
    arguments = ["find-batch", f"{STEPS}:mlp", "--start", "8", "--tries", "1", "--format", "json"]

    smaller, chosen = found(run_memplan(*arguments, **here)), found(run_memplan(*arguments, **here, CUDA_VISIBLE_DEVICES="0"))

    assert (smaller["gpu_name"], chosen["gpu_name"]) == ("Tesla T4", "NVIDIA A100-SXM4-80GB")


@pytest.mark.heavy
@pytest.mark.parametrize("call", REFUSED_CALLS)
def test_a_batch_is_found_whatever_nvml_refuses(run_memplan: Run, torch_build: TorchBuild, driver: Driver, call: str) -> None:
    """Where it does not tell what others hold, a trial runs out of memory, and that is an answer."""
    here = machine(torch_build, driver, "t4", busy={0: T4_BYTES - GIB}, refused=f"refuse {call} 4\n")

    answer = found(run_memplan("find-batch", f"{STEPS}:mlp", "--start", "8", "--tries", "2", "--format", "json", **here))

    sizes = [(trial["size"], trial["problem"] is None) for trial in answer["trials"]]
    assert sizes[0] == (8, True)
    assert sizes[1][0] > 4096  # where a rehearsal sees the end, with what CUDA was seen to take
    assert answer["size"] == max(size for size, runs in sizes if runs)


@pytest.mark.heavy
def test_where_nothing_fits_the_exit_code_is_1(run_memplan: Run, torch_build: TorchBuild, driver: Driver) -> None:
    """A GPU that somebody fills but for the context."""
    here = machine(torch_build, driver, "t4", busy={0: T4_BYTES - CONTEXT_BYTES - 8 * MIB})

    result = run_memplan("find-batch", f"{STEPS}:mlp", "--start", "2", **here)

    assert result.returncode == 1, result.stderr
    assert result.stdout == "No batch fits on Tesla T4: not even 1\n"


@pytest.mark.heavy
def test_the_workload_of_a_configuration_is_tried(run_memplan: Run, torch_build: TorchBuild, driver: Driver, small_workload: Path) -> None:
    """Where the plan says, once a step on this GPU has shown what its context takes."""
    here = machine(torch_build, driver, "t4", busy={0: T4_BYTES - 2 * GIB}) | {"MEMPLAN_METHOD": "rehearsed"}
    command = ("find-batch", "--config-path", small_workload, "--format", "json")
    found(run_memplan(*command, **here))

    answer = found(run_memplan(*command, **here))

    assert answer["name"] == "micro_batch_size"
    assert answer["size"] >= 1
    assert len(answer["trials"]) <= 4


PICKY = """
import torch
def build(device, batch=16, unit=1, least=1):
    model = torch.nn.Linear(4096, 4096).to(device)
    def step():
        if batch % unit or batch < least:
            raise ValueError(f"a batch of {batch} is not what it takes")
        model(torch.randn(batch * 64, 4096, device=device)).square().mean().backward()
        model.zero_grad()
    return step
"""


@pytest.mark.heavy
@pytest.mark.parametrize(("unit", "least"), [(8, 1), (1, 2)])
def test_a_program_that_takes_some_sizes_only_is_asked_for_those(
    run_memplan: Run, torch_build: TorchBuild, driver: Driver, tmp_path: Path, unit: int, least: int
) -> None:
    """Multiples of 8, or all but a single sample, as batch normalisation does."""
    (tmp_path / "picky.py").write_text(PICKY)
    here = machine(torch_build, driver, "t4", busy={0: T4_BYTES - GIB})

    answer = found(
        run_memplan("find-batch", "picky.py:build", "--set", f"unit={unit}", "--set", f"least={least}", "--format", "json", **here)
    )

    assert answer["ended"] == "found"
    assert answer["size"] % unit == 0
    assert max(trial["size"] for trial in answer["trials"]) == answer["size"] + unit
    assert answer["size"] > 64


@pytest.mark.heavy
def test_a_program_without_a_batch_is_told_apart(run_memplan: Run, torch_build: TorchBuild, driver: Driver) -> None:
    """With the way out."""
    result = run_memplan("find-batch", f"{STEPS}:fails", **machine(torch_build, driver, "t4"))

    assert result.returncode == 2
    assert "Traceback" not in result.stderr.split("its last output")[0]


def test_without_a_gpu_there_is_nothing_to_try(run_memplan: Run, tmp_path: Path) -> None:
    """Exit code 3, and what to type instead."""
    result = run_memplan("find-batch", f"{STEPS}:mlp", **no_driver(tmp_path).environment())

    assert (result.returncode, result.stdout) == (3, "")
    assert "no NVIDIA driver answers" in result.stderr


@pytest.mark.heavy
def test_a_required_batch_is_found_by_its_name(run_memplan: Run, torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """It has no default; and a start that the program does not take is brought to one that it does."""
    (tmp_path / "picky.py").write_text(PICKY.replace("batch=16, unit=1", "batch, unit=8"))

    answer = found(
        run_memplan(
            "find-batch", "picky.py:build", "--start", "13", "--tries", "1", "--format", "json", **machine(torch_build, driver, "t4")
        )
    )

    assert (answer["name"], answer["size"], answer["start"]) == ("batch", 8, 8)


@pytest.mark.heavy
def test_out_of_time_before_the_first_trial_is_said(run_memplan: Run, torch_build: TorchBuild, driver: Driver) -> None:
    """Exit code 1: nothing is known to fit."""
    result = run_memplan("find-batch", f"{STEPS}:mlp", "--start", "8", "--time", "0", **machine(torch_build, driver, "t4"))

    assert result.returncode == 1, result.stderr
    assert "the time limit was over before the first trial" in result.stdout


@pytest.mark.parametrize("option", ["--margin", "--time"])
def test_nan_is_no_number(run_memplan: Run, option: str) -> None:
    """Though it compares as if it were."""
    result = run_memplan("find-batch", f"{STEPS}:mlp", option, "nan")

    assert (result.returncode, "Traceback" in result.stderr) == (2, False)


@pytest.mark.parametrize("wrong", ["start=0", "margin=2", "most_tries=0", "gpu=find_gpu('h100')"])
def test_what_makes_no_sense_is_said_before_anything_runs(torch_build: TorchBuild, driver: Driver, wrong: str) -> None:
    """A GPU of another machine too."""
    code = f"import memplan; from memplan.hardware.catalog import find_gpu; memplan.find_batch({str(STEPS) + ':mlp'!r}, {wrong})"

    done = driver.run("-c", code, **machine(torch_build, driver, "t4"))

    assert done.returncode == 1
    assert "UsageError" in done.stderr.splitlines()[-3]


def test_values_without_a_function_make_no_sense(run_memplan: Run) -> None:
    """They are the function's."""
    result = run_memplan("find-batch", "--set", "a=1")

    assert result.returncode == 2
    assert "--set and --value need a function" in result.stderr


@pytest.mark.heavy
def test_a_program_finds_its_own_batch(torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """memplan.find_batch in a script, which is loaded anew for the trials and does not search again there."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(STEPS.parent)!r})\nfrom steps import mlp as build\nimport memplan\n"
        "def step(device, batch=64):\n    return build(device, batch=batch)\n"
        "if __name__ == '__main__':\n    print(memplan.find_batch(step, start=32, most_tries=1).size)\n"
    )

    done = driver.run(str(script), **machine(torch_build, driver, "t4"))

    assert done.stdout == "32\n", done.stderr


MAXIMUM = """
import torch
DATA = torch.arange(64)
def build(device, batch=16, unit=1):
    model = torch.nn.Linear(256, 256).to(device)
    def step():
        if batch > len(DATA) or batch % unit:
            raise ValueError(f"a data set of {len(DATA)} has no batch of {batch}")
        model(torch.randn(batch, 256, device=device)).square().mean().backward()
        model.zero_grad()
    return step
"""


@pytest.mark.heavy
@pytest.mark.parametrize("unit", [1, pytest.param(8, marks=pytest.mark.heavy)])
def test_a_program_with_a_maximum_is_found_at_it(
    run_memplan: Run, torch_build: TorchBuild, driver: Driver, tmp_path: Path, unit: int
) -> None:
    """A rehearsal sees that 64 is all there is: one trial, and what ended the search was the program, not memory."""
    (tmp_path / "maximum.py").write_text(MAXIMUM)

    answer = found(
        run_memplan("find-batch", "maximum.py:build", "--set", f"unit={unit}", "--format", "json", **machine(torch_build, driver, "t4"))
    )

    assert (answer["size"], answer["ended"], [trial["size"] for trial in answer["trials"]]) == (64, "refused", [64])


@pytest.mark.heavy
def test_a_program_that_takes_no_size_fails_with_its_own_error(
    run_memplan: Run, torch_build: TorchBuild, driver: Driver, tmp_path: Path
) -> None:
    """It may not be the size."""
    (tmp_path / "maximum.py").write_text(MAXIMUM.replace("torch.arange(64)", "torch.arange(0)"))

    result = run_memplan("find-batch", "maximum.py:build", **machine(torch_build, driver, "t4"))

    assert (result.returncode, result.stdout) == (2, "")
    assert "a data set of 0 has no batch of 16" in result.stderr


@pytest.mark.heavy
def test_the_batch_of_a_command_is_found(run_memplan: Run, torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """Each trial is the program itself with another value in its file, which stays as it is; nothing that it writes is left."""
    here = machine(torch_build, driver, "t4", busy={0: T4_BYTES - 3 * GIB})
    project = Path(shutil.copytree(OWN_PROGRAM, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__")))
    before = content(project)
    place = ("--field", "micro_batch_size=config.yaml:data.batch_size")

    result = run_memplan("find-batch", "--start", "4", "--tries", "1", "--format", "json", *place, "--", *COMMAND, cwd=project, **here)

    answer = found(result)
    assert (answer["name"], answer["size"], answer["start"], answer["start_is_from"]) == ("micro_batch_size", 4, 4, "you")
    assert answer["trials"][0]["device_used_bytes"] > CONTEXT_BYTES
    assert content(project) == before


@pytest.mark.heavy
def test_what_is_foreseen_for_a_command_runs(run_memplan: Run, torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """The rehearsed limit runs, and the next size does not."""
    here = machine(torch_build, driver, "t4", busy={0: T4_BYTES - GIB})
    (tmp_path / "train.py").write_text(LAYERS)

    answer = found(run_memplan("find-batch", "--format", "json", "--", "train.py", "{micro_batch_size}", cwd=tmp_path, **here))

    outcomes = {trial["size"]: trial["problem"] is None for trial in answer["trials"]}
    assert answer["ended"] == "found"
    assert (outcomes[answer["size"]], outcomes[answer["size"] + 1]) == (True, False)
    assert len(outcomes) <= 4


def test_a_command_that_fails_is_told_with_its_last_words(
    run_memplan: Run, torch_build: TorchBuild, driver: Driver, tmp_path: Path
) -> None:
    """It may not be the size."""
    (tmp_path / "train.py").write_text("raise SystemExit('no data in this folder')")
    here = machine(torch_build, driver, "t4")

    result = run_memplan("find-batch", "--start", "2", "--tries", "1", "--", "train.py", "{micro_batch_size}", cwd=tmp_path, **here)

    assert result.returncode == 2
    assert "no data in this folder" in result.stderr
    assert "Traceback" not in result.stderr

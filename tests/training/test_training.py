"""What runs in the user's own training: on the stand-in device, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memplan
from memplan.errors import UsageError
from memplan.standin.build import TorchBuild
from memplan.training.retry import batch_size_of, part_of
from memplan.training.watch import Watch
from tests.hardware.nvml_driver import GIB, Driver
from tests.standin.conftest import torch_build
from tests.standin.machine import machine

__all__ = ["torch_build"]

STEPS = Path(__file__).with_name("steps.py")
ROOT = Path(__file__).parents[2]


def train(environment: dict[str, str], *arguments: object) -> tuple[dict[str, Any], str]:
    """What a program of steps.py tells at its end, and its standard error."""
    done = subprocess.run(
        [sys.executable, str(STEPS), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def saved_plan(folder: Path, *, micro: int, accumulation: int, reserved: int) -> Path:
    """What `memplan --format json` prints, as far as a training is held to it."""
    estimate = {"peak_allocated_bytes": reserved, "peak_reserved_bytes": reserved, "device_used": {"expected_bytes": reserved}}
    planned = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation}
    path = folder / "plan.json"
    path.write_text(json.dumps({"stages": [{"planned": planned, "estimate": estimate}], "gpu": {"others_used_bytes": 0}}))
    return path


# fits_or_smaller


def test_a_step_that_runs_out_of_memory_goes_on_smaller(torch_build: TorchBuild, driver: Driver) -> None:
    """A card of which others leave 1.5 GiB; the samples of each step stay as many, and the second step begins with what fitted."""
    busy = {0: 15_835_660_288 - 3 * GIB // 2}

    told, said = train(machine(torch_build, driver, "t4", busy=busy), "retries", 0, 100_000)

    first = next(number for number in range(1, len(told["parts"])) if told["parts"][number] == told["micro"])
    assert told["retries"] >= 2
    assert sum(told["parts"][first:]) == 200_000
    assert max(told["parts"][first:]) == told["micro"] == -(-100_000 // 2 ** told["retries"])
    assert told["shape"] == []
    assert told["peak"] <= 3 * GIB // 2
    assert f"going on with {told['micro']}" in said


def test_where_one_sample_does_not_fit_the_error_is_torchs_own(torch_build: TorchBuild, driver: Driver) -> None:
    """After 4, 2 and 1."""
    told, _ = train(machine(torch_build, driver, "t4"), "one_does_not_fit")

    assert told == {"error": "OutOfMemoryError", "retries": 2}


def test_the_gradient_is_that_of_the_whole_batch() -> None:
    """Five samples in parts of two: 2, 2 and 1, weighed by their share; a tuple keeps its shape."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    batch = (torch.randn(5, 3), torch.randn(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_of(part):
        return torch.nn.functional.mse_loss(model(part[0]), part[1])

    with memplan.fits_or_smaller(2) as fitting:
        loss = fitting.step(loss_of, batch, optimizer)
    seen = model.weight.grad.clone()
    model.zero_grad()
    whole = loss_of(batch)
    whole.backward()

    assert torch.allclose(loss, whole)
    assert torch.allclose(seen, model.weight.grad)


def test_a_micro_batch_below_one_makes_no_sense() -> None:
    """It is said before anything runs."""
    with pytest.raises(UsageError, match="a micro-batch of 0"), memplan.fits_or_smaller(0):
        pass


def test_a_batch_without_samples_is_said() -> None:
    """Text alone has no samples to split."""
    with memplan.fits_or_smaller() as fitting, pytest.raises(UsageError, match="holds no tensor"):
        fitting.step(lambda part: part, ["text"], torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))


def test_a_batch_is_split_whatever_its_shape() -> None:
    """Mappings, lists and tuples of tensors, lists of as many texts; what has no samples stays whole."""
    pair = (torch.arange(8).reshape(4, 2), "text")
    batch = {"x": torch.arange(4), "pair": pair, "texts": ["a", "b", "c", "d"], "names": ["one", "two"], "scalar": torch.tensor(1)}

    part = part_of(batch, 1, 3, 4)

    assert batch_size_of(batch) == 4
    assert part["x"].tolist() == [1, 2]
    assert part["pair"][0].tolist() == [[2, 3], [4, 5]]
    assert (part["pair"][1], part["texts"], part["names"], part["scalar"].item()) == ("text", ["b", "c"], ["one", "two"], 1)


def test_a_batch_keeps_its_type() -> None:
    """transformers' BatchEncoding has attributes and methods that a loss may use."""
    from transformers import BatchEncoding

    batch = BatchEncoding({"input_ids": torch.arange(4)})

    part = part_of(batch, 1, 3, 4)

    assert part.input_ids.tolist() == [1, 2]
    assert batch.input_ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("batch", [{"x": torch.zeros(10, 2), "y": torch.zeros(3)}, torch.zeros(0, 8), [torch.tensor(1.0)]])
def test_a_batch_whose_samples_cannot_be_counted_is_refused(batch: object) -> None:
    """Split by one of the sizes it would be silently wrong."""
    with memplan.fits_or_smaller() as fitting, pytest.raises(UsageError, match="samples"):
        fitting.step(torch.mean, batch, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize("message", ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"])
def test_what_cudas_libraries_raise_for_want_of_memory_counts_too(message: str) -> None:
    """They are plain RuntimeErrors; any other is the program's own, and is not tried again. With two optimizers."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=0.0) for parameter in parameters]
    calls = []

    def loss_of(part):
        calls.append(len(part))
        if len(calls) == 2:
            raise RuntimeError(message)
        return part.mean() * parameters[0].sum() * parameters[1].sum()

    def fails(part):
        raise RuntimeError(f"of the program, with {len(part)}")

    with memplan.fits_or_smaller(4) as fitting:
        fitting.step(loss_of, torch.ones(8, 1), optimizers)
        with pytest.raises(RuntimeError, match="of the program"):
            fitting.step(fails, torch.ones(8, 1), optimizers)

    assert calls == [4, 4, 2, 2, 2, 2]
    assert (fitting.micro_batch_size, fitting.num_retries) == (2, 1)


def test_gradients_of_a_failed_try_are_dropped() -> None:
    """Those of both optimizers: what stays is the gradient of the whole batch."""
    parameter = torch.nn.Parameter(torch.ones(1))
    calls = []

    def loss_of(part):
        calls.append(len(part))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (part * parameter).mean()

    with memplan.fits_or_smaller(4) as fitting:
        fitting.step(loss_of, torch.arange(8.0), torch.optim.SGD([parameter], lr=0.0))

    assert parameter.grad is not None
    assert parameter.grad.item() == pytest.approx(3.5)


# callbacks


@pytest.mark.parametrize("trainer", ["transformers_trainer", "lightning_trainer"])
def test_a_training_is_held_to_its_plan(torch_build: TorchBuild, driver: Driver, tmp_path: Path, trainer: str) -> None:
    """The peak beside the plan's after the first step and each epoch, samples and batches a second; another batch than planned is told."""
    plan = saved_plan(tmp_path, micro=8, accumulation=2, reserved=2 * GIB)

    told, said = train(machine(torch_build, driver, "t4"), trainer, tmp_path / "out", plan, 4)

    assert [epoch["epoch"] for epoch in told["epochs"]] == [0, 1]
    assert all(epoch["samples_per_second"] > epoch["batches_per_second"] > 0 for epoch in told["epochs"])
    assert all(2**20 < epoch["peak_allocated_bytes"] <= epoch["peak_reserved_bytes"] for epoch in told["epochs"])
    assert "the plan is for a micro-batch of 8, and 4 is configured: something overrides it" in told["warnings"]
    assert said.count("memplan: first step: ") == 1
    assert "planned 2.00 GiB (-" in said


def test_a_batch_size_that_changes_elsewhere_is_told(torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """Lightning's second epoch has a loader with twice the batch."""
    told, _ = train(machine(torch_build, driver, "t4"), "lightning_trainer", tmp_path / "out", "", 4)

    assert told["batch"] == 8
    assert any("the batch size is changed elsewhere" in warning for warning in told["warnings"])


def test_without_a_gpu_a_watch_does_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """This process has none."""
    assert not torch.cuda.is_available()
    watch = Watch(saved_plan(tmp_path, micro=8, accumulation=1, reserved=GIB))

    watch.begin(device=None, configured=4, accumulation=2)
    watch.batch(torch.zeros(99, 2))
    watch.step_ended()
    watch.epoch_ended(0)

    assert (watch.epochs, watch.warnings, capsys.readouterr().err) == ([], [], "")

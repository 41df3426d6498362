"""
A user's script: `mypy --strict` and pyright pass it, and would not if a name or an argument of memplan were unknown to them.

It is checked, not run. A misspelt name has an "ignore" that the checkers would call unused, an error in both, if they took the name.
"""

from __future__ import annotations

from pathlib import Path

import torch
from typing_extensions import assert_type

import memplan
from memplan.data import DeviceCachedDataset, DeviceLoader, LoaderState, SampleError
from memplan.debug import no_compile


def build(device: str, batch: int = 8) -> memplan.FittingSteps:
    """Stand for a function that makes a step."""
    del device
    return memplan.fits_or_smaller(batch)


def plan() -> None:
    """Plan, look, write, take back."""
    found = memplan.plan("conf", gpu="rtx4090", target_effective_batch_size=256, pins={"n_negatives": 8}, method="analytic")
    assert_type(found, memplan.Plan)
    assert_type(found.fits, bool)
    assert_type(found.diff(), str)
    assert_type(found.after.training.micro_batch_size, int)
    assert_type(found.gpu, memplan.GpuSpec)
    for stage in found.stages:
        assert_type(stage.estimate.device_used.high_bytes, int)
    assert_type(found.apply(), tuple[Path, ...])
    assert_type(memplan.undo("conf"), tuple[Path, ...])
    assert_type(memplan.gpus(), list[memplan.GpuSpec])


def rehearse() -> None:
    """Rehearse a step, and search for its batch."""
    found = memplan.rehearse("train_step.py:build", gpu="a100-80", values={"batch": 8}, steps=3)
    assert_type(found, memplan.Rehearsal)
    assert_type(found.peak_reserved_bytes, int)
    searched = memplan.find_batch("train_step.py:build", start=8, margin=0.1)
    assert_type(searched, memplan.FoundBatch)
    assert_type(searched.size, "int | None")


def train(model: torch.nn.Linear, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """Watch a training whose steps fit."""
    fitting = memplan.fits_or_smaller()
    with memplan.Monitor(interval=0.5, log="run.jsonl") as monitor:
        fitting.step(lambda part: model(part).mean(), batch, optimizer)
    assert_type(monitor.peaks, dict[str, int])


def keep_data(dataset: torch.utils.data.TensorDataset, plan: memplan.Plan) -> None:
    """Keep a dataset on the GPU, take its batches, and go on in the middle of an epoch."""
    cached = DeviceCachedDataset(dataset, "cuda", dtype=torch.bfloat16, others=plan, on_error="skip", cache_file=Path("cache.safetensors"))
    assert_type(cached.device_bytes, int)
    assert_type(cached.skipped, dict[int, str])
    assert_type(cached.parts[0].shape, tuple[int, ...])
    memplan.data.DeviceCachedDataset([1, 2, 3], transform=float)
    loader = DeviceLoader(cached, 32, shuffle=True, generator=torch.Generator(), transform=lambda batch: batch)
    for images, labels in loader:
        print(images, labels)
    state = loader.state_dict()
    assert_type(state, LoaderState)
    assert_type(state["epoch"], int)
    loader.load_state_dict(state)
    DeviceLoader(dataset)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    DeviceCachedDataset(dataset, on_error="zeros")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@no_compile()
def debugged(step: int, *, name: str) -> float:
    """Run without torch.compile."""
    with no_compile(), memplan.debug.no_compile():
        return step + len(name)


def call_debugged() -> None:
    """Call it: it has the signature that it was written with."""
    assert_type(debugged(1, name="a"), float)
    debugged("1", name="a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def errors() -> None:
    """Catch what memplan raises."""
    try:
        plan()
    except memplan.DoesNotFitError as error:
        assert_type(error.message, str)
    except SampleError as error:
        assert_type(error.index, int)
    except memplan.MemplanError as error:
        assert_type(error.exit_code, int)


def misspelt() -> None:
    """Use names that there are not."""
    memplan.plam("conf")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    memplan.plan("conf", gpus="t4")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    memplan.plan("conf", method="rehearse")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    memplan.rehearse("train_step.py:build", gpu="t4", step=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    short = memplan.plan("conf").missing_bites  # type: ignore[attr-defined]  # pyright: ignore
    assert short

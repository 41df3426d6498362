"""
Programs run on a GPU of this machine, and held to rehearsals with the same PyTorch: what is written down of each run, and how it compares.

A recording is two files: NAME.json with the GPU, driver, versions, date and peaks, NAME.trace with the allocator's events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from memplan.execution.measure import Measurer
from memplan.execution.measurement import Measurement
from memplan.execution.rehearse import Rehearser
from memplan.execution.step_source import StepSource
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.gpu import GpuSpec
from memplan.memory.cuda_context import usual_context
from memplan.traces.requests import requests_of
from memplan.traces.trace import MemoryTrace
from tests.accuracy.programs_to_plan import PROGRAMS
from tests.conftest import SHARED

FILE = Path(__file__).with_name("programs_to_plan.py")
RECORDINGS = Path(__file__).with_name("recordings")
STEPS = 3
RESERVED_ERROR = 0.005
"""Of the reserved peak: how far a rehearsal may be from a GPU. Of convolutions, whose workspaces may be other there, it has a range."""


CONVOLVING = ("unet", "residual_network", "vision_transformer", "recurrent", "shared-resnet")
"""Beginnings of the names of programs for which cuDNN may pick a workspace, whether the device makes an allowance for it or not."""


class Program(NamedTuple):
    """A step with its values."""

    name: str
    target: StepSource
    values: dict[str, Any]


def programs() -> Iterator[Program]:
    """Yield the accuracy suite at two batches, and the shared workloads where they are there."""
    for name in PROGRAMS:
        for batch in (8, 32):
            yield Program(f"{name}-{batch}", StepSource(str(FILE), name), {"batch": batch})
    for file in sorted((SHARED / "standin" / "workloads").glob("*.py")):
        yield Program(f"shared-{file.stem}", StepSource(str(file), "build"), {})


def card_name(gpu: GpuSpec) -> str:
    """Return the driver's name of *gpu* as part of a file's."""
    return "-".join(gpu.name.lower().split())


def record(program: Program, gpu: GpuSpec, folder: Path) -> Path:
    """Run *program* on *gpu*, write down what was seen, and return the recording's JSON file."""
    with Measurer(program.target, gpu) as measurer:
        seen = measurer.measure(program.values, steps=STEPS)
    assert seen.trace is not None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{card_name(gpu)}-{seen.torch.partition('+')[0]}-{program.name}.json"
    told = {
        "program": program.name,
        "values": program.values,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "gpu": gpu.model_copy(update={"uuid": None, "origin": f"recorded, driver {gpu.driver_version}"}).model_dump(mode="json"),
        "measured": seen.model_dump(mode="json", round_trip=True),
    }
    path.with_suffix(".trace").write_bytes(seen.trace.to_bytes())
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return path


class Held(NamedTuple):
    """A recording beside a rehearsal."""

    program: str
    card: str
    allocated: tuple[int, int]
    """Peak, on the GPU and rehearsed, in bytes."""
    reserved: tuple[int, int]
    same_requests: bool
    """The same allocations and frees in the same order."""
    reserved_range: tuple[int, int]
    """What the rehearsal says is reserved at least, and at most: workspaces may be other on the GPU."""
    convolves: bool
    """cuDNN or cuFFT pick a workspace on the GPU."""
    context_bytes: int | None

    @property
    def reserved_error(self) -> float:
        """Rehearsed over measured, less 1."""
        return self.reserved[1] / self.reserved[0] - 1

    @property
    def holds(self) -> bool:
        """Say whether the rehearsal is as exact as it is said to be."""
        return self.allocated[0] == self.allocated[1] and abs(self.reserved_error) <= RESERVED_ERROR

    @property
    def is_in_range(self) -> bool:
        """Say whether what the GPU reserved lies in the range."""
        return self.reserved_range[0] <= self.reserved[0] <= self.reserved_range[1]


def hold(path: Path) -> Held:
    """Rehearse what the recording at *path* recorded, on that kind of GPU, and compare."""
    told = json.loads(path.read_text(encoding="utf-8"))
    measured = Measurement.model_validate(told["measured"])
    gpu = of_some_kind(GpuSpec.model_validate(told["gpu"]).model_copy(update={"others_used_bytes": 0}))
    program = next(program for program in programs() if program.name == told["program"])
    with Rehearser(program.target) as rehearser:
        seen = rehearser.rehearse(gpu=gpu, values=told["values"], steps=STEPS)
    assert seen.trace is not None
    used, context = seen.device_used, usual_context(gpu)
    recorded = requests_of(MemoryTrace.from_bytes(path.with_suffix(".trace").read_bytes()))
    rehearsed = requests_of(seen.trace)
    return Held(
        program=told["program"],
        card=gpu.name,
        allocated=(measured.peak_allocated_bytes, seen.peak_allocated_bytes),
        reserved=(measured.peak_reserved_bytes, seen.peak_reserved_bytes),
        same_requests=recorded.sequence == rehearsed.sequence and list(recorded.sizes) == list(rehearsed.sizes),
        reserved_range=(used.low_bytes - context.low_bytes, used.high_bytes - context.high_bytes),
        convolves=told["program"].startswith(CONVOLVING) or any(finding.kind == "library_workspaces" for finding in seen.findings),
        context_bytes=measured.outside_bytes,
    )


def torch_of(path: Path) -> str:
    """Return the PyTorch of the recording at *path*."""
    return str(json.loads(path.read_text(encoding="utf-8"))["measured"]["torch"])

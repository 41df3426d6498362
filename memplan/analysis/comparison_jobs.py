"""
A comparison in jobs that others run: for each number of GPUs, the kinds of one compute capability are one job.

GPUs of one capability share what is rehearsed (`comparison.py`). Each job is asked with the versions that decide what a rehearsal sees:
a worker that has others says so, and has no answer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import RootModel

from memplan.analysis.comparison import ComparedGpu, capability_of, compare
from memplan.description import Description
from memplan.errors import MissingError
from memplan.estimators.registry import estimator_by
from memplan.estimators.rehearsal_cache import READ_BY_PYTORCH, own_code
from memplan.execution.executors.jobs import Executor, Job, OnJob, run_jobs
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import find_torch
from memplan.planner.decision import DecisionOptions
from memplan.planner.pins import Pins
from memplan.planner.plan import AnyProgram
from memplan.workload.workload import Workload


class ComparisonJob(Description):
    """What is asked of a worker."""

    program: AnyProgram
    gpus: tuple[GpuSpec, ...]
    pins: dict[str, str]
    options: DecisionOptions
    versions: dict[str, str]
    """Of what decides a rehearsal, where it was asked for."""


class _Rows(RootModel[list[ComparedGpu]]):
    """What a worker answers."""


class Compared(NamedTuple):
    """One program of a comparison, and what `decide` is told of it."""

    program: AnyProgram
    options: DecisionOptions


def compare_elsewhere(
    programs: Sequence[Compared], gpus: Sequence[GpuSpec], executor: Executor, *, pins: Pins, on_job: OnJob | None = None
) -> list[list[ComparedGpu]]:
    """Return what `compare` says of each of *programs* on *gpus*, as workers of *executor* find it; `run_jobs` says what is raised."""
    kinds = _by_capability(gpus)
    asked = [(at, kind) for at in range(len(programs)) for kind in kinds]
    jobs = [_job(programs[at], kind, pins) for at, kind in asked]
    found: list[dict[GpuSpec, ComparedGpu]] = [{} for _ in programs]
    for (at, kind), answer in zip(asked, run_jobs(executor, jobs, on_job=on_job), strict=True):
        found[at] |= dict(zip(kind, _Rows.model_validate_json(answer).root, strict=True))
    return [[rows[gpu] for gpu in gpus] for rows in found]


def _by_capability(gpus: Sequence[GpuSpec]) -> list[tuple[GpuSpec, ...]]:
    kinds: dict[tuple[int, int], list[GpuSpec]] = {}
    for gpu in dict.fromkeys(gpus):
        kinds.setdefault(capability_of(gpu), []).append(gpu)
    return [tuple(kind) for _, kind in sorted(kinds.items())]


def _job(compared: Compared, gpus: tuple[GpuSpec, ...], pins: Pins) -> Job:
    program = compared.program
    request = ComparisonJob(program=program, gpus=gpus, pins=dict(pins.values), options=compared.options, versions=_versions(program))
    return Job(
        name=f"{program.name} on {program.parallelism.num_gpus} × {', '.join(gpu.name for gpu in gpus)}",
        function=f"{__name__}:{compare_here.__name__}",
        request=request.model_dump_json(round_trip=True),
        folder=str(Path.cwd()),
        needs_folder=not isinstance(program, Workload),
        environment=_environment(os.environ),
        without=READ_BY_PYTORCH,
    )


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what PyTorch and CUDA read of *environment*: a worker's own would be another's settings."""
    return {name: value for name, value in environment.items() if name.startswith(READ_BY_PYTORCH)}


def _versions(program: AnyProgram) -> dict[str, str]:
    # A program may run in another Python, whose PyTorch it has.
    torch = {"PyTorch": find_torch().version} if isinstance(program, Workload) else {}
    return {
        "memplan, by its code,": own_code("planner", "analysis", "programs", "hardware")[:12],
        "Python": ".".join(map(str, sys.version_info[:2])),
        **torch,
    }


def compare_here(request: str) -> str:
    """
    Return the answer to *request*, on a worker.

    Raises MissingError where it has other versions than who asks; else as `compare`.
    """
    job = ComparisonJob.model_validate_json(request)
    own = _versions(job.program)
    for what, version in job.versions.items():
        if own[what] != version:
            raise MissingError(f"a worker has {what} {own[what]}, and here is {version}", hint="install the same on every worker")
    estimator = estimator_by("rehearsed", is_slow=not isinstance(job.program, Workload))
    return _Rows(compare(job.program, job.gpus, estimator, pins=Pins(job.pins), **job.options)).model_dump_json(round_trip=True)

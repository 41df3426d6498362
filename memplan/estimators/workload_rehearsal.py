"""
`--method rehearsed`: the step of a workload, built as torch modules (`programs/built_in.py`) and run on the stand-in device.

The card of an estimate has memory without end, so that every size has a peak to compare with the budget. Near its real end the allocator
would first give cached memory back; a step that fits only so is tight, and no plan relies on it.
"""

from __future__ import annotations

import atexit
import json
from functools import lru_cache

from memplan.estimators.rehearsed import UNLIMITED_BYTES, Rehearser
from memplan.estimators.target import Target
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.spec import GpuSpec
from memplan.memory.rehearsal import Rehearsal
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

MOST_MICRO_BATCHES = 2
"""Micro-batches of a step that are run: with the second the gradients are there, and each that follows is like it."""


def estimate(workload: Workload, gpu: GpuSpec, stage: Stage | None) -> Rehearsal:
    """
    Return the memory of one step of *workload* in *stage* on *gpu*, by running it. The same step is run once.

    Raises UsageError where the step cannot be built (a package that it needs is missing), MissingError where this machine cannot rehearse.
    """
    micro_batches = min(workload.training.gradient_accumulation_steps, MOST_MICRO_BATCHES)
    step = workload.with_training(gradient_accumulation_steps=micro_batches, target_effective_batch_size=None)
    anonymous = () if stage is None else (stage.model_copy(update={"name": "stage", "max_n_negatives": None}),)
    step = step.model_copy(update={"name": "", "stages": anonymous})
    kind = of_some_kind(gpu).model_copy(update={"total_memory_bytes": UNLIMITED_BYTES, "others_used_bytes": 0})
    return _rehearsed(step.model_dump_json(), kind)


@lru_cache(maxsize=1024)
def _rehearsed(step: str, kind: GpuSpec) -> Rehearsal:
    """Run *step* (a workload of one stage, as JSON) on *kind*."""
    workload = json.loads(step)
    settings = {"PYTORCH_CUDA_ALLOC_CONF": workload["training"]["allocator_settings"]}
    rehearsal = _rehearser().rehearse(gpu=kind, values={"workload": workload}, looks=False, environment=settings)
    return rehearsal.model_copy(update={"trace": None})  # a plan asks for hundreds of sizes, and compares their peaks


@lru_cache(maxsize=1)
def _rehearser() -> Rehearser:
    """Return the process that rehearses workloads; it lives as long as this one."""
    rehearser = Rehearser(Target("memplan.programs.built_in", "build"))
    atexit.register(rehearser.close)
    return rehearser

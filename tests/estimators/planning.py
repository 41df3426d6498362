"""Plans of a small program, and what was run for them."""

from __future__ import annotations

import sys
from pathlib import Path

from memplan.analysis.make_plan import make_plan
from memplan.estimators.rehearsal_cache import RehearsalCache
from memplan.estimators.rehearsed import RehearsedEstimator
from memplan.hardware.gpu import GpuSpec
from memplan.planner.plan import Plan
from memplan.programs.command_line import command_program
from memplan.programs.command_program import CommandProgram

PROGRAM = Path(__file__).with_name("planned_program.py")


class Told(list[tuple[int, int]]):
    """Micro-batch and accumulation of each rehearsal, in order."""


def planned(program: CommandProgram, gpu: GpuSpec, cache: Path | None = None, *, target: int | None = None) -> tuple[Plan, Told]:
    """Plan *program*, and say what was run for it."""
    told = Told()
    rehearsals = RehearsedEstimator(
        None if cache is None else RehearsalCache(cache),
        on_rehearsal=lambda step: told.append((step.micro_batch_size, step.program.training.gradient_accumulation_steps)),
        is_slow=True,
    )
    fills = target is None and not program.has_present_batch
    return make_plan(program, gpu, rehearsals, target=target, fills_gpu=fills, finds_room=False), told


def command(*words: str | int, **options: object) -> CommandProgram:
    return command_program([sys.executable, str(PROGRAM), *map(str, words)], **options)  # type: ignore[arg-type]

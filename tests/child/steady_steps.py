"""Steps that ask for the same each time, or say so, beside the same ones that are run each time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memplan.child.models import built_in
from memplan.child.repeated_step import SteadyStep

MIB = 2**20

SIZES_MIB = (6, 6, 9, 14, 5)
ORDER = (1, 2, -2, 3, 4, 5, -5, -4, -3, -1)
"""Made and let go of in this order, these fill segments otherwise in the third step than in the second, which found less cached."""

STATE_BEFORE, STATE_MIB = 8, 11
"""The first step makes what lasts before that place of the order."""


def run_each_time(device: str, workload: dict[str, Any]) -> Callable[[], object]:
    """A built-in step, of which nobody knows that it is steady."""
    return partial(built_in.build(device, workload))


def fragments(device: str, *, is_steady: bool) -> Callable[[], object]:
    """What reserves more in the third step than in the second, for the same requests."""
    state: list[torch.Tensor] = []

    def step() -> None:
        made: dict[int, torch.Tensor] = {}
        for place, number in enumerate(ORDER):
            if place == STATE_BEFORE and not state:
                state.append(torch.empty(STATE_MIB * MIB, dtype=torch.int8, device=device))
            if number > 0:
                made[number] = torch.empty(SIZES_MIB[number - 1] * MIB, dtype=torch.int8, device=device)
            else:
                del made[-number]

    return SteadyStep(step) if is_steady else step


def keeps(device: str) -> Callable[[], object]:
    """What says that it is steady, and keeps 4 MiB of each step."""
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept.append(torch.empty(4 * MIB, dtype=torch.int8, device=device))

    return SteadyStep(step)

"""What a program does in its steps, as `child/habits.py` writes it: checked and typed here, judged by `analysis/doctor_checks.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from memplan.description import Description

HABITS = "MEMPLAN_HABITS"
"""The variable that asks a rehearsal for them."""

HabitKind = Literal[
    "empty_cache", "read", "unpinned_copy", "clipped_before_unscale", "zeroed_in_place", "dropped_gradients", "evaluation_with_gradient",
]  # fmt: skip

Change = Literal["empty_cache", "set_to_none", "fused", "no_grad"]
"""What a rehearsal can do otherwise than the program, to show what that saves."""


class Habit(Description):
    """A call that a line of the program makes in its steps."""

    kind: HabitKind
    """Which call."""

    place: str
    """FILE:LINE."""

    text: str
    """The line itself."""

    count: NonNegativeInt
    """How often."""

    num_steps: NonNegativeInt
    """In how many different steps."""


class OptimizerUse(Description):
    """An optimizer that stepped."""

    name: str
    """Its class."""

    can_be_fused: bool
    """It has a fused implementation."""

    is_fused: bool
    """It runs that."""

    foreach: bool | None
    """As the program has set it; None: PyTorch chooses."""

    num_parameters: dict[str, int]
    """What it trains, by type."""

    num_in_matrices: int
    """How many of them are in matrices; kernels of convolutions are not."""


class OptimizerSteps(Description):
    """Optimizer steps of one kind."""

    num_backwards: PositiveInt
    """Backwards whose gradients each of them used."""

    divisor: float | None
    """What the losses of these backwards were divided by, 1 for nothing; None: not all by the same, or by what only the GPU knows."""

    place: str
    """FILE:LINE that stepped, through whichever packages; empty where there is none."""

    count: PositiveInt
    """How many."""


class Convolution(Description):
    """A convolution of a module in training mode."""

    kind: str
    """Its class."""

    shapes: tuple[tuple[int, ...], ...]
    """Of what it got."""

    count: NonNegativeInt
    """How often it ran."""

    num_half: NonNegativeInt
    """How often under mixed or half precision."""

    num_channels_last: NonNegativeInt
    """More than 0: it ran in that memory format."""


class LoaderUse(Description):
    """A DataLoader that the program iterated over."""

    place: str
    """FILE:LINE of the loop."""

    batch_size: int | None
    """None: the dataset makes the batches."""

    pin_memory: bool
    """Its batches are in pinned memory."""

    num_workers: NonNegativeInt
    """0: the training process loads."""

    backwards_before: NonNegativeInt
    """Backwards that had begun when it was first iterated over."""

    iterated: NonNegativeInt
    """How often."""


class Recompilation(Description):
    """A function that torch.compile compiled again because a shape changed."""

    place: str
    """FILE:LINE, where it begins."""

    name: str
    """The function."""

    count: NonNegativeInt
    """How often again."""

    reason: str
    """PyTorch's, of the last time."""


class TorchSettings(Description):
    """PyTorch's own switches, at the end of the program."""

    matmul_precision: str
    """torch.get_float32_matmul_precision(): "highest" is without TF32."""

    cudnn_benchmark: bool
    """torch.backends.cudnn.benchmark."""

    is_deterministic: bool
    """Deterministic algorithms are asked for."""


class Habits(Description):
    """What was seen of one run."""

    found: tuple[Habit, ...]
    """Calls, by line."""

    autocasts: dict[str, str]
    """Types that autocast ran in, each with the first FILE:LINE that began it."""

    has_scaled: bool
    """A gradient scaler was in use."""

    optimizers: tuple[OptimizerUse, ...]
    """Those that stepped."""

    optimizer_steps: tuple[OptimizerSteps, ...]
    """By how many backwards they used."""

    num_backwards_left: int
    """Backwards behind the last optimizer step."""

    convolutions: tuple[Convolution, ...]
    """Of modules in training mode."""

    loaders: tuple[LoaderUse, ...]
    """DataLoaders."""

    recompilations: tuple[Recompilation, ...]
    """Of torch.compile."""

    settings: TorchSettings
    """PyTorch's switches."""


def request(changes: Mapping[Change, Sequence[str]]) -> str:
    """Return what MEMPLAN_HABITS says for a run with *changes*, each with the lines that it is for (none: all)."""
    return json.dumps({"changes": {name: list(places) for name, places in changes.items()}})

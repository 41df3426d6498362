"""A memory breakdown as rows of a report: category, size, share of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memplan.memory.breakdown import MemoryBreakdown
from memplan.units import format_bytes

CATEGORIES = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_state_bytes": "optimizer state",
    "activations_bytes": "activations",
    "batch_data_bytes": "batch data",
    "workspaces_bytes": "workspaces",
    "allocator_slack_bytes": "allocator slack",
    "cuda_context_bytes": "CUDA context",
}
"""The fields of a breakdown, in words."""

SMALL_SHARE = 0.02
"""Of the GPU: categories below it share a row in a short report."""


class Breakdown(NamedTuple):
    """What the memory of a step is made of."""

    title: str
    """Which step, and where in it the peak is."""
    rows: tuple[tuple[str, str, float], ...]
    """Category, size, share of the GPU; the total comes last."""


def breakdown_rows(breakdown: MemoryBreakdown, total_bytes: int, *, is_short: bool = False) -> tuple[tuple[str, str, float], ...]:
    """Return the rows of *breakdown* on a GPU of *total_bytes*; in a short one the small categories are one row, "other"."""
    parts = [(CATEGORIES[name], value) for name, value in breakdown if value]
    small = [part for part in parts if part[1] < SMALL_SHARE * total_bytes] if is_short else []
    if len(small) > 1:
        parts = [part for part in parts if part not in small]
        parts.append(("other", sum(value for _, value in small)))
    return tuple((name, format_bytes(value), value / total_bytes) for name, value in (*parts, ("total", breakdown.total_bytes)))


def joined(names: Sequence[str]) -> str:
    """Return *names* as a list in words: "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def count(number: int, noun: str) -> str:
    """Return *number* with its noun: "1 step", "3 steps"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")

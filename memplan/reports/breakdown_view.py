"""A memory breakdown as rows of a report: category, size, share of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memplan.memory.estimate import SET_UP, MemoryEstimate
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
    "nccl_buffers_bytes": "NCCL buffers",
    "symmetric_memory_bytes": "symmetric memory",
    "other_processes_bytes": "other processes",
}
"""The fields of a breakdown, in words."""

SHORT = {
    "model states": ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"),
    "activations": ("activations_bytes",),
    "other": (
        "batch_data_bytes", "workspaces_bytes", "allocator_slack_bytes",
        "cuda_context_bytes", "nccl_buffers_bytes", "symmetric_memory_bytes", "other_processes_bytes",
    ),
}  # fmt: skip
"""The rows of a short report, and the fields that each sums."""


class Breakdown(NamedTuple):
    """What the memory of a step is made of."""

    title: str
    """Which step, and where in it the peak is."""
    rows: tuple[tuple[str, str, float], ...]
    """Category, size, share of the GPU; the total comes last, where there is one."""


def breakdown_rows(estimate: MemoryEstimate, total_bytes: int, *, is_short: bool = False) -> tuple[tuple[str, str, float], ...]:
    """
    Return the rows of the breakdown of *estimate* on a GPU of *total_bytes*.

    A short one has model states, activations and the rest, without a total. Before the first step nothing is kept for a backward, and what
    would be activations are other tensors.
    """
    breakdown = estimate.breakdown
    if is_short:
        parts = [(name, sum(getattr(breakdown, field) for field in fields)) for name, fields in SHORT.items()]
    else:
        parts = [(CATEGORIES[name], value) for name, value in breakdown]
        parts.append(("total", breakdown.total_bytes))
    names = {"activations": "other tensors"} if estimate.peak_phase == SET_UP else {}
    return tuple((names.get(name, name), format_bytes(value), value / total_bytes) for name, value in parts if value)


def joined(names: Sequence[str]) -> str:
    """Return *names* as a list in words: "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return *number* with its noun: "1 step", "3 steps"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"

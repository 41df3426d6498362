"""
How much of a device is left for samples beside the training, asked before the first sample is read.

    left = (free now + what PyTorch holds) x (1 - margin) - what the training takes at its peak
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from memplan.analysis.dataset_memory import dataset_reserved_bytes, most_samples
from memplan.errors import DoesNotFitError, UsageError
from memplan.hardware.host import available_bytes
from memplan.memory.budget import MemoryBudget
from memplan.memory.cuda_context import CONTEXT_LOW_BYTES
from memplan.planner.plan import Plan
from memplan.units import format_bytes


class Room(NamedTuple):
    """What a device has for samples."""

    own_bytes: int
    """What this process can have of it: what is free, and what PyTorch's allocator holds already."""
    training_bytes: int
    """What the training takes of that at its peak."""
    told_by: str
    """Who says so."""
    margin: float
    """The share of it that stays free."""

    @property
    def left_bytes(self) -> int:
        """Return what samples may take."""
        return max(0, MemoryBudget(total_bytes=self.own_bytes, margin=self.margin).budget_bytes - self.training_bytes)


def device_room(device: torch.device, others: int | Plan | None, margin: float) -> Room:
    """Return what *device* has for samples beside *others*. Raises UsageError for a device whose free memory nobody tells."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        peak_bytes, told_by = _peak_of(others, device)
        return Room(free_bytes + reserved, max(peak_bytes, torch.cuda.memory_allocated(device)), told_by, margin)
    if device.type != "cpu":
        raise UsageError(f"the free memory of the device {device} is not known", hint='`device="cuda"` or `device="cpu"`')
    if isinstance(others, Plan):
        raise UsageError("a plan is of a GPU, and the device is the CPU", hint="give `others` in bytes")
    return Room(available_bytes(), others or 0, "given" if others else "not given", margin)


def _peak_of(others: int | Plan | None, device: torch.device) -> tuple[int, str]:
    """Return the most that the training holds by PyTorch's allocator and libraries, and who says so."""
    if others is None:
        return torch.cuda.max_memory_reserved(device), "that of this process so far"
    if isinstance(others, Plan):  # its context is partly there: at least what CUDA takes before the first tensor
        return max(0, max(stage.estimate.device_used.high_bytes for stage in others.stages) - CONTEXT_LOW_BYTES), "planned"
    return others, "given"


def check_fits(room: Room, sizes: Sequence[int], num_samples: int, device: torch.device) -> None:
    """Raise DoesNotFitError where *num_samples* samples, of values with these *sizes* in bytes, do not fit into *room*."""
    is_on_gpu = device.type == "cuda"
    needed = dataset_reserved_bytes(sizes, num_samples) if is_on_gpu else sum(sizes) * num_samples
    if needed <= room.left_bytes:
        return
    most = most_samples(sizes, room.left_bytes) if is_on_gpu else room.left_bytes // max(1, sum(sizes))
    raise DoesNotFitError(
        f"the dataset does not fit on {device}: {num_samples:,} samples of {format_bytes(sum(sizes))} take {format_bytes(needed)}, and "
        f"{format_bytes(room.left_bytes)} are left of {format_bytes(room.own_bytes)}: the training takes "
        f"{format_bytes(room.training_bytes)} at its peak ({room.told_by}), and {room.margin:.0%} stay free",
        hint=f"{min(most, num_samples):,} samples fit: keep some (`torch.utils.data.Subset`), or smaller ones (`dtype=torch.bfloat16`)"
        if most > 0
        else f"no sample fits: let the training take less, or say what it takes with `others`{_held_elsewhere(room, device)}",
    )


def _held_elsewhere(room: Room, device: torch.device) -> str:
    """Say what of a GPU other processes hold, and CUDA itself."""
    if device.type != "cuda":
        return ""
    _, total_bytes = torch.cuda.mem_get_info(device)
    return f"; {format_bytes(total_bytes - room.own_bytes)} of the GPU are in use beside PyTorch's tensors (`memplan gpus`)"

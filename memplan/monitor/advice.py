"""What samples say beside the GPU and the plan: too little used, too much, more and more, or a GPU that waits for its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from memplan.monitor.sampler import GpuSample, Sample, key_of
from memplan.units import format_bytes

LOW_SHARE, HIGH_SHARE = 0.50, 0.92
"""Of the GPU: below, a larger batch would fit; above, the next longer batch or an evaluation may not."""

GROWTH_PARTS = 4
GROWTH_SAMPLES = 20
GROWTH_SHARE = 0.01
"""Memory grows when the least of each of so many parts of the samples is above that of the part before, and by so much of the GPU in all.
The first step is no growth: optimizers make their state there, and allocators what they keep."""

WAITING_PERCENT = 40
WAITING_SAMPLES = 10
BUSY_CPU_PERCENT = 85


class Advice(NamedTuple):
    """A warning, and what to do."""

    kind: Literal["low", "high", "growth", "waiting", "over_plan"]
    gpu: int
    """CUDA's number of it."""
    message: str


def advise(samples: Sequence[Sample], *, planned_bytes: int | None = None) -> list[Advice]:
    """Return what *samples*, oldest first, say of each GPU of the last one; *planned_bytes* is what a plan counts on."""
    if not samples:
        return []
    return [advice for gpu in samples[-1].gpus for advice in _of_gpu([*_history(samples, gpu)], samples, planned_bytes)]


def _history(samples: Sequence[Sample], gpu: GpuSample) -> Iterator[GpuSample]:
    for sample in samples:
        yield from (each for each in sample.gpus if key_of(each) == key_of(gpu))


def _of_gpu(history: Sequence[GpuSample], samples: Sequence[Sample], planned_bytes: int | None) -> Iterator[Advice]:
    last = history[-1]
    used = [gpu.used_bytes for gpu in history if gpu.used_bytes is not None]
    if used and last.total_bytes and last.used_bytes is not None and last.processes != ():
        yield from _of_use(last, max(used), last.total_bytes, planned_bytes)
        yield from _of_growth(last, used, last.total_bytes, samples)
    yield from _of_waiting(last, history, samples)


def _of_use(gpu: GpuSample, peak: int, total: int, planned_bytes: int | None) -> Iterator[Advice]:
    said = f"GPU {gpu.number}: {format_bytes(peak)} of {format_bytes(total)} at most ({peak / total:.0%})"
    if peak > HIGH_SHARE * total:
        todo = "the next longer batch or an evaluation may not fit; see what would help: `memplan.plan(with_levers=True)`"
        yield Advice("high", gpu.number, f"{said}: {todo}")
    elif peak < LOW_SHARE * total:
        yield Advice("low", gpu.number, f"{said}: a larger micro-batch would fit; `memplan.plan()` or `memplan.find_batch()` says which")
    if planned_bytes is not None and peak > planned_bytes:
        over = format_bytes(peak - planned_bytes)
        yield Advice("over_plan", gpu.number, f"{said}: {over} more than planned; `plan.profile()` shows of what")


def _of_growth(gpu: GpuSample, used: Sequence[int], total: int, samples: Sequence[Sample]) -> Iterator[Advice]:
    if len(used) < GROWTH_SAMPLES:
        return
    size = len(used) // GROWTH_PARTS
    used = used[-size * GROWTH_PARTS :]
    least = [min(used[size * part : size * (part + 1)]) for part in range(GROWTH_PARTS)]
    grown = least[-1] - least[0]
    if grown <= GROWTH_SHARE * total or any(after <= before for before, after in pairwise(least)):
        return
    minutes = (samples[-1].time - samples[-size * GROWTH_PARTS].time) / 60
    yield Advice(
        "growth",
        gpu.number,
        f"GPU {gpu.number}: memory grows, {format_bytes(grown)} in {minutes:.1f} minutes: something is kept from step to step, as a loss "
        "that is summed with its graph (`loss.item()`), or outputs in a list; `memplan.rehearse(steps=10)` shows it without the GPU",
    )


def _of_waiting(gpu: GpuSample, history: Sequence[GpuSample], samples: Sequence[Sample]) -> Iterator[Advice]:
    recent = [each.utilization_percent for each in history[-WAITING_SAMPLES:]]
    told = [percent for percent in recent if percent is not None]
    if len(told) < WAITING_SAMPLES or not gpu.processes or sum(told) / len(told) >= WAITING_PERCENT:
        return
    latest = [*samples][-WAITING_SAMPLES:]  # a deque, as the monitor keeps them, has no slices
    cpu = sum(sample.cpu_percent for sample in latest) / len(latest)
    cause = (
        "the processors are busy: move work out of the data loading, or to the GPU"
        if cpu >= BUSY_CPU_PERCENT
        else "the processors are not: more `num_workers`, `pin_memory=True`, `persistent_workers=True`, or faster storage"
    )
    mean = sum(told) / len(told)
    said = f"GPU {gpu.number} is busy {mean:.0f}% of the time, and waits otherwise, for data as a rule"
    yield Advice("waiting", gpu.number, f"{said}; {cause} ({cpu:.0f}%)")

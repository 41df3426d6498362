"""Micro-batch and accumulation: the batch a rank holds at once, and how often.

A plan keeps the effective batch that the user asked for. It moves work between the micro-batch, which costs memory, and accumulation, which
costs time:

    effective batch = micro batch x accumulation steps x data-parallel size

The effective batch is never below the target. An exact one is taken where its micro-batch is at least half of the largest that fits: people
compare runs at the batch that they typed. Otherwise, and always where a tolerance is given, the plan takes the fewest accumulation steps
whose effective batch is within the tolerance above the target, and among those the smallest excess.
"""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_TOLERANCE = 0.05
"""Share of the target by which the effective batch may be above it where no exact one is worth its accumulation steps."""

LEAST_EXACT_SHARE = 0.5
"""Share of the largest micro-batch that fits which an exact one must have to be preferred."""


class Alternative(NamedTuple):
    """Another micro-batch and accumulation that the user may prefer, and the argument that asks for it."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    effective_batch_size: int
    argument: str


class BatchChoice(NamedTuple):
    """A micro-batch, its accumulation, and the rule that decided."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    effective_batch_size: int
    rule: str
    alternative: Alternative | None = None


def choose_batch(
    *,
    largest: int,
    target: int,
    data_parallel_size: int = 1,
    tolerance: float | None = None,
    pinned_micro_batch: int | None = None,
    pinned_accumulation: int | None = None,
    is_accumulation_fixed: bool = False,
    unit: int = 1,
) -> BatchChoice:
    """
    Return the micro-batch (a multiple of *unit* up to *largest*, which fits) and the accumulation for an effective batch of *target*.

    *tolerance*: share of the target by which the effective batch may always be above it; None prefers an exact one where its micro-batch is
    at least half of *largest*. What is pinned stays, also where it misses the target.
    *is_accumulation_fixed*: it is the program that pins it.
    """
    ranks = data_parallel_size
    unit = unit if largest >= unit else 1
    largest -= largest % unit
    if pinned_micro_batch is not None and pinned_accumulation is not None:
        return _choice(pinned_micro_batch, pinned_accumulation, ranks, "both are pinned")
    if pinned_micro_batch is not None:
        rule = "the micro-batch is pinned; accumulation makes up the target"
        return _choice(pinned_micro_batch, _steps(target, pinned_micro_batch * ranks), ranks, rule)
    if pinned_accumulation is not None:
        wanted = _least_micro_batch(target, pinned_accumulation * ranks, unit)
        why = "the program has no variable for accumulation" if is_accumulation_fixed else "accumulation is pinned"
        rule = f"{why}; the micro-batch makes up the target"
        if wanted > largest:
            rule = f"{why}; the micro-batch is the largest that fits, below what the target needs"
        return _choice(min(wanted, largest), pinned_accumulation, ranks, rule)
    sizes = range(largest, 0, -unit)
    exact = _largest_exact(sizes, target, ranks)
    near = _fewest_steps(sizes, target, ranks, DEFAULT_TOLERANCE if tolerance is None else tolerance)
    if tolerance is None and exact is not None and exact.micro_batch_size >= LEAST_EXACT_SHARE * largest:
        return exact._replace(alternative=_with_fewer_steps(exact, sizes, target, ranks))
    return near._replace(alternative=_exactly(near, exact) or _with_fewer_steps(near, sizes, target, ranks))


# *sizes*: the micro-batches that there are to choose from, the largest first


def _largest_exact(sizes: range, target: int, ranks: int) -> BatchChoice | None:
    """Return the choice with the largest micro-batch whose multiples meet the target exactly; None where none does."""
    samples, rest = divmod(target, ranks)
    micro = next((micro for micro in sizes if not rest and samples % micro == 0), None)
    return None if micro is None else _choice(micro, samples // micro, ranks, "the largest that fits and meets the target exactly")


def _fewest_steps(sizes: range, target: int, ranks: int, tolerance: float) -> BatchChoice:
    """Return the choice with the fewest accumulation steps within *tolerance*, or else the one nearest to the target from above."""
    for micro in sizes:
        steps = _steps(target, micro * ranks)
        smallest = _least_micro_batch(target, steps * ranks, -sizes.step)  # which needs no more steps has the smallest excess
        if smallest * steps * ranks <= target * (1 + tolerance):
            rule = f"the fewest accumulation steps for an effective batch at most {100 * tolerance:.3g}% above the target"
            return _choice(smallest, steps, ranks, rule)
    nearest = min(sizes, key=lambda micro: _steps(target, micro * ranks) * micro)
    return _choice(nearest, _steps(target, nearest * ranks), ranks, "the effective batch nearest to the target, from above")


def _with_fewer_steps(chosen: BatchChoice, sizes: range, target: int, ranks: int) -> Alternative | None:
    """Return what would take fewer accumulation steps than *chosen*, within the usual tolerance or beyond it; None where nothing would."""
    near = _fewest_steps(sizes, target, ranks, DEFAULT_TOLERANCE)
    argument = f"target_tolerance={DEFAULT_TOLERANCE}"
    if near.gradient_accumulation_steps >= chosen.gradient_accumulation_steps:
        steps = _steps(target, sizes[0] * ranks)
        micro = _least_micro_batch(target, steps * ranks, -sizes.step)
        near = _choice(micro, steps, ranks, "")
        argument = f"target_effective_batch_size={near.effective_batch_size}"
    if near.gradient_accumulation_steps >= chosen.gradient_accumulation_steps:
        return None
    return Alternative(near.micro_batch_size, near.gradient_accumulation_steps, near.effective_batch_size, argument)


def _exactly(chosen: BatchChoice, exact: BatchChoice | None) -> Alternative | None:
    """Return the exact choice as the alternative to one that is above the target."""
    if exact is None or chosen.effective_batch_size == exact.effective_batch_size:
        return None
    return Alternative(exact.micro_batch_size, exact.gradient_accumulation_steps, exact.effective_batch_size, "target_tolerance=0")


def _steps(target: int, samples: int) -> int:
    return -(-target // samples)


def _least_micro_batch(target: int, micro_batches: int, unit: int) -> int:
    """Return the smallest multiple of *unit* of which so many micro-batches make up the target."""
    return unit * _steps(_steps(target, micro_batches), unit)


def _choice(micro_batch_size: int, steps: int, ranks: int, rule: str) -> BatchChoice:
    return BatchChoice(micro_batch_size, steps, micro_batch_size * steps * ranks, rule)

"""Micro-batch and accumulation: the batch a rank holds at once, and how often.

A plan keeps the effective batch that the user asked for. It moves work between the micro-batch, which costs memory, and accumulation, which
costs time:

    effective batch = micro batch x accumulation steps x data-parallel size

Among the micro-batches that fit, the plan prefers one whose multiples meet the target exactly or most nearly, never below it, and among
those the largest.
"""

from typing import NamedTuple


class BatchChoice(NamedTuple):
    """A micro-batch, its accumulation, and the rule that decided."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    effective_batch_size: int
    rule: str


def choose_batch(
    *,
    largest: int,
    target: int,
    data_parallel_size: int = 1,
    pinned_micro_batch: int | None = None,
    pinned_accumulation: int | None = None,
) -> BatchChoice:
    """
    Return the micro-batch (1 to *largest*, which fits) and the accumulation for an effective batch of *target*.

    What is pinned stays, also where it misses the target.
    """
    if pinned_micro_batch is not None and pinned_accumulation is not None:
        return _choice(pinned_micro_batch, pinned_accumulation, data_parallel_size, "both are pinned")
    if pinned_micro_batch is not None:
        steps = _steps(target, pinned_micro_batch * data_parallel_size)
        return _choice(pinned_micro_batch, steps, data_parallel_size, "the micro-batch is pinned; accumulation makes up the target")
    if pinned_accumulation is not None:
        wanted = _steps(target, pinned_accumulation * data_parallel_size)
        rule = "accumulation is pinned; the micro-batch makes up the target"
        if wanted > largest:
            rule = "accumulation is pinned; the micro-batch is the largest that fits, below what the target needs"
        return _choice(min(wanted, largest), pinned_accumulation, data_parallel_size, rule)
    best = min(range(1, largest + 1), key=lambda micro: (_excess(target, micro * data_parallel_size), -micro))
    exact = _excess(target, best * data_parallel_size) == 0
    nearness = "meet the target exactly" if exact else "come nearest to the target from above"
    return _choice(
        best, _steps(target, best * data_parallel_size), data_parallel_size, f"the largest that fits among those whose multiples {nearness}"
    )


def _steps(target: int, samples: int) -> int:
    return -(-target // samples)


def _excess(target: int, samples: int) -> int:
    return _steps(target, samples) * samples - target


def _choice(micro_batch_size: int, steps: int, data_parallel_size: int, rule: str) -> BatchChoice:
    return BatchChoice(micro_batch_size, steps, micro_batch_size * steps * data_parallel_size, rule)

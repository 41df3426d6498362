"""
What a later step may take more than those that ran, where batches differ and nobody can look for the largest.

A function that makes its batches itself, or a program without a DataLoader, shows a few of them. Where these are of fixed length all
steps take the same; where a step trains on texts, boxes or graphs as they come, each is a draw, and the largest of thousands is above that
of ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from memplan.execution.run_record import RunRecord
from memplan.traces.kept import StepEnd
from memplan.traces.trace import EVALUATION

STANDARD_DEVIATIONS = 5.0
"""
Above the mean, up to which a later step is counted. After nine draws from a normal distribution the largest of a thousand more is above
that in one case of eight, by less than half a standard deviation mostly; lengths that have a limit stay below it. Those with a long tail
may not.
"""

LEAST_DRAWS = 4
"""Steps that say how much they differ."""

MOST_SHARE = 0.25
"""
Of the highest step, the most that is counted above it: where steps differ by so much, each has one length mostly, and lengths have a limit.
"""

LEAST_SHARE_OF_SIZES = 0.75
"""Of the steps, so many are of a size of their own: a training that does one thing and another in turn repeats two, and is no draw."""


def peaks_of_draws(record: RunRecord, ends: Sequence[StepEnd]) -> list[int]:
    """
    Return what each step but the first took at its peak, beside what lasts; none where the batches of a DataLoader, or an evaluation, tell
    more of the program. *ends*: those of its steps.
    """
    tells_more = bool(record.batches) or any(mark.phase == EVALUATION for mark in record.marks)
    peaks = [end.peak_bytes for end in ends[1:]] if not (record.command and tells_more) else []
    is_left = record.command and peaks == sorted(peaks, reverse=True)  # what is left of one step may count in the next
    return [] if is_left else peaks


def later_bytes(peaks: Sequence[int]) -> int:
    """Return the bytes by which a later step may be above the highest of *peaks*, those of `peaks_of_draws`; 0 where they are no draws."""
    num_sizes = len(set(peaks))
    is_in_order = list(peaks) in (sorted(peaks), sorted(peaks, reverse=True))  # it grows, or has not settled
    if len(peaks) < LEAST_DRAWS or num_sizes < LEAST_SHARE_OF_SIZES * len(peaks) or is_in_order or _has_one_of_another_kind(peaks):
        return 0
    bound = min(fmean(peaks) + STANDARD_DEVIATIONS * stdev(peaks), (1 + MOST_SHARE) * max(peaks))
    return max(0, round(bound) - max(peaks))


def _has_one_of_another_kind(peaks: Sequence[int]) -> bool:
    """Say whether the highest step stands apart, as one with a further loss does: the others say nothing of it."""
    lowest, *_, second, highest = sorted(peaks)
    return highest - second > (highest - lowest) / 2

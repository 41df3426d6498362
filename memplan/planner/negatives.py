"""
Negatives and positives: how many a stage could have at the planned micro-batch, and what they cost.

They are the user's choice: more of them change the loss and the time of a step. So a plan says how many would fit, and raises them only
where it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from memplan.estimators.interpolation import PeakLine
from memplan.planner.fitting import StageQuestions
from memplan.planner.search import largest_fitting
from memplan.workload.contrastive import Contrastive
from memplan.workload.stage import Stage

NOTHING_KNOWN: Mapping[int, int] = MappingProxyType({})

MOST_PER_ANCHOR = 4096
"""Where the search for more ends: nobody trains with so many explicit negatives or positives for an anchor."""


def has_negatives(stage: Stage) -> bool:
    """Say whether a stage has explicit negatives, or is meant to: without any it is another kind of training."""
    return stage.n_negatives > 0 or stage.max_n_negatives is not None


def most_negatives(stage: Stage, asked: StageQuestions, known: Mapping[int, int] = NOTHING_KNOWN) -> int:
    """
    Return the most negatives, from its present count on, with which *stage* fits; its present count where even that does not fit.

    No more than the stage's own `max_n_negatives`, where it has one. *known*: the peaks of other stages at this micro-batch, by the number
    of items for an anchor, to guess from.
    """
    limit = MOST_PER_ANCHOR if stage.max_n_negatives is None else stage.max_n_negatives
    return _most(lambda count: with_negatives(stage, count), stage.n_negatives, max(limit, stage.n_negatives), asked, known)


def most_positives(stage: Stage, asked: StageQuestions, known: Mapping[int, int] = NOTHING_KNOWN) -> int:
    """As `most_negatives`, for positives."""
    limit = max(MOST_PER_ANCHOR, stage.n_positives)
    return _most(lambda count: stage.model_copy(update={"n_positives": count}), stage.n_positives, limit, asked, known)


def _most(of_count: Callable[[int], Stage], present: int, limit: int, asked: StageQuestions, known: Mapping[int, int]) -> int:
    line = PeakLine(known)

    def fits(count: int) -> bool:
        if present < count < limit and guess(count) and not guess(count + 1):  # the end, as it seems
            asked.expect(of_count(count + 1))
        peak_bytes = asked.peak_bytes(of_count(count))
        if peak_bytes is not None:
            line.learn(asked.items_of(of_count(count)), peak_bytes)
        return peak_bytes is not None and peak_bytes <= asked.budget_bytes

    def guess(count: int) -> bool:
        peak_bytes = line.at(asked.items_of(of_count(count))) or asked.quick_bytes(of_count(count))
        return peak_bytes is not None and peak_bytes <= asked.budget_bytes

    if not fits(present):  # which the plan has asked about: it costs nothing
        return present
    found = largest_fitting(fits, low=present + 1, high=limit, guess=guess, leaps=True)
    return present if found is None else found


def positives_cost_memory(contrastive: Contrastive) -> bool:
    """Say whether a step encodes every positive of an anchor: with pairs it encodes one, and the others are rows of the epoch."""
    return contrastive.sampling != "pair"


def with_negatives(stage: Stage, n_negatives: int) -> Stage:
    """Return *stage* with that many negatives; a limit below them goes."""
    limit = stage.max_n_negatives
    return stage.model_copy(
        update={"n_negatives": n_negatives, "max_n_negatives": None if limit is not None and limit < n_negatives else limit}
    )

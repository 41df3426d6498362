"""What the plan and the comparison share: by which estimator, with what a person sees while it works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from memplan.errors import MissingError, NotRehearsedError

if TYPE_CHECKING:
    from memplan.cli.configuration import Configuration
    from memplan.estimators.base import Estimator
    from memplan.planner.planner import DecisionOptions

T = TypeVar("T")


class Asked(NamedTuple):
    """What somebody asked of a plan."""

    method: str
    target: int | None
    margin: float | None
    pins: Sequence[str]
    with_levers: bool = False

    def options(self, configuration: Configuration) -> DecisionOptions:
        """Return what `decide` is told of it."""
        from memplan.memory.budget import DEFAULT_MARGIN

        return {
            "target": self.target,
            "margin": DEFAULT_MARGIN if self.margin is None else self.margin,
            "fills_card": self.target is None and not configuration.has_batch,
        }


class Found(NamedTuple):
    """What came out, and by which method."""

    result: Any
    method: str
    why_not: str | None = None
    """Why it was not by rehearsal, where that was wished for."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Say so."""
        return (f"by formulas, since nothing was rehearsed: {self.why_not}",) if self.why_not else ()


def by_method(method: str, find: Callable[[str, Estimator], T]) -> Found:
    """
    Return what *find* finds by the estimator of *method*; with `auto` by rehearsal, or by formulas where that cannot be.

    Raises NotRehearsedError and MissingError for rehearsals that were asked for by name and cannot be.
    """
    from memplan.cli.progress import told_of_rehearsals
    from memplan.estimators.registry import best_estimator, estimator_by

    if method != "auto":
        estimator = estimator_by(method)
        with told_of_rehearsals(estimator):
            return Found(find(method, estimator), method)
    chosen, estimator, why_not = best_estimator()
    try:
        with told_of_rehearsals(estimator):
            return Found(find(chosen, estimator), chosen, why_not)
    except (NotRehearsedError, MissingError) as error:
        return Found(find("analytic", estimator_by("analytic")), "analytic", error.message)

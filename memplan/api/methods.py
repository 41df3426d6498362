"""By which estimator a question is answered: the one that was named, or rehearsals where they can be and the formulas where not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar, get_args

from memplan.errors import MissingError, NotEstimatedError, NotRehearsedError, UsageError
from memplan.estimators.base import Estimator
from memplan.estimators.registry import OnRehearsal, estimator_by

T = TypeVar("T")

Method: TypeAlias = Literal["auto", "analytic", "rehearsed"]


@dataclass(frozen=True)
class Answered(Generic[T]):  # no NamedTuple: in Python 3.10 it cannot be generic
    """An answer, and why it is not by rehearsal where that was wished for."""

    answer: T
    why_not_rehearsed: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Say so."""
        return (f"estimated by formulas, since it could not be rehearsed: {self.why_not_rehearsed}",) if self.why_not_rehearsed else ()


def by_method(
    method: Method, ask: Callable[[Estimator], T], on_rehearsal: OnRehearsal | None = None, *, is_slow: bool = False
) -> Answered[T]:
    """
    Return what *ask* says by the estimator of *method*; with `auto` by rehearsal, or by formulas where that cannot be.

    *on_rehearsal* is called before each rehearsal; *is_slow* are those of the user's own program. Raises NotRehearsedError and
    MissingError for rehearsals that were asked for by name and cannot be, and where there are no formulas either.
    """
    if method not in get_args(Method):
        raise UsageError(f"unknown method: {method!r}", hint=f"use one of {', '.join(get_args(Method))}")
    if method != "auto":
        return Answered(ask(estimator_by(method, on_rehearsal, is_slow=is_slow)))
    try:
        return Answered(ask(estimator_by("rehearsed", on_rehearsal, is_slow=is_slow)))
    except (NotRehearsedError, MissingError) as error:
        try:
            return Answered(ask(estimator_by("analytic")), error.message)
        except NotEstimatedError:
            raise error from None

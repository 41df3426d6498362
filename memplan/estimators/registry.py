"""The estimators by name."""

from __future__ import annotations

from memplan.errors import MissingError
from memplan.estimators import analytic, guide
from memplan.estimators.base import Estimator


def estimator_by(method: str) -> Estimator:
    """
    Return the estimator of *method*; that of rehearsals is loaded when it is asked for: an analytic plan starts without it.

    Raises MissingError for rehearsals where this machine has not what they need.
    """
    if method == "analytic":
        return analytic.estimate
    if method == "guide":
        return guide.estimate
    from memplan.estimators.workload_rehearsal import rehearsals  # noqa: PLC0415
    from memplan.standin.build import find_torch  # noqa: PLC0415

    find_torch()
    return rehearsals()


def best_estimator() -> tuple[str, Estimator, str | None]:
    """Return the method that this machine allows, its estimator, and why it is not rehearsals, where it is not."""
    try:
        return "rehearsed", estimator_by("rehearsed"), None
    except MissingError as error:
        return "analytic", analytic.estimate, error.message

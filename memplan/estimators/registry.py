"""The estimators by name."""

from __future__ import annotations

from memplan.estimators import analytic, guide
from memplan.estimators.base import Estimator

ESTIMATORS: dict[str, Estimator] = {
    "auto": analytic.estimate,  # the best that is there
    "analytic": analytic.estimate,
    "guide": guide.estimate,
}

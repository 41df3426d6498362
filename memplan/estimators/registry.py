"""The estimators by name."""

from __future__ import annotations

from typing import Literal

from memplan.estimators import analytic, guide
from memplan.estimators.base import Estimator

MethodName = Literal["auto", "analytic", "guide"]

ESTIMATORS: dict[str, Estimator] = {
    "auto": analytic.estimate,  # the best that is there
    "analytic": analytic.estimate,
    "guide": guide.estimate,
}

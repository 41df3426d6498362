"""The estimators by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from memplan.estimators.analytic.estimate import AnalyticEstimator
from memplan.estimators.base import Estimator
from memplan.estimators.guide import GuideEstimator

if TYPE_CHECKING:
    from memplan.estimators.steps import Step

PlanMethod: TypeAlias = Literal["analytic", "rehearsed", "guide"]
"""What needs no GPU of this machine."""

OnRehearsal: TypeAlias = "Callable[[Step], None]"
"""Is called before each rehearsal."""


def estimator_by(method: PlanMethod, on_rehearsal: OnRehearsal | None = None, *, is_slow: bool = False) -> Estimator:
    """
    Return the estimator of *method*, which *is_slow* where it runs the user's own program.

    That of rehearsals is loaded when it is asked for: an analytic plan starts without it.

    Raises MissingError for rehearsals where this machine has not what they need.
    """
    if method == "analytic":
        return AnalyticEstimator()
    if method == "guide":
        return GuideEstimator()
    from memplan.estimators.rehearsal_cache import RehearsalCache  # noqa: PLC0415
    from memplan.estimators.rehearsed import RehearsedEstimator  # noqa: PLC0415
    from memplan.hardware.cache_dir import default_cache  # noqa: PLC0415
    from memplan.hardware.torch_install import find_torch  # noqa: PLC0415

    if not is_slow:  # a program may run in another Python, whose PyTorch it has
        find_torch()
    return RehearsedEstimator(RehearsalCache(default_cache()), on_rehearsal, is_slow=is_slow)

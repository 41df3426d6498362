"""What a person sees while rehearsals run: one line that changes, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan.estimators.base import Estimator
    from memplan.estimators.workload_rehearsal import Step

WIDTH = 100


@contextmanager
def told_of_rehearsals(estimator: Estimator) -> Iterator[None]:
    """Show which step *estimator* runs, while the block lasts."""
    from memplan.estimators.base import rehearsing

    rehearses = rehearsing(estimator)
    if rehearses is None or not sys.stderr.isatty():
        yield
        return
    begin, count = time.monotonic(), 0

    def tell(step: Step) -> None:
        nonlocal count
        count += 1
        line = f"rehearsal {count} ({time.monotonic() - begin:.0f} s): {_described(step)}"
        sys.stderr.write(f"\r{line[:WIDTH]:{WIDTH}}")
        sys.stderr.flush()

    rehearses.tells = tell
    try:
        yield
    finally:
        rehearses.tells = None
        if count:
            sys.stderr.write(f"\r{'':{WIDTH}}\r")
            sys.stderr.flush()


def _described(step: Step) -> str:
    stages: Any = step.workload["stages"]
    negatives = f", {stages[0]['n_negatives']} negatives" if stages else ""
    return f"micro-batch {step.micro_batch_size}{negatives} on {step.card.name}"

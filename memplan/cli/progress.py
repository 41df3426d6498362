"""What a person sees while rehearsals run: one line that changes, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan.estimators.registry import OnRehearsal
    from memplan.estimators.rehearsed import Step

WIDTH = 100


@contextmanager
def rehearsal_progress() -> Iterator[OnRehearsal | None]:
    """Give what shows which step is rehearsed, while the block lasts; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    begin, count = time.monotonic(), 0

    def show(step: Step) -> None:
        nonlocal count
        count += 1
        line = f"rehearsal {count} ({time.monotonic() - begin:.0f} s): {_described(step)}"
        sys.stderr.write(f"\r{line[:WIDTH]:{WIDTH}}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if count:
            sys.stderr.write(f"\r{'':{WIDTH}}\r")
            sys.stderr.flush()


def _described(step: Step) -> str:
    stages: Any = step.workload["stages"]
    negatives = f", {stages[0]['n_negatives']} negatives" if stages else ""
    return f"micro-batch {step.micro_batch_size}{negatives} on {step.gpu.name}"

"""Memory over time."""

from __future__ import annotations

from pathlib import Path

from memplan.traces.timeline import timeline
from memplan.traces.trace import ACTIONS, CATEGORIES, Mark, MemoryTrace
from tests.conftest import RehearserOf

STEPS = Path(__file__).parents[1] / "child" / "steps.py"
PARAMETERS, ACTIVATIONS = CATEGORIES.index("parameters"), CATEGORIES.index("activations")


def test_bytes_of_each_category_after_each_event() -> None:
    """A parameter from before, an activation that comes and goes: only what is in the step is shown, with what there was."""
    names = ["segment_alloc", "alloc", "alloc", "free_requested", "free_completed", "alloc"]
    trace = MemoryTrace(
        "".join(ACTIONS[name] for name in names),
        [0, 0, 1024, 1024, 1024, 4096],
        [2**21, 1024, 2048, 2048, 2048, 512],
        [0] * 6,
        bytes([PARAMETERS, ACTIVATIONS, ACTIVATIONS]),
        (Mark(0, 0, "build"), Mark(2, 1, "forward"), Mark(5, 2, "forward")),
    )

    seen = timeline(trace, 1)

    assert [(sample.event, sample.allocated[PARAMETERS], sample.allocated[ACTIVATIONS]) for sample in seen.samples] == [
        (2, 1024, 2048),
        (4, 1024, 0),
    ]
    assert {sample.reserved_bytes for sample in seen.samples} == {2**21}
    assert seen.phases == (Mark(2, 1, "forward"),)


def test_the_step_shown_ends_where_the_next_begins(rehearser_of: RehearserOf) -> None:
    """Of three the second: behind the third everything is given back. Its highest moment is the peak, however few moments are kept."""
    rehearsal = rehearser_of(f"{STEPS}:mlp").rehearse(gpu="t4")
    assert rehearsal.trace is not None

    whole, short = timeline(rehearsal.trace), timeline(rehearsal.trace, most_samples=10)

    assert whole.step == 2
    assert len(short.samples) <= 10 < len(whole.samples)
    peaks = [max(sample.allocated_bytes for sample in shown.samples) for shown in (whole, short)]
    assert peaks[0] == peaks[1] <= rehearsal.peak_allocated_bytes
    assert peaks[0] >= 0.95 * rehearsal.peak_allocated_bytes
    assert [mark.phase for mark in whole.phases][:2] == ["forward", "backward"]

"""Steps whose requests are made again instead of running them: the same as if they were run, or else they are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memplan.child.repeated_step import repeated_step
from memplan.traces.requests import requests_of
from memplan.workload.workload import Workload
from tests.child.models.test_built_in import small
from tests.conftest import RehearserOf

MIB = 2**20
STEPS = Path(__file__).with_name("steady_steps.py")


def events(*described: tuple[str, int], stream: int = 0) -> list[dict[str, Any]]:
    return [{"action": action, "addr": address, "size": 512, "stream": stream} for action, address in described]


BUILT = ("alloc", 1), ("segment_alloc", 0)
STEP = ("alloc", 2), ("segment_alloc", 0), ("alloc", 3), ("free_requested", 2), ("free_completed", 2), ("free_completed", 3)


def test_a_step_that_gives_back_what_it_takes_can_be_repeated() -> None:
    """What was there before it may be anything."""
    assert repeated_step(events(*BUILT, *STEP), (1, 0)) is not None


@pytest.mark.parametrize(
    "step",
    [
        (("alloc", 2),),  # is kept
        (("free_completed", 1), ("alloc", 1)),  # one that it found
        (*STEP, ("segment_free", 0)),  # the cache is emptied
        (*STEP, ("oom", 0)),
        (),
    ],
)
def test_every_other_step_is_run(step: tuple[tuple[str, int], ...]) -> None:
    """None says so."""
    assert repeated_step(events(*BUILT, *step), (1, 0)) is None


def test_a_step_on_another_stream_is_run() -> None:
    """There its blocks are freed when the device has come so far."""
    assert repeated_step([*events(*BUILT), *events(*STEP, stream=7)], (1, 0)) is None


def test_what_lies_before_the_step_is_no_part_of_it() -> None:
    """It begins behind so many allocations and so many frees, whichever comes last."""
    before = events(("alloc", 1), ("alloc", 2), ("free_completed", 2), ("segment_free", 0))

    assert repeated_step([*before, *events(*STEP)], (2, 1)) is None  # whoever emptied the cache, it was behind the last free
    assert repeated_step([*before, *events(("alloc", 9), *STEP)], (3, 1)) is not None


@pytest.mark.parametrize(
    "workload",
    [
        small(),
        small({"precision": "fp16-mixed", "gradient_accumulation_steps": 2, "activation_checkpointing": True}),
        small(optimizer={"name": "adam8bit"}),
    ],
    ids=["plain", "accumulated", "8-bit"],
)
def test_a_built_in_step_asks_for_what_it_asks_for_when_it_is_run(rehearser_of: RehearserOf, workload: Workload) -> None:
    """Every request, every peak, every step, and what each allocation was for."""
    values = {"workload": workload.model_dump(mode="json")}

    repeated = rehearser_of("memplan.child.models.built_in:build").rehearse(gpu="a100-80", values=values)
    run = rehearser_of(f"{STEPS}:run_each_time").rehearse(gpu="a100-80", values=values)

    assert repeated.trace is not None
    assert run.trace is not None
    ours, theirs = requests_of(repeated.trace), requests_of(run.trace)
    count = len(repeated.trace.actions)
    assert (ours.sizes, ours.streams) == (theirs.sizes, theirs.streams)
    assert ours.begins_with(theirs)
    assert repeated.trace.purposes == run.trace.purposes
    assert [mark[1:] for mark in repeated.trace.marks] == [mark[1:] for mark in run.trace.marks if mark.position < count]
    assert repeated.steps == run.steps
    assert (repeated.device_used, repeated.breakdown, repeated.peak_phase) == (run.device_used, run.breakdown, run.peak_phase)


def test_a_repeated_step_may_reserve_more(rehearser_of: RehearserOf) -> None:
    """As the simulated allocator says too: 34 MiB, then 48, then 62, and no more."""
    program = rehearser_of(f"{STEPS}:fragments")

    repeated, run = (program.rehearse(gpu="a100-80", values={"is_steady": is_steady}) for is_steady in (True, False))

    assert [step.reserved_bytes // MIB for step in repeated.steps[:4]] == [34, 48, 62, 62]
    assert repeated.steps == run.steps
    assert repeated.peak_reserved_bytes == run.peak_reserved_bytes == 62 * MIB
    assert (repeated.trace, repeated.breakdown) == (run.trace, run.breakdown)  # its segments, marks and purposes too


def test_a_step_that_keeps_something_is_run_whatever_it_says(rehearser_of: RehearserOf) -> None:
    """4 MiB in each of ten steps."""
    found = rehearser_of(f"{STEPS}:keeps").rehearse(gpu="a100-80")

    assert [step.allocated_bytes // MIB for step in found.steps] == [4 * number for number in range(1, 11)]
    assert found.grows

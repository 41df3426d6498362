"""What samples say beside the GPU and the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest

from memplan.monitor.advice import GROWTH_SAMPLES, WAITING_SAMPLES, advise
from memplan.monitor.sampler import GpuSample, ProcessUse, Sample

GIB = 2**30


def samples(used: Sequence[int | None], *, busy: int | None = 90, cpu: float = 20.0, total: int | None = 16 * GIB) -> list[Sample]:
    """One GPU, a second apart."""
    process = (ProcessUse(pid=7, name="python", used_bytes=None),)
    return [
        Sample(
            time=float(second),
            cpu_percent=cpu,
            gpus=(GpuSample(number=0, uuid="GPU-1", used_bytes=bytes_, total_bytes=total, utilization_percent=busy, processes=process),),
        )
        for second, bytes_ in enumerate(used)
    ]


def kinds(found: Sequence[Sample], planned: int | None = None) -> list[str]:
    return [advice.kind for advice in advise(found, planned_bytes=planned)]


@pytest.mark.parametrize(("gib", "expected"), [(7.9, ["low"]), (8.1, []), (14.7, []), (14.8, ["high"])])
def test_a_card_should_be_used_by_half_and_not_to_the_brim(gib: float, expected: list[str]) -> None:
    """Of 16 GiB: under 8, over 14.72."""
    assert kinds(samples([int(gib * GIB)])) == expected


def test_the_peak_counts_and_not_the_moment() -> None:
    """Full once, nearly empty now."""
    assert kinds(samples([15 * GIB, GIB])) == ["high"]


def test_an_idle_card_needs_no_advice() -> None:
    """Nobody is there."""
    (sample,) = samples([GIB], busy=0)
    idle = sample.model_copy(update={"gpus": (sample.gpus[0].model_copy(update={"processes": ()}),)})

    assert kinds([idle] * 30) == []


def test_more_than_planned_is_told() -> None:
    """By how much."""
    (advice,) = advise(samples([10 * GIB]), planned_bytes=9 * GIB)

    assert advice.kind == "over_plan"
    assert "1.00 GiB more than planned" in advice.message


def test_memory_that_grows_is_told() -> None:
    """A hundred MiB a second, with the ups and downs of steps."""
    growing = [9 * GIB + second * 100 * 2**20 + (second % 3) * 50 * 2**20 for second in range(GROWTH_SAMPLES)]

    assert kinds(samples(growing)) == ["growth"]
    assert kinds(samples(growing[:-1])) == []


@pytest.mark.parametrize(
    "used",
    [
        [4 * GIB] * 3 + [10 * GIB] * 40,  # the optimizer's state comes with the first step
        [(10 if second % 2 else 9) * GIB for second in range(40)],  # up and down
        [10 * GIB + second * 2**10 for second in range(40)],  # next to nothing
    ],
)
def test_what_settles_does_not_grow(used: list[int]) -> None:
    """A first step, ups and downs, and crumbs."""
    assert kinds(samples(used)) == []


@pytest.mark.parametrize(("cpu", "cause"), [(95.0, "the processors are busy"), (20.0, "num_workers")])
def test_a_gpu_that_waits_is_told_with_a_cause(cpu: float, cause: str) -> None:
    """Busy or idle processors ask for different things."""
    (advice,) = advise(deque(samples([10 * GIB] * WAITING_SAMPLES, busy=15, cpu=cpu), maxlen=100))  # as the command keeps them

    assert advice.kind == "waiting"
    assert cause in advice.message
    assert "busy 15% of the time" in advice.message


@pytest.mark.parametrize("used", [[None], [10 * GIB]])
def test_figures_that_are_not_told_give_no_advice(used: list[int | None]) -> None:
    """No memory, no total, no use: nothing to say, and no crash."""
    assert kinds(samples(used * 30, busy=None, total=None), planned=None) == []
    assert advise([]) == []

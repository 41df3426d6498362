"""The largest micro-batch with which every stage of a program fits, where only a run tells which stage is the heaviest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from memplan.errors import SizeRefusedError
from memplan.estimators.base import Estimator
from memplan.hardware.gpu import GpuSpec
from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.budget import MODEL_ERROR, MemoryBudget
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.planner.fitting import budget_of, half_as_much_again, largest_micro_batch, questions_of
from memplan.planner.negatives import most_negatives
from memplan.planner.search import Largest
from memplan.workload.model import ParametersModel
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

SAMPLE_BYTES = {"many": 10, "long": 100, "short": 1}
PROGRAM = Program(stages=(Stage(name="short"), Stage(name="many", n_negatives=9), Stage(name="long", n_negatives=1)))
GPU = GpuSpec(name="gpu", total_memory_bytes=10_000, origin="test")


class Runs(Estimator):
    """Each sample takes bytes by its stage, and each negative as many again; of what has not been asked nothing is known."""

    method = "rehearsed"
    is_slow = True

    def __init__(self, *, most_negatives: int = 10_000) -> None:
        self.asked: dict[tuple[str, int, int], MemoryEstimate] = {}
        self.expected: list[tuple[str, int, int]] = []
        self._most_negatives = most_negatives

    def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        assert stage is not None
        size, negatives = program.training.micro_batch_size, stage.n_negatives
        if negatives > self._most_negatives:
            raise SizeRefusedError("there are no more")
        total = SAMPLE_BYTES[stage.name] * size * (1 + negatives)
        used = MemoryRange(low_bytes=total, expected_bytes=total, high_bytes=total)
        self.asked[stage.name, size, negatives] = MemoryEstimate(
            method="rehearsed",
            breakdown=MemoryBreakdown(activations_bytes=total),
            peak_allocated_bytes=total,
            peak_reserved_bytes=total,
            device_used=used,
            peak_phase="loss",
        )
        return self.asked[stage.name, size, negatives]

    def expect(self, program: Program, gpu: GpuSpec, stages: Sequence[Stage | None]) -> None:
        steps = [(stage.name, program.training.micro_batch_size, stage.n_negatives) for stage in stages if stage is not None]
        self.expected += [step for step in steps if step not in self.asked]

    def quick_estimate(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        assert stage is not None
        known = self.asked.get((stage.name, program.training.micro_batch_size, stage.n_negatives))
        return None if known is None else known.device_used


def test_a_workload_that_stands_for_a_program_has_a_smaller_budget() -> None:
    """By what its program may take more."""
    model = ParametersModel(num_parameters=1, activation_bytes_per_sample=1)

    own = budget_of(GPU, 0.1, Workload(model=model))
    read = budget_of(GPU, 0.1, Workload(model=model, stands_for_a_program=True))

    assert own.budget_bytes == 9000
    assert read.budget_bytes == int(9000 / (1 + MODEL_ERROR))


def test_every_stage_fits_with_the_largest() -> None:
    """That with most negatives would take 100 samples of 100 bytes each; another takes 200 bytes for a sample."""
    runs = Runs()

    found = largest_micro_batch(
        lambda size: PROGRAM.with_training(micro_batch_size=size), GPU, runs, MemoryBudget(total_bytes=10_000, margin=0), most=1000
    )

    assert found.size == 50
    assert {("many", 100, 9), ("many", 101, 9), ("long", 50, 1), ("long", 51, 1), ("short", 50, 0), ("many", 50, 9)} <= runs.asked.keys()
    assert [size for name, size, _ in runs.asked if name == "short"] == [50]


def test_what_will_be_asked_next_is_said_before(runs_that_know: Runs) -> None:
    """The other stages with the size that is found; no size next to a guess that no run of the stage bears out yet."""
    runs = runs_that_know

    found = largest_micro_batch(
        lambda size: PROGRAM.with_training(micro_batch_size=size), GPU, runs, MemoryBudget(total_bytes=10_000, margin=0), most=1000
    )

    assert found.size == 50
    assert runs.expected == [("many", 50, 9), ("short", 50, 0)]
    assert set(runs.expected) <= runs.asked.keys()


ONE_STAGE = PROGRAM.model_copy(update={"stages": PROGRAM.stages[1:2]})


def largest_of_one_stage(runs: Runs, *, budget_bytes: int, most: int = 1000, **options: Any) -> Largest:
    """Return the largest size with which the stage of many negatives is within the budget, as *runs* have it: 100 bytes for a sample."""
    budget = MemoryBudget(total_bytes=budget_bytes, margin=0)
    return largest_micro_batch(lambda size: ONE_STAGE.with_training(micro_batch_size=size), GPU, runs, budget, most=most, **options)


def test_what_would_be_planned_is_said_before_the_end_is_sure() -> None:
    """Two sizes say where the end is: what would be planned there is said, and the size behind it, which has to be too large."""
    runs = Runs()

    largest_of_one_stage(
        LineOf(runs),
        budget_bytes=10_050,
        chosen=lambda size: ONE_STAGE.with_training(micro_batch_size=64 if size >= 64 else size),
    )

    assert list(runs.asked) == [("many", size, 9) for size in (1, 2, 100, 101)]
    assert runs.expected == [("many", 64, 9), ("many", 101, 9)]


@pytest.mark.parametrize(("first", "sizes"), [(80, [80, 1, 100, 101]), (400, [400, 1, 100, 101]), (2000, [1, 2, 100, 101])])
def test_the_size_that_is_asked_for_first(first: int, sizes: list[int]) -> None:
    """It has to be run in any case, whether it fits or not; one that is more than may be asked for is none of these."""
    runs = Runs()

    found = largest_of_one_stage(LineOf(runs), budget_bytes=10_050, first=first)

    assert found.size == 100
    assert [size for _, size, _ in runs.asked] == sizes


class LineOf(Runs):
    """Runs from two of which the others are guessed."""

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self._runs = runs

    def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        return self._runs(program, gpu, stage)

    def expect(self, program: Program, gpu: GpuSpec, stages: Sequence[Stage | None]) -> None:
        self._runs.expect(program, gpu, stages)

    def quick_estimate(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        assert stage is not None
        total = SAMPLE_BYTES[stage.name] * program.training.micro_batch_size * (1 + stage.n_negatives)
        return MemoryRange(low_bytes=total, expected_bytes=total, high_bytes=total) if len(self._runs.asked) > 1 else None


class RoughAtFirst(LineOf):
    """Runs of which one alone says half as much again as is so."""

    def quick_estimate(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        assert stage is not None
        if not self._runs.asked:
            return None
        known = self._runs.asked.get((stage.name, program.training.micro_batch_size, stage.n_negatives))
        total = SAMPLE_BYTES[stage.name] * program.training.micro_batch_size * (1 + stage.n_negatives)
        total = total if known is not None or len(self._runs.asked) > 1 else total * 3 // 2
        return MemoryRange(low_bytes=total, expected_bytes=total, high_bytes=total)


@pytest.mark.parametrize(
    ("refuses", "asked"), [(False, [1, 20, 28, 30, 31]), (True, [1, 20, 30, 31])], ids=["two at once", "the second is refused"]
)
def test_behind_a_leap_by_one_run_two_sizes_are_asked_for(refuses: bool, asked: list[int]) -> None:
    """They are run at once, and the next guess is by both: the end, mostly. Where the program does not take the second, nothing is lost."""

    class Divided(Runs):
        def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
            if refuses and program.training.micro_batch_size == 28:
                raise SizeRefusedError("28 is not for it")
            return super().__call__(program, gpu, stage)

    runs = Divided()

    found = largest_of_one_stage(RoughAtFirst(runs), budget_bytes=3_050)

    assert found.size == 30
    assert [size for _, size, _ in runs.asked] == asked
    assert [size for _, size, _ in runs.expected] == [28, 31]


def test_where_the_second_of_two_sizes_is_beyond_the_data_the_answer_is_what_they_have() -> None:
    """That run shows it, and how many there are; what is refused from then on is said to be beyond the size that it was like."""
    in_data = [7]

    class Few(Runs):
        def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
            if program.training.micro_batch_size > 20:
                raise SizeRefusedError("no more samples than with 20", is_limit=True, num_samples=in_data.pop() if in_data else 20)
            return super().__call__(program.with_training(micro_batch_size=min(7, program.training.micro_batch_size)), gpu, stage)

    runs = Few()

    assert largest_of_one_stage(RoughAtFirst(runs), budget_bytes=3_050).size == 7
    assert [size for _, size, _ in runs.asked] == [1, 7]


def test_what_the_data_are_known_to_have_is_run_at_once() -> None:
    """The guess is far beyond it; no size between is tried, and none beyond."""

    class InEpoch(Runs):
        def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
            if program.training.micro_batch_size > 7:
                raise SizeRefusedError("an epoch has 7", is_limit=True, largest=7)
            return super().__call__(program, gpu, stage)

    runs = InEpoch()

    assert largest_of_one_stage(RoughAtFirst(runs), budget_bytes=3_050).size == 7
    assert [size for _, size, _ in runs.asked] == [1, 7]


@pytest.mark.parametrize(
    ("most", "asked"), [(1000, [1, 8, 101, 102]), (60, [1, 60]), (90, [1, 8, 90])], ids=["far", "as far as it may", "a little less"]
)
def test_far_from_the_one_run_a_part_of_the_way_is_gone_first(most: int, asked: list[int]) -> None:
    """One run puts the end at 67, so far away that it may be at a third of that, which takes long; nothing is begun beside a part."""
    runs = Runs()

    found = largest_of_one_stage(RoughAtFirst(runs), budget_bytes=10_150, most=most)

    assert found.size == min(most, 101)
    assert [size for _, size, _ in runs.asked] == asked
    assert [size for _, size, _ in runs.expected] == asked[3:]


def test_the_second_of_two_sizes_is_a_multiple_of_the_same_power_of_two() -> None:
    assert [half_as_much_again(size) for size in (1, 2, 3, 6, 64, 96, 264, 265)] == [2, 4, 4, 8, 128, 128, 392, 397]


@pytest.fixture
def runs_that_know() -> Runs:
    """Runs of which a good guess is there before any is made."""

    class Known(Runs):
        def quick_estimate(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
            assert stage is not None
            total = SAMPLE_BYTES[stage.name] * program.training.micro_batch_size * (1 + stage.n_negatives)
            return MemoryRange(low_bytes=total, expected_bytes=total, high_bytes=total)

    return Known()


def test_where_one_stage_does_not_fit_at_all_nothing_fits() -> None:
    """However little the others take."""
    budget = MemoryBudget(total_bytes=150, margin=0)

    found = largest_micro_batch(lambda size: PROGRAM.with_training(micro_batch_size=size), GPU, Runs(), budget, most=1000)

    assert found.size is None


@pytest.mark.parametrize(("limit", "expected"), [(10_000, 99), (40, 40)])
def test_negatives_are_found_in_a_few_runs(limit: int, expected: int) -> None:
    """100 bytes each: two runs say where the end is, and two that it is there; a number that the program does not take is too many."""
    runs, budget = Runs(most_negatives=limit), MemoryBudget(total_bytes=10_000, margin=0)
    program = PROGRAM.with_training(micro_batch_size=1)

    found = most_negatives(program.stages[2], questions_of(program, GPU, runs, budget))

    assert found == expected
    assert len(runs.asked) <= (6 if limit > expected else 12)


def test_the_peak_of_another_stage_says_where_the_end_is() -> None:
    """Two stages of one step differ in their negatives alone: the line through both is known, and only the end is run."""
    runs, budget = Runs(), MemoryBudget(total_bytes=10_000, margin=0)
    program = PROGRAM.with_training(micro_batch_size=1)
    stage = program.stages[2]
    asked = questions_of(program, GPU, runs, budget)

    found = most_negatives(stage, asked, {asked.items_of(stage.model_copy(update={"n_negatives": 8})): 900})

    assert found == 99
    assert [negatives for _, _, negatives in runs.asked] == [1, 99, 100]

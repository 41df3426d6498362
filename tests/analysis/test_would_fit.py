"""What would fit in place of a step that does not: the largest batch, and the GPUs that offer enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from memplan.analysis.would_fit import MOST_GPUS, STEPS_BEYOND, what_program_needs, what_would_fit
from memplan.errors import MemplanError, NothingSeenError, UsageError
from memplan.execution.rehearsal import OutOfMemory, Rehearsal, StepPeaks
from memplan.execution.rehearse import Rehearser
from memplan.execution.step_source import step_source_from
from memplan.hardware.catalog import catalog_gpus, find_gpu
from memplan.hardware.gpu import UNLIMITED_BYTES, GpuSpec
from memplan.hardware.torch_install import TorchBuild, find_torch
from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.estimate import MemoryRange
from memplan.units import GIB

STEPS = Path(__file__).parents[1] / "child" / "odd_steps.py"
MIB = 2**20

Need = Callable[[int], int]


OUT = OutOfMemory(message="", requested_bytes=1, free_bytes=0, step=1, phase="forward", place=None)


def rehearsal(used_bytes: int, *, fits: bool, values: Mapping[str, Any]) -> Rehearsal:
    return Rehearsal(
        method="rehearsed",
        breakdown=MemoryBreakdown(**dict.fromkeys(MemoryBreakdown.model_fields, 0) | {"activations_bytes": used_bytes}),
        peak_allocated_bytes=used_bytes,
        peak_reserved_bytes=used_bytes,
        device_used=MemoryRange(low_bytes=used_bytes, expected_bytes=used_bytes, high_bytes=used_bytes),
        peak_phase="forward of step 1",
        gpu_name="a GPU",
        torch="2.13.0",
        out_of_memory=None if fits else OUT,
        num_alloc_retries=0,
        steps=(),
        values=dict(values),
    )


class Program:
    """Stands in for rehearsals of a program: *need* by batch, of which it takes multiples of *unit*, and none from *breaks* on."""

    def __init__(self, need: Need, *, name: str = "batch_size", default: Any = 64, unit: int = 1, breaks: int = 2**60) -> None:
        self.need, self.name, self.default, self.unit, self.breaks = need, name, default, unit, breaks
        self.tried: list[int] = []

    def __call__(self, gpu: GpuSpec, values: Mapping[str, Any]) -> Rehearsal:
        all_values = {self.name: self.default} | dict(values)
        batch = all_values[self.name] if type(all_values[self.name]) is int else 1
        self.tried.append(batch)
        if self.need(batch) > gpu.total_memory_bytes:
            return rehearsal(gpu.total_memory_bytes, fits=False, values=all_values)
        if batch % self.unit or batch >= self.breaks:
            raise UsageError("the program failed in its step 1")
        return rehearsal(self.need(batch), fits=True, values=all_values)


def linear(batch: int) -> int:
    return (1000 + 10 * batch) * MIB


def small_card(memory_mib: int) -> GpuSpec:
    return find_gpu("t4").model_copy(update={"total_memory_bytes": memory_mib * MIB})


@pytest.mark.parametrize("name", ["micro_batch_size", "batch_size", "per_device_train_batch_size", "batch", "bs"])
@pytest.mark.parametrize("largest", [1, 2, 31, 62, 63])
def test_the_largest_batch_is_found(name: str, largest: int) -> None:
    """Whatever people call it; 64 was tried and did not fit."""
    found = what_would_fit(Program(linear, name=name), gpu=small_card(1000 + 10 * largest + 9), values={})

    assert (found.name, found.value) == (name, largest)
    assert found.device_used_bytes == linear(64)


def test_few_rehearsals_find_it() -> None:
    """About twice as many as the answer has bits: of a million samples 1000 fit."""
    program = Program(linear, default=10**6)

    assert what_would_fit(program, gpu=small_card(1000 + 10 * 1000), values={}).value == 1000
    assert len(program.tried) < 30


def test_not_even_one_fits() -> None:
    """Tried are the whole on a GPU without end, the whole on one as large as it used, and from its share of the GPU down to one."""
    program = Program(linear)

    found = what_would_fit(program, gpu=small_card(100), values={})

    assert (found.name, found.value) == ("batch_size", None)
    assert program.tried == [64, 64, 3, 2, 1]


@pytest.mark.parametrize("values", [{}, {"batch_size": None}, {"batch_size": "auto"}, {"batch_size": True}, {"batch_size": 2.5}])
def test_without_a_number_of_samples_none_is_tried(values: dict[str, Any]) -> None:
    """The GPUs are told all the same."""
    found = what_would_fit(Program(linear, name="width"), gpu=small_card(100), values=values)

    assert (found.name, found.value) == (None, None)
    assert found.gpus


@pytest.mark.parametrize(("unit", "largest"), [(2, 30), (8, 24), (16, 16), (64, None)])
def test_a_program_that_takes_only_some_batches_gets_one_of_them(unit: int, largest: int | None) -> None:
    """Multiples of 8, say: 31 samples would fit."""
    assert what_would_fit(Program(linear, unit=unit), gpu=small_card(1000 + 319), values={}).value == largest


def test_a_program_that_does_not_run_with_one_sample_gets_more() -> None:
    """As batch normalisation does not: of the others any."""

    class Normalised(Program):
        def __call__(self, gpu: GpuSpec, values: Mapping[str, Any]) -> Rehearsal:
            if values.get(self.name) == 1:
                raise UsageError("Expected more than 1 value per channel when training")
            return super().__call__(gpu, values)

    assert [what_would_fit(Normalised(linear), gpu=small_card(1000 + 10 * fits), values={}).value for fits in (2, 3, 30, 31)] == [
        2,
        3,
        30,
        31,
    ]


def test_a_program_that_fails_with_more_memory_keeps_its_report() -> None:
    """It was out of memory before it came to that; a smaller batch is told where it was given by hand."""
    found = what_would_fit(Program(linear, breaks=60), gpu=small_card(1000 + 319), values={"batch_size": 64})

    assert (found.device_used_bytes, found.gpus) == (None, ())
    assert (found.name, found.value) == ("batch_size", 31)


def test_memory_without_end_is_not_enough_for_everything() -> None:
    """More than anybody has addresses for."""
    found = what_would_fit(Program(lambda batch: UNLIMITED_BYTES * batch), gpu=small_card(100), values={})

    assert (found.device_used_bytes, found.gpus, found.value) == (None, (), None)


@pytest.mark.parametrize("needed_gib", [1, 7.9, 14.6, 23, 40, 79, 100, 178, 1000])
def test_the_cards_told_of_offer_so_much_and_are_the_smallest(needed_gib: float) -> None:
    """What they offer to programs, not what is on the box; none that is smaller does."""
    needed = int(needed_gib * GIB)
    offered = {card.spec.name: card.spec.total_memory_bytes for card in catalog_gpus() if not card.is_mig}

    found = what_would_fit(Program(lambda _: needed), gpu=small_card(100), values={})

    enough = sorted(size for size in offered.values() if size >= needed)
    assert [offered[name] for name in found.gpus] == enough[:MOST_GPUS]


@pytest.mark.heavy
def test_what_is_told_of_a_real_program_is_true(torch_build: TorchBuild) -> None:
    """It fits, one sample more does not, and it runs on the GPUs that are named: a program of one MiB a sample."""
    with Rehearser(step_source_from(f"{STEPS}:allocates")) as rehearser:

        def run(gpu: GpuSpec, values: Mapping[str, Any]) -> Rehearsal:
            return rehearser.rehearse(gpu=gpu, values=values, steps=1)

        card, tried = small_card(700), {"batch": 15_000}  # up to 630 of it are the CUDA context's
        assert not run(card, tried).fits

        found = what_would_fit(run, gpu=card, values=tried, runs_on=find_torch().has_kernels_for)

        assert (found.name, found.value) == ("batch", 70)
        assert run(card, {"batch": 70}).verdict == "fits"
        assert run(card, {"batch": 71}).verdict == "tight"
        assert found.device_used_bytes == (15_000 + 630) * MIB
        assert all(run(find_gpu(name), tried).fits for name in found.gpus)


def test_the_size_that_is_told_was_tried() -> None:
    """A step that tears holes where memory ends needs 3% more than it used where there was no end: told is the first size that did."""

    class TearsHoles(Program):
        def __call__(self, gpu: GpuSpec, values: Mapping[str, Any]) -> Rehearsal:
            self.need = linear if gpu.total_memory_bytes > 100 * GIB else lambda batch: int(linear(batch) * 1.03)
            found = super().__call__(gpu, values)
            return found if not found.fits else rehearsal(linear(64), fits=True, values=found.values)

    found = what_would_fit(TearsHoles(linear), gpu=small_card(100), values={})

    assert found.device_used_bytes == int(linear(64) * 1.05)


def test_the_upper_bound_of_what_it_used_is_tried_first() -> None:
    """Less is never enough, as the CUDA context may take that: a rehearsal on each of five sizes below it would be for nothing."""
    asked = []

    def run(gpu: GpuSpec, values: Mapping[str, Any]) -> Rehearsal:
        asked.append(gpu.total_memory_bytes)
        found = rehearsal(5000 * MIB, fits=gpu.total_memory_bytes >= 5600 * MIB, values=values)
        used = MemoryRange(low_bytes=4700 * MIB, expected_bytes=5000 * MIB, high_bytes=5600 * MIB)
        return found.model_copy(update={"device_used": used})

    found = what_would_fit(run, gpu=small_card(100), values={})

    assert found.device_used_bytes == 5600 * MIB
    assert asked == [UNLIMITED_BYTES, 5600 * MIB]


@pytest.mark.parametrize(("enough_mib", "asked_mib"), [(7000, [5000, 7000]), (90_000, [5000, 7000, 7350])])
def test_a_program_is_run_with_few_sizes(enough_mib: int, asked_mib: list[int]) -> None:
    """Each may cost five runs. One that ends, and may take more than there is, is run with as much as that; the last size is not tried."""
    asked = []

    def run(gpu: GpuSpec, steps: int | None) -> Rehearsal:
        asked.append(gpu.total_memory_bytes)
        most = 5000 if gpu.total_memory_bytes == UNLIMITED_BYTES else 7000
        found = rehearsal(5000 * MIB, fits=True, values={})
        used = MemoryRange(low_bytes=4700 * MIB, expected_bytes=5000 * MIB, high_bytes=most * MIB)
        fits = gpu.total_memory_bytes >= enough_mib * MIB
        return found.model_copy(update={"device_used": used, "num_alloc_retries": 0 if fits else 1})

    found = what_program_needs(run, rehearsal(1, fits=False, values={}), gpu=small_card(100), steps=4)

    assert asked == [UNLIMITED_BYTES, *(size * MIB for size in asked_mib)]
    assert found is not None
    assert found.device_used_bytes == (7000 * MIB if enough_mib == 7000 else int(7350 * MIB * 1.05))


def test_a_gpu_that_programs_do_not_run_on_is_not_named() -> None:
    """A V100 has the memory, and PyTorch may have no kernels for it."""

    def is_new(gpu: GpuSpec) -> bool:
        return gpu.compute_capability is not None and gpu.compute_capability >= (7, 5)

    everywhere, where_it_runs = (
        what_would_fit(Program(lambda _: 15 * GIB), gpu=find_gpu("rtx4060"), values={}, **options) for options in ({}, {"runs_on": is_new})
    )

    assert any("V100" in name for name in everywhere.gpus)
    assert not any("V100" in name for name in where_it_runs.gpus)
    assert len(where_it_runs.gpus) == len(everywhere.gpus) == MOST_GPUS


class WholeProgram:
    """Stands in for rehearsals of a whole program, whose first *passes* steps take a tenth of what the next one *needs*."""

    def __init__(self, needs: int, *, passes: int = 1, is_partial: bool = False, was_interrupted: bool = False) -> None:
        self.needs, self.passes, self.is_partial, self.was_interrupted = needs, passes, is_partial, was_interrupted
        self.asked: list[tuple[int, int | None]] = []

    def __call__(self, gpu: GpuSpec, steps: int | None) -> Rehearsal:
        self.asked.append((gpu.total_memory_bytes, steps))
        needs = self.needs if steps is None or steps > self.passes else self.needs // 10
        if needs > gpu.total_memory_bytes:
            return self.ended_by_memory(gpu)
        changed = {"lower_bound_reasons": ("it ended",) if self.is_partial else (), "was_interrupted": self.was_interrupted}
        return rehearsal(needs, fits=True, values={}).model_copy(update=changed)

    def ended_by_memory(self, gpu: GpuSpec) -> Rehearsal:
        return rehearsal(gpu.total_memory_bytes, fits=False, values={}).model_copy(update={"steps": (PEAKS,) * self.passes})


PEAKS = StepPeaks(peak_allocated_bytes=1, peak_reserved_bytes=1, allocated_bytes=1, reserved_bytes=1)


@pytest.mark.parametrize(("steps", "told"), [(None, 7 + STEPS_BEYOND), (100, 7 + STEPS_BEYOND), (8, 8)])
def test_a_program_that_memory_ended_is_run_a_little_further(steps: int | None, told: int) -> None:
    """Not to its end, which may be a thousand steps away, nor for more steps than were asked for; the report says how many it was."""
    program, card = WholeProgram(5 * GIB, passes=7), small_card(1000)

    found = what_program_needs(program, program(card, steps), gpu=card, steps=steps)

    assert found is not None
    assert (found.device_used_bytes, found.num_steps, found.is_of_program) == (5 * GIB, told, True)
    assert program.asked[1:] == [(UNLIMITED_BYTES, told), (5 * GIB, told)]


def test_a_program_that_is_tight_runs_to_its_end() -> None:
    """It did on the smaller GPU too."""
    program, card = WholeProgram(5 * GIB), small_card(6000)
    tight = rehearsal(5 * GIB, fits=True, values={}).model_copy(update={"num_alloc_retries": 1})

    found = what_program_needs(program, tight, gpu=card, steps=None)

    assert tight.verdict == "tight"
    assert found is not None
    assert (found.device_used_bytes, found.num_steps) == (5 * GIB, None)


def test_what_a_program_needs_that_takes_what_is_free_is_known_already() -> None:
    """It was run with unlimited memory before it was said not to fit: it is not run again."""
    program, card = WholeProgram(5 * GIB), small_card(4000)
    tight = rehearsal(4 * GIB, fits=False, values={}).model_copy(
        update={"out_of_memory": None, "needs": MemoryRange(low_bytes=4 * GIB, expected_bytes=5 * GIB, high_bytes=6 * GIB)}
    )

    found = what_program_needs(program, tight, gpu=card, steps=4)

    assert found is not None
    assert (found.device_used_bytes, found.num_steps, found.is_of_program, program.asked) == (6 * GIB, 4, True, [])


def test_what_a_program_needs_that_tells_too_little_is_a_lower_bound() -> None:
    """Where sizes are guessed, or the optimizer's state is not there yet."""
    program, card = WholeProgram(5 * GIB, passes=0, is_partial=True), small_card(1000)

    found = what_program_needs(program, program(card, 1), gpu=card, steps=1)

    assert found is not None
    assert (found.device_used_bytes, found.is_lower_bound) == (5 * GIB, True)


@pytest.mark.parametrize("error", [None, UsageError("it takes too long"), NothingSeenError("it ended", program_exit_code=3)])
def test_of_a_program_that_is_not_seen_to_run_nothing_is_told(error: MemplanError | None) -> None:
    """Interrupted, or it takes longer than it is given: how much it needs is not known then, and not that more memory does not help."""
    program, card = WholeProgram(5 * GIB, was_interrupted=error is None), small_card(1000)

    def run(gpu: GpuSpec, steps: int | None) -> Rehearsal:
        if error is not None:
            raise error
        return program(gpu, steps)

    assert what_program_needs(run, program.ended_by_memory(card), gpu=card, steps=None) is None

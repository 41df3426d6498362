"""What only the real program shows: each finding in a program that has it, and none in its twin that does not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from memplan.errors import MissingError
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.catalog import find_gpu
from memplan.units import format_bytes
from tests.conftest import RehearserOf, SharedRehearser

STEPS = Path(__file__).parents[1] / "child" / "findings_steps.py"
MIB = 2**20

Run = Callable[..., Rehearsal]


@pytest.fixture
def rehearser(rehearser_of: RehearserOf) -> SharedRehearser:
    """One process for all of the programs."""
    return rehearser_of(f"{STEPS}:build")


@pytest.fixture
def run(rehearser: SharedRehearser) -> Run:
    """Rehearse a program by its name."""

    def rehearse(name: str, *, steps: int | None = None, **values: object) -> Rehearsal:
        return rehearser.rehearse(gpu=find_gpu("t4"), values={"name": name, **values}, steps=steps, checks_tensor_types=True)

    return rehearse


def line_of(text: str) -> int:
    """The number of the only line of the programs that has *text* in it."""
    lines = STEPS.read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if text in line]
    return number


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints_reentrant"])
def test_checkpointing_that_works_is_no_finding(run: Run, name: str) -> None:
    """With either of PyTorch's implementations."""
    assert run(name).findings == ()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("switch_in_eval_mode", "Encoder is in eval mode"),
        ("switch_that_nobody_asks", "the switch is on in 1 module, and not one region was checkpointed"),
    ],
)
def test_a_switch_without_effect_is_told(run: Run, name: str, reason: str) -> None:
    """It was left in eval mode, or no code asks for it."""
    (finding,) = run(name).findings

    assert finding.kind == "checkpointing_without_effect"
    assert reason in finding.message


@pytest.mark.parametrize(("last", "expected"), [(1, 3), (3, 6), (5, 8), (100, 10)])
def test_a_function_that_takes_more_is_run_until_two_steps_change_nothing(run: Run, last: int, expected: int) -> None:
    """Three where the third takes no more, and ten at most; what a step keeps at its end the next one adds to its peak."""
    assert len(run("grows_until", last=last).steps) == expected


def test_memory_that_is_reserved_in_the_third_step_is_looked_at_until_it_settles(run: Run) -> None:
    """Its peak is that of smaller pieces, between which a larger one finds no place: no more is allocated, and 60 MiB more are reserved."""
    steps = run("reserves_more").steps

    assert len(steps) == 5
    assert len({step.peak_allocated_bytes for step in steps}) == 1
    assert [step.peak_reserved_bytes // 2**20 for step in steps] == [100, 100, 160, 160, 160]


@pytest.mark.parametrize("how", ["first", "named"])
def test_what_an_optimizer_has_computed_is_no_work_of_its_own(run: Run, how: str) -> None:
    """Activations are activations, whoever calls for them, and the peak is in the backward."""
    plain, found = run("steps_with_a_closure", batch=8192), run("steps_with_a_closure", batch=8192, how=how)

    assert found.peak_phase == plain.peak_phase == "backward of step 2"
    assert found.breakdown == plain.breakdown


def test_a_check_that_a_function_makes_passes_where_its_result_is_asserted(run: Run) -> None:
    """As YOLOv5 asks whether mixed precision gives about the same: the step itself asserts that it went on with it."""
    rehearsal = run("precision_after_a_check")

    assert rehearsal.failure is None
    assert [read.reason for read in rehearsal.reads] == ["an assertion holds"]


def test_a_check_whose_opposite_is_returned_is_no_assertion(run: Run) -> None:
    """`return not close(...)`, and `assert not differs(...)`: the answer that is right for the one is wrong for the other."""
    reads = run("precision_after_a_check", is_opposite=True).reads

    assert reads
    assert all(read.reason != "an assertion holds" for read in reads)


def test_parameters_without_gradient_are_named(run: Run) -> None:
    """Those in the optimizer that learn nothing; another one that has them too does not count them again."""
    (finding,) = run("head_without_gradient").findings

    assert finding.kind == "parameters_without_gradient"
    assert finding.message.startswith("2 parameters of the optimizer got no gradient in the steps that ran: unused.bias, unused.weight;")
    # 64 x 64 weights and 64 biases in fp32
    assert finding.message.endswith("not counted, if they are trained later: 16.2 KiB of gradients, and optimizer state")


def test_gradients_that_are_dropped_before_the_step_are_in_the_upper_bound(run: Run) -> None:
    """They may be kept in a later epoch. Kept from the third step on, they are there, and nothing is missing."""
    dropped, kept = (run("drops_gradients", steps=4, kept_from=kept_from) for kept_from in (None, 3))

    (finding,) = dropped.findings
    assert finding.kind == "dropped_gradients"
    # 64 x 64 weights and 64 biases in fp32: a gradient and AdamW's two moments, with 4 bytes of each parameter's count of steps
    assert finding.message.startswith("the gradients of 2 parameters (used.bias, used.weight) are computed and dropped before the")
    assert f"take up to {format_bytes(3 * 16_640)} more" in finding.message
    assert kept.findings == ()
    varies = kept.device_used.high_bytes - kept.peak_reserved_bytes
    assert dropped.device_used.high_bytes - dropped.peak_reserved_bytes - varies == pytest.approx(3 * 16_640, abs=100)


def test_frozen_parameters_and_those_that_learn_in_turn_are_no_finding(run: Run) -> None:
    """A head that was told not to learn; heads that get theirs from different batches of a step."""
    assert run("head_without_gradient", frozen=True).findings == ()
    assert run("heads_in_turn").findings == ()


def test_wide_tensors_under_autocast_are_told_with_the_lines_that_made_them(run: Run) -> None:
    """An fp32 log-softmax, 16384 rows of 1024: its result, and in its backward a gradient of that and its own result."""
    (finding,) = run("wide_loss", batch=16384).findings

    assert finding.kind == "wide_tensors"
    assert finding.message.startswith("float32 tensors take 192.0 MiB, 49% of the peak, under mixed precision: 128.0 MiB at ")
    assert f"64.0 MiB at {STEPS.relative_to(Path.cwd())}:{line_of('torch.log_softmax')}" in finding.message


def test_tensors_as_wide_as_the_rest_are_no_finding(run: Run) -> None:
    """All fp16 under autocast, all fp32 without, and fp32 too small to matter."""
    assert run("short_loss", batch=16384).findings == ()
    assert run("single_precision", batch=16384).findings == ()
    assert run("wide_loss", batch=16).findings == ()


def test_float64_is_told_without_mixed_precision_too(run: Run) -> None:
    """It takes twice what fp32 would."""
    (finding,) = run("double_by_accident", batch=16384).findings

    assert finding.message.startswith("float64 tensors take 1.13 GiB, 96% of the peak, twice what fp32 would take: ")


def test_memory_that_grows_is_followed_for_ten_steps(run: Run) -> None:
    """A list of losses with their graphs never stops; the last step's growth is told, and that since the second."""
    seen = run("leaks")

    (finding,) = seen.findings
    assert seen.grows
    assert len(seen.steps) == 10
    peaks = [step.peak_allocated_bytes for step in seen.steps]
    assert all(later > earlier for earlier, later in pairwise(peaks))
    assert finding.message.startswith("memory still grows: what is kept from earlier steps rose by 320.5 KiB in step 10, and by 2.5 MiB")


def test_memory_that_settles_is_told_of_as_settled(run: Run) -> None:
    """A buffer of four is fullest when the fifth comes: 5 x 4 MiB."""
    seen = run("settles", at=4)

    (finding,) = seen.findings
    assert not seen.grows
    assert seen.peak_allocated_bytes == 20 * MIB
    assert finding.message == "what is kept from earlier steps rose by 8.0 MiB from step 2 to step 4, and then held"


def test_what_is_given_back_is_no_growth(run: Run) -> None:
    """Three steps that keep more are followed; as much as of the first is kept at the end."""
    seen = run("gives_back")

    assert len(seen.steps) > 3
    assert [finding.kind for finding in seen.findings] == ["varying_steps"]


@pytest.mark.parametrize("name", ["loads_ahead", "second_network_later"])
def test_what_is_larger_later_and_not_more_is_no_growth(run: Run, name: str) -> None:
    """A batch that is loaded ahead is one batch; an optimizer that steps late makes its state once."""
    seen = run(name, steps=3)

    assert seen.grows
    assert seen.findings == ()


def test_steps_of_several_sizes_are_followed_for_ten_and_told_of(run: Run) -> None:
    """The largest of three is not the largest of all; what each takes is its batch, twice: as it is, and doubled."""
    seen = run("of_several_sizes")

    (finding,) = seen.findings
    assert len(seen.steps) == 10
    assert seen.peak_allocated_bytes == 2 * 9 * MIB
    assert finding.message.startswith("steps 2 to 10 take from 4.0 MiB to 18.0 MiB beside what lasts: their batches differ")


def test_steps_that_differ_a_little_and_keep_nothing_are_no_finding(run: Run) -> None:
    """512 bytes more than 1 MiB in every step, and none of it is there at its end."""
    seen = run("varies", steps=3)

    assert seen.grows
    assert seen.findings == ()


def test_of_batches_that_differ_the_tensor_is_shown_that_does(run: Run) -> None:
    """The images are larger, and alike; a fourth step was run to see types."""
    (finding,) = run("boxes", steps=3).findings

    assert finding.message.startswith("the shapes of the batches differ: 1×1×5 to 1×4×5 among the 4 that were taken;")


def test_steady_memory_takes_three_steps(run: Run) -> None:
    """And no finding; a number that the user gave is kept whatever happens."""
    assert len(run("steady").steps) == 3
    assert run("steady").findings == ()
    assert len(run("leaks", steps=4).steps) == 4
    assert len(run("settles", steps=1).steps) == 1


# what the memory was for


@pytest.mark.parametrize(
    ("name", "values", "parameters_mib", "gradients_mib", "state_mib"),
    [
        ("frozen_body", {}, 5, 1, 2),
        ("buffers", {}, 8, 4, 0),
        ("moving_average", {}, 8, 4, 0),
        ("average_in_a_dict", {}, 8, 4, 0),
        ("average_in_a_dict", {"is_new": True}, 8, 4, 0),
        ("from_meta", {}, 8, 4, 0),
        ("no_module", {}, 2, 2, 0),
        ("optimizer_of_its_own", {}, 4, 4, 4),
        ("optimizer_of_its_own", {"is_late": True}, 4, 4, 4),
        ("optimizer_of_its_own", {"are_parameters": True}, 4, 4, 4),
        ("optimizer_of_its_own", {"are_parameters": True, "is_late": True}, 4, 4, 4),
        ("with_optimizer", {"optimizer": "SGD"}, 4, 4, 0),
        ("with_optimizer", {"optimizer": "SGD", "momentum": 0.9}, 4, 4, 4),
        ("with_optimizer", {"optimizer": "AdamW", "foreach": False}, 4, 4, 8),
        (
            "with_optimizer",
            {"optimizer": "AdamW", "fused": True},
            4,
            4,
            8 + 4 * 512 / MIB,
        ),  # and a step count on the device for each weight
        ("with_optimizer", {"optimizer": "AdamW", "amsgrad": True}, 4, 4, 12),
        ("with_optimizer", {"optimizer": "Adafactor"}, 4, 4, 4 * 2 * 512 * 4 / MIB),  # a row and a column of 512 for each weight
        ("with_optimizer", {"optimizer": "SGD", "accumulation": 3}, 4, 4, 0),
        ("with_optimizer", {"optimizer": "AdamW", "accumulation": 3, "batch": 8192}, 4, 4, 8),
    ],
)
def test_categories_are_those_of_the_program(
    run: Run, name: str, values: dict[str, object], parameters_mib: float, gradients_mib: float, state_mib: float
) -> None:
    """Layers of 1 MiB, four of them (of the frozen body one more); all categories together are the peak."""
    seen = run(name, **values)

    found = seen.breakdown
    assert (found.parameters_bytes, found.gradients_bytes) == (parameters_mib * MIB, gradients_mib * MIB)
    assert found.optimizer_state_bytes == state_mib * MIB
    assert found.total_bytes - found.allocator_slack_bytes - found.cuda_context_bytes == seen.peak_allocated_bytes


@pytest.mark.parametrize(
    ("name", "values", "phase"),
    [
        ("peaks_forward", {}, "forward"),
        ("single_precision", {"batch": 4096}, "backward"),
        ("with_optimizer", {"optimizer": "AdamW", "foreach": True}, "optimizer"),
    ],
)
def test_the_phase_of_the_peak_is_told(run: Run, name: str, values: dict[str, object], phase: str) -> None:
    """Of whichever step reached it first."""
    assert run(name, **values).peak_phase.split()[0] == phase


def test_memory_that_runs_out_in_the_first_step_has_categories_too(rehearser: SharedRehearser) -> None:
    """4 MiB of weights lie there when the forward asks for more than the GPU has."""
    card = find_gpu("t4").model_copy(update={"total_memory_bytes": 64 * MIB})

    seen = rehearser.rehearse(
        gpu=card, values={"name": "with_optimizer", "optimizer": "SGD", "batch": 2**16}, context_bytes=0, checks_tensor_types=True
    )

    assert seen.out_of_memory is not None
    assert not seen.out_of_memory.is_caught
    assert (seen.out_of_memory.step, seen.steps) == (1, ())
    assert seen.breakdown.parameters_bytes == 4 * MIB


def test_peaks_that_a_program_resets_are_kept(run: Run) -> None:
    """The first step: 16 x 64 rows of 1024 x 4 bytes, sixteen times what the others take."""
    seen = run("resets", steps=3)

    assert seen.peak_allocated_bytes == 4 * MIB
    assert [step.peak_allocated_bytes for step in seen.steps] == [4 * MIB] * 3


def test_a_frozen_teacher_in_eval_mode_is_no_finding(run: Run) -> None:
    """It keeps nothing for a backward, so there is nothing to checkpoint."""
    assert "checkpointing_without_effect" not in {finding.kind for finding in run("teacher").findings}


@pytest.mark.heavy
def test_a_peak_behind_the_recorded_events_is_told_of(run: Run) -> None:
    """Its bytes are right; where it was and what it was made of is not known, and not made up."""
    seen = run("many_events", steps=4)

    assert seen.peak_allocated_bytes == 8 * 64 * 1024 * 4
    assert seen.peak_phase == "a step behind those recorded"
    (finding,) = seen.findings
    assert finding.kind == "unrecorded_peak"
    assert "the categories are those of forward of step 1" in finding.message
    assert seen.trace is not None
    assert {mark.step for mark in seen.trace.marks} == {1, 2}


@pytest.mark.heavy
def test_many_steps_are_recorded_to_their_end(run: Run) -> None:
    """Thirty of them, as long as their events are not too many."""
    seen = run("many_events", steps=1)
    assert (seen.peak_phase, seen.findings) == ("forward of step 1", ())

    long = run("with_optimizer", steps=30, optimizer="SGD")
    assert long.trace is not None
    assert long.trace.marks[-1].step == 30
    assert long.peak_phase.endswith("of step 1")


def test_what_the_closer_look_asks_of_the_allocator_counts_for_nothing(rehearser: SharedRehearser) -> None:
    """48 MiB beside 24 MiB of cache do not fit into 64: a retry, of a step that is not the program's."""
    card = find_gpu("t4").model_copy(update={"total_memory_bytes": 64 * MIB})

    seen = rehearser.rehearse(gpu=card, values={"name": "larger_when_types_are_checked"}, context_bytes=0, checks_tensor_types=True)

    assert (seen.num_alloc_retries, seen.peak_reserved_bytes, len(seen.steps)) == (0, 24 * MIB, 3)


def test_what_the_device_does_not_serve_in_the_closer_look_is_no_failure(run: Run) -> None:
    """The program's own steps made no such call; one step more of them does, and has no number."""
    assert run("not_served_when_types_are_checked").fits

    with pytest.raises(MissingError, match="does not serve cusparseSpGEMM"):
        run("not_served_when_types_are_checked", steps=4)


def test_what_a_tensor_of_codes_consists_of_is_told_as_the_tensor(run: Run) -> None:
    """An 8-bit optimizer's state: one byte for each of a million parameters."""
    breakdown = run("optimizer_of_codes", batch=4, steps=3).breakdown

    assert (breakdown.parameters_bytes, breakdown.optimizer_state_bytes) == (4 * MIB, MIB)

"""What a doctor finds in programs that were rehearsed, and that it finds nothing in clean ones; and in configurations, by the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memplan.analysis.doctor_checks import Evidence, Suspicion, WorkloadChange, suspect
from memplan.execution.program_habits import request
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse import Rehearser
from memplan.execution.step_source import step_source_from
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.workload.workload import Workload
from tests.conftest import RehearserOf

STEPS = Path(__file__).parents[1] / "child" / "habits_steps.py"

CLEAN = [
    "clean", "clean_evaluation", "clean_images", "clean_compiled", "clean_closure", "clean_small", "read_seldom",
    "clean_accumulation", "clean_cleared_by_hand", "clean_sum", "clean_two_losses", "clean_checkpointed", "clean_copies",
]  # fmt: skip

SLOW_LAST = [*(name for name in CLEAN if name != "clean_compiled"), pytest.param("clean_compiled", marks=pytest.mark.heavy)]

Seen = Callable[..., Rehearsal]
Found = Callable[..., list[Suspicion]]


@pytest.fixture(scope="module")
def observed(torch_build: TorchBuild) -> Iterator[Seen]:
    """Rehearse a program by its name with its habits recorded, on a GPU without end."""
    with Rehearser(step_source_from(f"{STEPS}:build"), habits=request({})) as rehearser:
        yield lambda name, **values: rehearser.rehearse(gpu=find_gpu("a100-80").endless(), values={"name": name, **values}, steps=6)


@pytest.fixture
def found(observed: Seen) -> Found:
    """What is suspected of a program by its name, on a GPU; the allocator's settings are tried whatever was seen."""

    def suspicions(name: str, *, gpu: str = "a100-80", **values: object) -> list[Suspicion]:
        all_of_it = suspect(Evidence(find_gpu(gpu), rehearsal=observed(name, **values)))
        return [one for one in all_of_it if one.check != "expandable-segments"]

    return suspicions


def line_of(text: str) -> int:
    """The number of the first line of the programs that has *text* in it."""
    lines = STEPS.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


@pytest.mark.parametrize("name", [*SLOW_LAST, "emptied", "zeroed", "foreach", "images", "evaluated"])
def test_recording_changes_nothing_of_memory(observed: Seen, rehearser_of: RehearserOf, name: str) -> None:
    """Every step's peaks are those of an ordinary rehearsal, to the byte."""
    plain = rehearser_of(f"{STEPS}:build").rehearse(gpu=find_gpu("a100-80").endless(), values={"name": name}, steps=6)

    assert observed(name).steps == plain.steps
    assert plain.habits is None


@pytest.mark.parametrize("name", SLOW_LAST)
def test_a_clean_program_is_silent(found: Found, name: str) -> None:
    """bf16, a fused optimizer, no_grad around evaluations, and so on."""
    assert found(name) == []


def test_a_clean_program_in_fp16_is_silent_where_there_is_no_bf16(found: Found) -> None:
    """A T4 has fp16 units and no bf16 ones."""
    assert found("clean_fp16", gpu="t4") == []


@pytest.mark.parametrize(
    ("name", "check", "evidence", "line"),
    [
        ("emptied", "empty-cache", "6 times, in 6 of 6 steps", "torch.cuda.empty_cache())"),
        ("read", "item-in-loop", "read a value from the GPU 6 times, in 6 of 6 steps", "losses.append(seen[-1].item())"),
        ("zeroed", "set-to-none", "filled them with zeros 6 times", "set_to_none=False))"),
        ("scaled_bf16", "gradient-scaler", "bf16 has the range of fp32", None),
        ("unpinned", "non-blocking-unpinned", "not pinned 6 times", "non_blocking=True)).square()"),
        ("evaluated", "evaluation-with-gradient", "ran 6 times in eval mode with gradients on", "model(rows.repeat(8, 1))"),
        ("foreach", "fused-optimizer", "AdamW with 16,785,408 parameters steps by foreach", None),
        ("for_loop", "fused-optimizer", "one parameter after the other (foreach=False)", None),
        ("recompiled", "recompilation", "because a shape changed", None),
    ],
)
def test_each_habit_is_found_with_its_evidence(found: Found, name: str, check: str, evidence: str, line: str | None) -> None:
    """And nothing else is: the line, how often it did so, and in how many steps."""
    (suspicion,) = found(name)

    assert suspicion.check == check
    assert evidence in suspicion.evidence
    assert line is None or suspicion.place == f"{STEPS}:{line_of(line)}"


def test_clipping_scaled_gradients_is_found_and_clipping_unscaled_ones_is_not(found: Found) -> None:
    """By the scaler's own state when the gradients are clipped."""
    assert [one.check for one in found("clipped_scaled", gpu="t4")] == ["clip-before-unscale"]


def test_fp16_without_a_scaler_is_found(found: Found) -> None:
    """On a T4, where fp16 is right; on an A100 bf16 would be."""
    assert [one.check for one in found("unscaled_fp16", gpu="t4")] == ["gradient-scaler"]
    assert [one.check for one in found("unscaled_fp16")] == ["precision", "gradient-scaler"]


def test_bf16_where_it_is_emulated_is_found(found: Found) -> None:
    """A T4 has compute capability 7.5."""
    (suspicion,) = found("clean", gpu="t4")

    assert (suspicion.check, suspicion.change) == ("precision", "autocast in fp16")
    assert "Tesla T4 (compute capability 7.5) has no bf16 units and emulates it" in suspicion.evidence


def test_fp32_is_found_by_what_the_gpu_could_do(found: Found) -> None:
    """An A100: bf16 and TF32; a T4: fp16 with a scaler; a P100 has no tensor cores."""
    ampere, turing = found("plain_fp32"), found("plain_fp32", gpu="t4")

    assert [one.check for one in ampere] == ["precision", "tf32"]
    assert "bfloat16" in ampere[0].change
    assert [one.check for one in turing] == ["precision"]
    assert turing[0].change.endswith("with a torch.amp.GradScaler")
    pascal = find_gpu("t4").model_copy(update={"compute_capability": (6, 0)})
    assert suspect(Evidence(pascal, rehearsal=None)) != ()  # the allocator's settings are tried anywhere
    assert not [one for one in suspect(Evidence(pascal)) if one.check == "precision"]


def test_convolutions_are_judged_by_their_shapes(found: Found) -> None:
    """One shape: the benchmark pays; many: it is timed anew each time; few, without it: nothing to say."""
    fixed = found("images")
    varying = found("images", sizes=[24, 26, 28, 30], benchmark=True)
    few = found("images", sizes=[24, 26, 28])

    assert [one.check for one in fixed] == ["cudnn-benchmark", "channels-last"]
    assert "2 convolutions ran in 6 steps, none with more than 1 shape" in fixed[0].evidence
    assert [one.check for one in varying] == ["cudnn-benchmark", "channels-last"]
    assert "with 4 different shapes" in varying[0].evidence
    assert [one.check for one in few] == ["channels-last"]


@pytest.mark.parametrize(
    ("name", "number"),
    [("accumulated", "1 backward pass"), ("accumulated_scaled", "1 backward pass"), ("accumulated_too_long", "5 backward passes")],
)
def test_losses_divided_by_another_number_than_the_step_has_are_found(found: Found, name: str, number: str) -> None:
    """By the division in the loss's own graph, and how many backwards the step used."""
    (suspicion,) = found(name, gpu="t4" if name == "accumulated_scaled" else "a100-80")

    assert suspicion.check == "misscaled-accumulation"
    assert suspicion.evidence.startswith(f"2 of 6 optimizer steps used {number} of losses that were divided by 4")
    assert suspicion.place == f"{STEPS}:{line_of('with what has accumulated')}"


# configurations


@pytest.mark.parametrize(
    ("gpu", "precision", "change"),
    [
        ("a100-80", "fp16-mixed", "bf16-mixed"),
        ("a100-80", "fp32", "bf16-mixed"),
        ("t4", "bf16-mixed", "fp16-mixed"),
        ("t4", "fp32", "fp16-mixed"),
        ("a100-80", "bf16-mixed", None),
        ("t4", "fp16-mixed", None),
    ],
)
def test_a_configured_precision_is_judged_by_the_gpu(built_in: Workload, gpu: str, precision: str, change: str | None) -> None:
    """As compute capability has it; the change is a workload that can be estimated and written."""
    evidence = Evidence(find_gpu(gpu), built_in.with_training(precision=precision))

    told = [one for one in suspect(evidence) if one.check == "precision"]

    assert [one.change for one in told] == ([f"train in {change}"] if change else [])
    for one in told:
        assert isinstance(one.trial, WorkloadChange)
        assert one.trial.workload.training.precision == change


def test_an_encoder_in_eval_mode_is_found(built_in: Workload) -> None:
    """The guide's trap: the checkpointing flag has no effect on it."""
    (suspicion,) = [one for one in suspect(Evidence(find_gpu("a100-80"), built_in)) if one.check == "checkpointing-without-effect"]

    assert isinstance(suspicion.trial, WorkloadChange)
    assert suspicion.trial.workload.training.activation_checkpointing

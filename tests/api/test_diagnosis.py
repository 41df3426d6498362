"""What the changes that a doctor suggests save: rehearsed, each by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.analysis.doctor_checks import Diagnosed
from memplan.api.configuration import Configuration, function_configuration, read_configuration
from memplan.api.diagnosis import changes_of, diagnose
from memplan.errors import NotRehearsedError
from memplan.hardware.catalog import find_gpu
from memplan.programs.function_program import FunctionProgram

STEPS = Path(__file__).parents[1] / "child" / "habits_steps.py"
MIB = 2**20


def program(name: str, **values: str) -> Configuration:
    """One of the programs, as a function whose arguments are given."""
    found = function_configuration(f"{STEPS}:build")
    assert isinstance(found.program, FunctionProgram)
    arguments = {**found.program.arguments, "name": "name", **{value: value for value in values}}
    return found._replace(program=found.program.model_copy(update={"arguments": arguments, "values": {"name": name, **values}}))


def findings(name: str) -> list[Diagnosed]:
    """What is found of a program on an A100, with what it saves."""
    return list(diagnose(program(name), find_gpu("a100-80"), steps=4).findings)


@pytest.mark.heavy
@pytest.mark.usefixtures("torch_build")
@pytest.mark.parametrize(
    ("name", "check", "least_bytes"),
    [
        # Rehearsed with PyTorch 2.13: 338 MiB are reserved, and 306 without foreach's temporaries.
        ("foreach", "fused-optimizer", 32 * MIB),
        ("evaluated", "evaluation-with-gradient", 0),
    ],
)
def test_what_a_change_saves_is_rehearsed(name: str, check: str, least_bytes: int) -> None:
    """The program is run again with the change made."""
    (finding,) = [one for one in findings(name) if one.check == check]

    assert finding.saving_method == "rehearsed"
    assert finding.saving_bytes is not None
    assert finding.saving_bytes >= least_bytes


@pytest.mark.heavy
@pytest.mark.usefixtures("torch_build")
def test_a_clean_program_has_no_finding_whatever_is_tried() -> None:
    """The allocator's settings among it."""
    assert findings("clean") == []


@pytest.mark.heavy
@pytest.mark.usefixtures("torch_build")
def test_without_effects_nothing_is_claimed() -> None:
    """Neither a saving nor a finding that only memory speaks for."""
    quiet = diagnose(program("foreach"), find_gpu("a100-80"), steps=4, with_effects=False)
    emptied = diagnose(program("emptied"), find_gpu("a100-80"), steps=4, with_effects=False)

    assert quiet.findings == ()
    assert [(one.check, one.saving_bytes) for one in emptied.findings] == [("empty-cache", None)]


def test_a_value_of_a_tree_is_written_where_its_layout_has_a_key(tree: Path) -> None:
    """The precision is; the encoder's eval mode is the trainer's code."""
    found = diagnose(read_configuration(tree), find_gpu("rtx4090"), method="analytic")

    assert {one.check: one.is_written_by_apply for one in found.findings} == {"precision": True, "checkpointing-without-effect": False}
    (change,) = changes_of(found)
    assert [(edit.dotted, edit.value) for edit in change.edits] == [("training.trainer.precision", "bf16-mixed")]
    precision = found.findings[0]
    line = (tree / "config.yaml").read_text().splitlines()[int((precision.place or "").rpartition(":")[2]) - 1]
    assert line.strip().startswith("precision:")


@pytest.mark.usefixtures("torch_build")
def test_a_program_that_never_uses_the_gpu_is_an_error(tmp_path: Path) -> None:
    """And nothing is found of it. What it said may tell why."""
    from memplan.api.configuration import command_configuration

    script = tmp_path / "cpu.py"
    script.write_text("import torch\ntorch.ones(3).sum()\nprint('two GPUs are needed')\n")

    with pytest.raises(NotRehearsedError, match="never used the GPU") as raised:
        diagnose(command_configuration([str(script)], is_planned=False), find_gpu("t4"))

    assert raised.value.hint is not None
    assert raised.value.hint.endswith("its last output:\n  two GPUs are needed")


def test_a_value_that_several_keys_decide_is_told_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe's `bf16: true` on a T4: it and `fp16` make the precision together, and a layout's rule is only read."""
    monkeypatch.chdir(Path(__file__).parents[1] / "trees" / "recipes")

    found = diagnose(read_configuration(Path("sft.yaml")), find_gpu("t4"), with_effects=False)

    (finding,) = found.findings
    line = Path("sft.yaml").read_text(encoding="utf-8").splitlines().index("bf16: true") + 1
    assert (finding.check, finding.place, finding.is_written_by_apply) == ("precision", f"sft.yaml:{line}", False)
    assert changes_of(found) == []

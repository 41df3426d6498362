"""A function as a program: its arguments are its variables, read from the source; nothing of it is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memplan.errors import UsageError
from memplan.programs.function_program import function_program

SOURCE = '''
raise RuntimeError("this file was run")

def build(device, per_device_train_batch_size=8, *, seq: int = 128, accumulation_steps=2, name="x"):
    """Build."""

def without(device, width=4): ...
def needs(device, batch): ...
'''


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file that says so when it is run."""
    file = tmp_path / "train_step.py"
    file.write_text(SOURCE)
    return file


def test_the_batch_is_found_by_its_name(source: Path) -> None:
    """So is accumulation; every other argument but the device is a variable by its own name."""
    program = function_program(f"{source}:build")
    pinned = program.pinned("seq", "512").with_training(micro_batch_size=3)

    assert program.variables == {"micro_batch_size", "gradient_accumulation_steps", "seq", "name"}
    assert (program.training.micro_batch_size, program.training.gradient_accumulation_steps) == (8, 2)
    assert pinned.arguments_with_values == {"accumulation_steps": "2", "per_device_train_batch_size": "3", "seq": "512"}
    assert pinned.typed == "build(per_device_train_batch_size=3, seq=512, accumulation_steps=2)"


@pytest.mark.parametrize(
    "arguments", ["batch_size=8, seq: int = 64", "batch_size: int = 8, *, seq=64", "seq: int, batch_size=8", "*, seq=64, batch_size=8"]
)
def test_a_function_may_take_no_device(tmp_path: Path, arguments: str) -> None:
    """An argument that is a number, or the batch, is a variable though it is the first."""
    (tmp_path / "step.py").write_text(f"def build({arguments}): ...\n")

    program = function_program(f"{tmp_path / 'step.py'}:build")

    assert program.variables == {"micro_batch_size", "seq"}
    assert program.training.micro_batch_size == 8


@pytest.mark.parametrize("name", ["gradient_accumulate_every", "accum_iter", "grad_accum"])
def test_accumulation_has_many_names(tmp_path: Path, name: str) -> None:
    """One that is not known would be taken for something else, and the effective batch be told too small."""
    (tmp_path / "step.py").write_text(f"def build(device, batch_size=4, {name}=4): ...\n")

    assert function_program(f"{tmp_path / 'step.py'}:build").training.gradient_accumulation_steps == 4


def test_an_argument_of_any_name_can_be_a_variable(tmp_path: Path) -> None:
    """What is said goes before what a name says."""
    (tmp_path / "step.py").write_text("def build(device, items=8, batch=3, parts=2, seq=64): ...\n")
    fields = ("micro_batch_size=items", "gradient_accumulation_steps=parts", "sequence_length=seq")

    program = function_program(f"{tmp_path / 'step.py'}:build", fields).pinned("sequence_length", "512")

    assert program.variables == {"micro_batch_size", "gradient_accumulation_steps", "sequence_length", "batch"}
    assert program.typed == "build(items=8, parts=2, seq=512)"


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("micro_batch_size=batch", "names no argument of without: did you mean batc"),
        ("micro_batch_size=conf.yaml:batch", "names no argument of without"),
        ("micro_batch_siz=width", "did you mean micro_batch_size"),
        ("effective_batch_size=width", "no argument of a function is the product"),
        ("micro_batch_size", "does not say where a variable is written"),
    ],
)
def test_a_field_that_is_no_argument_is_one_clear_error(tmp_path: Path, field: str, said: str) -> None:
    """With the arguments that there are, or how it is written."""
    (tmp_path / "step.py").write_text("def without(device, width, batc): ...\n")

    with pytest.raises(UsageError, match=re.escape(said)) as error:
        function_program(f"{tmp_path / 'step.py'}:without", [field])

    assert error.value.hint


def test_a_function_without_accumulation_cannot_vary_it(source: Path) -> None:
    """And one without a default has no present batch."""
    program = function_program(f"{source}:needs")

    assert not program.varies("gradient_accumulation_steps")
    assert program.training.micro_batch_size == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train_step.py:without", "no argument of without is the batch: it has width"),
        ("train_step.py:nothing", "defines no function nothing"),
        ("train_step.py:biuld", "defines no function biuld: did you mean build?"),
        ("nothere.py:build", "does not exist"),
        ("not.a.module:build", "there is no module not.a.module"),
        ("broken.py:build", "is not Python"),
        ("recipe.yaml", "'recipe.yaml' does not say FILE.py:build"),
    ],
)
def test_what_is_not_there_is_one_clear_error(source: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    """With the arguments that there are."""
    monkeypatch.chdir(source.parent)
    Path("broken.py").write_text("def build(:\n")

    with pytest.raises(UsageError, match=said):
        function_program(name)


def test_the_functions_of_the_file_are_named_where_none_has_the_name(source: Path) -> None:
    """One that begins with an underscore is its own affair."""
    source.write_text("def make(device): ...\ndef _inner(): ...\nasync def later(): ...\n")

    with pytest.raises(UsageError, match="defines no function build") as raised:
        function_program(f"{source}:build")

    assert raised.value.hint == f"it defines make: `{source}:NAME`"


def test_a_variable_that_is_not_there_is_named(source: Path) -> None:
    """With the one that was probably meant."""
    with pytest.raises(UsageError, match="no variable sequ: did you mean seq"):
        function_program(f"{source}:build").pinned("sequ", "1")


def test_a_module_is_found_below_the_working_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python would, without importing its parents."""
    package = source.parent / "mine" / "training"
    package.mkdir(parents=True)
    (package / "step.py").write_text(SOURCE)
    monkeypatch.chdir(source.parent)

    assert function_program("mine.training.step:build").training.micro_batch_size == 8

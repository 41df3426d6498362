"""A command as a program: where its variables are written, and what is refused before anything is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.errors import ConfigError, EditRefusedError, UsageError
from memplan.programs.command_line import changed_files, command_program, edits_of
from memplan.workload.parallelism import Parallelism

CONFIG = """# ours
data: {batch_size: 16}   # for each GPU
trainer:
  accumulate: 4
  limit_val_batches: 50
  lr: ${base.lr}
name: "16"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file with two variables."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


def test_placeholders_become_values() -> None:
    """Wherever they stand in a word, as often as they do; with accumulation comes the product of all."""
    words = ["python", "train.py", "--bs={micro_batch_size}", "{gradient_accumulation_steps}", "{micro_batch_size}x{effective_batch_size}"]
    program = command_program(words).with_training(micro_batch_size=8, gradient_accumulation_steps=3)

    assert program.words == ["python", "train.py", "--bs=8", "3", "8x24"]
    assert program.typed == "python train.py --bs=8 3 8x24"
    assert (program.name, program.has_present_batch) == ("train.py", False)


def test_what_is_in_braces_otherwise_stays() -> None:
    """A sweep of Hydra's and its references, a dict of Python's: only a name alone is a placeholder."""
    words = ["train.py", "lr={0.1,0.2}", '{"a": 1}', "dir=${data_dir}", "{}"]

    assert command_program(words).words == words


def test_a_field_is_read_from_its_file(config: Path) -> None:
    """Its present value; another one is an edit of that value alone, and the file stays as it is."""
    fields = [f"micro_batch_size={config}:data.batch_size", f"gradient_accumulation_steps={config}:trainer.accumulate"]
    present = command_program(["train.py"], fields=fields)
    planned = present.with_training(micro_batch_size=64, gradient_accumulation_steps=1)

    assert (present.training.micro_batch_size, present.training.gradient_accumulation_steps) == (16, 4)
    assert present.has_present_batch
    assert [(edit.dotted, edit.value) for edit in edits_of(planned)] == [("data.batch_size", 64), ("trainer.accumulate", 1)]
    assert changed_files(present) == []
    [change] = changed_files(planned)
    assert change.after.decode() == CONFIG.replace("16}", "64}").replace("accumulate: 4", "accumulate: 1")
    assert config.read_text() == CONFIG


def test_a_global_batch_says_what_is_accumulated(tmp_path: Path) -> None:
    """Over all GPUs, where nothing else does: what is rehearsed of the present values accumulates too."""
    file = tmp_path / "config.yaml"
    file.write_text("micro: 4\nglobal: 64\n")
    fields = [f"micro_batch_size={file}:micro", f"effective_batch_size={file}:global"]
    present = command_program(["train.py"], fields=fields, parallelism=Parallelism(devices=2))

    assert (present.training.gradient_accumulation_steps, present.effective_batch_size) == (8, 64)
    assert changed_files(present) == []


def test_variables_without_a_present_value_are_named(config: Path) -> None:
    """Those of the command's words and of the environment; a file says its own."""
    fields = [f"micro_batch_size={config}:data.batch_size", "gradient_accumulation_steps=STEPS"]
    assert command_program(["train.py"], fields=fields).without_value == ("gradient_accumulation_steps",)
    assert command_program(["train.py", "{micro_batch_size}"]).without_value == ("micro_batch_size",)


def test_a_variable_of_the_environment_comes_in_front() -> None:
    """As a shell has it."""
    program = command_program(["bash", "run.sh"], fields=["micro_batch_size=BATCH"]).with_training(micro_batch_size=5)

    assert program.words == ["BATCH=5", "bash", "run.sh"]


def test_what_makes_a_rehearsal_short_is_not_written(config: Path) -> None:
    """It is in the copies that a rehearsal reads, and in no edit."""
    program = command_program(
        ["train.py"],
        fields=[f"micro_batch_size={config}:data.batch_size"],
        short=[f"{config}:trainer.limit_val_batches=0", "WANDB_MODE=off"],
    )

    [change] = changed_files(program)
    assert b"limit_val_batches: 0\n" in change.after
    assert [edit.dotted for edit in edits_of(program)] == ["data.batch_size"]
    assert (program.words, program.words_of_rehearsal) == (["train.py"], ["WANDB_MODE=off", "train.py"])


def test_a_global_batch_is_the_target(config: Path) -> None:
    """What holds the product is met: the present one is aimed at, and accumulation can vary."""
    config.write_text("global_batch: 512\n")
    fields = [f"effective_batch_size={config}:global_batch"]
    program = command_program(["train.py", "--micro", "{micro_batch_size}"], fields=fields)

    assert program.training.target_effective_batch_size == 512
    assert program.varies("gradient_accumulation_steps")
    assert [edit.value for edit in edits_of(program.with_training(micro_batch_size=8, gradient_accumulation_steps=4))] == [32]


@pytest.mark.parametrize(
    ("words", "fields", "said"),
    [
        (["train.py", "{micro_batchsize}"], [], "did you mean micro_batch_size"),
        (["train.py"], ["micro_batch=FILE:key"], "did you mean micro_batch_size"),
        (["train.py"], ["micro_batch_size"], "does not say where a variable is written"),
        (["train.py"], ["micro_batch_size=conf.yaml:"], "does not say where a variable is written"),
        (["train.py"], ["micro_batch_size=not-a-name"], "neither FILE:KEY nor the name of a variable"),
        (["train.py"], ["micro_batch_size=CONFIG:data.batchsize"], "has no key `data.batchsize`: did you mean data.batch_size"),
        (["train.py"], ["micro_batch_size=CONFIG:name"], "has to be a whole number"),
        (["train.py"], ["sequence_length=CONFIG:trainer.lr"], "base.lr"),
        (["train.py"], ["micro_batch_size=nothere.yaml:a"], "nothere.yaml"),
        (["train.py"], ["micro_batch_size=config/small.py:batch_size"], "small.py: is neither YAML nor JSON"),
    ],
)
def test_what_makes_no_sense_is_one_clear_error(config: Path, words: list[str], fields: list[str], said: str) -> None:
    """Before anything is run: a misspelt name, a key that is not there, a value that is no count or is kept elsewhere."""
    with pytest.raises((UsageError, ConfigError, EditRefusedError), match=said):
        command_program(words, fields=[field.replace("CONFIG", str(config)) for field in fields])


def test_a_value_that_cannot_be_changed_is_refused_before_a_run(config: Path) -> None:
    """An alias stands for another place: which of them is meant is not guessed."""
    config.write_text("base: &size 8\ndata:\n  batch: *size\n")

    with pytest.raises(EditRefusedError, match="batch"):
        command_program(["train.py"], fields=[f"micro_batch_size={config}:data.batch"])

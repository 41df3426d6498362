"""A command as a program: where its variables are written, and what is refused before anything is run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memplan.errors import ConfigError, EditRefusedError, UsageError
from memplan.planner.pins import Pins, pin
from memplan.programs.command_line import changed_files, command_program, edits_of, edits_of_rehearsal
from memplan.programs.command_program import CommandProgram
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


def test_gpus_that_work_on_one_batch_are_counted_once(tmp_path: Path) -> None:
    """Where a file says how many do, or a pin: the effective batch is of the batches there are."""
    file = tmp_path / "config.yaml"
    file.write_text("tp: 4\n")
    words = ["train.py", "{micro_batch_size}", "--pp", "{pipeline_parallel_size}"]
    eight = Parallelism(devices=8)
    program = command_program(words, fields=[f"tensor_parallel_size={file}:tp"], parallelism=eight)

    pinned = pin(program, Pins({"pipeline_parallel_size": "2", "micro_batch_size": "3"}))

    assert (program.parallelism.data_parallel_size, program.effective_batch_size) == (2, 2)
    assert (pinned.parallelism.data_parallel_size, pinned.effective_batch_size) == (1, 3)
    assert isinstance(pinned, CommandProgram)
    assert pinned.words == ["train.py", "3", "--pp", "2"]


def test_a_size_that_does_not_divide_the_gpus_is_told_with_its_file(tmp_path: Path) -> None:
    """And what to say of the GPUs."""
    file = tmp_path / "config.yaml"
    file.write_text("tp: 4\n")

    with pytest.raises(ConfigError, match="tensor_parallel_size 4 does not divide 1 GPU") as error:
        command_program(["train.py", "{micro_batch_size}"], fields=[f"tensor_parallel_size={file}:tp"])

    assert (error.value.file, error.value.hint) == (file, "say on how many GPUs it trains: `num_gpus=8`")


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


@pytest.mark.parametrize(("name", "example"), [("sequence_length", 512), ("n_negatives", 8)])
def test_a_variable_that_has_no_value_is_asked_for_with_a_likely_one(name: str, example: int) -> None:
    """Nobody trains with 512 negatives."""
    with pytest.raises(UsageError, match=f"the variable {name} has no value") as error:
        _ = command_program(["train.py", f"{{{name}}}"]).words

    assert error.value.hint == f'give it one: `pins={{"{name}": {example}}}`'


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


def test_a_key_alone_is_one_of_the_files_that_the_command_names(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it stands below or without; a variable that the environment has goes first, and other names are variables."""
    words = ["train.py", "--config", str(config)]
    program = command_program(words, fields=["micro_batch_size=batch_size"], short=["trainer.limit_val_batches=0", "WANDB_MODE=off"])

    assert [(place.file, place.key) for place in program.places] == [(Path(os.path.relpath(config)), "data.batch_size")]
    assert [place.key for place in program.shortened if place.is_of_environment] == ["WANDB_MODE"]
    assert b"limit_val_batches: 0\n" in changed_files(program)[0].after
    monkeypatch.setenv("batch_size", "8")
    assert command_program(words, fields=["micro_batch_size=batch_size"]).places[0].is_of_environment


@pytest.mark.parametrize(
    ("words", "short", "problem"),
    [
        (["--config", "{config}"], "trainer.limit_val_batch=0", "nothing is written at `trainer.limit_val_batch`, which no file that the"),
        (["--config", "{config}"], "batch=0", "nothing is written at `batch`, which is several keys: a.batch, b.batch"),
        (["--config", "{config}", "--data.batch_size", "4"], "data.batch_size=2", "which the command sets: `--data.batch_size 4`"),
        ([], "data.batch_size=2", "nothing is written at `data.batch_size`, which no file that the command names has"),
    ],
)
def test_a_key_alone_that_nothing_can_be_written_at_is_told(config: Path, words: list[str], short: str, problem: str) -> None:
    """With how to name its file."""
    config.write_text(f"{config.read_text()}a: {{batch: 1}}\nb: {{batch: 2}}\n")

    with pytest.raises(UsageError) as raised:
        command_program(["train.py", *(word.format(config=config) for word in words)], short=[short])

    assert problem in raised.value.message
    assert raised.value.hint == f"name its file: `FILE:{short.partition('=')[0]}`"


def test_a_key_that_only_a_file_with_comments_has_is_not_said_to_be_nowhere(config: Path) -> None:
    """Which nobody can edit: what can be done about that is told."""
    commented = config.with_name("commented.json")
    commented.write_text('{\n  "train": {"batch_size": 8}  // samples\n}\n')

    with pytest.raises(UsageError) as raised:
        command_program(["train.py", "--config", str(config), "--opt", str(commented)], fields=["micro_batch_size=train.batch_size"])

    assert "nothing is written at `train.batch_size`, which no file that the command names and that can be read has" in raised.value.message
    assert raised.value.message.endswith(f"{commented}:2: has a comment: JSON with comments is not edited")
    assert (
        raised.value.hint
        == "give the value as a word of the command, `{micro_batch_size}`, or plan with a copy of the file without comments"
    )


def test_a_number_of_the_script_without_its_file_is_no_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which would be set for nothing; one that is set is meant."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("BATCH_SIZE = 8\n")

    with pytest.raises(UsageError, match=r"no variable BATCH_SIZE of the environment is set, and train\.py has a number") as raised:
        command_program(["train.py"], fields=["micro_batch_size=BATCH_SIZE"])
    monkeypatch.setenv("BATCH_SIZE", "4")

    assert raised.value.hint is not None
    assert raised.value.hint.startswith("name its file: `train.py:BATCH_SIZE`; a variable of the environment")
    assert command_program(["train.py"], fields=["micro_batch_size=BATCH_SIZE"]).places[0].is_of_environment


@pytest.mark.parametrize(
    ("words", "short", "problem"),
    [
        (
            ["--config", "{config}"],
            "limit_val_batch=0",
            ", which no file that the command names has: did you mean limit_val_batches?",
        ),
        ([], "eval_steps=0", ", which no file that the command names has"),
    ],
)
def test_a_name_in_small_letters_that_is_set_nowhere_is_no_variable_of_the_environment(
    config: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], short: str, problem: str
) -> None:
    """It would have no effect, and nobody would know."""
    name = short.partition("=")[0]
    command = ["train.py", *(word.format(config=config) for word in words)]
    with pytest.raises(UsageError) as raised:
        command_program(command, short=[short])
    monkeypatch.setenv(name, "8")

    assert raised.value.message == f"nothing is written at `{name}`{problem}"
    assert raised.value.hint == (
        f"name its file: `FILE:{name}`; a variable of the environment with such a name has to be set: `{name}=… memplan …`"
    )
    assert command_program(command, short=[short]).shortened[0].is_of_environment


def test_a_key_may_have_dots_dashes_and_slashes_in_its_name(config: Path) -> None:
    """As argbind's files have them; a path of a file without a key is no key."""
    config.write_text("train/Loader.batch-size: 8\nval/Loader.n_examples: 250\n")
    command = ["train.py", "--config", str(config)]

    program = command_program(command, fields=["micro_batch_size=train/Loader.batch-size"], short=["val/Loader.n_examples=2"])

    assert program.training.micro_batch_size == 8
    assert [(edit.dotted, edit.value) for edit in edits_of_rehearsal(program)] == [
        ("train/Loader.batch-size", 8),
        ("val/Loader.n_examples", 2),
    ]
    [changed] = changed_files(program.with_training(micro_batch_size=16))
    assert changed.after == b"train/Loader.batch-size: 16\nval/Loader.n_examples: 2\n"
    with pytest.raises(UsageError, match="neither FILE:KEY nor the name of a variable"):
        command_program(command, fields=[f"micro_batch_size={config}"])
    with pytest.raises(UsageError, match=r"did you mean train/Loader\.batch-size\?"):
        command_program(command, fields=["micro_batch_size=train/Loader.batch_size"])


def test_an_item_of_a_list_is_a_key_of_its_own(config: Path) -> None:
    """As Donut's `train_batch_sizes: [8]`: by its place, from 0; the list alone is asked for again with that."""
    config.write_text("data:\n  train_batch_sizes: [8, 4]  # one for each dataset\n")
    command = ["train.py", "--config", str(config)]

    program = command_program(command, fields=["micro_batch_size=train_batch_sizes.0"])

    assert program.training.micro_batch_size == 8
    [edit] = edits_of(program.with_training(micro_batch_size=32))
    assert (edit.key, edit.value) == (("data", "train_batch_sizes", "0"), 32)
    with pytest.raises(UsageError, match=r"did you mean data\.train_batch_sizes\.0\?"):
        command_program(command, fields=["micro_batch_size=train_batch_sizes"])
    with pytest.raises(ConfigError) as raised:
        command_program(command, fields=[f"micro_batch_size={config}:data.train_batch_sizes"])
    assert raised.value.hint == "name one of its values, `data.train_batch_sizes.0`"


def test_a_product_and_accumulation_leave_the_micro_batch(config: Path) -> None:
    """On each GPU: 512 samples of an optimizer step are 4 accumulated micro-batches of 64 on two GPUs."""
    config.write_text("batch: 512\naccumulate: 4\n")
    fields = [f"effective_batch_size={config}:batch", f"gradient_accumulation_steps={config}:accumulate"]
    program = command_program(["train.py"], fields=fields, parallelism=Parallelism(devices=2))

    assert (program.training.micro_batch_size, program.effective_batch_size) == (64, 512)
    assert program.varies("micro_batch_size")
    changed = edits_of(program.with_training(micro_batch_size=8, gradient_accumulation_steps=2))
    assert {edit.dotted: edit.value for edit in changed} == {"batch": 32, "accumulate": 2}


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
        (["train.py"], ["micro_batch_size=not a name"], "neither FILE:KEY nor the name of a variable"),
        (["train.py"], ["micro_batch_size=CONFIG:data.batchsize"], "has no key `data.batchsize`: did you mean data.batch_size"),
        (["train.py"], ["micro_batch_size=CONFIG:trainer.batch_size"], "no key `trainer.batch_size`: did you mean data.batch_size"),
        (
            ["train.py"],
            ["micro_batch_size=FOLDER/documents.yaml:train.batch_size"],
            "documents.yaml: holds 2 documents, and no key `train.batch_size`",
        ),
        (["train.py"], ["micro_batch_size=CONFIG:name"], "has to be a whole number"),
        (["train.py"], ["sequence_length=CONFIG:trainer.lr"], "base.lr"),
        (["train.py"], ["micro_batch_size=nothere.yaml:a"], "nothere.yaml"),
        (["train.py"], ["micro_batch_size=config/small.ini:batch_size"], "small.ini: is neither YAML, JSON, TOML, Python nor a shell"),
    ],
)
def test_what_makes_no_sense_is_one_clear_error(config: Path, words: list[str], fields: list[str], said: str) -> None:
    """Before anything is run: a misspelt name, a key that is not there, a value that is no count or is kept elsewhere."""
    documents = config.with_name("documents.yaml")
    documents.write_text("data: {folder: here}\n---\ntrain: {batch_size: 16}\n")
    with pytest.raises((UsageError, ConfigError, EditRefusedError), match=said):
        command_program(words, fields=[field.replace("CONFIG", str(config)).replace("FOLDER", str(config.parent)) for field in fields])


def test_a_value_that_cannot_be_changed_is_refused_before_a_run(config: Path) -> None:
    """An alias stands for another place: which of them is meant is not guessed."""
    config.write_text("base: &size 8\ndata:\n  batch: *size\n")

    with pytest.raises(EditRefusedError, match="batch"):
        command_program(["train.py"], fields=[f"micro_batch_size={config}:data.batch"])


# stages


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    """A folder with the files of two stages, and of something else."""
    folder = tmp_path / "stages"
    folder.mkdir()
    (folder / "b_stage.yaml").write_text("data: {k: 12}  # hard\n")
    (folder / "a_stage.yaml").write_text("data: {k: 4}\n")
    (folder / "notes.yaml").write_text("nothing: here\n")
    return folder


def staged(folder: Path, *words: str, fields: tuple[str, ...] = ("n_negatives=STAGE:data.k",)) -> CommandProgram:
    return command_program(["train.py", *words], fields=fields, stages=[f"{folder}/*_stage.yaml"])


def test_each_file_is_a_stage(stages: Path) -> None:
    """In sorted order, named by the file, with the values that it has now; what is called a stage is no variable."""
    program = staged(stages, "stage={stage}")

    assert [(stage.name, stage.n_negatives, stage.file) for stage in program.stages] == [
        ("a_stage", 4, stages / "a_stage.yaml"),
        ("b_stage", 12, stages / "b_stage.yaml"),
    ]
    assert program.variables == program.stage_variables == {"n_negatives"}
    assert changed_files(program) == []


def test_a_stage_has_a_command_of_its_own(stages: Path) -> None:
    """With its name, its path and its values; of all stages together the command keeps its braces."""
    program = staged(stages, "stage={stage}", "--file={stage_file}", "-k", "{n_negatives}")
    second = program.model_copy(update={"stages": program.stages[1:]})

    assert second.words == ["train.py", "stage=b_stage", f"--file={stages}/b_stage.yaml", "-k", "12"]
    assert program.words == ["train.py", "stage={stage}", "--file={stage_file}", "-k", "{n_negatives}"]


def test_a_pinned_stage_changes_its_own_file(stages: Path) -> None:
    """And no other; without a name all are pinned."""
    program = staged(stages, "{stage}")
    pinned = pin(program, Pins({"b_stage.n_negatives": "16"}))

    [change] = changed_files(pinned)
    assert (change.path, change.after) == (stages / "b_stage.yaml", b"data: {k: 16}  # hard\n")
    assert [edit.value for edit in edits_of(pin(program, Pins({"n_negatives": "8"})))] == [8, 8]
    with pytest.raises(UsageError, match=r"no stage 'c_stage'"):
        pin(program, Pins({"c_stage.n_negatives": "1"}))


def test_each_stages_file_is_short_in_a_rehearsal(stages: Path) -> None:
    """STAGE stands for it there too; in no edit."""
    program = command_program(["train.py", "{stage}"], short=["STAGE:data.k=1"], stages=[f"{stages}/*_stage.yaml"])

    assert [change.after for change in changed_files(program)] == [b"data: {k: 1}\n", b"data: {k: 1}  # hard\n"]
    assert edits_of(program) == []


@pytest.mark.parametrize(
    ("words", "fields", "patterns", "said"),
    [
        (["{stage}"], [], ["*.toml"], "no file matches the stages '.*toml'"),
        (["{stage}"], [], [], "{stage} is of a stage, and no stages are named"),
        ([], ["n_negatives=STAGE:data.k"], [], "STAGE:data.k is of a stage, and no stages are named"),
        ([], [], ["*_stage.yaml"], "nothing differs from stage to stage"),
        ([], ["n_negatives=STAGE:data.k"], ["*_stage.yaml"], "nothing differs from stage to stage"),
        (["{stage}"], ["n_negatives=STAGE:data.k"], ["*.yaml"], r"notes.yaml: has no key `data.k`"),
        (["{stage}"], ["n_negatives=STAGE:data"], ["*_stage.yaml"], "a_stage.yaml"),
        (["{stage}"], [], ["*_stage.yaml", "more/*.yaml"], "two stages are called a_stage"),
        (["{stage}"], ["micro_batch_size=STAGE:data.batch"], ["*_stage.yaml"], "one value for all stages"),
        (["{stage}"], ["sequence_length=STAGE:data.length"], ["*_stage.yaml"], "only n_positives and n_negatives"),
        (["{stge}"], [], ["*_stage.yaml"], "did you mean stage"),
    ],
)
def test_stages_that_make_no_sense_are_one_clear_error(
    stages: Path, words: list[str], fields: list[str], patterns: list[str], said: str
) -> None:
    """Before anything is run; the file is named that lacks a key."""
    (stages / "more").mkdir()
    (stages / "more" / "a_stage.yaml").write_text("data: {k: 4}\n")

    with pytest.raises((UsageError, ConfigError), match=said):
        command_program(["train.py", *words], fields=fields, stages=[f"{stages}/{pattern}" for pattern in patterns])


@pytest.mark.parametrize("value", ["-1", "many", "true", "1.5", "null"])
def test_negatives_are_counted(stages: Path, value: str) -> None:
    """What is no whole number is told with its file."""
    (stages / "b_stage.yaml").write_text(f"data: {{k: {value}}}\n")

    with pytest.raises(ConfigError, match=r"b_stage.yaml: `data.k` is .*, where n_negatives has to be a whole number from 0 on"):
        staged(stages, "{stage}")


@pytest.mark.parametrize(
    "word", ["${sequence_length:-512}", "data={sequence_length:512}", '{"sequence_length": 512}', "{lr: 1, sequence_length: 2}"]
)
def test_braces_of_others_are_no_placeholders(word: str) -> None:
    """A shell's, Hydra's, JSON's."""
    assert command_program(["train.py", "{micro_batch_size}", word]).command[-1] == word

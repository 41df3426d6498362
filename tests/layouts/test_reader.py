"""Reading a Hydra tree and editing it by the same table."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from memplan.edits.apply import prepare
from memplan.errors import ConfigError, EditRefusedError
from memplan.layouts.reader import Reading
from memplan.layouts.registry import locate
from memplan.layouts.templates import templates_folder
from memplan.layouts.writer import edits_for, unwritable
from memplan.workload.model import ContrastiveEncoderModel
from tests.conftest import content


def read(path: Path) -> Reading:
    located = locate(path)
    assert located is not None
    return located.read()


def change(path: Path, old: str, new: str) -> None:
    data = path.read_bytes()
    assert old.encode() in data
    path.write_bytes(data.replace(old.encode(), new.encode(), 1))


def own_layout(folder: Path) -> Path:
    """A copy of memplan's own layout, as a user's in `templates`."""
    return Path(shutil.copytree(templates_folder() / "hydra-contrastive", folder / "templates" / "mine"))


@pytest.mark.parametrize("given", ["", "..", "config.yaml"])
def test_a_tree_is_found_by_its_folder_its_project_and_its_main_file(tree: Path, given: str) -> None:
    """conf, the folder above it, and conf/config.yaml mean the same."""
    located = locate(tree / given)

    assert located is not None
    assert located.root.resolve() == tree.resolve()


def test_a_tree_becomes_a_workload(tree: Path) -> None:
    """What the files say is taken from them, the rest from the starter."""
    workload = read(tree).workload
    model = workload.model

    assert (workload.training.micro_batch_size, workload.training.gradient_accumulation_steps) == (8, 4)
    assert (workload.training.sequence_length, workload.training.precision, workload.parallelism.devices) == (256, "fp16-mixed", 1)
    assert workload.training.target_effective_batch_size is None
    assert isinstance(model, ContrastiveEncoderModel)
    assert model.encoder.lora is not None
    assert (model.encoder.lora.rank, model.encoder.lora.dropout) == (8, 0.1)
    assert [(stage.name, stage.n_positives, stage.n_negatives) for stage in workload.stages] == [
        ("default", 64, 32),
        ("01_stage", 32, 24),
        ("02_stage", 16, 8),
        ("03_stage", 16, 12),
    ]


@pytest.mark.parametrize(
    "entry", ["curriculum: default", "/curriculum: default", "override curriculum: default", "override /curriculum: default"]
)
def test_the_stage_that_training_starts_with_comes_first(tree: Path, entry: str) -> None:
    """Hydra's defaults list names it: it is run, and so it is planned, with the file that holds its values."""
    change(tree / "config.yaml", "- curriculum: default", f"- {entry}")

    reading = read(tree)

    assert [stage.name for stage in reading.workload.stages] == ["default", "01_stage", "02_stage", "03_stage"]
    assert reading.stage_files["default"] == tree / "text_curriculum" / "default.yaml"
    assert reading.other_stages == ()


def test_a_stage_that_training_starts_with_is_not_planned_twice(tree: Path) -> None:
    """One of the numbered ones: it comes first; default.yaml, which has a stage's keys too, is then left alone and noticed."""
    change(tree / "config.yaml", "- curriculum: default", "- curriculum: 02_stage")

    reading = read(tree)

    assert [stage.name for stage in reading.workload.stages] == ["02_stage", "01_stage", "03_stage"]
    assert [(stage.name, stage.n_negatives) for stage in reading.other_stages] == [("default", 32)]


@pytest.mark.parametrize(("folder", "kind"), [("curriculum", "stage"), ("text_curriculum", "text")])
def test_a_tree_may_have_its_stages_in_other_places(tree: Path, folder: str, kind: str) -> None:
    """The other two shapes in which trees of this kind were published."""
    for path in sorted((tree / "text_curriculum").glob("[0-9]*_stage.yaml")):
        path.rename(path.with_name(path.name.replace("stage", kind)))
    if folder != "text_curriculum":
        (tree / "text_curriculum").rename(tree / folder)
    reading = read(tree)

    assert [stage.name for stage in reading.workload.stages][:2] == ["default", f"01_{kind}"]
    assert reading.stage_files[f"01_{kind}"] == tree / folder / f"01_{kind}.yaml"


@pytest.mark.parametrize("entry", ["curriculum: nowhere", "curriculum: null", "curriculum: [a, b]", "data: default"])
def test_a_choice_that_names_no_file_is_a_warning_or_nothing(tree: Path, entry: str) -> None:
    """What cannot be followed is not guessed: the numbered stages are planned."""
    change(tree / "config.yaml", "- curriculum: default", f"- {entry}")

    reading = read(tree)

    assert [stage.name for stage in reading.workload.stages] == ["01_stage", "02_stage", "03_stage"]
    assert any("text_curriculum/nowhere.yaml does not exist" in warning for warning in reading.warnings) == (entry == "curriculum: nowhere")


def test_a_duplicate_key_elsewhere_is_a_warning(tree: Path) -> None:
    """Real stage files have them; they do not keep a plan from being made or written."""
    reading = read(tree)

    assert any("02_stage.yaml:5: `positive_level` is set here and in line 4" in warning for warning in reading.warnings)


def test_edits_are_the_difference_of_two_workloads(tree: Path) -> None:
    """Only what changed, in the file and under the key that it has there; one line a value."""
    reading = read(tree)
    stages = (reading.workload.stages[0], *(stage.model_copy(update={"n_negatives": 20}) for stage in reading.workload.stages[1:]))
    after = reading.workload.model_copy(update={"stages": stages}).with_training(
        micro_batch_size=2, precision="bf16-mixed", sequence_length=128
    )

    changes = prepare(edits_for(reading, after))

    edits = {(edit.file.name, edit.dotted, edit.value) for change in changes for edit in change.edits}
    assert edits == {
        ("config.yaml", "data_loader.batch_size", 2),
        ("config.yaml", "training.trainer.precision", "bf16-mixed"),
        ("config.yaml", "data_loader.tokenization.max_length", 128),
        ("config.yaml", "data_loader.streaming.max_length", 128),
        ("01_stage.yaml", "n_negatives", 20),
        ("02_stage.yaml", "n_negatives", 20),
        ("03_stage.yaml", "n_negatives", 20),
    }
    for prepared in changes:
        before, now = prepared.before.split(b"\n"), prepared.after.split(b"\n")
        assert sum(old != new for old, new in zip(before, now, strict=True)) == len(prepared.edits)


def test_an_unchanged_workload_makes_no_edits(tree: Path) -> None:
    """Nothing is written that is right already."""
    reading = read(tree)

    assert edits_for(reading, reading.workload) == []


def test_reading_changes_nothing(tree: Path) -> None:
    """Every file is as it was, and none is new."""
    before = content(tree)

    read(tree)

    assert content(tree) == before


@pytest.mark.parametrize(
    ("file", "old", "new", "line", "problem"),
    [
        ("config.yaml", "batch_size: 8 ", "batch_size: 0 ", 9, "`data_loader.batch_size` is 0: input should be greater than 0"),
        ("config.yaml", "batch_size: 8 ", "batch_size: -8 ", 9, "`data_loader.batch_size` is -8"),
        ("config.yaml", "batch_size: 8 ", "batch_size: auto ", 9, "`data_loader.batch_size` is 'auto'"),
        ("config.yaml", "batch_size: 8 ", "batch_size: true ", 9, "`data_loader.batch_size` is True"),
        ("config.yaml", "batch_size: 8 ", "batch_size: 2.5 ", 9, "`data_loader.batch_size` is 2.5"),
        ("config.yaml", "batch_size: 8 ", "batch_size: [8] ", 9, "is a sequence, not a single value"),
        ("config.yaml", '"16-mixed"', '"8-mixed"', 31, "'8-mixed', which memplan does not know"),
        ("config.yaml", "r: 8,", "r: 8, r: 9,", 21, "`model.lora.r` stands 2 times (lines 21, 21)"),
        ("config.yaml", "batch_size: 8 ", "batch_size: ${x.y} ", 9, "which this file alone does not resolve"),
        ("config.yaml", "top_k: 2", "top_k: 9", None, "top_k 9 is more than num_experts 4"),
        ("text_curriculum/01_stage.yaml", "n_negatives: 24", "n_negatives: -24", 8, "`n_negatives` is -24"),
        ("text_curriculum/01_stage.yaml", "n_negatives: 24", "n_negatives: yes please", 8, "`n_negatives` is 'yes please'"),
        ("text_curriculum/01_stage.yaml", "n_negatives: 24", "n_negatives: true", 8, "`n_negatives` is True"),
        ("text_curriculum/01_stage.yaml", "n_negatives: 24", "negatives: 24", None, "has no value for `n_negatives`"),
        ("text_curriculum/01_stage.yaml", "n_negatives: 24", "n_negatives: [", 9, "is not valid YAML"),
    ],
)
def test_a_wrong_value_is_told_with_file_and_line(tree: Path, file: str, old: str, new: str, line: int | None, problem: str) -> None:
    """One line: file, line, value, and what is wrong with it."""
    change(tree / file, old, new)

    with pytest.raises(ConfigError) as caught:
        read(tree)

    assert problem in caught.value.message
    assert "\n" not in caught.value.message
    if line is not None:
        assert caught.value.line == line
        assert f"{Path(file).name}:{line}: " in caught.value.message


def test_a_duplicate_of_the_very_key_is_refused(tree: Path) -> None:
    """Which of two batch sizes counts is not for memplan to guess."""
    change(tree / "config.yaml", "  num_workers: 0", "  batch_size: 16")

    with pytest.raises(ConfigError, match=r"`data_loader\.batch_size` stands 2 times \(lines 9, 10\)"):
        read(tree)


def test_a_value_from_a_merge_is_read_but_not_edited(tree: Path) -> None:
    """Reading follows anchors and merges; an edit there would change more than was asked."""
    change(
        tree / "config.yaml",
        "data_loader:\n  batch_size: 8        # anchors\n",
        "shared: &shared\n  batch_size: 8\ndata_loader:\n  <<: *shared\n",
    )
    reading = read(tree)

    assert reading.workload.training.micro_batch_size == 8
    with pytest.raises(EditRefusedError, match="comes from a merged mapping"):
        prepare(edits_for(reading, reading.workload.with_training(micro_batch_size=2)))


def test_an_absent_value_has_the_framework_default_and_that_is_said(tree: Path) -> None:
    """A missing key and null: Lightning trains in fp32, without accumulation, on what the machine has."""
    change(tree / "config.yaml", "    devices: 1\n", "")
    change(tree / "config.yaml", '    precision: "16-mixed"\n', "")
    change(tree / "config.yaml", "accumulate_grad_batches: 4", "accumulate_grad_batches: null")
    reading = read(tree)

    assert reading.workload.parallelism.devices == 1
    assert reading.workload.training.gradient_accumulation_steps == 1
    assert reading.workload.training.precision == "fp32"
    for key in ("training.trainer.devices", "training.trainer.precision", "training.trainer.accumulate_grad_batches"):
        assert any(f"`{key}` is not set; planned with the default" in warning for warning in reading.warnings)


@pytest.mark.parametrize(("text", "devices"), [("4", 4), ("[0, 1, 2]", 3), ('"0,1"', 2), ("auto", 1), ("-1", 1)])
def test_devices_are_counted(tree: Path, text: str, devices: int) -> None:
    """A number, a list, "0,1"; what depends on the machine is planned for 1 and said."""
    change(tree / "config.yaml", "devices: 1", f"devices: {text}")
    reading = read(tree)

    assert reading.workload.parallelism.devices == devices
    assert any("depends on the machine" in warning for warning in reading.warnings) == (text in ("auto", "-1"))


def test_two_keys_of_one_field_that_differ_are_said_and_the_larger_is_planned(tree: Path) -> None:
    """The sequence length stands twice."""
    change(tree / "config.yaml", "  streaming:\n    max_length: 256", "  streaming:\n    max_length: 512")
    reading = read(tree)

    assert reading.workload.training.sequence_length == 512
    assert any("`data_loader.tokenization.max_length` is 256" in warning for warning in reading.warnings)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("all-MiniLM-L6-v2", "all-mpnet-base-v2", "config.yaml:20: `model.base_model_name` is sentence-transformers/all-mpnet-base-v2"),
        ("  base_model_name: sentence-transformers/all-MiniLM-L6-v2\n", "", "`model.base_model_name` is not set"),
        (
            "    devices: 1\n",
            "    devices: 1\n    strategy: fsdp\n",
            "`training.trainer.strategy` is fsdp: memplan does not know the memory of sharded",
        ),
    ],
)
def test_what_the_layout_was_not_written_for_is_refused(tree: Path, old: str, new: str, problem: str) -> None:
    """Another encoder has other sizes, and sharded training another memory: no number would be true."""
    change(tree / "config.yaml", old, new)

    with pytest.raises(ConfigError) as caught:
        read(tree)

    assert problem in caught.value.message


def test_what_the_layout_has_no_key_for_is_known(tree: Path) -> None:
    """An apply would lose it."""
    reading = read(tree)
    after = reading.workload.with_training(activation_checkpointing=False, micro_batch_size=2)

    assert unwritable(reading, after) == ["training.activation_checkpointing"]
    assert unwritable(reading, reading.workload.with_training(micro_batch_size=2)) == []


def test_a_value_without_a_spelling_is_refused(tree: Path, tmp_path: Path) -> None:
    """A user's table that knows no pure bf16 cannot write it."""
    own = own_layout(tmp_path)
    change(own / "layout.yaml", ', "bf16-true": bf16', "")
    located = locate(tree, {"MEMPLAN_TEMPLATES": str(tmp_path / "templates")})
    assert located is not None
    reading = located.read()

    with pytest.raises(EditRefusedError, match="cannot say 'bf16'"):
        edits_for(reading, reading.workload.with_training(precision="bf16"))


def test_a_tree_without_stages_is_refused(tree: Path) -> None:
    """There is nothing to plan negatives for."""
    for stage in tree.glob("text_curriculum/*.yaml"):
        stage.unlink()

    with pytest.raises(ConfigError, match="has no stages"):
        read(tree)


def test_the_real_tree_is_read_and_edited_byte_for_byte(real_tree: Path) -> None:
    """The real project: 5 stages, four files without a last newline, blanks on empty lines, a duplicate key, and all of it stays."""
    reading = read(real_tree)
    stages = tuple(stage.model_copy(update={"n_negatives": 30}) for stage in reading.workload.stages)
    after = reading.workload.model_copy(update={"stages": stages}).with_training(micro_batch_size=16)

    changes = prepare(edits_for(reading, after))

    assert [(stage.n_positives, stage.n_negatives) for stage in reading.workload.stages] == [(64, 32), (64, 24)] + [(16, 8)] * 4
    assert len(changes) == 7
    for prepared in changes:
        for edit in prepared.edits:
            assert prepared.after.replace(str(edit.value).encode(), b"#") != prepared.after
        differing = [pair for pair in zip(prepared.before.split(b"\n"), prepared.after.split(b"\n"), strict=True) if pair[0] != pair[1]]
        assert len(differing) == 1
        assert prepared.before.endswith(b"\n") == prepared.after.endswith(b"\n")


def test_own_layouts_are_found_first(tree: Path, tmp_path: Path) -> None:
    """A user's table in MEMPLAN_TEMPLATES wins over memplan's own."""
    own = own_layout(tmp_path)
    change(own / "layout.yaml", "name: hydra-contrastive", "name: mine")
    located = locate(tree, {"MEMPLAN_TEMPLATES": str(tmp_path / "templates")})

    assert located is not None
    assert located.layout.name == "mine"
    assert located.read().workload.training.micro_batch_size == 8


BROKEN = [
    ("name: hydra-contrastive", "- hydra-contrastive", 3, "is not valid YAML"),
    ("detect:\n  file: config.yaml", "detect:\n  files: config.yaml", 10, "`detect.files`: no such field"),
    ("keys: [data_loader.batch_size, training.trainer]", "keys: 3", 11, "`detect.keys`"),
    ("roots: [., conf]", "roots: [1, 2]", 6, "`roots.0`"),
    ("title: Hydra", "titel: Hydra", None, "`title`: is missing"),
    ("{field: training.micro_batch_size,", "{field: name.micro_batch_size,", 17, "`name.micro_batch_size` is not a field"),
    ("{field: training.micro_batch_size,", "{field: training.micro_batch,", 17, "`training.micro_batch` is not a field"),
    ("{field: model.encoder.lora.rank,", "{field: model.encoder.lora,", None, "`model.encoder.lora` is not a field"),
    ("key: data_loader.batch_size, default: 1}", "key: data_loader..batch_size, default: 1}", 17, "must be keys joined by dots"),
    ("key: data_loader.batch_size, default: 1}", "key: data_loader.batch_size, default: many}", 17, "the default 'many'"),
    ('"32-true": fp32', '"32-true": fp33', None, "`32-true` is spelled 'fp33'"),
    ('allowed: ["32"', 'allowed: ["31"', None, "`31` is allowed and has no meaning"),
    ("folders: [text_curriculum, curriculum]", "folders: /abs", None, "must be a path below the tree's folder"),
    ("    n_negatives: n_negatives", "    num_negatives: n_negatives", None, "`num_negatives` is not a field of a stage"),
    ("workload: workload.yaml", "workload: [a]", 14, "`workload`"),
]


@pytest.mark.parametrize(("old", "new", "line", "problem"), BROKEN)
def test_a_mistake_in_a_layout_is_told_in_the_layout(
    tree: Path, tmp_path: Path, old: str, new: str, line: int | None, problem: str
) -> None:
    """With its own file and line, before a file of the user is read; never a traceback."""
    own = own_layout(tmp_path)
    change(own / "layout.yaml", old, new)

    with pytest.raises(ConfigError) as caught:
        locate(tree, {"MEMPLAN_TEMPLATES": str(tmp_path / "templates")})

    assert caught.value.file == own / "layout.yaml"
    assert problem in caught.value.message
    assert line is None or caught.value.line == line


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "workload.yaml: cannot be read"),
        ("- 1\n", "workload.yaml: is not a workload"),
        ("model: {kind: transformer}\n", "workload.yaml:1: `model"),
        ("training: {precision: fp61}\n", "workload.yaml"),
    ],
)
def test_a_mistake_in_a_starter_workload_is_told_there(tree: Path, tmp_path: Path, text: str | None, problem: str) -> None:
    """It is the layout's author's, not the user's."""
    own = own_layout(tmp_path)
    (own / "workload.yaml").unlink()
    if text is not None:
        (own / "workload.yaml").write_text(text)
    located = locate(tree, {"MEMPLAN_TEMPLATES": str(tmp_path / "templates")})
    assert located is not None

    with pytest.raises(ConfigError) as caught:
        located.read()

    assert problem in caught.value.message


def test_a_folder_of_layouts_that_is_not_there_is_an_error(tree: Path, tmp_path: Path) -> None:
    """A typo in MEMPLAN_TEMPLATES does not pass for no layouts."""
    with pytest.raises(ConfigError, match="is not a folder"):
        locate(tree, {"MEMPLAN_TEMPLATES": str(tmp_path / "templats")})


@pytest.mark.parametrize(
    ("present", "precision", "written"),
    [
        ('"16-mixed"', "bf16-mixed", b'"bf16-mixed"'),
        ('"16"', "bf16-mixed", b'"bf16"'),
        ("16", "fp32", b"32"),
        ('"16-mixed"', "fp32", b'"32"'),  # 32-true is not among those that the trainer accepts
    ],
)
def test_a_spelling_stays_in_the_family_of_the_present_one(tree: Path, present: str, precision: str, written: bytes) -> None:
    """Lightning 1 and 2 spell a precision differently, and a trainer may take only some."""
    change(tree / "config.yaml", '"16-mixed"', present)
    reading = read(tree)

    (prepared,) = prepare(edits_for(reading, reading.workload.with_training(precision=precision)))

    assert b"precision: " + written in prepared.after


def test_a_length_that_is_too_long_is_told_where_it_stands(tree: Path) -> None:
    """In config.yaml, not in the last file that was read."""
    change(tree / "config.yaml", "  streaming:\n    max_length: 256", "  streaming:\n    max_length: 1024")

    with pytest.raises(ConfigError, match="1024 is more than the model's 512 learned positions") as caught:
        read(tree)

    assert (caught.value.file, caught.value.line) == (tree / "config.yaml", 16)


def test_a_named_pipe_among_the_stages_is_refused(tree: Path) -> None:
    """Reading it would wait for a writer without end."""
    os.mkfifo(tree / "text_curriculum" / "04_stage.yaml")

    with pytest.raises(ConfigError, match=r"04_stage\.yaml: is not a regular file"):
        read(tree)


def test_a_folder_of_stages_that_cannot_be_listed_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions that were taken away; who is root reads it all the same, so the system's refusal is made here."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)

    with pytest.raises(ConfigError, match="text_curriculum: cannot be listed: Permission denied"):
        read(tree)

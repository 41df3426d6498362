"""`memplan` as a user runs it: a real process, its output, its exit code, and the files it leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.conftest import Run, content


def test_without_a_configuration_the_built_in_workload_is_planned_and_said(run_memplan: Run) -> None:
    """In an empty folder."""
    result = run_memplan("--gpu-memory", "24")

    assert result.returncode == 0
    assert "Fits on a GPU with 24 GB" in result.stdout
    assert "the built-in workload, since this folder has no configuration" in result.stdout


def test_a_clusters_variables_do_not_silence_a_plan(run_memplan: Run) -> None:
    """RANK and its like in a shell of a job, where no torchrun is: the same report as without."""
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}

    plain, in_job = run_memplan("--gpu", "t4"), run_memplan("--gpu", "t4", **variables)

    assert (in_job.returncode, in_job.stdout) == (plain.returncode, plain.stdout)
    assert "Fits on Tesla T4" in in_job.stdout


def test_without_options_the_help_is_shown(run_memplan: Run) -> None:
    """`memplan` alone."""
    result = run_memplan()

    assert result.returncode == 0
    assert result.stdout.startswith("Usage: memplan")


def test_apply_and_undo_on_a_tree(run_memplan: Run, tree: Path) -> None:
    """Written in the project's folder, byte for byte back with undo, and a second apply writes nothing."""
    before = content(tree)

    arguments = ["--gpu", "RTX 4090", "--grow-negatives", "--apply"]
    applied = run_memplan(*arguments, cwd=tree.parent)
    again = run_memplan(*arguments, cwd=tree.parent)
    written = content(tree)
    undone = run_memplan("undo", cwd=tree.parent)

    assert (applied.returncode, again.returncode, undone.returncode) == (0, 0, 0)
    assert "Wrote 5 files" in applied.stderr
    assert "nothing to write" in again.stderr
    assert b"batch_size: 4        # anchors\n  num_workers: 0\n  \n" in written["config.yaml"]
    assert written["config.yaml.backup"] == before["config.yaml"]
    assert undone.stdout.count("put back") == 5
    assert {name: data for name, data in content(tree).items() if name in before} == before


def test_apply_on_the_real_tree(run_memplan: Run, real_tree: Path) -> None:
    """The main job: `memplan --gpu-memory 24 --apply` in the real project's folder, and back."""
    before = content(real_tree)

    applied = run_memplan("--gpu-memory", "24", "--apply", cwd=real_tree.parent)
    written = content(real_tree)
    undone = run_memplan("undo", "--config-path", real_tree)

    assert applied.returncode == 0, applied.stderr
    assert "Wrote 1 file" in applied.stderr
    assert "default" in applied.stdout  # the stage that training starts with, whose 32 negatives decide
    assert written["config.yaml"] == before["config.yaml"].replace(b"batch_size: 4\n", b"batch_size: 2\n").replace(
        b"accumulate_grad_batches: 4\n", b"accumulate_grad_batches: 8\n"
    )
    assert {name: data for name, data in written.items() if name in before and name != "config.yaml"} == {
        name: data for name, data in before.items() if name != "config.yaml"
    }
    assert undone.returncode == 0
    assert {name: data for name, data in content(real_tree).items() if name in before} == before


def test_dry_run_shows_the_diff_and_writes_nothing(run_memplan: Run, tree: Path) -> None:
    """Neither files nor backups nor a journal."""
    before = content(tree)

    result = run_memplan("--gpu", "RTX 4090", "--dry-run", "--config-path", tree)

    assert result.returncode == 0
    assert "-  batch_size: 8        # anchors\n+  batch_size: 4        # anchors" in result.stdout
    assert "Nothing was written" in result.stderr
    assert content(tree) == before


def test_what_does_not_fit_exits_with_1_and_is_not_written(run_memplan: Run, tree: Path) -> None:
    """What is missing, what would help, and no file touched."""
    before = content(tree)

    result = run_memplan("--gpu-memory", "2GiB", "--apply", "--config-path", tree)

    assert result.returncode == 1
    assert "short" in result.stdout
    assert "what would help" in result.stdout
    assert "Nothing was written, since the plan does not fit." in result.stderr
    assert content(tree) == before


def test_json_is_one_object_on_standard_output(run_memplan: Run, tree: Path) -> None:
    """With the plan's fields, what was changed, and nothing else on the stream."""
    result = run_memplan("--gpu", "RTX 4090", "--grow-negatives", "--apply", "--format", "json", "--config-path", tree)
    answer = json.loads(result.stdout)

    assert result.stderr == ""
    assert (answer["fits"], answer["applied"], answer["effective_batch_size"]) == (True, True, 32)
    assert answer["stages"][1]["planned"]["n_negatives"] == answer["stages"][1]["room"]["n_negatives"] > 24
    assert {"key": "data_loader.batch_size", "value": 4} in answer["changes"][0]["edits"]


@pytest.mark.heavy
def test_json_never_says_applied_of_what_was_not(run_memplan: Run, tree: Path) -> None:
    """An apply that is refused has no answer on standard output; one with nothing to write says that nothing was applied."""
    import fcntl

    arguments = ["--gpu", "rtx4090", "--apply", "--format", "json", "--config-path", tree]
    with (tree / "config.yaml").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused = run_memplan(*arguments)
    first, again = run_memplan(*arguments), run_memplan(*arguments)

    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is locked by another program" in refused.stderr
    assert [json.loads(answer.stdout)["applied"] for answer in (first, again)] == [True, False]


def test_a_plan_for_code_that_was_mended_can_be_applied(run_memplan: Run, tree: Path) -> None:
    """The mode of the encoder is in the trainer's code: the report offers the pin, and with it the plan can be written."""
    result = run_memplan("--gpu", "rtx4090", "--config-path", tree, "--pin", "is_in_eval_mode=false", "--apply")

    assert result.returncode == 0, result.stderr
    assert b"batch_size: 16 " in (tree / "config.yaml").read_bytes()


def test_an_error_of_a_file_names_the_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not taken for one of the output."""
    from memplan.cli import app

    def fail(**_: object) -> None:
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr(app.cli, "main", fail)

    assert app.run([]) == 2
    assert capsys.readouterr().err == "Error: some/file: Permission denied\n"


def test_pins_target_and_margin(run_memplan: Run, tree: Path) -> None:
    """They say what they say, and what is pinned is written too."""
    result = run_memplan(
        "--gpu", "a100-80", "--config-path", tree, "--target-effective-batch", "64", "--margin", "0.2", "--pin", "micro_batch_size=2",
        "--pin", "02_stage.n_negatives=9", "--pin", "sequence_length=128", "--format", "json",
    )  # fmt: skip
    answer = json.loads(result.stdout)

    assert (answer["after"]["training"]["micro_batch_size"], answer["effective_batch_size"]) == (2, 64)
    assert answer["after"]["training"]["sequence_length"] == 128
    assert [stage["planned"]["n_negatives"] for stage in answer["stages"]] == [32, 24, 9, 12]
    assert answer["budget_bytes"] == int(85_095_874_560 * 0.8)


def test_a_hugging_face_config_can_be_planned(run_memplan: Run, tmp_path: Path) -> None:
    """A file from a model's page is enough."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))

    result = run_memplan("--gpu", "t4", "--config-path", "config.json", "--pin", "precision=fp16-mixed", "--target-effective-batch", "64")

    assert result.returncode == 0, result.stderr
    assert "Fits on Tesla T4" in result.stdout
    assert "n_negatives" not in result.stdout


@pytest.mark.heavy
def test_a_config_alone_fills_the_card_and_says_what_was_assumed(run_memplan: Run, tmp_path: Path) -> None:
    """It has a model and no training: the largest micro-batch that fits, and one more would not."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    arguments = ["--gpu", "t4", "--config-path", "config.json", "--format", "json"]

    answer = json.loads(run_memplan(*arguments).stdout)
    micro = answer["after"]["training"]["micro_batch_size"]

    assert micro > 8
    assert answer["after"]["training"]["gradient_accumulation_steps"] == 1
    assert run_memplan(*arguments, "--pin", f"micro_batch_size={micro}").returncode == 0
    assert run_memplan(*arguments, "--pin", f"micro_batch_size={micro + 1}").returncode == 1
    assert "does not say how it is trained: planned with precision fp32, sequence_length 512, optimizer adamw" in answer["notes"][0]


@pytest.mark.heavy
def test_a_workload_that_names_no_batch_fills_the_card(run_memplan: Run, tmp_path: Path) -> None:
    """Nobody chose one sample; a batch or a target of its own stays what it is."""
    model = {
        "kind": "transformer", "architecture": "decoder", "num_layers": 2, "hidden_size": 256, "num_attention_heads": 4,
        "intermediate_size": 1024, "vocab_size": 1000, "num_positions": 512,
    }  # fmt: skip
    answers = []
    for training in ({}, {"micro_batch_size": 2}, {"target_effective_batch_size": 6}):
        (tmp_path / "workload.json").write_text(json.dumps({"model": model, "training": training}))
        answers.append(json.loads(run_memplan("--gpu", "t4", "--config-path", "workload.json", "--format", "json").stdout))

    assert answers[0]["after"]["training"]["micro_batch_size"] > 64
    assert "workload.json names no batch size: without a target the plan fills the GPU" in answers[0]["notes"]
    assert [answer["effective_batch_size"] for answer in answers[1:]] == [2, 6]


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("conf/config.yaml", "data_loader:\n  batch_size: 3\n", "conf/config.yaml: lacks `training.trainer`, which a hydra-contrastive"),
        (
            "conf/config.yaml",
            "data:\n  batch_size: 3\n",
            "conf/config.yaml: looks like a training configuration (it has `data.batch_size`)",
        ),
        ("conf/config.yaml", "data: [\n", "conf/config.yaml:2: is not valid YAML"),
        ("qlora.yml", "base_model: a/b\nmicro_batch_size: 2\n", "qlora.yml:1: `base_model`: unknown model: 'a/b'"),
        (
            "recipes/sft.yaml",
            "model_name_or_path: a/b\nper_device_train_batch_size: 2\n",
            "recipes/sft.yaml:1: `model_name_or_path`: unknown model: 'a/b'",
        ),
        ("ds.json", '{\n\t"zero_optimization": {"stage": 2}\n}', "ds.json: is a DeepSpeed configuration"),
        (
            "config.yaml",
            "train_batch_size: 2048\neval_batch_size: 4096\n",
            "config.yaml: looks like a training configuration (it has `train_batch_size`)",
        ),
        (
            "config.yaml",
            "trainer: {devices: 1}\nmodel:\n  encoder: {batch_size: 1}\n  train_ds: {batch_size: 16}\n  validation_ds: {batch_size: 8}\n",
            "config.yaml: looks like a training configuration (it has `model.train_ds.batch_size`)",
        ),
        (
            "config.yaml",
            "deepspeed:\n  stage: 2\nargs:\n  per_device_train_batch_size: 8\n  batch_size: auto\n",
            "config.yaml: looks like a training configuration (it has `args.per_device_train_batch_size`)",
        ),
        ("workload.yaml", "model: {}\n", "workload.yaml:1: `model`: `kind` must be"),
    ],
)
def test_a_configuration_that_memplan_cannot_read_is_refused_and_nothing_else_is_planned(
    run_memplan: Run, tmp_path: Path, file: str, text: str, problem: str
) -> None:
    """The file and the missing key, or the framework that it looks like: found in the folder, and given by its path."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)

    for arguments in ((), ("--config-path", file)):
        result = run_memplan("--gpu-memory", "24", *arguments)

        assert (result.returncode, result.stdout) == (2, "")
        assert f"Error: {problem}" in result.stderr


@pytest.mark.parametrize("file", ["docker-compose.yml", "package.json", "pyproject.toml", "charts/values.yaml"])
def test_files_that_describe_no_training_are_no_configuration(run_memplan: Run, tmp_path: Path, file: str) -> None:
    """A project has other YAML and JSON files: the built-in workload is planned, and said to be."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text('{"services": {"web": {"image": "x"}}}' if not file.endswith("toml") else "[project]\nname = 'x'\n")

    result = run_memplan("--gpu-memory", "24")

    assert result.returncode == 0
    assert "the built-in workload, since this folder has no configuration" in result.stdout


@pytest.mark.parametrize("folder", ["recipes/llama", "training_configs", "experiments/a/b"])
def test_a_folder_whose_recipes_are_further_below_is_not_planned(run_memplan: Run, tmp_path: Path, folder: str) -> None:
    """The built-in workload in their place would be a plan of something else."""
    below = tmp_path / folder / "sft.yaml"
    below.parent.mkdir(parents=True)
    below.write_text("model_name_or_path: a/b\nper_device_train_batch_size: 2\n")
    below.with_name("damaged.yaml").write_text("model_name_or_path: [\n")

    result = run_memplan("--gpu-memory", "24")

    assert (result.returncode, result.stdout) == (2, "")
    assert f"Error: {folder}/sft.yaml: is a recipe for supervised fine-tuning with TRL, below this folder" in result.stderr
    assert f"hint: name the one to plan, `--config-path {folder}/sft.yaml`" in result.stderr


def test_recipes_of_packages_and_of_tests_are_not_what_a_folder_trains(run_memplan: Run, tmp_path: Path) -> None:
    """Nor hidden ones, nor those of a virtual environment."""
    for folder in ("tests/recipes", ".cache", "env/lib", "node_modules/a"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "sft.yaml").write_text("model_name_or_path: a/b\nper_device_train_batch_size: 2\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()

    assert run_memplan("--gpu-memory", "24").returncode == 0


def test_the_built_in_workload_is_planned_where_it_is_named(run_memplan: Run, tree: Path) -> None:
    """Beside a tree too."""
    result = run_memplan("--gpu-memory", "24", "--config-path", "built-in", "--format", "json", cwd=tree.parent)

    assert json.loads(result.stdout)["source"] == "the built-in workload"


BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}


def test_a_folder_that_holds_a_model_or_a_workload_is_planned(run_memplan: Run, tmp_path: Path) -> None:
    """config.json or workload.yaml, here or in the folder that is named; both at once are not guessed between."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(BERT))

    here = run_memplan("--gpu", "t4", "--format", "json", cwd=model)
    named = run_memplan("--gpu", "t4", "--format", "json", "--config-path", "model")
    (model / "workload.yaml").write_text("model: {kind: parameters, num_parameters: 1, activation_bytes_per_sample: 1}\n")
    both = run_memplan("--gpu", "t4", cwd=model)

    assert json.loads(here.stdout)["after"]["model"] == json.loads(named.stdout)["after"]["model"]
    assert json.loads(here.stdout)["source"] == "config.json"
    assert both.returncode == 2
    assert "workload.yaml: is beside config.json" in both.stderr


def test_what_is_pinned_is_not_assumed(run_memplan: Run, tmp_path: Path) -> None:
    """A config.json says nothing of the training; what the user says is told of no more."""
    (tmp_path / "config.json").write_text(json.dumps(BERT))

    notes = [
        json.loads(run_memplan("--gpu", "t4", "--format", "json", *pins).stdout)["notes"][0]
        for pins in ((), ("--pin", "precision=bf16-mixed", "--pin", "sequence_length=128"))
    ]

    assert "planned with precision fp32, sequence_length 512, optimizer adamw" in notes[0]
    assert "planned with optimizer adamw (" in notes[1]


def test_a_pin_that_the_files_have_no_key_for_is_planned_but_not_applied(run_memplan: Run, tree: Path) -> None:
    """Else the plan would count on what the training does not do."""
    before = content(tree)
    pinned = ["--gpu", "rtx4090", "--config-path", tree, "--pin", "optimizer=sgd"]

    assert run_memplan(*pinned).returncode == 0
    refused = run_memplan(*pinned, "--apply")

    assert refused.returncode == 2
    assert "the plan counts on optimizer.name, which these files have no key for" in refused.stderr
    assert content(tree) == before


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252"])
def test_a_stream_that_knows_no_arrows_is_no_crash(run_memplan: Run, tree: Path, encoding: str) -> None:
    """Written with question marks, and the apply is done and said."""
    result = run_memplan("--gpu", "rtx4090", "--apply", "--grow-negatives", "--config-path", tree, PYTHONIOENCODING=encoding)

    assert result.returncode == 0, result.stderr
    assert "8 ? 4" in result.stdout
    assert "Wrote 5 files" in result.stderr


def test_a_reader_that_leaves_stops_the_program_before_it_writes(run_memplan: Run, tree: Path) -> None:
    """What was not shown is not applied; the exit code is a closed pipe's, not "does not fit"."""
    import subprocess
    import sys

    before = content(tree)
    command = [sys.executable, "-m", "memplan", "--gpu", "rtx4090", "--apply", "--config-path", str(tree)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()

    assert process.wait(timeout=60) == 141
    assert "Traceback" not in said
    assert content(tree) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_is_an_error(run_memplan: Run) -> None:
    """A full disk: one line and exit code 2."""
    import subprocess
    import sys

    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "memplan", "--gpu", "t4"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )

    assert result.returncode == 2
    assert result.stderr.startswith("Error: the output could not be written")


def test_the_guide_reproduces_its_table(run_memplan: Run) -> None:
    """24 is 24 GiB to it, 23.5GiB gives 45/5; it takes no target of ours."""
    boxed = json.loads(run_memplan("--gpu-memory", "24", "--method", "guide", "--format", "json").stdout)
    exact = json.loads(run_memplan("--gpu-memory", "23.5GiB", "--method", "guide", "--format", "json").stdout)
    card = run_memplan("--gpu", "a100-80", "--method", "guide")

    assert [stage["planned"]["micro_batch_size"] for stage in boxed["stages"]] == [46, 120, 120, 120, 120]
    assert (exact["stages"][0]["planned"]["micro_batch_size"], exact["stages"][0]["planned"]["gradient_accumulation_steps"]) == (45, 5)
    assert "The guide's" in card.stdout or "Fits" in card.stdout


def test_a_kind_of_card_in_another_size(run_memplan: Run) -> None:
    """--gpu says the kind, --gpu-memory the size."""
    answer = json.loads(run_memplan("--gpu", "rtx4090", "--gpu-memory", "48GiB", "--format", "json").stdout)

    assert (answer["gpu"]["compute_capability"], answer["gpu"]["total_memory_bytes"]) == ([8, 9], 48 * 2**30)


BAD = [
    (["--gpu-memory", "lots"], 2, "'lots' is not a size"),
    (["--gpu-memory", "-24"], 2, "'-24' is not a size"),
    (["--gpu-memory", "0"], 2, "less than one byte"),
    (["--gpu", "rtx9999"], 2, "unknown GPU"),
    (["--gpu", "a100"], 2, "could be"),
    (["--gpu-memory", "24", "--target-effective-batch", "0"], 2, "0 is not in the range"),
    (["--gpu-memory", "24", "--target-effective-batch", "most"], 2, "'most' is not a valid number of samples, nor max"),
    (["--gpu-memory", "24", "--margin", "1.5"], 2, "1.5 is not in the range"),
    (["--gpu-memory", "24", "--margin", "nan"], 2, "nan"),
    (["--gpu-memory", "24", "--pin", "batch=3"], 2, "no such field"),
    (["--gpu-memory", "24", "--config-path", "nowhere"], 2, "nowhere: does not exist"),
    (["--gpu-memory", "24", "--config-path", "n" * 300], 2, "n: does not exist"),
    (["--gpu-memory", "24", "--config-path", "."], 2, "has no configuration that memplan reads"),
    (["--gpu-memory", "24", "--apply"], 2, "there is nothing to apply to"),
    (["--gpu-memory", "24", "--apply", "--dry-run"], 2, "exclude each other"),
    (["--gpu-memory", "24", "--apply", "--method", "guide"], 2, "never written"),
    (["--gpu-memory", "24", "--method", "guide", "--margin", "0.1"], 2, "its own target and margin"),
    (["--gpu-memory", "24", "--nonsense"], 2, "No such option"),
    (["--gpu-memory", "24", "gpus"], 2, "write options after it: `memplan gpus …`"),
    (["--gpu-memory", "24", "--target-effective-batch", "3", "--pin", "micro_batch_size=4"], 2, "below one micro-batch"),
    (["undo"], 2, "nothing to undo"),
]


@pytest.mark.parametrize(("arguments", "code", "problem"), BAD, ids=[" ".join(arguments) for arguments, _, _ in BAD])
def test_bad_input_gets_one_clear_line_and_writes_nothing(
    run_memplan: Run, tmp_path: Path, arguments: list[str], code: int, problem: str
) -> None:
    """The right exit code, no traceback, nothing on standard output, no file."""
    result = run_memplan(*arguments)

    assert result.returncode == code
    assert problem in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_value_names_file_and_line_and_nothing_is_written(run_memplan: Run, tree: Path) -> None:
    """As an editor can jump to it."""
    config = tree / "config.yaml"
    config.write_bytes(config.read_bytes().replace(b"batch_size: 8 ", b"batch_size: -8 "))
    before = content(tree)

    result = run_memplan("--gpu-memory", "24", "--apply", cwd=tree.parent)

    assert result.returncode == 2
    assert result.stderr.startswith("Error: conf/config.yaml:9: `data_loader.batch_size` is -8: ")
    assert content(tree) == before


def test_a_value_that_cannot_be_edited_is_refused_before_anything_is_written(run_memplan: Run, tree: Path) -> None:
    """One refusal stops the whole transaction."""
    config = tree / "config.yaml"
    config.write_bytes(config.read_bytes().replace(b"batch_size: 8 ", b"batch_size: ${size} ").replace(b"defaults:", b"size: 8\ndefaults:"))
    before = content(tree)

    result = run_memplan("--gpu-memory", "24", "--apply", cwd=tree.parent)

    assert result.returncode == 2
    assert "`data_loader.batch_size` is ${size}" in result.stderr
    assert "change its source `size` in line 2 instead" in result.stderr
    assert content(tree) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_tree_without_permission_is_refused(run_memplan: Run, tree: Path) -> None:
    """Another user's read-only files: said, and nothing written."""
    import subprocess
    import sys

    before = content(tree)
    for folder in (tree, *tree.parents[:-1]):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    # The dry run imports everything while this user's Python can still be read.
    script = """
import os, sys
from memplan.cli.app import run
import memplan.edits.apply
run([*sys.argv[1:], "--dry-run"])
os.setgid(65534)
os.setuid(65534)
sys.exit(run([*sys.argv[1:], "--apply"]))
"""
    arguments = ["--gpu", "rtx4090", "--config-path", str(tree)]

    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)

    assert result.returncode == 2, result.stderr
    assert "cannot be written: permission denied" in result.stderr
    assert content(tree) == before


def test_an_unknown_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is the user's to solve becomes one line; a bug keeps its traceback."""
    from memplan.cli import app

    def fail(**_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(app.cli, "main", fail)

    with pytest.raises(RuntimeError, match="a bug"):
        app.run([])

"""`memplan --stages … -- train.py stage={stage}` as a user runs it: each stage is rehearsed, and its file written and put back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from memplan.hardware.torch_install import TorchBuild
from tests.conftest import Run, content

TREE = Path(__file__).parents[1] / "trees" / "staged"
FOLDER = "conf/text_curriculum"
STAGES = ("--stages", f"{FOLDER}/*_stage.yaml")
NEGATIVES = ("--field", "n_negatives=STAGE:data.n_negatives")
BATCH = (
    *("--field", "micro_batch_size=conf/config.yaml:data.batch_size"),
    *("--field", "gradient_accumulation_steps=conf/config.yaml:trainer.accumulate"),
)
COMMAND = ("--", "train.py", "stage={stage}")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of a program with three stages."""
    return Path(shutil.copytree(TREE, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.heavy
def test_stages_are_planned_written_and_put_back(run_memplan: Run, torch_build: TorchBuild, project: Path) -> None:
    """One batch for all; negatives grow up to what a stage's limit or its memory allows, but for those that are pinned."""
    before = content(project)
    size = ("--gpu-memory", "1GiB", "--format", "json")
    pins = ("micro_batch_size=32", "01_easy_stage.max_n_negatives=6", "02_hard_stage.n_negatives=8")
    wanted = ("--target-effective-batch", "64", "--grow-negatives", *(word for pin in pins for word in ("--pin", pin)))

    planned = run_memplan(*size, *wanted, "--apply", *STAGES, *NEGATIVES, *BATCH, *COMMAND, cwd=project)

    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    easy, hard, last = (stage["planned"] for stage in plan["stages"])
    assert [stage["name"] for stage in plan["stages"]] == ["01_easy_stage", "02_hard_stage", "03_last_stage"]
    assert [stage["present"]["n_negatives"] for stage in plan["stages"]] == [4, 12, 1]
    assert all(stage["estimate"]["device_used"]["high_bytes"] <= plan["budget_bytes"] for stage in plan["stages"])
    assert [easy["micro_batch_size"], easy["gradient_accumulation_steps"]] == [32, 2]
    assert [easy["n_negatives"], hard["n_negatives"]] == [6, 8]
    written = {path: text for path, text in content(project).items() if text != before.get(path) and path.startswith("conf")}
    assert written[f"{FOLDER}/02_hard_stage.yaml"] == before[f"{FOLDER}/02_hard_stage.yaml"].replace(b": 12 ", b": 8 ")
    for name, count, found in (("01_easy_stage", 4, easy), ("03_last_stage", 1, last)):
        file = f"{FOLDER}/{name}.yaml"
        assert found["n_negatives"] > count
        assert written[file] == before[file].replace(f"negatives: {count}".encode(), f"negatives: {found['n_negatives']}".encode())

    fresh = run_memplan("rehearse", *size, "--steps", "3", "--", "train.py", "stage=03_last_stage", cwd=project)
    rehearsed = json.loads(fresh.stdout)
    assert rehearsed["peak_reserved_bytes"] == plan["stages"][2]["estimate"]["peak_reserved_bytes"]
    again = json.loads(run_memplan("--apply", "--format", "json", cwd=project).stdout)
    assert "stages" in again["remembered"]
    assert [[stage["planned"] for stage in again["stages"]], again["applied"]] == [[easy, hard, last], False]

    checked = run_memplan("check", "--drift", "--gpu-memory", "1GiB", "--format", "json", cwd=project)
    assert [stage["verdict"] for stage in json.loads(checked.stdout)["stages"]] == ["fits"] * 3
    (project / FOLDER / "01_easy_stage.yaml").write_bytes(before[f"{FOLDER}/01_easy_stage.yaml"])
    assert "01_easy_stage.yaml" in run_memplan("check", "--drift", cwd=project).stdout
    (project / FOLDER / "01_easy_stage.yaml").write_bytes(written[f"{FOLDER}/01_easy_stage.yaml"])
    assert run_memplan("undo", cwd=project).returncode == 0
    assert {path: text for path, text in content(project).items() if path in before} == before


@pytest.mark.heavy
@pytest.mark.timeout(1500)  # the plan through its command takes four minutes on two cores that nobody shares
@pytest.mark.skipif(find_spec("hydra") is None or find_spec("lightning") is None, reason="hydra-core or lightning is not installed")
def test_the_trainer_of_a_tree_and_memplan_s_own_modules_plan_alike(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path) -> None:
    """
    Four encoders with LoRA, experts and a curriculum, by Hydra and Lightning: the same plan, written into the same keys.

    What holds weights, gradients, the optimizer's state and the batch is the same, to blocks of 512 bytes; the whole within 2.5%.
    """
    project = Path(shutil.copytree(TREE.parent / "curriculum", tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__")))
    before = content(project)
    wanted = ("--gpu-memory", "12", "--target-effective-batch", "2", "--format", "json")
    stages = ("--stages", "conf/curriculum/*_stage.yaml", *("--field", "n_negatives=STAGE:n_negatives"))

    by_modules = run_memplan(*wanted, "--config-path", "conf", "--method", "rehearsed", cwd=project)
    by_program = subprocess.run(  # which takes minutes
        [sys.executable, "-m", "memplan", *wanted, "--apply", *stages, "--", "train.py", "curriculum={stage}"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (by_modules.returncode, by_program.returncode) == (0, 0), by_modules.stderr + by_program.stderr
    modules, program = json.loads(by_modules.stdout), json.loads(by_program.stdout)
    assert [stage["name"] for stage in program["stages"]] == ["01_stage", "02_stage"]
    for planned, own in zip(program["stages"], modules["stages"], strict=True):
        assert planned["planned"]["micro_batch_size"] == own["planned"]["micro_batch_size"] == 1
        assert planned["planned"]["gradient_accumulation_steps"] == own["planned"]["gradient_accumulation_steps"] == 2
        theirs, ours = planned["estimate"], own["estimate"]
        # transformers keeps the positions and types of 512 tokens as buffers of each encoder
        assert theirs["breakdown"]["parameters_bytes"] == ours["breakdown"]["parameters_bytes"] + 4 * 2 * 512 * 8
        for category in ("gradients", "optimizer_state", "batch_data"):
            assert theirs["breakdown"][f"{category}_bytes"] == pytest.approx(ours["breakdown"][f"{category}_bytes"], abs=1024), category
        assert theirs["peak_reserved_bytes"] == pytest.approx(ours["peak_reserved_bytes"], rel=0.025)
    after = content(project)
    config = before["conf/config.yaml"].replace(b"batch_size: 2 ", b"batch_size: 1 ").replace(b"batches: 1", b"batches: 2")
    assert {path: text for path, text in after.items() if path in before} == before | {"conf/config.yaml": config}
    assert {Path(path).parts[0] for path in after.keys() - before.keys()} <= {".memplan", "conf"}  # the backup, and nothing that it wrote
    assert run_memplan("undo", cwd=project).returncode == 0
    assert content(project)["conf/config.yaml"] == before["conf/config.yaml"]


@pytest.mark.heavy
def test_a_stage_that_fails_is_named(run_memplan: Run, torch_build: TorchBuild, project: Path) -> None:
    """The others run: with why, and what it said."""
    file = project / FOLDER / "03_last_stage.yaml"
    file.write_text(file.read_text().replace("length", "lenght"))

    result = run_memplan("--gpu-memory", "1GiB", *STAGES, *NEGATIVES, *BATCH, *COMMAND, cwd=project)

    assert result.returncode == 2
    assert "in stage 03_last_stage, with micro-batches of " in result.stderr
    assert "KeyError: 'length'" in result.stderr


@pytest.mark.heavy
def test_a_command_that_runs_another_stage_is_told(run_memplan: Run, torch_build: TorchBuild, project: Path) -> None:
    """What it takes would be that of the wrong one."""
    other = ("--stages", f"{FOLDER}/02_hard_stage.yaml", f"{FOLDER}/03_last_stage.yaml")
    program = project / "train.py"
    program.write_text(program.read_text().replace("['stage']", ".get('stag', '01_easy_stage')"))

    result = run_memplan("--gpu-memory", "1GiB", *other, *NEGATIVES, *BATCH, *COMMAND, cwd=project)

    assert result.returncode == 2
    assert f"in stage 02_hard_stage, the program does not read {FOLDER}/02_hard_stage.yaml" in result.stderr


@pytest.mark.heavy
def test_negatives_that_are_not_read_are_told(run_memplan: Run, torch_build: TorchBuild, project: Path) -> None:
    """More of them would fit for ever."""
    for file in (project / FOLDER).iterdir():
        file.write_text(file.read_text() + "notes:\n  k: 2\n")
    options = ("--gpu-memory", "1GiB", "--target-effective-batch", "16", "--pin", "micro_batch_size=8", "--grow-negatives")

    result = run_memplan(*options, *STAGES, "--field", "n_negatives=STAGE:notes.k", *BATCH, *COMMAND, cwd=project)

    assert result.returncode == 2
    assert "in stage 01_easy_stage, n_negatives was changed from 2 to 3, and every allocation stayed the same" in result.stderr


def test_a_pattern_that_the_shell_has_expanded_is_the_same(run_memplan: Run, project: Path) -> None:
    """Its words follow the option as they are."""
    files = sorted(f"{FOLDER}/{file.name}" for file in (project / FOLDER).iterdir())
    quoted = run_memplan("explain-config", *STAGES, *NEGATIVES, *BATCH, *COMMAND, cwd=project)
    expanded = run_memplan("explain-config", "--stages", *files, *NEGATIVES, *BATCH, *COMMAND, cwd=project)

    assert quoted.stdout == expanded.stdout
    assert quoted.stdout.count(".n_negatives ") == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*STAGES, *BATCH, "--", "train.py"], "nothing differs from stage to stage"),
        (["--stages", "conf/*.yml", *BATCH, *COMMAND], "no file matches the stages 'conf/*.yml'"),
        (
            ["--stages", f"{FOLDER}/01_easy_stage.yaml", "conf/nothere.yaml", *BATCH, *COMMAND],
            "no file matches the stages 'conf/nothere.yaml'",
        ),
        ([*BATCH, *COMMAND], "{stage} is of a stage, and no stages are named"),
        (STAGES, "--stages are those of a command"),
        ([*STAGES, *BATCH, "--grow-negatives", *COMMAND], "`--grow-negatives` is to change"),
        ([*STAGES, *BATCH, *NEGATIVES, "--pin", "04_stage.n_negatives=1", *COMMAND], "no stage '04_stage'"),
        ([*STAGES, "--field", "micro_batch_size=STAGE:data.n_negatives", *COMMAND], "one value for all stages"),
    ],
)
def test_what_makes_no_sense_is_one_clear_error(run_memplan: Run, project: Path, arguments: list[str], said: str) -> None:
    """Before anything is run, with what to do; nothing is left behind."""
    before = content(project)

    result = run_memplan("--gpu", "t4", *arguments, cwd=project)

    assert result.returncode == 2
    assert said in result.stderr
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr
    assert content(project) == before

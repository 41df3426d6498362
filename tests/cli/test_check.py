"""`memplan check`: does the present configuration fit, and has it left the plan that was applied?"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from ruamel.yaml import YAML

from memplan.hardware.torch_install import TorchBuild
from tests.conftest import Run, content
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / "tests" / "trees" / "own_program"


def test_the_worst_stage_decides_in_one_line(run_memplan: Run, tree: Path) -> None:
    """Of what a plan says of the present values: the stage that takes most, and nothing is written."""
    before = content(tree)
    checked = run_memplan("check", "--gpu", "rtx4090", "--config-path", tree)
    plan = json.loads(run_memplan("--gpu", "rtx4090", "--config-path", tree, "--format", "json").stdout)

    worst = max(plan["stages"], key=lambda stage: stage["present_estimate"]["device_used"]["high_bytes"])
    size = f"{worst['present_estimate']['device_used']['high_bytes'] / 2**30:.2f} GiB of {plan['budget_bytes'] / 2**30:.2f} GiB"
    assert checked.stdout.startswith(f"does not fit: {size} on GeForce RTX 4090, ")
    assert checked.stdout.endswith(f"over the budget, stage {worst['name']}, by formulas, {tree} (hydra-contrastive)\n")
    assert (checked.returncode, checked.stdout.count("\n")) == (1, 1)
    assert content(tree) == before


@pytest.mark.heavy
def test_what_a_plan_applied_fits_and_has_not_drifted(run_memplan: Run, tree: Path) -> None:
    """Until somebody changes a value: then it is named with its line, what was planned, and what is there."""
    run_memplan("--gpu", "rtx4090", "--config-path", tree, "--apply")
    fits = run_memplan("check", "--gpu", "rtx4090", "--config-path", tree)
    kept = run_memplan("check", "--drift", "--config-path", tree)
    config = tree / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("  batch_size: 4", "  batch_size: 12", 1))
    line = text[: text.index("  batch_size: 4")].count("\n") + 1
    drifted = run_memplan("check", "--drift", "--config-path", tree)
    both = run_memplan("check", "--drift", "--gpu", "rtx4090", "--config-path", tree, "--format", "json")

    assert (fits.returncode, kept.returncode, drifted.returncode, both.returncode) == (0, 0, 1, 1)
    assert fits.stdout.startswith("fits: ")
    assert "are as planned" in kept.stdout
    assert drifted.stdout.strip().endswith(f"config.yaml:{line}: `data_loader.batch_size` is 12, planned 4")
    answer = json.loads(both.stdout)
    assert (answer["fits"], [drift["present"] for drift in answer["drift"]]) == (False, ["12"])


def test_each_stage_is_a_test_case(run_memplan: Run, tree: Path) -> None:
    """In XML that parses, and as GitHub's commands with the file and line of the batch."""
    stages = {path.stem for path in (tree / "text_curriculum").glob("*_stage.yaml")}
    arguments = ("check", "--gpu", "rtx4060", "--config-path", tree, "--format")
    suite = ET.fromstring(run_memplan(*arguments, "junit").stdout)
    commands = run_memplan(*arguments, "github").stdout.splitlines()

    names = {case.get("name") for case in suite.iter("testcase")}
    assert stages < names
    assert len([*suite.iter("failure")]) == int(suite.get("failures") or 0) == len(names)
    line = next(number for number, text in enumerate((tree / "config.yaml").read_text().splitlines(), 1) if "  batch_size: " in text)
    assert len(commands) == len(names)
    assert all(command.startswith(f"::error file={tree / 'config.yaml'},line={line}::does not fit: ") for command in commands)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--gpu", "t4"], 2, "this folder has no configuration"),
        (["--drift"], 2, "no plan has been applied here"),
        (["--auto"], 3, "no NVIDIA driver"),
        (["--gpu", "t4", "--", "train.py", "{micro_batch_size}"], 2, "the present value of micro_batch_size is not known"),
        (["--gpu", "t4", "--method", "analytic", "--", "train.py"], 2, "--method analytic knows nothing of it"),
        (["--gpu", "t4", "build.py:build", "--", "train.py"], 2, "a function and a command exclude each other"),
    ],
)
def test_what_cannot_be_told_is_an_error_everywhere(run_memplan: Run, arguments: list[str], code: int, said: str) -> None:
    """With the exit code of any command, in the log and in the file that continuous integration reads."""
    options, _, command = " ".join(arguments).partition(" -- ")
    words = [*options.split(), "--format", "junit", *(["--", *command.split()] if command else [])]
    result = run_memplan("check", *words, CUDA_VISIBLE_DEVICES="")

    assert (result.returncode, said in result.stderr) == (code, True), result.stderr
    [error] = ET.fromstring(result.stdout).iter("error")
    assert said in (error.get("message") or "")


@pytest.mark.heavy
def test_a_program_is_checked_as_it_is_started(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path) -> None:
    """The second time from what is kept, with the figures of a rehearsal; another size of its file is another check."""
    project = Path(shutil.copytree(PROGRAM, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__")))
    field = ("--field", "micro_batch_size=config.yaml:data.batch_size")

    def check(*options: str) -> Any:
        words = ("check", "--gpu", "t4", *options, "--format", "json", "--", "train.py", "config.yaml")
        return json.loads(run_memplan(*words, cwd=project, XDG_CACHE_HOME=str(tmp_path / "cache")).stdout)

    first, second = check(), check()
    alone = run_memplan("rehearse", "--gpu", "t4", "--steps", "3", "--format", "json", "--", "train.py", "config.yaml", cwd=project)
    (project / "config.yaml").write_text((project / "config.yaml").read_text().replace("batch_size: 16 ", "batch_size: 160 "))
    large = check(*field)

    assert (first["evidence"], second["evidence"], large["evidence"]) == ("rehearsed now", "kept rehearsal", "rehearsed now")
    assert first["stages"] == second["stages"]
    assert first["stages"][0]["device_used"] == json.loads(alone.stdout)["device_used"]
    assert (first["fits"], large["fits"], large["stages"][0]["values"]["micro_batch_size"]) == (True, False, 160)


def shell(command: str, cwd: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line as a shell does in which this memplan is installed."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    memplan = programs / "memplan"
    memplan.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m memplan "$@"\n')
    memplan.chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(["sh", "-ec", command], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_where_nothing_was_applied_nothing_has_drifted(run_memplan: Run, tree: Path) -> None:
    """A hook runs in every clone, and git keeps no journal."""
    told = run_memplan("check", "--drift", "--if-applied", "--config-path", tree)

    assert (told.returncode, told.stdout) == (0, "no drift: no plan has been applied here\n")


def test_if_applied_is_nothing_without_drift(run_memplan: Run, tree: Path) -> None:
    refused = run_memplan("check", "--gpu", "rtx4090", "--if-applied", "--config-path", tree)

    assert refused.returncode == 2
    assert "give both: `--drift --if-applied`" in refused.stderr


@pytest.mark.heavy
def test_the_hooks_run_as_they_are_written(run_memplan: Run, tree: Path, tmp_path: Path) -> None:
    """Each entry with its arguments: red for what does not fit and what has drifted, green after a plan."""
    fits, drift = YAML(typ="safe").load(REPOSITORY / ".pre-commit-hooks.yaml")
    options = " --gpu rtx4090"

    assert [shell(entry, tree.parent, tmp_path).returncode for entry in (fits["entry"] + options, drift["entry"])] == [1, 0]
    assert run_memplan("--gpu", "rtx4090", "--apply", cwd=tree.parent).returncode == 0
    assert [shell(entry, tree.parent, tmp_path).returncode for entry in (fits["entry"] + options, drift["entry"])] == [0, 0]
    (tree / "config.yaml").write_text((tree / "config.yaml").read_text().replace("  batch_size: 4", "  batch_size: 8", 1))
    assert [shell(entry, tree.parent, tmp_path).returncode for entry in (fits["entry"] + options, drift["entry"])] == [1, 1]
    for hook in (fits, drift):
        assert {"id", "name", "entry", "language"} <= hook.keys()
        assert all(re.search(hook["files"], name) for name in ("conf/config.yaml", "job.toml", "finetune.sh", "train.py", "ds.json"))


def test_the_action_of_the_documents_runs(tree: Path, tmp_path: Path) -> None:
    """Its YAML parses, and its command line prints a workflow command on a tree like the one that it names."""
    text = (REPOSITORY / "docs" / "checking.md").read_text(encoding="utf-8")
    [workflow] = re.findall(r"```yaml\n(# \.github/workflows/.*?)```", text, re.DOTALL)
    steps = YAML(typ="safe").load(workflow)["jobs"]["fits"]["steps"]
    [command] = [step["run"] for step in steps if step.get("run", "").startswith("memplan ")]

    result = shell(command, tree.parent, tmp_path)

    assert result.returncode == 1
    assert result.stdout.startswith("::error file=conf/config.yaml,line=")

"""`memplan compare`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from memplan.hardware.catalog import catalog_gpus
from memplan.hardware.torch_install import TorchBuild
from tests.conftest import Run
from tests.estimators.test_rehearsed import small_workload
from tests.standin.conftest import torch_build

__all__ = ["small_workload", "torch_build"]

PROGRAM = Path(__file__).parents[1] / "trees" / "own_program"


def test_every_card_has_a_row(run_memplan: Run) -> None:
    """The smallest first; MIG instances when they are asked for."""
    answer = json.loads(run_memplan("compare", "--format", "json").stdout)
    with_mig = json.loads(run_memplan("compare", "--format", "json", "--mig").stdout)

    whole = [card for card in catalog_gpus() if not card.is_mig]
    totals = [row["gpu"]["total_memory_bytes"] for row in answer["gpus"]]
    assert len(totals) == len(whole)
    assert totals == sorted(totals)
    assert len(with_mig["gpus"]) == len(catalog_gpus())
    assert answer["method"] == "analytic"


def test_a_row_says_what_a_plan_says(run_memplan: Run) -> None:
    """A GPU that is named twice, once by another name, has one row."""
    (row,) = json.loads(run_memplan("compare", "rtx4090", "RTX 4090", "--format", "json").stdout)["gpus"]
    plan = json.loads(run_memplan("--gpu", "rtx4090", "--format", "json").stdout)

    assert [stage["planned"] for stage in row["stages"]] == [stage["planned"] for stage in plan["stages"]]
    assert [stage["device_used_bytes"] for stage in row["stages"]] == [stage["estimate"]["device_used_bytes"] for stage in plan["stages"]]
    assert (row["fits"], row["budget_bytes"]) == (plan["fits"], plan["budget_bytes"])


def test_where_nothing_fits_it_says_what_is_missing(run_memplan: Run) -> None:
    """Exit code 1 only where no GPU will do."""
    mixed, none = run_memplan("compare", "rtx4060", "a100-80"), run_memplan("compare", "rtx4060")

    assert re.search(r"GeForce RTX 4060 +7.89 GiB +none fits", mixed.stdout)
    assert " short" in mixed.stdout
    assert (mixed.returncode, none.returncode) == (0, 1)


def test_markdown_is_a_table(run_memplan: Run) -> None:
    lines = run_memplan("compare", "t4", "h100", "--format", "markdown").stdout.splitlines()

    assert lines[0] == "| GPU | for programs | micro-batch | accumulation | effective | n_negatives | memory | % of GPU |"
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| Tesla T4", "| H100 80GB HBM3"]


@pytest.mark.parametrize(
    ("arguments", "message"), [(["nocard"], "unknown GPU: 'nocard'"), (["t4", "--margin", "nan"], "nan is not a valid number")]
)
def test_mistakes_are_told(run_memplan: Run, arguments: list[str], message: str) -> None:
    result = run_memplan("compare", *arguments)

    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.heavy
def test_cards_are_compared_by_rehearsal(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path, small_workload: Path) -> None:
    """Two of one kind share what was run; the second time nothing is."""
    arguments = ["compare", "a100-40", "a100-80", "--config-path", small_workload, "--format", "json", "--target-effective-batch", "64"]
    first, second = (run_memplan(*arguments, MEMPLAN_METHOD="auto", XDG_CACHE_HOME=str(tmp_path / "cache")) for _ in range(2))

    answer = json.loads(first.stdout)
    assert answer["method"] == "rehearsed"
    assert [row["fits"] for row in answer["gpus"]] == [True, True]
    assert first.stdout == second.stdout
    assert len(list((tmp_path / "cache" / "memplan" / "rehearsals").iterdir())) <= 2


def test_formulas_are_taken_where_nothing_can_be_rehearsed(run_memplan: Run, tmp_path: Path, small_workload: Path) -> None:
    """And it says why."""
    result = run_memplan(
        "compare", "t4", "--config-path", small_workload, MEMPLAN_METHOD="auto", XDG_CACHE_HOME=str(tmp_path / "cache"), PATH="", CC=""
    )

    assert result.returncode == 0
    assert "estimated by formulas, since it could not be rehearsed: no C compiler" in result.stderr


def test_a_program_is_compared(run_memplan: Run, torch_build: TorchBuild) -> None:
    """Its rows are what its plan says."""
    build = f"{PROGRAM / 'train_step.py'}:build"
    options = ("--pin", "length=64", "--target-effective-batch", "8", "--format", "json")
    rows = json.loads(run_memplan("compare", "--gpus", "t4, a100-40", *options, build).stdout)["gpus"]
    plan = json.loads(run_memplan("--gpu", "a100-40", *options, build).stdout)

    assert [row["gpu"]["name"] for row in rows] == ["Tesla T4", "NVIDIA A100-SXM4-40GB"]
    assert rows[1]["stages"][0]["planned"] == plan["stages"][0]["planned"]
    assert rows[1]["stages"][0]["device_used_bytes"] == plan["stages"][0]["estimate"]["device_used_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["t4", "a.py:build", "b.py:build"], "several programs are named"),
        (["t4", "a.py:build", "--", "train.py"], "several programs are named"),
        (["--gpus", "t4", "--", "train.py"], "nothing says where the batch size of train.py is written"),
        (["--gpus", "t4", "--method", "analytic", "--", "train.py", "{micro_batch_size}"], "knows nothing of it"),
    ],
)
def test_mistakes_with_programs_are_told(run_memplan: Run, arguments: list[str], said: str) -> None:
    result = run_memplan("compare", *arguments)

    assert (result.returncode, said in result.stderr) == (2, True), result.stderr

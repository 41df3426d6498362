"""`memplan compare`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from memplan.cli import compare
from memplan.hardware.catalog import catalog_gpus
from memplan.hardware.torch_install import TorchBuild
from memplan.workload import parallelism
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


def test_the_largest_batch_is_compared_whatever_the_configuration_aims_at(run_memplan: Run) -> None:
    """The built-in workload has a target of its own, which takes accumulation."""
    (row,) = json.loads(run_memplan("compare", "rtx4090", "--target-effective-batch", "max", "--format", "json").stdout)["gpus"]

    assert row["fits"]
    assert {stage["planned"]["gradient_accumulation_steps"] for stage in row["stages"]} == {1}


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


@pytest.mark.heavy
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


SHARED = {
    "model": {
        "kind": "transformer", "architecture": "decoder", "num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16,
        "intermediate_size": 8192, "vocab_size": 50_257, "num_positions": 2048, "head": "language_model",
    },
    "training": {"precision": "fp16-mixed", "sequence_length": 512, "activation_checkpointing": True, "target_effective_batch_size": 16},
    "parallelism": {"strategy": "fsdp"},
}  # fmt: skip
"""A model whose states take more than a T4's memory, and a quarter of them do not."""


def test_several_numbers_of_gpus_show_the_smallest_machine(run_memplan: Run, tmp_path: Path) -> None:
    """1.4 billion parameters take 20 GiB of states: no T4 has them, four share them, and one A100 has them. Above 8 are machines of 8."""
    file = tmp_path / "workload.yaml"
    file.write_text(json.dumps(SHARED))
    arguments = ("--config-path", file, "--method", "analytic", "--num-gpus", "16,1,4")

    result = run_memplan("compare", "a100-80", "t4", *arguments, "--format", "json")
    rows = [(row["gpu"]["name"].split()[-1], row["num_gpus"], row["fits"]) for row in json.loads(result.stdout)["gpus"]]

    assert rows[:3] == [("T4", 1, False), ("T4", 4, True), ("A100-SXM4-80GB", 1, True)]
    assert sorted({num_gpus for _, num_gpus, _ in rows}) == [1, 4, 16]
    assert "smallest machine that suffices: 4 × Tesla T4" in run_memplan("compare", "a100-80", "t4", *arguments).stderr


def test_a_strategy_is_chosen_for_all_rows(run_memplan: Run, tmp_path: Path) -> None:
    """Whole on each of four, it fits on no T4."""
    file = tmp_path / "workload.yaml"
    file.write_text(json.dumps(SHARED))

    result = run_memplan("compare", "t4", "--config-path", file, "--method", "analytic", "--num-gpus", "4", "--strategy", "ddp")

    assert result.returncode == 1
    assert "none of these machines suffices" in result.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_number_that_cannot_be_divided_has_a_row_that_says_so(run_memplan: Run, tmp_path: Path, is_pinned: bool) -> None:
    """The others are planned; where none can be divided there is no table."""
    degree = {} if is_pinned else {"sharding_degree": 4, "devices": 4}
    file = tmp_path / "workload.yaml"
    file.write_text(json.dumps({**SHARED, "parallelism": {"strategy": "fsdp", **degree}}))
    arguments = ["compare", "t4", "--config-path", file, "--method", "analytic", *(["--pin", "sharding_degree=4"] if is_pinned else [])]

    table = run_memplan(*arguments, "--num-gpus", "6,4,1")
    rows = json.loads(run_memplan(*arguments, "--num-gpus", "6,4,1", "--format", "json").stdout)["gpus"]
    none = run_memplan(*arguments, "--num-gpus", "3,6")

    assert [(row["num_gpus"], row["fits"], row["problem"]) for row in rows] == [
        (1, False, "sharding_degree 4 does not divide 1 rank"),
        (4, True, None),
        (6, False, "sharding_degree 4 does not divide the 6 ranks"),
    ]
    assert len(re.findall("not planned", table.stdout)) == 2
    assert "smallest machine that suffices: 4 × Tesla T4" in table.stderr
    assert (none.returncode, "does not divide the 6 ranks" in none.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-gpus", "1,two"], "no list of numbers of GPUs, like 1,2,4,8"),
        (["--num-gpus", "8,12"], "12 GPUs are no whole machines of 8"),
        (["--strategy", "zero9"], "Invalid value for '--strategy'"),
    ],
)
def test_numbers_that_make_no_machines_are_refused(run_memplan: Run, arguments: list[str], message: str) -> None:
    """With what would."""
    result = run_memplan("compare", "t4", "--method", "analytic", *arguments)

    assert result.returncode == 2
    assert message in result.stderr


def test_the_command_line_knows_every_strategy() -> None:
    """It lists them without loading what describes them."""
    assert compare.STRATEGIES == parallelism.STRATEGIES


def test_formulas_are_not_handed_to_others(run_memplan: Run) -> None:
    """They take no time; what is rehearsed there, tests/analysis/test_comparison_jobs.py shows."""
    result = run_memplan("compare", "t4", "--method", "analytic", "--executor", "dask")

    assert result.returncode == 2
    assert "--executor is for rehearsals" in result.stderr

"""What the functions of the API refuse, before anything is done."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.api.arguments import _TYPES, check_arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("source", 3),
        ("gpu", 24),
        ("gpu", ["t4"]),
        ("gpu_memory", [24]),
        ("gpu_memory", {}),
        ("pins", ["n_negatives=8"]),
        ("pins", {8: 8}),
        ("target_effective_batch_size", "64"),
        ("target_effective_batch_size", 64.0),
        ("target_effective_batch_size", 0),
        ("target_effective_batch_size", True),
        ("target_tolerance", "5%"),
        ("target_tolerance", 5),
        ("target_tolerance", -1),
        ("target_tolerance", math.nan),
        ("margin", None),
        ("margin", 1),
        ("margin", -1),
        ("margin", math.nan),
        ("grow_negatives", "yes"),
        ("method", "foo"),
        ("method", "measured"),
    ],
)
def test_a_plan_refuses_what_it_cannot_take_and_names_the_argument(name: str, value: Any) -> None:
    """With what it takes; nothing is planned with a value that was never meant."""
    given: dict[str, Any] = {"source": "built-in", "gpu": "t4", "method": "analytic"} | {name: value}

    with pytest.raises(memplan.UsageError) as caught:
        memplan.plan(**given)

    assert name in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "given",
    [{"gpu": 3}, {"gpu": None}, {"steps": "3"}, {"steps": 0}, {"values": ["batch=8"]}, {"timeout_seconds": 0}, {"context_bytes": -1}],
)
def test_a_rehearsal_refuses_what_it_cannot_take(given: dict[str, Any], tmp_path: Path) -> None:
    """Without a word about the user's program, which is not run."""
    with pytest.raises(memplan.UsageError, match=r"not valid|unknown GPU"):
        memplan.rehearse(f"{tmp_path}/train_step.py:build", **({"gpu": "t4"} | given))


@pytest.mark.parametrize("given", [{"start": "8"}, {"start": 0}, {"margin": "5%"}, {"margin": 1}, {"most_tries": 0}])
def test_a_search_refuses_what_it_cannot_take(given: dict[str, Any], tmp_path: Path) -> None:
    """Before it asks for a GPU."""
    with pytest.raises(memplan.UsageError, match="is not valid"):
        memplan.find_batch(f"{tmp_path}/train_step.py:build", **given)


@pytest.mark.parametrize("path", [None, 3])
def test_a_path_is_a_path(path: Any) -> None:
    """Of undo."""
    with pytest.raises(memplan.UsageError, match="give a path"):
        memplan.undo(path)


@pytest.mark.parametrize("size", [24, "24", "24GB"])
def test_a_size_is_a_number_or_a_text(size: Any) -> None:
    """All of them the size that GPUs are sold with."""
    plan = memplan.plan("built-in", gpu_memory=size, method="analytic")

    assert plan.gpu.marketing_gb == 24


def test_the_table_knows_arguments_of_the_functions_only() -> None:
    """A renamed argument takes its line along."""
    names = {name for function in (memplan.plan, memplan.rehearse, memplan.undo) for name in inspect.signature(function).parameters}

    assert set(_TYPES) <= names


def test_what_is_right_passes() -> None:
    """Without a word."""
    check_arguments(gpu="t4", pins={"n_negatives": 8, "is_in_eval_mode": False, "precision": "fp32"}, margin=0, target_tolerance=1.0)

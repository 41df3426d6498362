"""Comparisons that are handed to others: what comes back is what this machine would have found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.analysis.comparison import compare
from memplan.analysis.comparison_jobs import Compared, ComparisonJob, compare_elsewhere, compare_here
from memplan.errors import MissingError
from memplan.estimators.registry import estimator_by
from memplan.hardware.cache_dir import default_cache
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild, find_torch
from memplan.planner.pins import Pins
from memplan.workload.workload import Workload
from tests.execution.executors.test_jobs import InThreads, connected
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

SMALL = Workload.model_validate(
    {
        "model": {
            "kind": "transformer", "architecture": "decoder", "num_layers": 2, "hidden_size": 256, "num_attention_heads": 4,
            "intermediate_size": 1024, "vocab_size": 1000, "num_positions": 128, "head": "language_model",
        },
        "training": {"sequence_length": 128},
    }
)  # fmt: skip
PINS = Pins({"micro_batch_size": "2", "gradient_accumulation_steps": "1"})


def without_rehearsals(folder: Path) -> str:
    """A cache with what this user's has, but for rehearsals: the simulated GPU need not be compiled again."""
    (folder / "memplan").mkdir(parents=True)
    for each in default_cache().iterdir():
        if each.name != "rehearsals":
            (folder / "memplan" / each.name).symlink_to(each)
    return str(folder)


def test_a_worker_finds_what_is_found_here(torch_build: TorchBuild) -> None:
    """In the order of the GPUs, one job for each compute capability. They share a cache here; the heavy test has one for each side."""
    gpus = [find_gpu("a100-80"), find_gpu("a100-40")]
    asked: list[tuple[int, int]] = []

    with InThreads() as executor:
        (elsewhere,) = compare_elsewhere(
            [Compared(SMALL, {"target": 2})], gpus, executor, pins=PINS, on_job=lambda ended, count: asked.append((ended, count))
        )
    here = compare(SMALL, gpus, estimator_by("rehearsed"), pins=PINS, target=2)

    assert elsewhere == here
    assert [row.gpu.name for row in elsewhere] == [gpu.name for gpu in gpus]
    assert asked[0] == (0, 1)


def test_a_worker_with_other_versions_says_so(torch_build: TorchBuild) -> None:
    """It would find something else."""
    versions = {"PyTorch": "2.1.0"}
    request = ComparisonJob(program=SMALL, gpus=(find_gpu("t4"),), pins={}, options={}, versions=versions).model_dump_json()

    with pytest.raises(MissingError, match=f"a worker has PyTorch {find_torch().version}, and here is 2.1.0".replace("+", r"\+")):
        compare_here(request)


@pytest.mark.heavy
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["ray", "dask", "slurm"])
def test_executors_find_what_is_found_here(torch_build: TorchBuild, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two kinds of GPU, and on one and on four of each: JSON of every row, byte for byte."""
    gpus = [find_gpu("t4"), find_gpu("a100-40")]
    four = SMALL.model_copy(update={"parallelism": SMALL.parallelism.model_copy(update={"devices": 4})})
    programs = [Compared(each, {"target": 8}) for each in (SMALL, four)]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("XDG_CACHE_HOME", without_rehearsals(tmp_path / "workers"))

    with connected(name) as executor:
        elsewhere = compare_elsewhere(programs, gpus, executor, pins=PINS)
    monkeypatch.setenv("XDG_CACHE_HOME", without_rehearsals(tmp_path / "here"))
    here = [compare(each.program, gpus, estimator_by("rehearsed"), pins=PINS, **each.options) for each in programs]

    assert _as_json(elsewhere) == _as_json(here)


def _as_json(found: list) -> str:  # type: ignore[type-arg]
    return json.dumps([[row.model_dump(mode="json") for row in rows] for rows in found])

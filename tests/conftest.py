"""What several tests share: the built-in workload, copies of configuration trees, the command as a user runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse import Rehearser
from memplan.execution.step_source import TypedText, step_source_from
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.layouts.templates import template_data, templates_folder
from memplan.workload.workload import Workload
from memplan.workload.workload_file import workload_from
from tests.hardware.nvml_driver import Driver, build_driver
from tests.shares import share_from
from tests.standin.conftest import torch_build
from tests.training.processes import train
from tests.warm_python import WarmPython

__all__ = ["torch_build", "train"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take a share of the tests."""
    parser.addoption("--share", metavar="N/M", help="run share N of M (tests/shares.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is in another share; what may take longest comes first, so that no process is left alone with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    if not config.getoption("share"):
        return
    try:
        share = share_from(config.getoption("share"))
    except ValueError as error:
        raise pytest.UsageError(f"--share: {error}") from error
    config.hook.pytest_deselected(items=[item for item in items if not share.has(item.nodeid)])
    items[:] = [item for item in items if share.has(item.nodeid)]


SHARED = Path(__file__).parents[2] / "shared"
"""Ground truth and real configurations; not on a user's machine."""

ANY_PROGRAM = Path(__file__).parent / "child" / "any_program.py"


def shared_files(pattern: str) -> list[Path]:
    """Return the shared files that match *pattern*; where there are none, one that is not there: `skip_without` then says why."""
    return sorted(SHARED.glob(pattern)) or [SHARED / pattern]


def skip_without(path: Path) -> None:
    """Skip a test of a shared file on a machine that has none."""
    if not path.exists():
        pytest.skip(f"{path.relative_to(SHARED.parent)} is not on this machine")


OWN_TREE = Path(__file__).parent / "trees" / "contrastive"
"""A configuration tree of our own with the traps that real ones have."""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


class SharedRehearser:
    """
    Rehearses one program as a Rehearser of its own would, in the process that rehearses all of them.

    That process has imported PyTorch and nothing of any test; the program is loaded in the fork of its rehearsal.
    """

    def __init__(self, rehearser: Rehearser, program: str) -> None:
        self._rehearser = rehearser
        self._source = step_source_from(program)

    def rehearse(self, *, gpu: GpuSpec | str, values: Mapping[str, Any] | None = None, **options: Any) -> Rehearsal:
        """Rehearse the program with *values*; the rest is as for `Rehearser.rehearse`."""
        card = find_gpu(gpu) if isinstance(gpu, str) else gpu
        typed = {name: value for name, value in (values or {}).items() if isinstance(value, TypedText)}
        others = {name: value for name, value in (values or {}).items() if name not in typed}
        call = {"file": self._source.name, "function": self._source.function, "values": others, "texts": typed}
        return self._rehearser.rehearse(gpu=card, values=call, **options)


RehearserOf = Callable[[str], SharedRehearser]


@pytest.fixture
def built_in() -> Workload:
    """The workload that is planned without a configuration."""
    template = templates_folder() / "hydra-contrastive" / "workload.yaml"
    return workload_from(template_data(template), template)


@pytest.fixture
def a100() -> GpuSpec:
    """An A100 with 80 GB, as `find_gpu` gives it, without the catalogue."""
    return GpuSpec(
        name="NVIDIA A100-SXM4-80GB",
        total_memory_bytes=85_095_874_560,
        compute_capability=(8, 0),
        multiprocessors=108,
        origin="test",
        marketing_gb=80,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A writable copy of our own configuration tree; its `conf` folder."""
    return Path(shutil.copytree(OWN_TREE, tmp_path / "project")) / "conf"


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A writable copy of our own recipes, the config.json of their model beside them."""
    return Path(shutil.copytree(OWN_TREE.parent / "recipes", tmp_path / "recipes"))


@pytest.fixture
def retriever(tmp_path: Path) -> Path:
    """A writable copy of our own recipe of a retriever, the config.json of its model beside it."""
    return Path(shutil.copytree(OWN_TREE.parent / "retriever", tmp_path / "retriever")) / "rag_retrieval.yaml"


@pytest.fixture
def real_tree(tmp_path: Path) -> Path:
    """A writable copy of a real project's configuration tree; its `conf` folder."""
    source = SHARED / "real-configs" / "naics-embedder"
    if not source.is_dir():
        pytest.skip("the real configuration trees are not on this machine")
    copy = tmp_path / "project"
    for path in sorted(source.rglob("*.yaml")):
        target = copy / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return copy / "conf"


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """What runs commands as processes of their own, without the time that imports take."""
    with closing(WarmPython()) as found:
        yield found


@pytest.fixture
def run_memplan(warm_python: WarmPython, tmp_path: Path) -> Run:
    """Run `memplan` as a user does, in an empty folder unless told otherwise."""

    def run(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        whole = os.environ | {"PYTHONIOENCODING": "utf-8"} | environment
        return warm_python.run(["-m", "memplan", *map(str, arguments)], environment=whole, cwd=cwd or tmp_path)

    return run


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Driver:
    """A driver of today, compiled once for all who ask it."""
    return build_driver(tmp_path_factory.mktemp("driver"), python=warm_python)


@pytest.fixture(scope="session")
def rehearser_of(torch_build: TorchBuild) -> Iterator[RehearserOf]:
    """What rehearses a program, FILE.py:function, without a process of its own: importing PyTorch takes longer than most rehearsals."""
    with Rehearser(step_source_from(f"{ANY_PROGRAM}:build")) as rehearser:
        SharedRehearser(rehearser, f"{ANY_PROGRAM.with_name('steps.py')}:mlp").rehearse(gpu="t4", steps=1)  # in no test's own environment
        yield lambda program: SharedRehearser(rehearser, program)


@pytest.fixture(autouse=True)
def _by_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of commands are by formulas, which take no time, unless a test says otherwise."""
    monkeypatch.setenv("MEMPLAN_METHOD", "analytic")


@pytest.fixture(autouse=True)
def _every_gpu_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of whoever runs the tests is not meant."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def content(root: Path) -> dict[str, bytes]:
    """Every file below *root* with its bytes."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

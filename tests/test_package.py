"""What the package says of itself, and what is in it when it is built and installed."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import memplan
from memplan.hardware.torch_install import TorchBuild
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

REPOSITORY = Path(__file__).parents[1]

DISTRIBUTIONS = {
    "liger_kernel": "liger-kernel",
    "elftools": "pyelftools",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "hydra": "hydra-core",
    "pytorch_lightning": "lightning",
    "ruamel": "ruamel.yaml",
    "typing_extensions": "typing-extensions",
}
"""By the name that is imported, where the package has another."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The table [project] of pyproject.toml, and that of hatch."""
    tomllib = pytest.importorskip("tomllib", reason="Python reads TOML from 3.11 on")
    content: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    return content["project"] | {"hatch": content["tool"]["hatch"]}


def names_of(requirements: list[str]) -> set[str]:
    """The packages that *requirements* name."""
    return {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}  # type: ignore[index]


def imported() -> set[str]:
    """Every package besides Python's own that a module of memplan imports."""
    found = set()
    for path in (REPOSITORY / "memplan").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return {DISTRIBUTIONS.get(name, name) for name in found - sys.stdlib_module_names - {"memplan"}}


def test_the_version_is_that_of_the_module(project: dict[str, Any]) -> None:
    """It is written once; hatchling reads it there."""
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    assert Path(memplan.__file__) == REPOSITORY / project["hatch"]["version"]["path"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", memplan.__version__)


def test_the_license_is_there_in_full(project: dict[str, Any]) -> None:
    """As an SPDX expression, and as its text."""
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


TOOLS = {"dev", "docs"}
"""The extras of whoever works on memplan."""


def test_what_is_imported_is_required_and_nothing_else(project: dict[str, Any]) -> None:
    """By the package itself or by one of its extras. transformers' Trainer imports accelerate; DeepSpeed is imported by its name."""
    extras = {name: names_of(packages) for name, packages in project["optional-dependencies"].items()}

    assert set(extras) == {
        "lightning",
        "transformers",
        "data",
        "notebook",
        "plots",
        "hydra",
        "ray",
        "dask",
        "slurm",
        "deepspeed",
        "liger",
        *TOOLS,
    }
    for_users = set().union(*(packages for name, packages in extras.items() if name not in TOOLS))
    assert names_of(project["dependencies"]) | for_users - {"accelerate", "deepspeed"} == imported()
    assert not names_of(project["dependencies"]) & for_users


def test_whoever_works_on_memplan_has_every_extra(project: dict[str, Any]) -> None:
    """The tests use all of them; the site is built in an environment of its own."""
    extras = project["optional-dependencies"]

    assert f"memplan[{','.join(name for name in extras if name not in TOOLS)}]" in extras["dev"]


def test_every_pinned_package_is_asked_for(project: dict[str, Any]) -> None:
    """constraints.txt names what pyproject.toml does; coverage comes with pytest-cov."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = names_of([line for line in lines if line and not line.startswith("#")])
    asked_for = names_of([*project["dependencies"], *(each for packages in project["optional-dependencies"].values() for each in packages)])

    assert pinned - {"coverage"} == asked_for - {"memplan", "typing-extensions", "tomli"}


class Built(NamedTuple):
    """The package, built from a copy of this repository."""

    copy: Path
    wheel: Path
    sdist: Path
    tools: Path
    """Where hatchling is, if this environment lacks it."""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What *command* prints, run as by a user who has no checkout: nothing of this one is on its path."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MEMPLAN_METHOD", "MEMPLAN_TEMPLATES")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built without a network where hatchling is installed, as the extra `dev` has it."""
    folder = tmp_path_factory.mktemp("package")
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", ".coverage*", "dist", "build", "*.egg-info")
    copy = Path(shutil.copytree(REPOSITORY, folder / "copy", ignore=ignored))
    tools = folder / "tools"
    tools.mkdir()
    if find_spec("hatchling") is None:
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", tools, "hatchling>=1.27", cwd=folder)
    run(sys.executable, "-m", "hatchling", "build", "-d", folder / "dist", cwd=copy, PYTHONPATH=str(tools))
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return Built(copy, wheel, sdist, tools)


class Installed(NamedTuple):
    """An environment of its own with memplan installed, and what memplan needs borrowed from this one: PyTorch takes gigabytes."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def command(self) -> Path:
        """`memplan`."""
        return self.folder / "bin" / "memplan"


def installed(what: Path, built: Built, folder: Path) -> Installed:
    """Install *what*, a wheel or a folder, into an environment that pip makes no other change to."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if Path(path).name == "site-packages"]
    # Files of the kind .pth in what is borrowed are not followed: an editable memplan there stays out.
    (packages / "borrowed.pth").write_text("\n".join([*borrowed, str(built.tools)]), encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet")
    run(*pip, "--no-deps", "--no-build-isolation", "--force-reinstall", what, cwd=folder)
    return Installed(folder)


@pytest.fixture(scope="module")
def from_wheel(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """memplan as its wheel installs it."""
    return installed(built.wheel, built, tmp_path_factory.mktemp("from-wheel"))


def files_below(folder: Path) -> set[str]:
    """Every file below *folder* that is not compiled."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def content_of(wheel: Path) -> set[str]:
    """The files of *wheel*, without those that describe it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.mark.heavy
def test_the_wheel_holds_the_package_and_the_templates(built: Built) -> None:
    """Every file of both, and no other: GPUs, C sources, the hook that whole scripts run under."""
    package = {f"memplan/{name}" for name in files_below(built.copy / "memplan")}
    templates = {f"memplan/templates/{name}" for name in files_below(built.copy / "templates")}

    assert content_of(built.wheel) == package | templates
    assert {
        "memplan/hardware/gpus.json",
        "memplan/workload/models.json",
        "memplan/standin/csrc/card.c",
        "memplan/child/hook/sitecustomize.py",
    } <= package
    assert "memplan/templates/compiled.json" in templates


@pytest.mark.heavy
def test_a_wheel_of_the_source_distribution_is_the_same(built: Built, tmp_path: Path) -> None:
    """Whoever builds memplan from its sources misses nothing."""
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (sources,) = tmp_path.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist", cwd=sources, PYTHONPATH=str(built.tools))

    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == built.wheel.name
    assert content_of(wheel) == content_of(built.wheel)
    assert (sources / "LICENSE").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()


METADATA = """
import json
from importlib import metadata
import memplan
about = metadata.metadata("memplan")
print(json.dumps([memplan.__file__, about["Version"], about["License-Expression"], sorted(about.get_all("Provides-Extra"))]))
"""


@pytest.mark.heavy
def test_the_installed_package_says_what_it_is(from_wheel: Installed, tmp_path: Path) -> None:
    """Its own copy runs, not the checkout; version and license are those of the repository."""
    file, version, license_expression, extras = json.loads(run(from_wheel.python, "-c", METADATA, cwd=tmp_path))

    assert Path(file).is_relative_to(from_wheel.folder)
    assert (version, license_expression) == (memplan.__version__, "Apache-2.0")
    assert extras == [
        "dask",
        "data",
        "deepspeed",
        "dev",
        "docs",
        "hydra",
        "liger",
        "lightning",
        "notebook",
        "plots",
        "ray",
        "slurm",
        "transformers",
    ]
    assert run(from_wheel.command, "--version", cwd=tmp_path) == f"memplan, version {memplan.__version__}\n"


@pytest.mark.heavy
def test_an_installed_memplan_plans_by_formulas(from_wheel: Installed, tmp_path: Path) -> None:
    """In an empty folder: the built-in workload is one of the templates, the GPU one of gpus.json."""
    assert run(from_wheel.command, "--gpu-memory", "24", "--method", "analytic", cwd=tmp_path).startswith("Fits on ")
    answer = run(from_wheel.command, "--gpu", "t4", "--pin", "n_negatives=2", "--method", "analytic", "--format", "json", cwd=tmp_path)

    assert json.loads(answer)["fits"] is True


SMALL = {
    "model": {
        "kind": "transformer", "architecture": "decoder", "num_layers": 2, "hidden_size": 128, "num_attention_heads": 2,
        "intermediate_size": 256, "vocab_size": 1000, "num_positions": 128, "head": "language_model",
    },
    "training": {"sequence_length": 64, "precision": "fp16-mixed", "target_effective_batch_size": 8},
}  # fmt: skip


@pytest.mark.heavy
def test_an_installed_memplan_rehearses_a_plan(from_wheel: Installed, torch_build: TorchBuild, tmp_path: Path) -> None:
    """The simulated GPU is compiled from the installed C sources, and the step runs in a process of the installed memplan."""
    (tmp_path / "small.json").write_text(json.dumps(SMALL), encoding="utf-8")
    arguments = ["--gpu", "t4", "--config-path", "small.json", "--method", "rehearsed", "--format", "json"]
    answer = json.loads(run(from_wheel.command, *arguments, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")))

    assert (answer["fits"], answer["effective_batch_size"], answer["method"]) == (True, 8, "rehearsed")
    assert list((tmp_path / "cache" / "memplan").glob("standin-*/libstandin.so"))


@pytest.mark.heavy
def test_an_installed_memplan_rehearses_a_script(from_wheel: Installed, torch_build: TorchBuild, tmp_path: Path) -> None:
    """Under the installed hook, which every Python of the script starts with."""
    script = (REPOSITORY / "tests" / "child" / "steps.py").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(f"{script}\n\nif __name__ == '__main__':\n    mlp('cuda')()\n", encoding="utf-8")

    shown = run(from_wheel.command, "rehearse", "--gpu", "t4", "--", "train.py", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))

    assert shown.startswith("Fits on Tesla T4: 512.0 MiB")  # as in tests/cli/test_rehearse.py


@pytest.mark.heavy
def test_pip_installs_a_folder(built: Built, tmp_path: Path) -> None:
    """`pip install .`, and no file of the package less than in the wheel."""
    environment = installed(built.copy, built, tmp_path / "environment")
    (packages,) = environment.folder.glob("lib/python*/site-packages")

    assert content_of(built.wheel) == {f"memplan/{name}" for name in files_below(packages / "memplan")}
    assert run(environment.command, "--gpu-memory", "24", "--method", "analytic", cwd=tmp_path).startswith("Fits on ")

"""Which script a command runs, and what it imports of the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.programs.run_script import RunScript, imported_files, run_script


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scripts, in which the commands run."""
    for name in ("train.py", "conf.py", "pack/__init__.py", "pack/__main__.py", "pack/sizes.py", "pack/run.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "script", "words"),
    [
        ("train.py a b", "train.py", "a b"),
        ("python -u train.py conf.py", "train.py", "conf.py"),
        ("torchrun --nproc-per-node 2 train.py x", "train.py", "x"),
        ("python -m torch.distributed.run train.py x", "train.py", "x"),
        ("python -m pack conf.py", "pack/__main__.py", "conf.py"),
        ("python -m pack.run train.py", "pack/run.py", "train.py"),
    ],
)
def test_the_first_file_of_this_machine_is_the_script(command: str, script: str, words: str) -> None:
    """Or the module of the project that `-m` names, but for a launcher's, which is installed."""
    assert run_script(command.split()) == RunScript(Path(script), words.split())


@pytest.mark.parametrize("command", ["axolotl train c.yaml", "python missing.py", "python -m", "python -m missing"])
def test_a_program_that_is_installed_has_no_script(command: str) -> None:
    """Nothing of it is here to be read."""
    assert run_script(command.split()) is None


def test_what_a_script_imports_of_its_project_is_found() -> None:
    """Modules beside it and members of packages, wherever the import stands; not what is installed, nor what is not Python."""
    Path("train.py").write_text("import torch, conf\ndef f():\n    from pack import sizes, missing\nfrom pack.run import *\n")
    Path("conf.py").write_text("import train; print 2")

    assert imported_files(Path("train.py")) == [Path("conf.py"), Path("pack/run.py"), Path("pack/sizes.py"), Path("pack/__init__.py")]
    assert imported_files(Path("conf.py")) == []


def test_relative_imports_are_those_of_the_package() -> None:
    """Beside the script, or above it."""
    Path("pack/run.py").write_text("from . import sizes\nfrom .. import conf\nfrom .__main__ import x\n")

    found = [path.resolve() for path in imported_files(Path("pack/run.py"))]
    assert found == [Path(name).resolve() for name in ("pack/sizes.py", "conf.py", "pack/__main__.py")]

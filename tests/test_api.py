"""What `import memplan` offers: the names, and the examples of their docstrings, run as a user would."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memplan
from memplan.hardware.torch_install import TorchBuild
from tests.conftest import OWN_TREE
from tests.hardware.nvml_driver import Driver
from tests.standin.conftest import torch_build
from tests.standin.machine import machine

__all__ = ["torch_build"]

TRAIN_STEP = """
import torch

def build(device, batch=8):
    model = torch.nn.Linear(256, 256, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.zeros(batch, 256, device=device)
    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return step
"""
RUN_EXAMPLES = """
import doctest, inspect, sys
import memplan
finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False)
for name in {names!r}:
    for test in finder.find(getattr(memplan, name), name, module=False, globs={{}}):
        runner.run(test, clear_globs=False)
print(runner.summarize(verbose=False))
sys.exit(bool(runner.failures))
"""
NO_EXAMPLE = ("Plan", "Rehearsal", "FoundBatch", "FittingSteps")
"""What functions return: the examples of these show them."""


def examples() -> list[str]:
    """The public names that a docstring should show in use: all but errors and what functions return."""
    return [name for name in memplan.__all__ if not name.endswith("Error") and name not in (*NO_EXAMPLE, "__version__")]


@pytest.mark.parametrize("name", memplan.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    """Each with a docstring of its own."""
    public = getattr(memplan, name)

    assert name in dir(memplan)
    assert name == "__version__" or public.__doc__


def test_a_name_that_there_is_not_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="module 'memplan' has no attribute 'plam'"):
        memplan.plam  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", examples())
def test_every_public_function_shows_an_example(name: str) -> None:
    """In its docstring."""
    assert ">>> " in (getattr(memplan, name).__doc__ or "")


@pytest.mark.parametrize("name", [name for name in examples() if inspect.isfunction(getattr(memplan, name))])
def test_every_argument_of_a_public_function_has_a_name_and_a_type(name: str) -> None:
    """No `**options: Any`: an editor shows what there is."""
    for parameter in inspect.signature(getattr(memplan, name)).parameters.values():
        assert parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        assert parameter.annotation is not parameter.empty


@pytest.mark.heavy
def test_the_examples_run(torch_build: TorchBuild, driver: Driver, tmp_path: Path) -> None:
    """All of them, on a machine with one simulated GPU, in a folder with a configuration and a training step."""
    shutil.copytree(OWN_TREE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "train_step.py").write_text(TRAIN_STEP)

    done = subprocess.run(
        [sys.executable, "-c", RUN_EXAMPLES.format(names=examples())],
        cwd=tmp_path,
        env=os.environ | machine(torch_build, driver, "t4"),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempted=" in done.stdout

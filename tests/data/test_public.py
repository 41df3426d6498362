"""What `memplan.data` and `memplan.debug` offer: the names, and the examples of their docstrings."""

from __future__ import annotations

import doctest
import subprocess
import sys
from types import ModuleType

import pytest

from memplan import data, debug


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in (data, debug) for name in module.__all__])
def test_every_public_name_says_what_it_is_and_its_examples_run(module: ModuleType, name: str) -> None:
    """As a user would run them."""
    public = getattr(module, name)
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder(recurse=False).find(public, name, globs={}):
        runner.run(example)

    assert public.__doc__
    assert runner.failures == 0
    assert runner.tries > 0 or name not in ("DeviceCachedDataset", "DeviceLoader", "no_compile")


@pytest.mark.heavy
def test_who_imports_memplan_has_them_when_they_are_asked_for() -> None:
    """They bring PyTorch along."""
    asked = "print({'memplan.data', 'memplan.debug', 'torch'} & set(sys.modules))"
    code = f"import sys, memplan; memplan.plan; {asked}; print(memplan.data.DeviceLoader.__name__, memplan.debug.no_compile.__name__)"

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "set()\nDeviceLoader no_compile\n"

"""
Every Python that a rehearsed script starts loads this file first: as soon as PyTorch has been imported, recording begins.

The script itself is run by Python as ever. A sitecustomize that this one hides is loaded in its place.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))


class _AfterTorch(MetaPathFinder):
    """Finds torch as all others do, and begins to record when it has been loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            sys.path.append(_ROOT)
            try:
                from memplan.programs.script import begin
            finally:
                sys.path.remove(_ROOT)
            begin()

        loader.exec_module = exec_module
        return spec


def _load_hidden() -> None:
    """Run the sitecustomize that would have been found without this one."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "MEMPLAN_RESULTS" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
_load_hidden()

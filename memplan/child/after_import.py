"""Changing a module of the program's when it is imported, or at once where it has been."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


def change_when_imported(changes: Mapping[str, Callable[[Any], None]]) -> None:
    """Call the function of each module of that name with the module, once, as soon as it has been loaded."""
    for name, change in changes.items():
        if name in sys.modules:
            _change_when_loaded(sys.modules[name], change)
    sys.meta_path.insert(0, _AfterImport({name: change for name, change in changes.items() if name not in sys.modules}))


def _change_when_loaded(module: Any, change: Callable[[Any], None]) -> None:
    """Call *change* with *module*: at once, or when it has been loaded that imports what has led here, as transformers does PyTorch."""
    spec = getattr(module, "__spec__", None)
    if type(spec) is not ModuleSpec or not spec._initializing:  # type: ignore[attr-defined]
        change(module)
        return

    def on_loaded() -> None:
        if sys.modules.get(spec.name) is module:  # or it has failed
            change(module)

    vars(spec)["on_loaded"] = on_loaded
    spec.__class__ = _SpecOfUnfinished


class _SpecOfUnfinished(ModuleSpec):
    """The spec of a module that is being loaded: `importlib._bootstrap._load_unlocked` says in it when that has ended."""

    on_loaded: Callable[[], None]

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__["_initializing"])

    @_initializing.setter
    def _initializing(self, is_loading: bool) -> None:
        self.__dict__["_initializing"] = is_loading
        if not is_loading:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            self.on_loaded()


class _AfterImport(MetaPathFinder):
    """Finds the modules as the other finders do, and changes each when it has been loaded."""

    def __init__(self, changes: Mapping[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        change = self._changes.get(fullname)
        if change is None:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # those in front have been asked, and may ask this one again
        others = (finder for finder in behind if hasattr(finder, "find_spec"))
        spec: Any = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec

"""Changing a module of a program's: when it has been loaded, whenever that was asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memplan.child.after_import import change_when_imported

Ask = Callable[[], None]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for modules of a test's own, of which nothing is left behind it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def note(seen: list[Any]) -> Ask:
    """Return what asks for a note of the last name that the module `whole_module` makes, as soon as it is loaded."""
    return lambda: change_when_imported({"whole_module": lambda module: seen.append(getattr(module, "LAST", None))})


def test_a_module_is_changed_as_it_is_loaded_or_at_once(modules: Path) -> None:
    """Once for each time that it is asked for."""
    (modules / "whole_module.py").write_text("LAST = 1\n")
    before: list[Any] = []
    behind: list[Any] = []

    note(before)()
    importlib.import_module("whole_module")
    note(behind)()

    assert (before, behind) == ([1], [1])


@pytest.mark.parametrize("way", ["import whole_module", "from whole_module import LAST"])
def test_a_module_that_is_being_loaded_is_changed_when_that_has_ended(modules: Path, way: str) -> None:
    """transformers imports PyTorch in the middle of a module of its own, and with it what changes that one."""
    seen: list[Any] = []
    (modules / "whole_module.py").write_text("import asks_for_it\nLAST = 1\n")
    (modules / "asks_for_it.py").write_text("import sys\nsys.modules['whole_module'].ASK()\n")
    (modules / "program.py").write_text(f"{way}\nimport whole_module\n")
    sys.meta_path.insert(0, _WithAsk(note(seen)))

    importlib.import_module("program")

    assert seen == [1]
    assert sys.modules["whole_module"].__spec__ is not None
    assert not getattr(sys.modules["whole_module"].__spec__, "_initializing", True)


def test_a_module_that_fails_while_it_is_loaded_is_left_alone(modules: Path) -> None:
    """Its error is what the program sees."""
    seen: list[Any] = []
    (modules / "whole_module.py").write_text("import asks_for_it\nraise ValueError('broken')\n")
    (modules / "asks_for_it.py").write_text("import sys\nsys.modules['whole_module'].ASK()\n")
    sys.meta_path.insert(0, _WithAsk(note(seen)))

    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("whole_module")
    assert seen == []


class _WithAsk:
    """Gives the module of the tests what it asks with."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the module, with its function; None of others."""
        if fullname != "whole_module":
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec: Any = next(filter(None, (finder.find_spec(fullname, path, target) for finder in behind)), None)
        assert spec is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            module.ASK = self._ask
            execute(module)

        spec.loader.exec_module = exec_module
        return spec

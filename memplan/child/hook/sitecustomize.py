"""
Every Python that a rehearsed script starts loads this file first: as soon as PyTorch has been imported, recording begins.

The script itself is run by Python as ever. A sitecustomize that this one hides is loaded in its place.
"""

import importlib.util
import os
import signal
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(_HERE))))  # _HERE may be a link


class _AfterTorch(MetaPathFinder):
    """
    Finds torch as the other finders do, and starts the recorder when it has been loaded.

    It stays until then: `importlib.util.find_spec("torch")`, which transformers, datasets and diffusers call first, loads nothing.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec: Any = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            sys.path.insert(0, _ROOT)
            import memplan  # this one: the program's Python may have another installed, of another version perhaps

            del sys.path[0], memplan
            from memplan.child.script import begin

            begin()

        spec.loader.exec_module = exec_module
        return spec


def _load_hidden() -> None:
    """Run the sitecustomize that would have been found without this one."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _file_of_ours(name: str) -> Any:
    """Load a module of `child/` as a file: its package need not be found here."""
    spec: Any = importlib.util.spec_from_file_location(f"memplan_{name}", os.path.join(_ROOT, "memplan", "child", f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _report_before_signals() -> None:
    """
    Have what was seen written before a signal ends this process.

    Only the main thread can ask for that, and it need not be the one that imports torch. In an interpreter beside the main one, none can.
    """
    with suppress(ValueError):
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _write_and_end)
        os.register_at_fork(after_in_child=_end_as_ever)


def _end_as_ever() -> None:
    """In a forked child: signals end it, as in `child/script.py`, which asks for them again where the child uses the GPU."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _write_and_end:
            signal.signal(number, signal.SIG_DFL)


def _write_and_end(number: int, frame: Any) -> None:
    del frame
    script = sys.modules.get("memplan.child.script")
    if script is not None:
        script.write()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if "MEMPLAN_RESULTS" in os.environ:
    if "MEMPLAN_WARM" in os.environ:
        _file_of_ours("launched").run_in_fork()
    _report_before_signals()
    if "MEMPLAN_WORLD" in os.environ:
        _file_of_ours("one_rank").take_rank()
    _file_of_ours("held_back").hold_back()
    _file_of_ours("set_variables").note_setters()
    sys.meta_path.insert(0, _AfterTorch())
_load_hidden()

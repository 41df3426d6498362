"""
Runs Python programs in forks of itself: the process behind `warm_python.py`, which has imported memplan's command and its arguments.

A request is a line of JSON on stdin: arguments (as Python takes them: `-c CODE …` or `-m MODULE …`), cwd, environment, and the files
for the two outputs. Each fork runs its program to the end of the interpreter, as a process of its own would; the answer is its status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import sys
import types
from pathlib import Path
from typing import Any

import memplan

NOT_IMPORTED = (
    *("memplan.__main__", "memplan.child", "memplan.training", "memplan.data", "memplan.debug", "memplan.integrations"),
    "memplan.execution.executors.on_",
)
"""What runs when it is imported, or imports PyTorch, or an extra."""


def import_all() -> None:
    """Import what commands import when they need it: a fork has it already."""
    _import_below(memplan)
    assert "torch" not in sys.modules, "a fork that has PyTorch takes a second to end"
    for name in ("pynvml", "rich.console", "rich.table", "ruamel.yaml", *sys.argv[1:]):
        importlib.import_module(name)
    gc.freeze()  # a fork that looked at these objects when it ends would copy the memory of them all


def _import_below(package: types.ModuleType) -> None:
    # not walk_packages: that imports every package to look into it
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not module.name.startswith(NOT_IMPORTED):
            imported = importlib.import_module(module.name)
            if module.ispkg:
                _import_below(imported)


def become(request: dict[str, Any]) -> None:
    """Make this process what a shell would have started."""
    os.environ.clear()
    os.environ.update(
        # Coverage counts what this fork does. Under it PyTorch takes half as long again to import, so what the fork starts goes uncounted:
        # tests that rehearse in their own process count the child's code.
        {name: value for name, value in request["environment"].items() if not name.startswith("COVERAGE_PROCESS")}
    )
    os.chdir(request["cwd"])
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY),
        (2, request["stderr"], os.O_WRONLY),
    ):
        os.dup2(os.open(path, flags), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(arguments: list[str]) -> None:
    """Run what Python runs with *arguments*."""
    option, what, *rest = arguments
    if option == "-c":
        sys.argv, sys.path[0] = ["-c", *rest], ""
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv, sys.path[0] = [what, *rest], str(Path.cwd())
        runpy.run_module(what, run_name="__main__", alter_sys=True)


def main() -> None:
    """Serve requests until there are no more; in a fork, run one and return."""
    import_all()
    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            become(request)
            run(request["arguments"])
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps(status), file=replies, flush=True)


if __name__ == "__main__":
    main()

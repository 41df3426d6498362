"""
Python programs as processes of their own, without the time that imports take: forks of a process that has imported memplan's command.

What is read when a process starts, the loader's and Python's own variables, a fork has from the process that it is a fork of: there is one
for each set of these that was asked for twice. The first program of each set is started as a user starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

SERVER = Path(__file__).with_name("warm_server.py")
TIMEOUT_SECONDS = 120
READ_AT_THE_START = ("LD_", "PYTHON", "LC_", "LANG", "COVERAGE", "COV_", "MALLOC_", "TZ")
"""How the variables begin that a process reads when it starts, and a fork of one that has started does not."""

Finished = subprocess.CompletedProcess[str]


class WarmPython:
    """Runs Python with arguments, in an environment. *imports*: modules that a fork has, besides memplan's. To be closed."""

    def __init__(self, *imports: str) -> None:
        self._imports = imports
        self._asked: set[frozenset[tuple[str, str]]] = set()
        self._servers: dict[frozenset[tuple[str, str]], subprocess.Popen[str]] = {}

    def close(self) -> None:
        """End the processes of which the others were forks."""
        for server in self._servers.values():
            with server:
                assert server.stdin is not None
                server.stdin.close()

    def run(self, arguments: Sequence[str], *, environment: Mapping[str, str], cwd: Path) -> Finished:
        """Run Python with *arguments* in *cwd*, where no variables are set but *environment*; return what it said and how it ended."""
        kind = frozenset(item for item in environment.items() if item[0].startswith(READ_AT_THE_START))
        if arguments[0] not in ("-c", "-m") or kind not in self._asked:
            self._asked.add(kind)
            return started(arguments, environment=environment, cwd=cwd)
        if kind not in self._servers:
            self._servers[kind] = subprocess.Popen(
                [sys.executable, str(SERVER), *self._imports],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        try:
            return ask(self._servers[kind], arguments, environment=environment, cwd=cwd)
        except BaseException:
            with self._servers.pop(kind) as broken, contextlib.suppress(ProcessLookupError):
                os.killpg(broken.pid, signal.SIGKILL)
            raise


def started(arguments: Sequence[str], *, environment: Mapping[str, str], cwd: Path) -> Finished:
    """Start Python with *arguments* as a user does."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=dict(environment),
        cwd=cwd,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        timeout=TIMEOUT_SECONDS,
    )


def ask(server: subprocess.Popen[str], arguments: Sequence[str], *, environment: Mapping[str, str], cwd: Path) -> Finished:
    """Let a fork of *server* run *arguments*."""
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: Path(folder, name) for name in ("stdout", "stderr")}
        for path in outputs.values():
            path.touch()
        request = {"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment)}
        print(json.dumps(request | {name: str(path) for name, path in outputs.items()}), file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], TIMEOUT_SECONDS)[0]:
            raise subprocess.TimeoutExpired(list(arguments), TIMEOUT_SECONDS)
        status = json.loads(server.stdout.readline())
        said = {name: path.read_text(encoding="utf-8", errors="replace") for name, path in outputs.items()}
        return subprocess.CompletedProcess([sys.executable, *arguments], status, **said)

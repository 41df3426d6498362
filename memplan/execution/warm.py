"""
A second run of a program without its imports: in a fork of a process that has made them (`child/warm.py`).

Importing PyTorch and other packages takes most of a rehearsal's seconds, and is the same every time. A warm process is started after a
first run, which shows what the program imports. It serves the other runs of that rehearsal (values are found by running a program again),
or, with `keep_warm`, the rehearsals that follow in the same folder. Where a launcher starts the program that trains, the launcher runs as
ever, and what it starts runs in the fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from memplan.execution.command import PythonProgram
from memplan.execution.program_process import ignored_signals
from memplan.execution.warm_connection import SOCKET, address_in, ask, next_answer, request_for
from memplan.hardware.cache_dir import default_cache
from memplan.standin.launch import command_for

IDLE_SECONDS = 600.0
"""After so long without a rehearsal a process that is kept ends."""

_PROGRAM = "program.json"
_VARIABLES = "variables.json"
_ROOT = str(Path(__file__).parents[2])

IMPORT_OURS = f"sys.path.insert(0, {_ROOT!r}); import memplan; del sys.path[0]"
"""Has `memplan` be this one: the program's Python may have another installed, of another version perhaps. `sys` is imported before it."""

_BOOT = f"""
import atexit, sys
atexit.register(lambda: leave())
sys.path[:] = [path for path in sys.path if path]
{IMPORT_OURS}
from memplan.child.warm import leave, serve
run = serve(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
run()
"""

_OF_A_SHELL = frozenset(
    ("_", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "WINDOWID", "WINDOW", "STY", "TERM_SESSION_ID", "XDG_SESSION_ID", "PYTEST_CURRENT_TEST")
)
_OF_A_TERMINAL = ("SSH_", "TMUX", "VSCODE_", "KITTY_", "ALACRITTY_", "WEZTERM_", "DBUS_SESSION_")
"""Variables, and how their names begin, that differ from command to command or from terminal to terminal, and decide no size."""


class WarmProgram:
    """A program that runs in a fork of a warm process."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid = pid
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self._exit_code is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the program", timeout or 0)
            answer = next_answer(self._connection)
            self._exit_code = -signal.SIGKILL if answer is None else int(answer["status"])
        return self._exit_code

    def close(self) -> None:
        """Say that nothing is needed any more of what the program left in the folder of the warm process, which may end then."""
        self._connection.close()

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, where it still runs."""
        if self._exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class WarmProcess(NamedTuple):
    """A process that has imported what a program imports."""

    folder: Path
    """Its own; what a program that it runs writes has to go to a folder in this one."""
    process: subprocess.Popen[bytes] | None = None
    """Where it is this process's to end."""

    def end(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        elif (connection := ask(str(self.folder), {"end": True}, ())) is not None:
            connection.close()

    def start(self, program: PythonProgram, environment: Mapping[str, str], *, streams: Sequence[int]) -> WarmProgram | None:
        """Start *program* in a fork with that environment and standard input, output and error; None where that cannot be had any more."""
        asked = request_for(
            script=program.script,
            module=program.module,
            arguments=program.arguments,
            command=[program.python, *program.words],
            environment=environment,
            ignored=ignored_signals(),
        )
        connection = ask(str(self.folder), asked, streams)
        if connection is None:
            return None
        begun = next_answer(connection)
        if begun is None:
            connection.close()
            return None
        return WarmProgram(connection, begun["pid"])

    def has_imported_with(self, variables: Mapping[str, str]) -> bool:
        """Say whether the program set the same *variables* when it showed what it imports: a package may read one at its import."""
        before: dict[str, str] = json.loads((self.folder / _VARIABLES).read_text(encoding="utf-8"))
        return _without_ports(before) == _without_ports(variables)

    def import_all(self, modules: Sequence[str]) -> None:
        """Have it import *modules*, in its own time."""
        connection = ask(str(self.folder), {"import": list(modules)}, ())
        if connection is not None:
            connection.close()

    def launched(self) -> PythonProgram | None:
        """Return the program that a launcher starts, and that runs in a fork then; None where the process serves what is typed."""
        words = json.loads((self.folder / _PROGRAM).read_text(encoding="utf-8"))
        return None if words is None else PythonProgram(*words)

    def variables(self) -> dict[str, str]:
        """Return what a launcher finds in its environment, so that the program that it starts runs in a fork."""
        program = self.launched()
        if program is None:
            return {}
        return {"MEMPLAN_WARM": str(self.folder), "MEMPLAN_WARM_PROGRAM": json.dumps([program.python, *program.beginning])}


def start_warm(
    program: PythonProgram,
    environment: Mapping[str, str],
    folder: Path,
    *,
    modules: Sequence[str],
    variables: Mapping[str, str],
    idle_seconds: float = 0.0,
    is_launched: bool = False,
) -> WarmProcess:
    """
    Start a process that will have imported *modules* as *program* would: with its Python and its options, in this working folder.

    *variables* are those of the environment that the program sets itself, before its imports perhaps. *is_launched*: it is not what is
    typed that starts the program. The process ends with this one, or after *idle_seconds* without a program. *folder* is its own; one that
    is kept removes it at its end.
    """
    environment = {**environment, **variables}
    (folder / _VARIABLES).write_text(json.dumps(dict(variables)), encoding="utf-8")
    (folder / _PROGRAM).write_text(json.dumps(program if is_launched else None), encoding="utf-8")
    with socket.socket(socket.AF_UNIX) as listening, address_in(folder) as address:
        listening.bind(address)
        listening.listen()
        words = [program.python, *program.options, "-c", _BOOT, str(listening.fileno()), str(folder), str(idle_seconds)]
        process = subprocess.Popen(
            command_for(words, outlives_us=idle_seconds > 0),
            env=environment,
            pass_fds=(listening.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    if idle_seconds:
        process.wait()  # it has left another process behind, which is nobody's
    warm = WarmProcess(folder, None if idle_seconds else process)
    warm.import_all(modules)
    return warm


def _without_ports(variables: Mapping[str, str]) -> dict[str, str]:
    """Return *variables* without those that are drawn anew in every run: ports, and the socket of W&B's service."""
    return {name: value for name, value in variables.items() if not name.endswith(("_PORT", "WANDB_SERVICE"))}


# processes that are kept


def lasting_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of *environment* but memplan's own and those that differ between commands or between terminals."""
    left_out = (*_OF_A_TERMINAL, "MEMPLAN_")
    return {name: value for name, value in environment.items() if name not in _OF_A_SHELL and not name.startswith(left_out)}


def kept_file(program: PythonProgram, environment: Mapping[str, str], *, libraries: Path, writes_are_allowed: bool) -> Path:
    """Return the file in the user's cache that says where a process is kept for a program of that Python, in this working folder."""
    lasting = sorted(lasting_variables(environment).items())
    known_by = [_ROOT, program.python, program.options, str(libraries), writes_are_allowed, str(Path.cwd()), lasting]
    return default_cache() / "warm" / hashlib.sha256(json.dumps(known_by).encode()).hexdigest()[:16]


class Kept:
    """
    Where a process is kept that is warm for a program of one Python, with one environment, in this working folder.

    Its folder is a temporary one; *file* says which. Runs beside each other may each start one, of which the last is found.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def find(self) -> WarmProcess | None:
        """Return the process, where there is one."""
        with contextlib.suppress(OSError):
            return _process_in(Path(self._file.read_text(encoding="utf-8")))
        return None

    def started(self) -> list[WarmProcess]:
        """Return every process that was started here and is there still; the others are forgotten."""
        found = []
        for name in sorted(self._list.glob("*")) if self._list.is_dir() else []:
            with contextlib.suppress(OSError):
                folder = Path(name.read_text(encoding="utf-8"))
                if not folder.exists():  # a process removes it at its end; one that is about to begin has no socket in it yet
                    name.unlink()
                process = _process_in(folder)
                found += [process] if process is not None else []
        return found

    def make_folder(self) -> Path:
        """Return a folder for a process that is to be found from now on."""
        folder = Path(tempfile.mkdtemp(prefix="memplan-warm-")).resolve()  # the process removes it when it ends
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(f".{os.getpid()}")
        partial.write_text(str(folder), encoding="utf-8")
        partial.replace(self._file)
        self.started()
        self._list.mkdir(exist_ok=True)
        (self._list / folder.name).write_text(str(folder), encoding="utf-8")
        return folder

    @property
    def _list(self) -> Path:
        return self._file.with_suffix(".started")


def _process_in(folder: Path) -> WarmProcess | None:
    """Return the process of this user whose folder that is, where it is there."""
    with contextlib.suppress(OSError):
        if folder.stat().st_uid == os.getuid() and (folder / SOCKET).exists():
            return WarmProcess(folder)
    return None

"""
How a program is asked of a warm process, and how its end is heard (`child/warm.py` says what goes over the connection).

Loaded as a file, too, by Pythons that a launcher starts (`child/launched.py`): nothing but the standard library is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SOCKET = "socket"
"""The socket's name in the folder of a warm process."""

_ANSWER_SECONDS = 600.0


def ask(folder: str, request: Mapping[str, Any], streams: Sequence[int]) -> socket.socket | None:
    """Send *request* and the descriptors *streams* to the process whose *folder* that is; None where it has ended, or was never there."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_ANSWER_SECONDS)
        with address_in(folder) as address:
            connection.connect(address)
        socket.send_fds(connection, [b"\n"], streams)
        connection.sendall((json.dumps(request) + "\n").encode())
    except OSError:
        connection.close()
        return None
    return connection


@contextlib.contextmanager
def address_in(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Give the address of the socket in *folder*: a short one, however long the folder's path is (108 bytes are allowed, unix(7))."""
    number = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{number}/{SOCKET}"
    finally:
        os.close(number)


def next_answer(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next line that is said; None where nothing more comes."""
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n"):
            byte = connection.recv(1)  # never more than this line: its successor tells of the end, and is waited for by the descriptor
            if not byte:
                return None
            line += byte
        answer: dict[str, Any] = json.loads(line)
        return answer
    return None


def request_for(
    *, script: str, module: str, arguments: Sequence[str], command: Sequence[str], environment: Mapping[str, str], ignored: Sequence[int]
) -> dict[str, Any]:
    """Return what asks for a program, to be run in this process's working folder and with its mask for new files. *ignored*: signals."""
    mask = os.umask(0)
    os.umask(mask)
    asked = {
        "script": script,
        "module": module,
        "arguments": list(arguments),
        "command": list(command),
        "environment": dict(environment),
        "folder": str(Path.cwd()),
        "umask": mask,
        "ignored": list(ignored),
    }
    return {"run": asked}

"""A process on the simulated GPU that takes requests: what it answers, what it says, and how it is ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from memplan.standin.launch import command_for

LAST_WORDS = 20
"""Lines of a program's output that are shown when it failed."""

_KEPT_BYTES = 16_384


class TookTooLongError(Exception):
    """A request was not answered in time; the process has been ended."""


class Process:
    """
    A process of its own session, so that it and all it started end together.

    It is given two file descriptors as its last arguments: requests come by the first as lines of JSON, answers go back by the second.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            command_for([sys.executable, *arguments, str(requests), str(answers)]),
            env=dict(environment),
            pass_fds=(requests, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(requests)
        os.close(answers)
        self._is_ended = False
        self._said = bytearray()
        self._listening = threading.Lock()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def _listen(self) -> None:
        """Keep the end of what is said, however much that is."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        said = b"more"
        while said:
            select.select([descriptor], [], [])
            with self._listening:  # so that nobody finds the pipe empty before what was in it is kept
                said = os.read(descriptor, 65_536)
                self._said += said
                del self._said[:-_KEPT_BYTES]

    def ask(self, request: Mapping[str, Any], *, timeout_seconds: float) -> int:
        """
        Send *request*; return how it ended: 0, an exit code, or minus the signal that ended it.

        Raises TookTooLongError, with everything ended, after *timeout_seconds*.
        """
        self._said.clear()
        try:
            os.write(self._requests, (json.dumps(request) + "\n").encode())
        except BrokenPipeError:
            return self._wait()
        answer = self._read_line(time.monotonic() + timeout_seconds)
        return int(json.loads(answer)["status"]) if answer else self._wait()

    def _read_line(self, deadline: float) -> bytes:
        """Return the next line of the answers; nothing when the process ended without one."""
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.end()
                raise TookTooLongError
            said = os.read(self._answers, 4096)
            if not said:
                return b""
            line += said
        return line

    def _wait(self) -> int:
        status = self._process.wait()
        self._listener.join(timeout=1)
        return status

    @property
    def is_running(self) -> bool:
        """Say whether it can be asked."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """Return the end of what the program said since it was asked last."""
        self._hear_out()
        return "\n".join(self._said.decode("utf-8", errors="replace").splitlines()[-LAST_WORDS:])

    def _hear_out(self) -> None:
        """Wait until what it wrote before it answered is kept, and no longer than a second: others that it started may write on."""
        assert self._process.stdout is not None
        until = time.monotonic() + 1
        while self._listener.is_alive() and time.monotonic() < until:
            with self._listening:
                if not select.select([self._process.stdout.fileno()], [], [], 0)[0]:
                    return
            time.sleep(0.001)

    def end(self) -> None:
        """End the process and everything that it started."""
        if self._is_ended:
            return
        self._is_ended = True
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join(timeout=1)
        os.close(self._requests)
        os.close(self._answers)
        assert self._process.stdout is not None
        self._process.stdout.close()

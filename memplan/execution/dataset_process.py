"""What the samples of a dataset are, asked of a process of its own: only there the user's code is run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from memplan.errors import MissingError, UsageError
from memplan.execution.process import LAST_WORDS

NUM_READ = 8
"""Samples that are read, spread over the dataset: one alone does not show that shapes differ."""

TIMEOUT_SECONDS = 600.0


def describe_dataset(source: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """
    Return the number of samples of the dataset "FILE.py:make_dataset" or "module:Dataset", their values, and what stays on the host.

    Raises UsageError where there is no such dataset, a sample fails, samples differ, or it takes too long.
    """
    return _answer("memplan.data.describe", source, str(NUM_READ), timeout_seconds=timeout_seconds)


def measure_loading(
    source: str, *, batch_size: int, worker_counts: Sequence[int], seconds: float, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, Any]:
    """
    Return how fast the dataset *source* is loaded with each number of workers, each measured for so many *seconds*.

    Raises UsageError as `describe_dataset`, MissingError where this Python has no PyTorch.
    """
    if PathFinder.find_spec("torch") is None:
        hint = "install PyTorch, or leave the dataset out: the settings are then by rule"
        raise MissingError("this Python has no PyTorch, which loads the dataset", hint=hint)
    request = json.dumps({"batch_size": batch_size, "worker_counts": list(worker_counts), "seconds": seconds})
    return _answer("memplan.data.measure_loading", source, request, timeout_seconds=timeout_seconds)


def _answer(module: str, source: str, *arguments: str, timeout_seconds: float) -> dict[str, Any]:
    """Return what *module* writes of the dataset *source*, run in a process of its own."""
    place = source.rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        raise UsageError(f"{place} does not exist", hint="check the path of the file")
    with tempfile.TemporaryDirectory(prefix="memplan-dataset-") as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-c", f"from {module} import main; main()", source, *arguments, str(result)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            hint = "name a smaller part of the dataset"
            raise UsageError(f"{source} took longer than {timeout_seconds:.0f} seconds", hint=hint) from error
        if not result.exists():
            said = done.stdout.decode("utf-8", errors="replace").strip().splitlines()[-LAST_WORDS:]
            raise UsageError(f"{source} failed: {said[-1] if said else f'exit code {done.returncode}'}", hint=_shown(said))
        answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "error" in answer:
        raise UsageError(f"{source}: {answer['error']}", hint=answer["hint"])
    return answer


def _shown(said: list[str]) -> str:
    return "name a dataset, or a class or function that makes one without arguments; it said:\n" + "\n".join(f"  {line}" for line in said)

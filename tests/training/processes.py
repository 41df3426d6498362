"""Runs the programs of steps.py in processes of their own: forks of one that has imported PyTorch where the device is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.warm_python import WarmPython

ROOT = Path(__file__).parents[2]

Train = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture(scope="session")
def train() -> Iterator[Train]:
    """What a program of steps.py tells at its end, and its standard error."""
    with closing(WarmPython("torch", "torch._dynamo")) as python:

        def run(environment: dict[str, str], *arguments: object) -> tuple[dict[str, Any], str]:
            whole = os.environ | {"PYTHONPATH": str(ROOT)} | environment
            done = python.run(["-m", "tests.training.steps", *map(str, arguments)], environment=whole, cwd=Path.cwd())
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout.splitlines()[-1]), done.stderr

        yield run

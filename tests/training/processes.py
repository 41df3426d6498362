"""Runs the programs of steps.py in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = Path(__file__).with_name("steps.py")
ROOT = Path(__file__).parents[2]


def train(environment: dict[str, str], *arguments: object) -> tuple[dict[str, Any], str]:
    """What a program of steps.py tells at its end, and its standard error."""
    done = subprocess.run(
        [sys.executable, str(STEPS), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr

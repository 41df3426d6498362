"""
How long a plan takes, beside what others need before they can say anything: `import torch`.

    python benchmarks/startup.py [ROUNDS]

Each command runs in turn, ROUNDS times (15), in an empty folder; the fastest and the median of each are shown, and the ratio to the first.
Turn by turn, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = {
    'python -c "import torch"': [sys.executable, "-c", "import torch"],
    "memplan --gpu-memory 24 --method analytic": [sys.executable, "-m", "memplan", "--gpu-memory", "24", "--method", "analytic"],
    "the same with --format json": [sys.executable, "-m", "memplan", "--gpu-memory", "24", "--method", "analytic", "--format", "json"],
    "memplan of a small decoder, rehearsed before and kept": [
        sys.executable,
        "-m",
        "memplan",
        "--gpu",
        "t4",
        "--config-path",
        "small.json",
    ],
    "memplan --help": [sys.executable, "-m", "memplan", "--help"],
    'python -c "import click, pydantic, rich.console, rich.table"': [
        *(sys.executable, "-c", "import click, pydantic, rich.console, rich.table; pydantic.BaseModel"),
    ],
    'python -c "pass"': [sys.executable, "-c", "pass"],
}


SMALL = {
    "model": {
        "kind": "transformer", "architecture": "decoder", "num_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
        "intermediate_size": 2048, "vocab_size": 16000, "num_positions": 512, "head": "language_model",
    },
    "training": {"sequence_length": 256, "precision": "fp16-mixed", "target_effective_batch_size": 64},
}  # fmt: skip


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every run of every command."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "small.json").write_text(json.dumps(SMALL), encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "memplan", "--gpu", "t4", "--config-path", "small.json"], cwd=folder, check=True, capture_output=True
        )
        for _ in range(rounds):
            for name, command in COMMANDS.items():
                start = time.perf_counter()
                subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main(rounds: int = 15) -> None:
    """Print a table, and the same as one line of JSON."""
    seconds = measure(rounds)
    base = statistics.median(next(iter(seconds.values())))
    print(f"{'command':62} {'fastest':>8} {'median':>8} {'of import torch':>16}")
    for name, runs in seconds.items():
        print(f"{name:62} {min(runs):7.3f}s {statistics.median(runs):7.3f}s {statistics.median(runs) / base:15.1%}")
    print(json.dumps({name: {"fastest_s": min(runs), "median_s": statistics.median(runs)} for name, runs in seconds.items()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

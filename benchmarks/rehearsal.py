"""
How long a rehearsal takes, from the command to the report, and what memory of the host: beside the imports that it cannot do without, and
beside what others report of their estimators.

    python benchmarks/rehearsal.py [ROUNDS]

Each command runs in turn, ROUNDS times (3); the fastest and the median of each are shown, with the most memory that a process took.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = Path(__file__).with_name("rehearsal_steps.py")

PUBLISHED = """\
published: xMem (the best estimator without a GPU known to us) 24 s an estimate on average, 570 to 1,476 s for models of 1.5 to 4 billion
parameters, median error 3.6%; DNNMem 13.8%; fake-tensor tracking 5 to 6% under what is asked for, 17% under what is reserved"""


def command(*arguments: str) -> list[str]:
    """Return the command of a rehearsal."""
    return [sys.executable, "-m", "memplan", "rehearse", *arguments]


COMMANDS = {
    'python -c "import torch, torch._dynamo"': [sys.executable, "-c", "import torch, torch._dynamo"],
    "the same, and GPT-2 from transformers": [sys.executable, "-c", "import torch._dynamo; from transformers import GPT2LMHeadModel"],
    "rehearse three linear layers (a100-80)": command("--gpu", "a100-80", f"{STEPS}:mlp"),
    "rehearse GPT-2, batch 8, sequence 512 (a100-80)": command("--gpu", "a100-80", f"{STEPS}:gpt2"),
    "rehearse BERT-base, batch 16, sequence 512 (t4)": command("--gpu", "t4", f"{STEPS}:bert"),
    "rehearse Llama 8B, full, sequence 4096, checkpointing (h200)": command("--gpu", "h200", f"{STEPS}:llama"),
}  # fmt: skip


def run(arguments: list[str], environment: dict[str, str] | None = None) -> tuple[float, int]:
    """Return the seconds that a command takes, and the KiB of its largest process so far."""
    start = time.perf_counter()
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def first_build() -> float:
    """Return the seconds of a rehearsal that has to build the device, less those of the next."""
    cache = tempfile.mkdtemp()
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    arguments = command("--gpu", "t4", f"{STEPS}:mlp")
    seconds = [run(arguments, environment)[0] for _ in range(2)]
    shutil.rmtree(cache)
    return seconds[0] - seconds[1]


def main(rounds: int = 3) -> None:
    """Print a table, what others report, and the same as one line of JSON."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    resident: dict[str, int] = {}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            taken, largest = run(arguments)
            seconds[name].append(taken)
            resident.setdefault(name, largest)
    print(f"{'command':62} {'fastest':>8} {'median':>8} {'host memory so far':>20}")
    for name, runs in seconds.items():
        print(f"{name:62} {min(runs):7.2f}s {statistics.median(runs):7.2f}s {resident[name] / 2**20:15.2f} GiB")
    print(f"{'building the device, once':62} {first_build():7.2f}s")
    print(PUBLISHED)
    print(json.dumps({name: {"fastest_s": min(runs), "median_s": statistics.median(runs)} for name, runs in seconds.items()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""
How long a rehearsal of one rank takes, beside the same model on one GPU, for more and more ranks.

    python benchmarks/ranks.py [ROUNDS]

Each command runs in turn, ROUNDS times (5); the fastest and the median of each are shown, and the ratio of the medians to one GPU's.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

STEP = str(Path(__file__).with_name("ranks_step.py"))
RANKS = (8, 64, 512)


def commands() -> dict[str, list[str]]:
    """Return the rehearsals by what they are of; the first is of one GPU."""
    found = {"one GPU": rehearsal("alone", 1)}
    for strategy in ("ddp", "fsdp"):
        found |= {f"{strategy}, {ranks} ranks": rehearsal(strategy, ranks) for ranks in RANKS}
    return found


def rehearsal(strategy: str, ranks: int) -> list[str]:
    """Return the command that rehearses one of so many ranks."""
    machines = ["--num-gpus", str(min(8, ranks)), "--num-nodes", str(max(1, ranks // 8))] if ranks > 1 else []
    return [sys.executable, "-m", "memplan", "rehearse", "--gpu", "h100", *machines, "--", STEP, strategy]


def main() -> None:
    """Measure, and print the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    seconds: dict[str, list[float]] = {name: [] for name in commands()}
    for _ in range(rounds):
        for name, command in commands().items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - start)
    alone = statistics.median(next(iter(seconds.values())))
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"{name:16} {min(found):6.2f} s  median {median:6.2f} s  {median / alone:5.2f}")


if __name__ == "__main__":
    main()

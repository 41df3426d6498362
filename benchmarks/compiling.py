"""
How long programs take that are compiled: rehearsed, beside the same program on the simulated GPU with all that it compiles and benchmarks.

    python benchmarks/compiling.py [ROUNDS]

Each command runs in turn, ROUNDS times (1), with empty caches; the fastest of each is shown, its CPU seconds, the ratio of both, and the
peaks that both found.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import find_torch
from memplan.memory.cuda_context import CONTEXT_BYTES
from memplan.standin.build import build
from memplan.standin.launch import command_for, environment_for, own_caches

PROGRAMS = Path(__file__).with_name("compiled")
GPU = "a100-40"


class Taken(NamedTuple):
    """What a run took."""

    seconds: float
    cpu_seconds: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def rehearsed(program: Path, *arguments: str) -> Taken:
    """Rehearse *program*."""
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", GPU, "--format", "json", "--", str(program), *arguments]
    return timed(command, dict(os.environ))


def as_it_is(program: Path, *arguments: str) -> Taken:
    """Run *program* on the simulated GPU with nothing but that changed."""
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_for(find_gpu(GPU), build(find_torch()), context_bytes=CONTEXT_BYTES) | own_caches(Path(folder))
        return timed(command_for([sys.executable, str(program), *arguments]), environment)


def timed(command: list[str], environment: dict[str, str]) -> Taken:
    """Run *command*, which ends its output with two peaks, or is a report."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if run.stdout.startswith("{"):
        report = json.loads(run.stdout)
        peaks = report["peak_allocated_bytes"], report["peak_reserved_bytes"]
    else:
        peaks = tuple(map(int, run.stdout.split()[-2:]))
    return Taken(time.perf_counter() - start, cpu_seconds, *peaks)


COMMANDS = {
    "GPT-2, torch.compile": ("gpt.py", "50304"),
    "GPT-2 with odd rows, torch.compile: two ends": ("gpt.py", "50257"),
    "linear attention, triton.autotune": ("linear_attention.py",),
}


def main(rounds: int = 1) -> None:
    """Print a table."""
    print(f"{'program':46} {'':12} {'seconds':>8} {'of CPU':>8} {'peak reserved':>14}")
    for name, (program, *arguments) in COMMANDS.items():
        runs = {
            kind: min((run(PROGRAMS / program, *arguments) for _ in range(rounds)), key=lambda taken: taken.seconds)
            for kind, run in {"as it is": as_it_is, "rehearsed": rehearsed}.items()
        }
        for kind, taken in runs.items():
            print(f"{name:46} {kind:12} {taken.seconds:7.1f}s {taken.cpu_seconds:7.1f}s {taken.peak_reserved_bytes / 2**30:10.3f} GiB")
        print(f"{'':46} {'ratio':12} {runs['as it is'].seconds / runs['rehearsed'].seconds:8.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

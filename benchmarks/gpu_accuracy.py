"""
How exact rehearsals are beside this machine's GPU, with the same PyTorch.

    python benchmarks/gpu_accuracy.py [--to FOLDER] [--only PROGRAM …]

Runs thirteen programs at two batches (`tests/accuracy/programs_to_plan.py`), and the shared workloads where they are there, on the first
GPU that CUDA shows; writes what each did to `tests/accuracy/recordings/`, rehearses it, and prints both. Exit code 1: a program without
convolutions is not as exact as rehearsals are said to be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from memplan.errors import MemplanError
from memplan.hardware.detect import detect_gpus
from memplan.units import format_bytes
from tests.accuracy.on_card import RECORDINGS, Held, hold, programs, record


def main(folder: Path, only: list[str]) -> int:
    """Run, write, rehearse, print."""
    gpu = detect_gpus()[0]
    print(f"{gpu.name}, driver {gpu.driver_version}\n")
    heads = ("allocated", "rehearsed", "reserved", "rehearsed")
    print(f"{'program':26} {' '.join(f'{head:>12}' for head in heads)} {'error':>9} {'requests':>9} {'context':>11}")
    found = []
    for program in programs():
        if only and program.name not in only:
            continue
        held = hold(record(program, gpu, folder))
        found.append(held)
        print(
            f"{held.program:26} {held.allocated[0]:12} {held.allocated[1]:12} {held.reserved[0]:12} {held.reserved[1]:12} "
            f"{held.reserved_error:+9.3%} {'same' if held.same_requests else 'differ':>9} {format_bytes(held.context_bytes or 0):>11}",
            flush=True,
        )
    exact = [held for held in found if not held.convolves]
    print(f"\nwithout convolutions: {summed(exact)}")
    print(f"with convolutions, FFTs or RNNs: {summed([held for held in found if held.convolves])}")
    return 0 if all(held.holds for held in exact) else 1


def summed(found: list[Held]) -> str:
    """Return how many hold, in words."""
    equal = sum(held.allocated[0] == held.allocated[1] for held in found)
    near = sum(abs(held.reserved_error) <= 0.005 for held in found)
    worst = max((abs(held.reserved_error) for held in found), default=0.0)
    return f"allocated equal in {equal} of {len(found)}, reserved within 0.5% in {near} of {len(found)} (worst {worst:.2%})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=RECORDINGS, help="where recordings are written")
    parser.add_argument("--only", action="append", default=[], metavar="PROGRAM", help="this program only, as lora-8; may be repeated")
    arguments = parser.parse_args()
    try:
        sys.exit(main(arguments.to, arguments.only))
    except MemplanError as error:
        sys.exit(f"Error: {error}")

"""
How exact rehearsals are beside this machine's GPU, with the same PyTorch.

    python benchmarks/gpu_accuracy.py [--to FOLDER] [--part PART …] [--only PROGRAM …]

suite     thirteen programs at two batches (`tests/accuracy/programs_to_plan.py`), and the shared workloads where they are there
programs  users' programs from beginning to end (`tests/accuracy/whole_on_card.py`), those whose packages are installed
calls     what calls of CUDA's libraries allocate (`tests/accuracy/library_calls.py`), for `tests/accuracy/test_library_calls.py` to compare
context   what a process holds beside the allocator (`tests/accuracy/context_steps.py`)

Each is run on the first GPU that CUDA shows and written to `tests/accuracy/recordings/`; the first two are rehearsed, and both are printed.
Exit code 1: a program of the suite without convolutions is not as exact as rehearsals are said to be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from memplan.errors import MemplanError
from memplan.hardware.detect import detect_gpus
from memplan.hardware.gpu import GpuSpec
from memplan.units import format_bytes
from tests.accuracy.on_card import RECORDINGS, Held, card_name, hold, programs, record
from tests.accuracy.whole_on_card import PROGRAMS, record_program, rehearse_program

PARTS = ("suite", "programs", "calls", "context")
SCRIPTS = {"calls": "library_calls.py", "context": "context_steps.py"}


def run_suite(gpu: GpuSpec, folder: Path, only: list[str]) -> bool:
    """Run, write, rehearse and print the suite; say whether it is as exact as it is said to be."""
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
    return all(held.holds for held in exact)


def summed(found: list[Held]) -> str:
    """Return how many hold, in words."""
    equal = sum(held.allocated[0] == held.allocated[1] for held in found)
    near = sum(abs(held.reserved_error) <= 0.005 for held in found)
    worst = max((abs(held.reserved_error) for held in found), default=0.0)
    return f"allocated equal in {equal} of {len(found)}, reserved within 0.5% in {near} of {len(found)} (worst {worst:.2%})"


def run_programs(gpu: GpuSpec, folder: Path, only: list[str]) -> None:
    """Run, write, rehearse and print whole programs."""
    told = {"driver": gpu.driver_version, "date": datetime.now(timezone.utc).date().isoformat()}
    with (folder / f"whole-programs-{card_name(gpu)}.jsonl").open("w", encoding="utf-8") as file:
        for program in PROGRAMS:
            if not program.is_here or (only and program.name not in only):
                continue
            recorded = record_program(program) | told
            file.write(json.dumps(recorded) + "\n")
            rehearsed = rehearse_program(program, gpu.name)
            errors = [rehearsed[peak] / recorded[peak] - 1 for peak in ("peak_allocated_bytes", "peak_reserved_bytes")]
            print(
                f"{program.name:60} {recorded['peak_reserved_bytes']:12} {errors[0]:+9.3%} {errors[1]:+9.3%} {rehearsed['verdict']}",
                flush=True,
            )


def run_script(part: str, gpu: GpuSpec, folder: Path) -> None:
    """Write what the script of *part* records."""
    out = folder / f"{SCRIPTS[part].removesuffix('.py').replace('_', '-')}-{card_name(gpu)}.jsonl"
    subprocess.run([sys.executable, str(RECORDINGS.parent / SCRIPTS[part]), str(out)], check=True)


def main(folder: Path, parts: list[str], only: list[str]) -> int:
    """Do *parts*."""
    gpu = detect_gpus()[0]
    print(f"{gpu.name}, driver {gpu.driver_version}\n")
    folder.mkdir(parents=True, exist_ok=True)
    holds = "suite" not in parts or run_suite(gpu, folder, only)
    if "programs" in parts:
        run_programs(gpu, folder, only)
    for part in SCRIPTS.keys() & set(parts):
        run_script(part, gpu, folder)
    return 0 if holds else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=RECORDINGS, help="where recordings are written")
    parser.add_argument("--part", action="append", choices=PARTS, help="this part only; may be repeated")
    parser.add_argument("--only", action="append", default=[], metavar="PROGRAM", help="this program only, as lora-8; may be repeated")
    arguments = parser.parse_args()
    try:
        sys.exit(main(arguments.to, arguments.part or list(PARTS), arguments.only))
    except MemplanError as error:
        sys.exit(f"Error: {error}")

"""
How exact it is to work sizes out from a few rehearsals, beside rehearsals of those sizes, and beside what others report.

    python benchmarks/accuracy.py [CARD ...]

Thirteen programs (`tests/accuracy/programs_to_plan.py`) on three kinds of GPU, unless others are named: about ten minutes. For each: how
many rehearsals it took, the errors of the points that were worked out, and whether the largest batch called fitting fits and the next not.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.accuracy.programs_to_plan import PROGRAMS
from tests.accuracy.sweeps import CARDS, assess

PUBLISHED = """\
published, against measured peaks: xMem 3.6% median error; DNNMem 13.8%; formulas and guides off by 2 to 10 times. These
figures are against rehearsals; how those stand to real GPUs: README, and the recordings of `tests/accuracy`."""


def main(cards: list[str]) -> None:
    """Print a table, the sums, and the same as one line of JSON."""
    print(f"{'program':22} {'card':8} {'rehearsals':>10} {'points':>7} {'median':>8} {'worst':>8} {'largest':>8} {'fits':>5} {'next':>5}")
    found = []
    for card in cards:
        for program in PROGRAMS:
            seen = assess(program, card)
            found.append(seen)
            errors = [abs(error) for error in seen.errors] or [0.0]
            print(
                f"{program:22} {card:8} {seen.num_rehearsals:10} {len(seen.errors):7} {statistics.median(errors):8.3%} {max(errors):8.3%} "
                f"{seen.largest:8} {seen.fits!s:>5} {seen.next_fits!s:>5}",
                flush=True,
            )
    errors = [error for seen in found for error in seen.errors]
    absolute = [abs(error) for error in errors]
    under = sum(error < 0 for error in errors)
    right = sum(seen.fits and not seen.next_fits for seen in found)
    print(f"\n{len(errors)} points worked out: median error {statistics.median(absolute):.3%}, worst {max(absolute):.3%}, {under} under")
    print(f"the largest batch called fitting fits, and the next does not: {right} of {len(found)}")
    print(f"the peak reported for it is a fresh rehearsal's: {sum(s.reported_bytes == s.rehearsed_bytes for s in found)} of {len(found)}")
    print(PUBLISHED)
    print(json.dumps([asdict(seen) for seen in found]))


if __name__ == "__main__":
    main(sys.argv[1:] or list(CARDS))

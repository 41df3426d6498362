"""
Gathers what each process of a `torchrun` has to say at rank 0, over CPUs.

    python -c "from memplan.programs.ranks import main; main()"

Reads its own from standard input; at rank 0 prints all of them, by rank, as one JSON list. Run with the environment that torchrun made.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)
"""Ranks come when they have run their steps, some much later than others."""


def main() -> None:
    """Gather."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = int(os.environ["RANK"])
    gathered: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(json.load(sys.stdin), gathered)
    if gathered is not None:
        json.dump(gathered, sys.stdout)
    dist.destroy_process_group()

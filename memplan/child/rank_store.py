"""
What the processes of a `torchrun` have to say to each other, by the store that torchrun keeps.

    python -c "from memplan.child.rank_store import main; main('share')"

`share`: what rank 0 reads from its standard input is printed by all. `gather`: what each reads is printed by rank 0, as one JSON list by
rank. Run with the environment that torchrun made.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(minutes=30)
"""Ranks come when they have run their steps, some much later than others; rank 0 when it has planned."""


def main(what: str) -> None:
    """Share or gather."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
    store = PrefixStore(f"memplan {what}", found)
    others = [str(other) for other in range(num_ranks) if other]
    if what == "gather":
        store.set(str(rank), sys.stdin.read())
        told = [store.get(str(other)).decode() for other in range(num_ranks)] if rank == 0 else []
        print(f"[{', '.join(told)}]")
    elif rank == 0:
        own = sys.stdin.read()
        store.set("own", own)
        store.wait([f"read by {other}" for other in others], TIMEOUT)  # the store may be this process's own
        print(own)
    else:
        print(store.get("own").decode())
        store.set(f"read by {rank}", "")

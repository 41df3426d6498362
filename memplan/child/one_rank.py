"""
Which of the ranks that train together this process is, where the others are not there.

MEMPLAN_WORLD says how many GPUs each machine has, how many machines there are, and which rank is rehearsed. A launcher (torchrun,
accelerate, deepspeed, Lightning, `mp.spawn`) starts a process for each GPU of one machine, as ever: the one on the rehearsed rank's GPU
becomes that rank, and the others wait, before they have loaded anything, until it has ended. Ray's workers have to answer to Ray, and each
runs as a rank of its own beside the one that is told of.

Loaded at the start of every Python that a rehearsed script starts, so with as few imports as can be.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

_LOOKS_EVERY_SECONDS = 0.05
_RUNNING = "rank"
"""The file in the folder for results that has the number of the process that is the rank."""


class NeedsOtherRankError(RuntimeError):
    """The program needs what only another rank could tell."""


class World(NamedTuple):
    """The ranks that train together, and the one that is rehearsed."""

    num_gpus: int
    """Of each machine, and ranks on it."""
    num_nodes: int
    rank: int

    @property
    def size(self) -> int:
        """Return how many ranks there are."""
        return self.num_gpus * self.num_nodes

    @property
    def local_rank(self) -> int:
        """Return the rank's number on its machine, and that of its GPU."""
        return self.rank % self.num_gpus

    def variables(self) -> dict[str, str]:
        """Return what torchrun sets for this rank (`torch/distributed/elastic/agent/server/local_elastic_agent.py` of PyTorch 2.13)."""
        node = self.rank // self.num_gpus
        return {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank), "LOCAL_WORLD_SIZE": str(self.num_gpus),
            "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(self.num_nodes),
            "ROLE_RANK": str(self.rank), "ROLE_WORLD_SIZE": str(self.size), "NODE_RANK": str(node),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"), "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
            "TORCHELASTIC_RUN_ID": os.environ.get("TORCHELASTIC_RUN_ID", "none"),
        }  # fmt: skip


def world() -> World | None:
    """Return what MEMPLAN_WORLD says; None where there is one process only."""
    text = os.environ.get("MEMPLAN_WORLD")
    return World(*map(int, text.split())) if text else None


def take_rank() -> None:
    """Become the rank that is rehearsed, where a launcher has started this process for its GPU; wait until it has ended where not."""
    ranks = world()
    if ranks is None:
        return
    chosen = ranks.local_rank
    started = next((os.environ[name] for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE") if name in os.environ), "")
    if started.isdecimal() and int(started) <= chosen:
        chosen = 0  # the launcher was told of fewer
    if os.environ.get("LOCAL_RANK", str(chosen)) != str(chosen):
        wait_for_rank()
    os.environ.update(ranks.variables())
    say_rank()


def say_rank() -> None:
    """Say that this process is the rank that the others wait for."""
    file = Path(os.environ["MEMPLAN_RESULTS"], f"{_RUNNING}.{os.getpid()}")
    file.write_text(str(os.getpid()), encoding="ascii")
    file.replace(file.with_name(_RUNNING))


def wait_for_rank() -> NoReturn:
    """End when the process that is the rank has ended, as that of another rank would that had the same to do."""
    file = Path(os.environ["MEMPLAN_RESULTS"], _RUNNING)
    parent = os.getppid()
    while os.getppid() == parent and (not file.exists() or _runs(file.read_text(encoding="ascii"))):
        time.sleep(_LOOKS_EVERY_SECONDS)
    os._exit(0)


def _runs(process: str) -> bool:
    """Say whether the process with that number has not ended. One that has ended is a zombie, until its parent asks how."""
    try:
        status = Path("/proc", process, "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"

"""Where memplan itself runs under torchrun: which process this is, and how what each has found comes together."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from memplan.errors import UsageError

NAMES = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
"""Of the launcher, in a command."""


class Rank(NamedTuple):
    """One process of several that train together."""

    number: int
    local: int
    """Of this machine; CUDA's number of its GPU."""
    num_ranks: int


def rank_of(environment: Mapping[str, str] = os.environ) -> Rank:
    """
    Return which process this is; the only one where torchrun did not start it.

    RANK and its like are set by clusters too, for every shell of a job. TORCHELASTIC_RUN_ID is torchrun's own: PyTorch asks for it in
    `torch.distributed.is_torchelastic_launched` (distributed_c10d.py of 2.13).
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in environment or not all(environment.get(name, "").isdecimal() for name in (*names, "MASTER_PORT")):
        return Rank(0, 0, 1)
    return Rank(*(int(environment[name]) for name in names))


def share(own: Any) -> Any:
    """Return what rank 0 gives, in every process. Raises UsageError where the processes do not find each other."""
    return _told("share", own)


def gather(own: Any) -> list[Any]:
    """Return what every process gives, by rank; nothing where this is not rank 0. Raises as `share`."""
    found: list[Any] = _told("gather", own)
    return found


def _told(what: str, own: Any) -> Any:
    """Ask a process of its own that loads PyTorch, which this one does without."""
    import subprocess  # noqa: PLC0415  (every plan asks which rank it is)

    code = f"from memplan.child.rank_store import main; main({what!r})"
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(own), capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UsageError(
            f"the processes of torchrun did not find each other: {said[-1] if said else 'no reason given'}",
            hint="profile without torchrun: `plan.profile()`",
        )
    return json.loads(done.stdout)

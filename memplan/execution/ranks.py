"""The ranks that train together, and the one of them that is rehearsed: the others need not be there."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from memplan.errors import UsageError
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torchrun import NAMES

MOST_GPUS = 64
"""Of one machine: cards that the simulated machine has (csrc/card.c)."""


_WATCHING = ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
"""Threads of ProcessGroupNCCL that ask the other ranks whether they live."""


class Ranks(NamedTuple):
    """How many processes train together, one for each GPU, and which of them is run."""

    num_gpus: int = 1
    """Of each machine."""
    num_nodes: int = 1
    """Machines."""
    rank: int = 0
    is_asked: bool = False
    """Even one process alone finds what torchrun would tell it."""
    kinds: tuple[GpuSpec, ...] = ()
    """The GPUs of each machine, where they are not alike, as CUDA counts them."""

    @property
    def size(self) -> int:
        """Return how many ranks there are."""
        return self.num_gpus * self.num_nodes

    @property
    def local_rank(self) -> int:
        """Return which GPU of its machine the rank has."""
        return self.rank % self.num_gpus

    def gpu_of(self, rank: int, alike: GpuSpec) -> GpuSpec:
        """Return the GPU that *rank* has: *alike*, where all are."""
        return self.kinds[rank % self.num_gpus] if self.kinds else alike

    def gpus_with(self, own: GpuSpec) -> list[GpuSpec]:
        """Return the GPUs of the rank's machine, of which it has *own*."""
        kinds = self.kinds or (own,) * self.num_gpus
        return [own if number == self.local_rank else kind for number, kind in enumerate(kinds)]

    @property
    def are_launched(self) -> bool:
        """Say whether each finds what torchrun would tell it."""
        return self.size > 1 or self.is_asked

    def checked(self) -> Ranks:
        """Return these. Raises UsageError where there is no such rank, or no such machine."""
        if self.num_gpus > MOST_GPUS:
            raise UsageError(f"a machine has at most {MOST_GPUS} GPUs here", hint="say how many machines there are: `num_nodes=8`")
        if not 0 <= self.rank < self.size:
            raise UsageError(f"there is no rank {self.rank} of {self.size}", hint=f"ranks go from 0 to {self.size - 1}")
        return self

    def variables(self) -> dict[str, str]:
        """Return what child/one_rank.py reads, and what keeps PyTorch from watching for ranks that do not answer."""
        if not self.are_launched:
            return {}
        return {"MEMPLAN_WORLD": f"{self.num_gpus} {self.num_nodes} {self.rank}", **dict.fromkeys(_WATCHING, "0")}


ONE_RANK = Ranks()
"""A process that trains alone."""

_GPUS = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)(?:=(\d+))?")
_NODES = re.compile(r"--(?:nnodes|num[-_]machines|num[-_]nodes)(?:=(?:\d+:)?(\d+))?")
_SETTING = re.compile(r"""^\s*"?(num_processes|num_machines)"?\s*:\s*"?'?(\d+)""", re.MULTILINE)


def launched_by(words: Sequence[str]) -> Ranks:
    """
    Return how many GPUs and machines the launcher in the command *words* is told of: torchrun, accelerate or deepspeed.

    They say it before the script that they start, or in Accelerate's file of settings. Accelerate counts the processes of all machines.
    """
    program = next((at for at, word in enumerate(words) if at and word.endswith(".py")), len(words))
    launcher = words[:program] if _launcher(words[:program]) else ()
    num_gpus, num_nodes = (_number(launcher, option) for option in (_GPUS, _NODES))
    if _launcher(launcher) == "accelerate":
        settings = _accelerate_settings(launcher)
        num_gpus, num_nodes = num_gpus or settings.get("num_processes", 0), num_nodes or settings.get("num_machines", 0)
        num_gpus //= num_nodes or 1
    return Ranks(num_gpus or 1, num_nodes or 1)


def _accelerate_settings(words: Sequence[str]) -> dict[str, int]:
    """Return the numbers in the file that `accelerate launch` reads: the one that *words* name, else the user's own."""
    named = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--config_file"]
    named += [word.partition("=")[2] for word in words if word.startswith("--config_file=")]
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"))
    for file in [Path(named[0])] if named else [home / "accelerate" / f"default_config.{ending}" for ending in ("yaml", "json")]:
        if file.is_file():
            return {name: int(number) for name, number in _SETTING.findall(file.read_text(encoding="utf-8", errors="replace"))}
    return {}


def _launcher(words: Sequence[str]) -> str | None:
    names = [word.rpartition("/")[2] for word in words]
    if any(name in NAMES or name == "tune" for name in names):
        return "torchrun"
    return next((name for name in ("accelerate", "deepspeed") if any(word.split(".")[0] == name for word in names)), None)


def _number(words: Sequence[str], option: re.Pattern[str]) -> int:
    """Return the number behind *option*; 0 where it is not among *words*, or says something else (`auto`)."""
    for at, word in enumerate(words):
        found = option.fullmatch(word)
        if found:
            value = found[1] or (words[at + 1].rpartition(":")[2] if at + 1 < len(words) else "")
            return int(value) if value.isdecimal() else 0
    return 0

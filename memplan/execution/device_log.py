"""What the simulated GPU wrote down of a run: calls that it does not serve, and workspaces that a library would have decided on itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from memplan.errors import MissingError
from memplan.memory.nccl_buffers import Communicator


class DeviceLog(NamedTuple):
    """One run's."""

    not_served: tuple[str, ...] = ()
    """Names of calls."""
    workspaces: Mapping[str, int] = {}
    """The largest allowance in bytes for what a library picks at run time, by kind of operation."""
    workspace_sizes: frozenset[int] = frozenset()
    """The bytes of all workspaces, up to some hundreds: an allocation of so many is for one of them."""
    asks_cudnn: bool = False
    """cuDNN itself said which kernels convolutions take, and what they want."""
    unsure_sizes: Mapping[int, int] = {}
    """By how many bytes workspaces may be larger on the GPU: of a number of bytes, and of 0 those that are none."""
    has_unknown_attention: bool = False
    """cuDNN computed attention: what its kernels may ask for is not known."""

    communicators: tuple[Communicator, ...] = ()
    """Those of NCCL."""
    managed_bytes: int = 0
    """The most that there was of CUDA's managed memory, which is in no allocator's count."""

    @property
    def largest_workspace_bytes(self) -> int:
        """Return the largest allowance: what a run may have reserved less, where none was made without any."""
        return max(self.workspaces.values(), default=0)

    def check(self) -> None:
        """Raise MissingError where a call was not served: no number of that run would be true."""
        if self.not_served:
            raise MissingError(f"the simulated GPU does not serve {', '.join(self.not_served)}", hint="without it no number would be true")


NO_LOG = DeviceLog()
"""Of a run on a real GPU."""


def read_device_log(path: Path) -> DeviceLog:
    """Return the log at *path*; an empty one where the device had nothing to say."""
    not_served: set[str] = set()
    workspaces: dict[str, int] = {}
    sizes: set[int] = set()
    communicators: list[Communicator] = []
    unsure_sizes: dict[int, int] = {}
    has_unknown_attention, asks_cudnn, managed_bytes = False, False, 0
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        kind, _, rest = line.partition(" ")
        if line.startswith("not served "):
            not_served.add(line.removeprefix("not served "))
        elif kind == "workspace":
            name, _, size = rest.rpartition(" ")
            workspaces[name] = max(workspaces.get(name, 0), int(size))
            sizes.add(int(size))
        elif kind == "known":
            sizes.add(int(rest.rpartition(" ")[2]))
        elif kind == "unsure":
            _, size, _, by = rest.split()
            unsure_sizes[int(size)] = max(unsure_sizes.get(int(size), 0), int(by))
        elif kind == "communicator":
            communicators.append(Communicator(int(rest)))
        elif kind == "peers":
            at, _, num_peers = rest.partition(" ")
            communicators[int(at)] = communicators[int(at)]._replace(num_peers=int(num_peers))
        elif kind == "managed":
            managed_bytes = max(managed_bytes, int(rest.rpartition(" ")[2]))
        elif line == "unknown attention":
            has_unknown_attention = True
        elif line == "asked cuDNN":
            asks_cudnn = True
    return DeviceLog(
        not_served=tuple(sorted(not_served)),
        workspaces=workspaces,
        workspace_sizes=frozenset(sizes),
        asks_cudnn=asks_cudnn,
        unsure_sizes=unsure_sizes,
        has_unknown_attention=has_unknown_attention,
        communicators=tuple(communicators),
        managed_bytes=managed_bytes,
    )

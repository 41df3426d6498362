"""
What NCCL takes of a GPU beside PyTorch's allocator, as a range: buffers for each communicator, by what it connects.

A communicator has channels, and on each a ring and a tree through its ranks. Towards each neighbour on them it has a buffer for each of its
protocols, those of a peer on the same machine, or those of the network between machines. Constants are those of NCCL 2.27 (file names below
are its own), and hold from 2.18 to 2.28 where nothing else is said. How many channels there are, NCCL finds out on the machine; that, and
which ranks are on one machine, is what the range is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from memplan.hardware.gpu import GpuSpec
from memplan.memory.estimate import MemoryRange
from memplan.units import KIB, MIB

SIMPLE_BYTES, LL_BYTES, LL128_BYTES = 4 * MIB, 512 * KIB, 4800 * KIB
"""Buffers of the three protocols, on each channel (init.cc, `computeBuffSizes`: NCCL_BUFFSIZE, NCCL_LL_BUFFSIZE, NCCL_LL128_BUFFSIZE)."""

USUAL_VERSION = (2, 28)
"""NCCL of PyTorch 2.11, where nobody says which there is."""

PAGE_BYTES = 2 * MIB
"""What memory from cuMem comes in, as NCCL takes it since 2.19 (alloc.h)."""

MARGIN, PROCESS_BYTES = 1.25, 512 * MIB
"""Of the upper bound: for what is not modelled, and once for each process, kernels and mappings. Ours: no source gives one."""

ALONE_BYTES = 564 * MIB
"""
Of a process that is alone in its communicators, which connects nothing: recorded on an H100 with NCCL 2.28 (PyTorch 2.11), of one
communicator. When it was destroyed, 174 of them stayed.
"""

_SHARED_CHUNKS = 16
"""Of the buffer that sends and receives share, for each channel (NCCL_SHARED_STEPS, proxy.h)."""


class Link(Enum):
    """How the GPUs of a machine reach each other; its values are the channels of a communicator there: fewest, usual, most."""

    NVLINK = (16, 24, 32)
    PCIE = (2, 4, 8)
    HOST = (1, 2, 4)
    """Through the memory of the host, as with NCCL_P2P_DISABLE: the GPU holds no buffers."""


_ACROSS_MACHINES = (4, 16, 32)
"""Channels of a communicator over several machines with NVLink, whose network cards are the narrow part."""


def link_of(gpu: GpuSpec) -> Link:
    """Return how several of *gpu* in one machine reach each other, unless settings say otherwise."""
    is_server = any(word in gpu.name for word in ("SXM", "HBM3", "HGX", "GH200", "GB200", "B200", "H200", "H800", "V100"))
    return Link.NVLINK if is_server and "PCIe" not in gpu.name else Link.PCIE


class Communicator(NamedTuple):
    """One that a process made."""

    num_ranks: int
    num_peers: int = 0
    """Ranks that it has sent to, or received from, one by one."""


def nccl_buffers(
    communicators: Iterable[Communicator],
    *,
    gpu: GpuSpec,
    num_gpus: int,
    version: tuple[int, int],
    settings: Mapping[str, str],
) -> MemoryRange:
    """
    Return what *communicators* take of each *gpu*, of which a machine has *num_gpus*.

    *version* is NCCL's. *settings* are variables of the environment, of which those that begin with NCCL_ count.
    """
    world = _World(gpu, num_gpus, version, settings)
    made = list(communicators)
    several = [each for each in made if each.num_ranks > 1]
    if not several:
        alone = ALONE_BYTES if made else 0
        return MemoryRange(low_bytes=0, expected_bytes=alone, high_bytes=int(alone * MARGIN))
    low, expected, high = (sum(world.bytes_of(each, end) for each in several) for end in range(3))
    return MemoryRange(low_bytes=low, expected_bytes=max(low, expected), high_bytes=max(expected, int(high * MARGIN) + PROCESS_BYTES))


class _World(NamedTuple):
    gpu: GpuSpec
    num_gpus: int
    version: tuple[int, int]
    settings: Mapping[str, str]

    def _setting(self, name: str, default: int) -> int:
        text = self.settings.get(f"NCCL_{name}", "")
        return int(text) if text.lstrip("-").isdecimal() else default

    @property
    def _link(self) -> Link:
        return Link.HOST if self._setting("P2P_DISABLE", 0) else link_of(self.gpu)

    @property
    def _has_cumem(self) -> bool:
        return self._setting("CUMEM_ENABLE", 1 if self.version >= (2, 19) else 0) > 0

    @property
    def _connects_late(self) -> bool:
        """Say whether buffers come with the first use of an algorithm (init.cc, NCCL_RUNTIME_CONNECT of 2.22)."""
        return self.version >= (2, 22) and self._has_cumem and self._setting("RUNTIME_CONNECT", 1) > 0

    def _num_channels(self, num_nodes: int, end: int) -> int:
        usual = _ACROSS_MACHINES if num_nodes > 1 and self._link is Link.NVLINK else self._link.value
        most = min(self._setting("MAX_NCHANNELS", 64), self._setting("MAX_CTAS", 64))
        return max(min(usual[end], most), self._setting("MIN_NCHANNELS", 0), self._setting("MIN_CTAS", 0))

    def bytes_of(self, communicator: Communicator, end: int) -> int:
        """Return what one communicator takes; *end*: 0 for the least, 1 for what is expected, 2 for the most."""
        local = min(communicator.num_ranks, self.num_gpus)
        num_nodes = -(-communicator.num_ranks // local)
        channels = self._num_channels(num_nodes, end)
        near = 0 if local == 1 else 1 if local == 2 else (1, 2, 2)[end]  # neighbours on the ring, and on the tree
        far = 0.0 if num_nodes == 1 else (1, 3, 4)[end] / local
        neighbours = channels * (near * self._peer_bytes + far * self._network_bytes)
        peers = min(communicator.num_peers, local - 1) * self._channels_of_peer(num_nodes, channels) * self._peer_bytes
        shared = self._shared_bytes(channels, num_nodes) if end == 2 or not self._connects_late or communicator.num_peers else 0
        return int(neighbours) + peers + shared + self._multicast_bytes(local, channels, end) + self._small_bytes(channels, end)

    @property
    def _peer_bytes(self) -> int:
        """Return what one neighbour on a channel costs a GPU, both ways (transport/p2p.cc: what is sent is kept by the receiver)."""
        if self._link is Link.HOST:
            return 0
        return _paged(self._protocols_bytes + 4 * KIB) + PAGE_BYTES

    @property
    def _network_bytes(self) -> int:
        """Return the same of a neighbour on another machine (transport/net.cc), with RDMA between network card and GPU."""
        return _paged(self._protocols_bytes - self._setting("LL_BUFFSIZE", LL_BYTES)) + _paged(self._protocols_bytes)

    @property
    def _protocols_bytes(self) -> int:
        sizes = (("BUFFSIZE", SIMPLE_BYTES), ("LL_BUFFSIZE", LL_BYTES), ("LL128_BUFFSIZE", LL128_BYTES))
        return sum(self._setting(name, default) for name, default in sizes)

    def _channels_of_peer(self, num_nodes: int, channels: int) -> int:
        if num_nodes > 1 or self._link is not Link.NVLINK:
            return 2
        return min(_power_of_two(channels), self._setting("MAX_P2P_NCHANNELS", 64))

    def _shared_bytes(self, channels: int, num_nodes: int) -> int:
        """Return the buffer that sends and receives share (proxy.cc, `ncclProxySharedBuffersInit`); a network has one each way."""
        is_near = num_nodes == 1 and self._link is Link.NVLINK
        chunk = min(self._setting("P2P_NVL_CHUNKSIZE", 512 * KIB) if is_near else 128 * KIB, self._setting("BUFFSIZE", SIMPLE_BYTES) // 8)
        return _power_of_two(channels) * _SHARED_CHUNKS * chunk * (1 if num_nodes == 1 else 2)

    def _multicast_bytes(self, local: int, channels: int, end: int) -> int:
        """Return NVLink SHARP's buffers (transport/nvls.cc): GPUs from Hopper on, behind NVSwitch."""
        has = (self.gpu.compute_capability or (0, 0)) >= (9, 0) and self._link is Link.NVLINK and local >= 3
        if not has or not self._setting("NVLS_ENABLE", 2) or (self._connects_late and end == 0):
            return 0
        chunks = 8 * self._setting("NVLS_CHUNKSIZE", 128 * KIB)
        if self.version < (2, 21):
            return _paged(channels * 2 * (SIMPLE_BYTES + PAGE_BYTES) * local, 512 * MIB)
        if self.version < (2, 22):
            return _paged(channels * 2 * (chunks + PAGE_BYTES) * local, 512 * MIB)
        return _paged(self._setting("NVLS_NCHANNELS", 16) * 2 * chunks * local, 512 * MIB if self.version < (2, 26) else PAGE_BYTES)

    def _small_bytes(self, channels: int, end: int) -> int:
        """Return its structures and queues: arrays of a few KiB, each a page of its own with cuMem."""
        if not self._has_cumem:
            return 8 * MIB if end else 0
        return PAGE_BYTES * (3 * _power_of_two(channels) + 4)


def _paged(size: float, page: int = PAGE_BYTES) -> int:
    return -(-int(size) // page) * page


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

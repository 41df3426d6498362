"""NCCL with the other ranks missing: what copies of this rank would send, byte for byte where this rank's own bytes are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.execution.device_log import read_device_log
from memplan.hardware.torch_install import TorchBuild
from memplan.memory.nccl_buffers import Communicator
from tests.standin.calls import on_device
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

_FIRST = """
from struct import pack, unpack
INT32, INT64, HALF, FLOAT, DOUBLE = 2, 4, 6, 7, 8
SUM, PRODUCT, MAX, MIN, AVERAGE = range(5)

class Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]

def communicator(size, rank):
    made = c_void_p()
    assert cuda.ncclCommInitRank(byref(made), c_int(size), Id(), c_int(rank)) == 0
    return made

def call(name, *arguments):
    found = getattr(cuda, name)(*[c_void_p(each) if i < 2 else each for i, each in enumerate(arguments)])
    assert found == 0, (name, found)

def move(name, address, peer):
    assert getattr(cuda, name)(c_void_p(address), c_size_t(1), INT32, peer, group, None) == 0

group = communicator(4, 2)
p, q = malloc(4096), malloc(4096)
"""

WORLD = {"MEMPLAN_WORLD": "4 1 2"}


def test_sums_are_those_of_copies_and_the_largest_of_copies_is_each(torch_build: TorchBuild) -> None:
    """Of integers and of floats with a type of the host; a product, and what a kernel left, is not known."""
    on_device(
        torch_build,
        _FIRST
        + """
def reduced(content, type, operation):
    write(p, content)
    fill(q, 0xEE, 64)
    width = {INT32: 4, FLOAT: 4, INT64: 8, DOUBLE: 8, HALF: 2}[type]
    call("ncclAllReduce", p, q, c_size_t(len(content) // width), type, operation, group, None)
    return read(q, len(content))

assert unpack("2i", reduced(pack("2i", 3, -5), INT32, SUM)) == (12, -20)
assert unpack("2q", reduced(pack("2q", 1 << 40, 7), INT64, SUM)) == (1 << 42, 28)
assert unpack("2f", reduced(pack("2f", 0.5, -2), FLOAT, SUM)) == (2.0, -8.0)
assert unpack("d", reduced(pack("d", 0.1), DOUBLE, SUM)) == (0.4,)
assert [unpack("i", reduced(pack("i", 9), INT32, one)) for one in (MAX, MIN, AVERAGE)] == [(9,)] * 3
assert reduced(pack("i", 9), INT32, PRODUCT) == bytes(4)
assert reduced(b"ab", HALF, SUM) == bytes(2)
kernel()
call("ncclAllReduce", p, q, c_size_t(1), INT32, SUM, group, None)
assert read(q, 4) == bytes(4)
""",
        **WORLD,
    )


def test_what_is_gathered_is_what_this_rank_has_for_each(torch_build: TorchBuild) -> None:
    """All-gather and all-to-all fill four places; of what is scattered this rank, the third, gets the third part, four times."""
    on_device(
        torch_build,
        _FIRST
        + """
write(p, pack("2i", 1, 2))
call("ncclAllGather", p, q, c_size_t(2), INT32, group, None)
assert unpack("8i", read(q, 32)) == (1, 2) * 4
write(p, pack("8i", *range(8)))
call("ncclReduceScatter", p, q, c_size_t(2), INT32, SUM, group, None)
assert unpack("2i", read(q, 8)) == (16, 20)
call("ncclAlltoAll", p, q, c_size_t(2), INT32, group, None)
assert unpack("8i", read(q, 32)) == (4, 5) * 4
call("ncclBroadcast", p, q, c_size_t(2), INT32, 2, group, None)
assert unpack("2i", read(q, 8)) == (0, 1)
write(q, pack("2i", 30, 31))
call("ncclBroadcast", p, q, c_size_t(2), INT32, 0, group, None)  # another rank's, which has what this one has there
assert unpack("2i", read(q, 8)) == (30, 31)
write(q, pack("i", 5))
call("ncclReduce", p, q, c_size_t(1), INT32, SUM, 0, group, None)
assert unpack("i", read(q, 4)) == (5,)
""",
        **WORLD,
    )


def test_what_ranks_send_each_other_in_a_group(torch_build: TorchBuild) -> None:
    """A copy of this rank sends here what this rank sends to itself; of what another one sends alone nothing is known."""
    on_device(
        torch_build,
        _FIRST
        + """
write(p, pack("4i", *range(4)))
cuda.ncclGroupStart()
for peer in range(4):
    move("ncclSend", p + 4 * peer, peer)
    move("ncclRecv", q + 4 * peer, peer)
cuda.ncclGroupEnd()
assert unpack("4i", read(q, 16)) == (2,) * 4
write(q, pack("i", 9))
move("ncclRecv", q, 1)
assert read(q, 4) == bytes(4)
""",
        **WORLD,
    )


def test_communicators_are_told_with_their_ranks_and_those_that_were_sent_to(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Also one that is split off, of which only this process knows how many it will have."""
    log = tmp_path / "log"
    on_device(
        torch_build,
        _FIRST
        + """
made = c_void_p()
cuda.memplan_next_group(2)
assert cuda.ncclCommSplit(group, 1, 1, byref(made), None) == 0
count, rank = c_int(), c_int()
cuda.ncclCommCount(made, byref(count)), cuda.ncclCommUserRank(made, byref(rank))
assert (count.value, rank.value) == (2, 1)
none = c_void_p(1)
assert cuda.ncclCommSplit(group, -1, 0, byref(none), None) == 0 and not none.value
cuda.ncclGroupStart()
for peer in (0, 1, 3):
    move("ncclSend", p, peer)
cuda.ncclGroupEnd()
""",
        **WORLD,
        MEMPLAN_LOG=str(log),
    )

    assert read_device_log(log).communicators == (Communicator(4, 3), Communicator(2))


def test_without_a_world_several_ranks_are_refused(torch_build: TorchBuild, tmp_path: Path) -> None:
    """One process alone makes a communicator of one."""
    log = tmp_path / "log"
    on_device(
        torch_build,
        _FIRST.replace("group = communicator(4, 2)", "group = communicator(1, 0)")
        + """
made = c_void_p()
assert cuda.ncclCommInitRank(byref(made), c_int(2), Id(), c_int(0)) == 5
""",
        MEMPLAN_LOG=str(log),
    )

    assert read_device_log(log).not_served == ("NCCL with several processes",)


@pytest.mark.parametrize(("said", "version"), [("22907", 22907), ("", 22705)])
def test_its_version_is_that_of_the_library_that_is_stood_in_for(torch_build: TorchBuild, said: str, version: int) -> None:
    """As MEMPLAN_NCCL has it."""
    on_device(torch_build, f"v = c_int(); cuda.ncclGetVersion(byref(v)); assert v.value == {version}, v.value", MEMPLAN_NCCL=said)

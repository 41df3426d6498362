"""NCCL's buffers, held to what people have measured, and worked by hand."""

from __future__ import annotations

import pytest

from memplan.hardware.catalog import find_gpu
from memplan.memory.estimate import MemoryRange
from memplan.memory.nccl_buffers import Communicator, nccl_buffers
from memplan.units import MIB
from tests.memory.test_cuda_context import RECORDED


def buffers(
    *sizes: int, gpu: str = "a100-40", num_gpus: int = 8, version: tuple[int, int] = (2, 18), peers: int = 0, **settings: str
) -> MemoryRange:
    """Of communicators with so many ranks."""
    return nccl_buffers(
        [Communicator(size, peers) for size in sizes], gpu=find_gpu(gpu), num_gpus=num_gpus, version=version, settings=settings
    )


@pytest.mark.parametrize(
    ("measured_mib", "found"),
    [
        (544, buffers(2, num_gpus=2)),  # nccl issue 964: A100 with NVLink, two ranks
        (688, buffers(4, num_gpus=4)),  # the same, more ranks
        (958, buffers(8, gpu="h100", version=(2, 29))),  # vllm pull request 46234: eight GPUs
        (1024, buffers(4, gpu="h100", num_gpus=4, version=(2, 29))),  # vllm pull request 51485
        (1833, buffers(2, 2, gpu="h100", num_gpus=2, version=(2, 21), NCCL_CUMEM_ENABLE="0")),  # vllm pull request 10511
        (5722, buffers(8, 8, 8, peers=2)),  # nccl issue 864: three communicators and more; what they send one by one is not told
    ],
)
def test_the_range_holds_what_was_measured(measured_mib: int, found: MemoryRange) -> None:
    """Its upper bound is what a verdict has to be sure of; its lower bound is far below only where an algorithm may not be used."""
    assert found.low_bytes <= measured_mib * MIB <= found.high_bytes


def test_two_ranks_on_nvlink_by_hand() -> None:
    """24 channels with one neighbour of 12 MiB, a shared buffer of 256 MiB, and small things: before 2.19 without pages of 2 MiB."""
    assert buffers(2, num_gpus=2).expected_bytes == (24 * 12 + 256 + 8) * MIB


def test_a_process_alone_takes_what_was_recorded() -> None:
    """A communicator of one connects nothing, and yet an H100 held 564 MiB more after its first `all_reduce`: 1,174 and not 610."""
    held = {row["after"]: row["outside_mib"] for row in RECORDED if row["of"] == ["init", "nccl"]}

    assert buffers() == MemoryRange(low_bytes=0, expected_bytes=0, high_bytes=0)
    assert buffers(1).expected_bytes == (held["nccl"] - held["init"]) * MIB
    assert buffers(1).high_bytes == 705 * MIB
    assert buffers(1, 8).expected_bytes == buffers(8).expected_bytes


def test_settings_change_them_as_nccl_reads_them() -> None:
    """Fewer channels, smaller buffers, no NVLink SHARP, no peers: less of each; what is no number is no setting."""
    plain = buffers(8, gpu="h100", version=(2, 27))

    for settings in (
        {"NCCL_MAX_NCHANNELS": "4"},
        {"NCCL_BUFFSIZE": "1048576"},
        {"NCCL_NVLS_ENABLE": "0"},
        {"NCCL_P2P_DISABLE": "1"},
    ):
        assert buffers(8, gpu="h100", version=(2, 27), **settings).expected_bytes < plain.expected_bytes
    assert buffers(8, gpu="h100", version=(2, 27), NCCL_BUFFSIZE="large") == plain
    assert buffers(8, gpu="h100", version=(2, 27), NCCL_MIN_NCHANNELS="32").expected_bytes > plain.expected_bytes


def test_what_ranks_send_each_other_one_by_one_has_buffers_of_its_own() -> None:
    """All-to-all over eight GPUs of one machine: 32 channels of 12 MiB for each of seven peers, and the shared buffer."""
    plain, sending = (buffers(8, version=(2, 27), peers=peers) for peers in (0, 7))

    assert sending.expected_bytes - plain.expected_bytes == (7 * 32 * 12 + 256) * MIB


def test_cards_on_pcie_have_fewer_channels() -> None:
    """So that a communicator of theirs takes a tenth."""
    assert buffers(8, gpu="rtx4090").expected_bytes < buffers(8).expected_bytes / 4
    assert buffers(16, num_gpus=8).low_bytes > 0

"""
What calls of CUDA's libraries allocate on the simulated GPU, beside what was recorded on an H100, and of convolutions on an H200 too.

2,481 configurations of `library_calls.py` (NVIDIA H100 80GB HBM3, 2026-11-26) and 1,568 (NVIDIA H200, 2026-11-27), driver 580.159.04,
PyTorch 2.11.0 with cuDNN 9.19: the allocations and frees of each call, in order. Another PyTorch may choose another kernel; such calls are
left out.
"""

from __future__ import annotations

import json
import operator
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memplan.hardware.torch_install import TorchBuild
from memplan.standin.build import ASKED_CUDNN
from tests.accuracy.on_card import RECORDINGS
from tests.hardware.nvml_driver import Driver
from tests.standin.conftest import torch_build
from tests.standin.machine import machine

__all__ = ["torch_build"]

SCRIPT = Path(__file__).with_name("library_calls.py")
CARDS = {"h100": "nvidia-h100-80gb-hbm3", "h200": "nvidia-h200"}
BLOCK_BYTES = 512
"""What the allocator rounds up to: an allowance is told by an odd number, which takes the same block."""


class Call(NamedTuple):
    """One call on both, which asked for the same besides workspaces."""

    config: dict[str, Any]
    name: str
    recorded: list[int]
    simulated: list[int]

    @property
    def is_equal(self) -> bool:
        """Say whether each block that is asked for is as large as it was, in the same order."""
        return asked(self.recorded) == asked(self.simulated)

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes a block had more on the GPU; where one of them has a workspace and the other none, the peak."""
        there, here = asked(self.recorded), asked(self.simulated)
        if len(there) != len(here):
            return peak(self.recorded) - peak(self.simulated)
        return BLOCK_BYTES * max(map(operator.sub, there, here), default=0)


def blocks(sizes: list[int]) -> list[int]:
    """Return *sizes*, the freed ones negative, as the allocator rounds them."""
    return [(1 if size > 0 else -1) * -(-abs(size) // BLOCK_BYTES) for size in sizes]


def asked(sizes: list[int]) -> list[int]:
    """Return the blocks without frees: what is left of the call before is freed when Python comes to it."""
    return [block for block in blocks(sizes) if block > 0]


def peak(sizes: list[int]) -> int:
    """Return the most bytes at a time."""
    return BLOCK_BYTES * max(accumulate(blocks(sizes)), default=0)


def key_of(row: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in row.items() if name not in {"calls", "chosen"}}, sort_keys=True)


def read(text: str) -> dict[str, dict[str, Any]]:
    """Return the rows of *text* by what they were given."""
    return {key_of(row): row for row in map(json.loads, text.splitlines())}


def compared(
    torch_build: TorchBuild, driver: Driver, out: Path, *kinds: str, card: str = "h100", asks_cudnn: bool
) -> dict[str, list[Call]]:
    """Return the calls of *kinds*, or all; without those for which this PyTorch takes another kernel, or that either refuses."""
    environment = machine(torch_build, driver, card) | {"MEMPLAN_WORKSPACES": "1", "MEMPLAN_ASK_CUDNN": str(int(asks_cudnn))}
    done = driver.run("-W", "ignore", str(SCRIPT), str(out), *kinds, **environment)
    assert done.returncode == 0, done.stderr
    simulated = read(out.read_text(encoding="utf-8"))
    found: dict[str, list[Call]] = defaultdict(list)
    for key, row in read((RECORDINGS / f"library-calls-{CARDS[card]}.jsonl").read_text(encoding="utf-8")).items():
        here = simulated.get(key)
        if here is None or isinstance(row["calls"], str) or isinstance(here["calls"], str) or row.get("chosen") != here.get("chosen"):
            continue
        found[row["kind"]] += [Call(row, name, row["calls"][name], here["calls"][name]) for name in row["calls"]]
    return found


@pytest.fixture(scope="module")
def calls(torch_build: TorchBuild, driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Call]]:
    """Those of all kinds, as with a cuDNN that cannot be asked."""
    return compared(torch_build, driver, tmp_path_factory.mktemp("calls") / "calls.jsonl", asks_cudnn=False)


@pytest.fixture(scope="module", params=["h100", pytest.param("h200", marks=pytest.mark.heavy)])
def asking(
    torch_build: TorchBuild, driver: Driver, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[Call]]:
    """Convolutions, whose kernels cuDNN itself says. Nothing was fitted to the H200."""
    if torch_build.cudnn_version not in ASKED_CUDNN:
        pytest.skip(f"cuDNN {torch_build.cudnn} is not asked without a GPU")
    found = {}
    for kind in ("convolution", "benchmarked"):  # what is tried is found anew in a process of its own
        out = tmp_path_factory.mktemp(kind) / "calls.jsonl"
        found |= compared(torch_build, driver, out, kind, card=request.param, asks_cudnn=True)
    return found


def shares(calls: list[Call]) -> tuple[float, float]:
    """Return which share of *calls* is equal, and which share has enough."""
    return sum(call.is_equal for call in calls) / len(calls), sum(call.missing_bytes <= 0 for call in calls) / len(calls)


@pytest.mark.parametrize(
    ("kind", "least_calls", "least_equal"),
    [
        ("attention", 150, 1.0), ("recurrence", 500, 0.96), ("ctc", 100, 1.0), ("normalization", 80, 1.0), ("factorization", 270, 0.7),
        ("sparse", 40, 0.95),
    ],
)  # fmt: skip
def test_a_library_takes_what_it_took_on_the_gpu(calls: dict[str, list[Call]], kind: str, least_calls: int, least_equal: float) -> None:
    """None takes less; nearly all the same."""
    equal, enough = shares(calls[kind])

    assert len(calls[kind]) >= least_calls
    assert equal >= least_equal
    assert enough == 1.0, [call for call in calls[kind] if call.missing_bytes > 0][:3]


def test_a_fourier_transform_takes_no_less_than_on_the_gpu(calls: dict[str, list[Call]]) -> None:
    """Those of powers of two and small primes take nothing besides their result, as there."""
    equal, enough = shares(calls["fourier"])

    assert len(calls["fourier"]) >= 150
    assert equal >= 0.7
    assert enough == 1.0


def of_convolutions(calls: dict[str, list[Call]]) -> Iterator[tuple[str, list[Call]]]:
    """Yield the calls of convolutions by direction, element size and layout."""
    groups = defaultdict(list)
    for call in calls["convolution"]:
        config = call.config
        groups[f"{call.name} {config['dtype'] == 'float32'} {config['channels_last']}"].append(call)
    yield from groups.items()


PARTIAL_SUMS_BYTES = 132 * 128 * 256 * 4
"""By how much a kernel in clusters may differ on an H100: the range has it (csrc/backend.c)."""


def test_convolutions_take_what_cudnn_asks_for_without_a_gpu(asking: dict[str, list[Call]]) -> None:
    """Nine of ten to the block, the others by what their partial sums may differ, more or less."""
    group = asking["convolution"]
    differing = [abs(call.missing_bytes) for call in group if not call.is_equal]

    assert len(group) > 4000
    assert shares(group)[0] >= 0.91
    assert max(differing) <= PARTIAL_SUMS_BYTES
    assert sum(peak(call.simulated) for call in group) == pytest.approx(sum(peak(call.recorded) for call in group), rel=0.01)


def test_what_is_tried_takes_what_it_took_on_the_gpu(asking: dict[str, list[Call]]) -> None:
    """`torch.backends.cudnn.benchmark`: the largest workspace of what PyTorch tries, in the first call."""
    group = asking["benchmarked"]

    lacking = [peak(call.recorded) - peak(call.simulated) for call in group]

    assert len(group) == 360
    assert max(map(abs, lacking)) <= PARTIAL_SUMS_BYTES
    assert sum(abs(each) <= 512 for each in lacking) >= 0.8 * len(group)


def test_most_convolutions_take_no_more_than_their_allowance(calls: dict[str, list[Call]]) -> None:
    """Which kernel cuDNN picks is not known: nine of ten have enough; in sum each direction and layout has what they take."""
    for name, group in of_convolutions(calls):
        lacking = [call for call in group if call.missing_bytes > 2**20]

        assert len(lacking) <= 0.12 * len(group), name
        assert sum(peak(call.simulated) for call in group) >= 0.95 * sum(peak(call.recorded) for call in group), name
    assert shares(calls["convolution"])[1] >= 0.9


def test_an_allowance_for_convolutions_is_not_twice_what_they_take(calls: dict[str, list[Call]]) -> None:
    """In sum over all: it is there for the kernels that copy, and about half of them do."""
    group = calls["convolution"]

    assert sum(peak(call.simulated) for call in group) <= 1.4 * sum(peak(call.recorded) for call in group)

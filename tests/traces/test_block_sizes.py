"""The sizes of CUDA's caching allocator are those of the PyTorch that is installed."""

from __future__ import annotations

import re
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from memplan.traces import block_sizes


@pytest.fixture(scope="module")
def header() -> str:
    """The header of the allocator's sizes, which comes with PyTorch."""
    spec = PathFinder.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "include" / "c10" / "core" / "AllocatorConfig.h").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "size_bytes"),
    [
        ("kMinBlockSize", block_sizes.MIN_BLOCK_BYTES),
        ("kSmallSize", block_sizes.MAX_SMALL_BYTES),
        ("kSmallBuffer", block_sizes.SMALL_SEGMENT_BYTES),
        ("large_segment_size_", block_sizes.LARGE_SEGMENT_BYTES),
        ("kMinLargeAlloc", block_sizes.MIN_LARGE_BYTES),
        ("kRoundLarge", block_sizes.LARGE_ROUND_BYTES),
    ],
)
def test_a_size_is_that_of_pytorchs_header(header: str, name: str, size_bytes: int) -> None:
    """Source: c10/core/AllocatorConfig.h of the installed PyTorch."""
    found = re.search(rf"\b{name}(?: = |{{)(\d+)", header)

    assert found is not None, f"this PyTorch's header has no {name}"
    assert size_bytes == int(found[1])

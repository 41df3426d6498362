"""A GPU as it is planned for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from memplan.hardware.gpu import GpuSpec


@given(total=st.integers(1, 2**50), used=st.integers(0, 2**50))
def test_what_is_free_is_what_others_leave(total: int, used: int):
    """And never less than nothing, when the two were read a moment apart."""
    card = GpuSpec(name="a GPU", total_memory_bytes=total, others_used_bytes=used, origin="test")

    assert card.free_memory_bytes == (total - used if used < total else 0)


@pytest.mark.parametrize("change", [{"total_memory_bytes": 0}, {"others_used_bytes": -1}, {"multiprocessors": 0}, {"vram": 1}])
def test_a_card_that_cannot_be_is_refused(change: dict[str, int]):
    """No memory, less than none in use, no multiprocessors, a field that no GPU has."""
    with pytest.raises(ValidationError, match=next(iter(change))):
        GpuSpec.model_validate({"name": "a GPU", "total_memory_bytes": 1, "origin": "test"} | change)


def test_a_gpu_that_runs_the_kernels_of_another_kind_is_rehearsed_as_that_kind():
    """It keeps its own threads, which decide its context; in JSON it is itself."""
    card = GpuSpec(name="a GPU", total_memory_bytes=1, compute_capability=(8, 6), multiprocessors=82, origin="test")
    twin = card.model_copy(update={"kernels_of": ((8, 9), 128)})

    assert twin.endless().kind == ((8, 9), 128)
    assert card.endless().kind == card.kind == twin.kind
    assert twin.model_dump() == card.model_dump()

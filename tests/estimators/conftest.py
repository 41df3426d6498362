"""What the plans of programs share: the GPU, and where their rehearsals are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.units import GIB


@pytest.fixture(scope="module")
def gpu() -> GpuSpec:
    """A GPU that a few thousand samples fill."""
    return find_gpu("t4").model_copy(update={"total_memory_bytes": GIB})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where rehearsals are kept."""
    return tmp_path_factory.mktemp("cache")

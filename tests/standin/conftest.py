"""Rehearsals need Linux, a CUDA build of PyTorch and a C compiler: without them these tests say so and are skipped."""

from __future__ import annotations

import pytest

from memplan.errors import MissingError
from memplan.hardware.torch_install import TorchBuild, find_torch
from memplan.standin.build import build


@pytest.fixture(scope="session")
def torch_build() -> TorchBuild:
    """The PyTorch that rehearsals run."""
    try:
        found = find_torch()
        build(found)
    except MissingError as error:
        pytest.skip(f"no rehearsals here: {error.message}")
    return found

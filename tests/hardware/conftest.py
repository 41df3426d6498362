"""The driver that every test here asks, compiled once."""

from __future__ import annotations

import pytest

from tests.hardware.nvml_driver import Driver, build_driver


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """A driver of today."""
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(autouse=True)
def _every_gpu_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of whoever runs the tests is not meant."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

"""The PyTorch that is installed is found without importing it."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from memplan.errors import MissingError
from memplan.hardware.torch_install import TorchBuild, find_torch
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]


def test_it_is_what_its_package_says(torch_build: TorchBuild) -> None:
    """The version of the package, with CUDA's as PyTorch itself names it, and the folder of its libraries."""
    assert torch_build.version.partition("+")[0] == metadata.version("torch").partition("+")[0]
    assert torch_build.cuda_major >= 11
    assert (torch_build.libraries / "libtorch_cuda.so").exists()


def test_cudnn_is_that_of_its_package(torch_build: TorchBuild) -> None:
    """As cuDNN writes its own version: 92000 for 9.20.0."""
    try:
        major, minor, patch = map(int, metadata.version(f"nvidia-cudnn-cu{torch_build.cuda_major}").split(".")[:3])
    except metadata.PackageNotFoundError:
        pytest.skip("cuDNN is not a package here")

    assert torch_build.cudnn_version == major * 10000 + minor * 100 + patch


@pytest.mark.parametrize(
    ("version", "has_cuda", "problem"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", False, "is not built for CUDA"),
        ("__version__ = '2.5.1+cu124'\ncuda: Optional[str] = '12.4'\n", True, "is older than 2.6"),
    ],
)
def test_a_torch_that_cannot_rehearse_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, has_cuda: bool, problem: str
) -> None:
    """A CPU build, and one from before the allocator of today."""
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text(version)
    if has_cuda:
        (package / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(MissingError, match=problem):
        find_torch()


def test_other_systems_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS and Windows have no CUDA build to rehearse."""
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(MissingError, match="Linux with glibc only"):
        find_torch()


def test_no_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without PyTorch."""
    monkeypatch.setattr(sys, "path", [])

    with pytest.raises(MissingError, match="this Python has no PyTorch"):
        find_torch()

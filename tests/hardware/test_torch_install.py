"""The PyTorch that is installed is found without importing it."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from memplan.errors import MissingError
from memplan.hardware import torch_install
from memplan.hardware.torch_install import TorchBuild, find_torch
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]


def test_it_is_what_its_package_says(torch_build: TorchBuild) -> None:
    """The version of the package, with CUDA's as PyTorch itself names it, and the folder of its libraries."""
    assert torch_build.version.partition("+")[0] == metadata.version("torch").partition("+")[0]
    assert torch_build.cuda_major >= 11
    assert (torch_build.libraries / "libtorch_cuda.so").exists()


def test_cudnn_is_that_of_its_package(torch_build: TorchBuild) -> None:
    """As cuDNN writes its own version: 92000 for 9.20.0, and 8902 for 8.9.2."""
    try:
        major, minor, patch = map(int, metadata.version(f"nvidia-cudnn-cu{torch_build.cuda_major}").split(".")[:3])
    except metadata.PackageNotFoundError:
        pytest.skip("cuDNN is not a package here")

    assert torch_build.cudnn_version == major * (10000 if major >= 9 else 1000) + minor * 100 + patch
    assert torch_build.cudnn == f"{major}.{minor}.{patch}"


@pytest.mark.parametrize(
    ("requirement", "number", "cudnn"),
    [
        ("nvidia-cudnn-cu12 (==8.9.2.26) ; platform_system", 8902, "8.9.2"),  # of 2.1.2
        ("nvidia-cudnn-cu12==9.1.0.70; platform_system", 90100, "9.1.0"),  # of 2.5.1
        ("filelock", 90000, "9.0.0"),
    ],
)
def test_cudnn_that_is_no_package_is_the_one_that_pytorch_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requirement: str, number: int, cudnn: str
) -> None:
    """As its package says; else some cuDNN 9."""
    package = make_package(tmp_path, "__version__ = '2.1.2+cu121'\ncuda: Optional[str] = '12.1'\n", has_cuda=True)
    about = tmp_path / "torch-2.1.2.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Name: torch\nRequires-Dist: {requirement}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch_install, "_version_of", lambda _: None)

    found = find_torch()

    assert (found.libraries, found.cuda_major, found.cudnn_version, found.cudnn) == (package / "lib", 12, number, cudnn)


def make_package(folder: Path, version: str, *, has_cuda: bool) -> Path:
    package = folder / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text(version)
    if has_cuda:
        (package / "lib" / "libtorch_cuda.so").touch()
    return package


@pytest.mark.parametrize(
    ("version", "has_cuda", "problem"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", False, "is not built for CUDA"),
        ("__version__ = '2.0.1+cu118'\ncuda: Optional[str] = '11.8'\n", True, "2.0.1.* is older than 2.1"),
    ],
)
def test_a_torch_that_cannot_rehearse_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, has_cuda: bool, problem: str
) -> None:
    """A CPU build, and one whose tensors do not tell what the recorder follows."""
    make_package(tmp_path, version, has_cuda=has_cuda)
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

"""The PyTorch that is installed is found without importing it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from memplan.errors import MissingError, NoKernelsError
from memplan.hardware import torch_install
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
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


def build_for(folder: Path, flags: str) -> TorchBuild:
    """A PyTorch whose library has *flags* among its texts, as the compiler leaves a literal there."""
    (folder / "libtorch_python.so").write_bytes(b"\x7fELF\0sm_\0is sm_99 \0" + flags.encode() + b"\0compute_\0")
    return TorchBuild("2.13.0+cu130", 13, 92000, folder)


def gpu_of(capability: tuple[int, int] | None) -> GpuSpec:
    return GpuSpec(name="a GPU", total_memory_bytes=16 * 2**30, compute_capability=capability, origin="test")


@pytest.mark.parametrize(
    ("flags", "runs", "fails"),
    [
        # PyTorch 2.13 for CUDA 13.0: a V100 and a P40 are too old; an L4 runs the machine code for 8.6, a B300 that for 10.0.
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 1)], [(6, 1), (7, 0), (7, 2), (13, 0)]),
        # PyTorch 2.1 for CUDA 12.1, before Blackwell was.
        ("sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", [(5, 2), (6, 1), (7, 0), (9, 0)], [(3, 5), (10, 0), (12, 0)]),
        ("sm_80 sm_90 compute_90", [(8, 6), (9, 0), (10, 0), (12, 0)], [(7, 5)]),  # PTX is compiled for what is newer
        ("sm_80 sm_90a", [(8, 9), (9, 0)], [(9, 1), (10, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0)]),  # machine code is not for earlier minor revisions
    ],
)
def test_kernels_run_on_the_kinds_of_gpu_that_they_are_compiled_for(
    tmp_path: Path, flags: str, runs: list[tuple[int, int]], fails: list[tuple[int, int]]
) -> None:
    """As the CUDA C++ programming guide has it of machine code and PTX."""
    build = build_for(tmp_path, flags)

    assert build.kernels == tuple(flags.split())
    assert [build.has_kernels_for(gpu_of(capability)) for capability in (*runs, *fails)] == [True] * len(runs) + [False] * len(fails)


def test_without_knowing_either_kind_a_program_is_taken_to_run(tmp_path: Path) -> None:
    """A size that was typed says nothing of the kind; a build need not say what it has."""
    assert build_for(tmp_path, "sm_90").has_kernels_for(gpu_of(None))
    assert TorchBuild("2.13.0", 13, 92000, tmp_path / "nowhere").has_kernels_for(gpu_of((7, 0)))


def test_a_gpu_without_kernels_is_told_with_what_there_is(tmp_path: Path) -> None:
    """Whatever memory a program takes, it fails there."""
    build = build_for(tmp_path, "sm_75 sm_80")

    with pytest.raises(
        NoKernelsError, match=r"PyTorch 2\.13\.0\+cu130 has no kernels for Tesla V100.* \(compute capability 7\.0\)"
    ) as found:
        build.check_kernels(find_gpu("v100-16"))

    assert "it has those for sm_75, sm_80" in found.value.message
    build.check_kernels(find_gpu("t4"))


def test_the_kernels_are_those_that_pytorch_itself_tells(torch_build: TorchBuild) -> None:
    """`torch.cuda.get_arch_list()` says nothing where there is no GPU; what it is made of does."""
    tells = "import torch; print(torch._C._cuda_getArchFlags())"
    flags = subprocess.run([sys.executable, "-c", tells], capture_output=True, text=True, check=True).stdout

    assert torch_build.kernels == tuple(flags.split())

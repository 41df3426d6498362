"""The PyTorch that is installed here, read from its files: importing it takes longer than a whole plan."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from memplan.errors import MissingError


class TorchBuild(NamedTuple):
    """The PyTorch that a rehearsal would run."""

    version: str
    """As in 2.13.0+cu130."""
    cuda_major: int
    cudnn_version: int
    libraries: Path


def find_torch(python: str | None = None) -> TorchBuild:
    """
    Return the PyTorch of this interpreter, or of that at *python*, without importing it.

    Raises MissingError where there is none that a rehearsal can run: no PyTorch, none for CUDA, an old one, another system.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        raise MissingError("rehearsals run on Linux with glibc only", hint='use `method="analytic"` here')
    origin = _origin() if python is None else _origin_in(python)
    if origin is None:
        raise MissingError(f"{python or 'this Python'} has no PyTorch", hint=_INSTALL)
    folder = Path(origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    version, cuda = (_assigned(name, text) for name in ("__version__", "cuda"))
    if cuda is None or not (folder / "lib" / "libtorch_cuda.so").exists():
        raise MissingError(f"PyTorch {version} of this Python is not built for CUDA", hint=_INSTALL)
    numbers = tuple(map(int, re.findall(r"\d+", version or "0")[:2]))
    if numbers < (2, 6):
        raise MissingError(f"PyTorch {version} is older than 2.6", hint="rehearsals run with PyTorch 2.6 or later")
    return TorchBuild(version or "", int(cuda.split(".")[0]), _cudnn_version(folder.parent), folder / "lib")


def _origin() -> str | None:
    spec = PathFinder.find_spec("torch")  # where a new process would find it, whatever this one has loaded
    return spec.origin if spec is not None else None


def _origin_in(python: str) -> str | None:
    """Return where another interpreter finds torch."""
    looks = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    try:
        answer = subprocess.run([python, "-c", looks], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingError(f"{python} does not run: {error}") from error
    return answer.stdout.strip() or None


_INSTALL = "install PyTorch's CUDA build (it runs without a GPU): `pip install torch===2.13.0`"


def _assigned(name: str, text: str) -> str | None:
    match = re.search(rf"^{name}\b[^=]*= ['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _cudnn_version(packages: Path) -> int:
    """Return cuDNN's number, as 92000 for 9.20.0, from the package that PyTorch depends on and that mostly lies beside it."""
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        beside = next(packages.glob(f"{name.replace('-', '_')}-*.dist-info"), None)
        version = beside.name.removesuffix(".dist-info").rpartition("-")[2] if beside else _version_of(name)
        if version is not None:
            major, minor, patch = version.split(".")[:3]
            return int(major) * 10000 + int(minor) * 100 + int(patch)
    return 90000


def _version_of(package: str) -> str | None:
    from importlib import metadata  # noqa: PLC0415  (takes longer to load than all the rest of a plan that is kept)

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

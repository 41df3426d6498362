"""The PyTorch that is installed here, read from its files: importing it takes longer than a whole plan."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memplan.errors import MissingError, NoKernelsError

if TYPE_CHECKING:
    from memplan.hardware.gpu import GpuSpec

OLDEST = (2, 1)
"""The first PyTorch whose tensors tell when a gradient has been accumulated (`register_post_accumulate_grad_hook`)."""


class TorchBuild(NamedTuple):
    """The PyTorch that a rehearsal would run."""

    version: str
    """As in 2.13.0+cu130."""
    cuda_major: int
    cudnn_version: int
    """As cuDNN says it: 92000 for 9.20.0. Before 9.0 the minor number had one digit: 8902 for 8.9.2 (cudnn_version.h)."""
    libraries: Path

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the first two numbers of its version."""
        return _numbers(self.version)

    @property
    def cudnn(self) -> str:
        """Return cuDNN's version as its package has it: 9.20.0."""
        major, rest = divmod(self.cudnn_version, 10_000 if self.cudnn_version >= 90_000 else 1000)
        return f"{major}.{rest // 100}.{rest % 100}"

    @property
    def nccl_version(self) -> tuple[int, int]:
        """Return NCCL's version, as the name of its package beside PyTorch says it; that of PyTorch 2.11 where it is not there."""
        names = (path.name for path in self.libraries.parent.parent.glob("nvidia_nccl_cu*.dist-info"))
        found = (re.search(r"-(\d+)\.(\d+)", name) for name in names)
        return next(((int(one[1]), int(one[2])) for one in found if one), (2, 28))

    @property
    def nccl_number(self) -> str:
        """Return the same as NCCL says it, of a version without a patch: 22900 for 2.29."""
        return "{}{:02}00".format(*self.nccl_version)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return what its kernels are compiled for, as `torch.cuda.get_arch_list()` does; nothing where it does not say that."""
        return _kernels(self.libraries / "libtorch_python.so")

    def has_kernels_for(self, gpu: GpuSpec) -> bool:
        """Say whether its kernels run on *gpu*; where either's kind is not known, they are taken to."""
        if gpu.compute_capability is None or not self.kernels:
            return True
        return any(_runs(kernel, gpu.compute_capability) for kernel in self.kernels)

    def check_kernels(self, gpu: GpuSpec) -> None:
        """Raise NoKernelsError where programs fail on *gpu* whatever memory they take: this PyTorch has no kernels for it."""
        if self.has_kernels_for(gpu):
            return
        assert gpu.compute_capability is not None
        capability = ".".join(map(str, gpu.compute_capability))
        raise NoKernelsError(
            f"PyTorch {self.version} has no kernels for {gpu.name} (compute capability {capability}), and programs fail there: "
            f"it has those for {', '.join(self.kernels)}",
            hint="install a PyTorch that has them: builds for an earlier CUDA support older GPUs, later builds newer GPUs",
        )


@lru_cache(maxsize=8)
def _kernels(library: Path) -> tuple[str, ...]:
    """Return the list that PyTorch's build leaves as text in *library* (CUDA_ARCH_FLAGS in torch/csrc/cuda/Module.cpp)."""
    content = library.read_bytes() if library.exists() else b""
    # Of 30 MB: where it may begin is found by literals, which is three times as fast as by the whole pattern.
    starts = (found.start() for begin in (rb"\0sm_", rb"\0compute_") for found in re.finditer(begin, content))
    texts = [found[1] for start in starts if (found := _KERNELS.match(content, start))]
    return tuple(max(texts, key=len).decode().split()) if texts else ()


_KERNELS = re.compile(rb"\0((?:(?:sm|compute)_\d+[a-z]? ?)+)\0")


def _runs(kernel: str, capability: tuple[int, int]) -> bool:
    """
    Say whether what is compiled for *kernel* runs on a GPU of *capability*.

    As the CUDA C++ programming guide has it: machine code (sm) within its major revision, from its minor one on; PTX (compute) from its
    revision on; what is made for one revision's own features (sm_90a) on that alone.
    """
    kind, _, number = kernel.partition("_")
    digits = number.rstrip("abcdefghijklmnopqrstuvwxyz")
    compiled_for = int(digits[:-1]), int(digits[-1])
    if digits != number:
        return capability == compiled_for
    return capability >= compiled_for and (kind == "compute" or capability[0] == compiled_for[0])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


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
    if _numbers(version or "0") < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingError(f"PyTorch {version} is older than {oldest}", hint=f"rehearsals run with PyTorch {oldest} or later")
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
    """
    Return cuDNN's number, from the package that PyTorch depends on and that mostly lies beside it.

    Where cuDNN is not a package, it is the one that PyTorch's own package asks for.
    """
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        beside = next(packages.glob(f"{name.replace('-', '_')}-*.dist-info"), None)
        version = beside.name.removesuffix(".dist-info").rpartition("-")[2] if beside else _version_of(name)
        if version is not None:
            return _cudnn_number(version)
    about = next(packages.glob("torch-*.dist-info/METADATA"), None)
    wanted = (
        re.search(r"^Requires-Dist: nvidia-cudnn-cu\d+ ?\(?==([\d.]+)", about.read_text(encoding="utf-8"), re.MULTILINE) if about else None
    )
    return _cudnn_number(wanted[1]) if wanted else 90_000


def _cudnn_number(version: str) -> int:
    major, minor, patch = map(int, version.split(".")[:3])
    return major * (10_000 if major >= 9 else 1000) + minor * 100 + patch


def _version_of(package: str) -> str | None:
    from importlib import metadata  # noqa: PLC0415  (takes longer to load than all the rest of a plan that is kept)

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

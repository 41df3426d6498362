"""Building the stand-in device: three shared libraries, compiled once for each PyTorch and kept.

The C files beside this one serve what matters; every other function that PyTorch wants becomes one that does nothing (a kernel of a
library) or, where its answer would be a size, says that it is not served. No CUDA header is needed: only a C compiler.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from memplan.errors import MissingError

SOURCES = Path(__file__).with_name("csrc")
RUNTIME, DRIVER, NVML, NVRTC = "libstandin.so", "libcuda.so.1", "libnvidia-ml.so.1", "libnvrtc.so"
_PARTS = {
    RUNTIME: ("card.c", "memory.c", "device.c", "streams.c", "graphs.c", "libraries.c", "backend.c", "rnn.c"),
    DRIVER: ("driver.c",),
    NVML: ("nvml.c",),
    NVRTC: ("nvrtc.c",),
}

# Libraries of PyTorch that call CUDA; the others are large and call none of it.
_CALLERS = (
    "libc10_cuda.so",
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_python.so",
    "libcaffe2_nvrtc.so",
    "libtorch_nvshmem.so",
)

# Packages with CUDA code of their own: what they want of CUDA is served too, or named.
_EXTENSIONS = ("bitsandbytes/libbitsandbytes_cuda{cuda}*.so", "flash_attn*.so", "xformers/*.so", "torchvision/*.so", "causal_conv1d*.so")

# Functions that answer something: success without an answer would be garbage, and sooner or later a wrong number.
_ANSWERS = re.compile(r"Get|Query|Find|Import|Export|Open|MakePlan|Estimate|Managed|Conditional|bufferSize|[sS]izes?(2|Ext|_v8)?$|PlanInit")
# Functions that make a handle and return it by their first argument.
_MAKES_A_HANDLE = re.compile(r"(cublas|cusolver|cusparse|cudnn)\w*Create(?!Identity)\w*|cublasLt\w*Create")
# Functions after which the device holds what it held: settings, destruction, waiting.
_COMPUTES_NOTHING = re.compile(r"\w*(Set|Destroy|Synchronize|Record|Wait|Profiler|Enable|Unload|Free|Release|Retain)\w*")
_NOT_SUPPORTED = {"cudnn": 3000, "cufft": 16, "cusolver": 9, "cusparse": 10, "cublas": 15}
_DRIVER_NOT_SUPPORTED = 801


class TorchBuild(NamedTuple):
    """The PyTorch that a rehearsal would run."""

    version: str
    """As in 2.13.0+cu130."""
    cuda_major: int
    cudnn_version: int
    libraries: Path


def find_torch() -> TorchBuild:
    """
    Return the PyTorch of this interpreter, without importing it.

    Raises MissingError where there is none that a rehearsal can run: no PyTorch, none for CUDA, an old one, another system.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        raise MissingError("rehearsals run on Linux with glibc only", hint="use `--method analytic` here")
    spec = PathFinder.find_spec("torch")  # where a new process would find it, whatever this one has loaded
    if spec is None or spec.origin is None:
        raise MissingError("this Python has no PyTorch", hint=_INSTALL)
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    version, cuda = (_assigned(name, text) for name in ("__version__", "cuda"))
    if cuda is None or not (folder / "lib" / "libtorch_cuda.so").exists():
        raise MissingError(f"PyTorch {version} of this Python is not built for CUDA", hint=_INSTALL)
    numbers = tuple(map(int, re.findall(r"\d+", version or "0")[:2]))
    if numbers < (2, 6):
        raise MissingError(f"PyTorch {version} is older than 2.6", hint="rehearsals run with PyTorch 2.6 or later")
    return TorchBuild(version or "", int(cuda.split(".")[0]), _cudnn_version(folder.parent), folder / "lib")


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


def build(torch: TorchBuild, cache: Path | None = None) -> Path:
    """
    Return the folder with the device's libraries for *torch*, compiling them where they are not there yet.

    Two processes may build at once: each compiles into a folder of its own and the first to finish gives it its name. Raises MissingError
    when there is no C compiler, or it fails.
    """
    cache = cache or default_cache()
    folder = cache / f"standin-{_fingerprint(torch)}"
    if folder.is_dir():
        return folder
    compiler = _compiler()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    except OSError:  # a cache that cannot be written: built for this run alone
        working = cache = Path(tempfile.mkdtemp(prefix="memplan-standin-"))
        atexit.register(shutil.rmtree, working, ignore_errors=True)
        folder = working
    try:
        _compile_all(torch, compiler, working)
    except BaseException:  # Ctrl-C too: half a device is of no use to anybody
        shutil.rmtree(working, ignore_errors=True)
        raise
    if folder != working:
        try:
            working.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(working)
    return folder


def default_cache() -> Path:
    """Return memplan's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memplan"


def _fingerprint(torch: TorchBuild) -> str:
    digest = hashlib.sha256(repr((torch.version, torch.cuda_major, torch.cudnn_version, platform.machine())).encode())
    for path in _extensions(torch):
        digest.update(f"{path} {path.stat().st_mtime_ns}".encode())
    for path in (*sorted(SOURCES.iterdir()), Path(__file__), Path(__file__).with_name("symbols.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    wanted = [os.environ.get("CC", ""), "cc", "gcc", "clang", sysconfig.get_config_var("CC") or ""]
    for name in wanted:
        found = shutil.which(name.split()[0]) if name else None
        if found:
            return found
    raise MissingError("there is no C compiler to build the stand-in device with", hint="install one (`apt install gcc`), or name it in CC")


def _compile_all(torch: TorchBuild, compiler: str, folder: Path) -> None:
    from memplan.standin.symbols import runtime_functions  # noqa: PLC0415  (a reader of libraries, which nobody else needs)

    callers = [torch.libraries / name for name in _CALLERS if (torch.libraries / name).exists()] + _extensions(torch)
    sources = {library: [SOURCES / name for name in names] for library, names in _PARTS.items()}
    served = {library: _defined(paths) for library, paths in sources.items()}
    stubs = {
        RUNTIME: "".join(map(_runtime_stub, sorted(runtime_functions(callers) - served[RUNTIME]))),
        DRIVER: "".join(map(_driver_stub, sorted(_driver_functions(torch, callers) - served[DRIVER]))),
    }
    for library, paths in sources.items():
        if library in stubs:
            path = folder / f"{library}.stubs.c"
            path.write_text('#include "card.h"\n' + stubs[library], encoding="utf-8")
            paths.append(path)
        _compile(torch, compiler, folder / library, paths, soname=_soname(torch, library))
    (folder / "libcuda.so").symlink_to(DRIVER)  # the name that Triton links with


def _extensions(torch: TorchBuild) -> list[Path]:
    """Return the libraries of other packages, beside PyTorch, that call CUDA."""
    packages = torch.libraries.parents[1]
    return sorted(path for pattern in _EXTENSIONS for path in packages.glob(pattern.format(cuda=torch.cuda_major)))


def _driver_functions(torch: TorchBuild, callers: list[Path]) -> set[str]:
    from memplan.standin.symbols import driver_functions, functions_in_sources  # noqa: PLC0415

    triton = torch.libraries.parents[1] / "triton" / "backends" / "nvidia"
    return driver_functions(callers) | functions_in_sources(sorted(triton.glob("*.c")))


def _defined(paths: Iterable[Path]) -> set[str]:
    """Return the functions that the C files define: each begins a line with its type, or is made by a macro that names it."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    defined = set(re.findall(r"^(?:int|void|void \*\*|size_t|unsigned|char|const char \*) ?\*{0,2}(\w+)\(", text, re.MULTILINE))
    kinds = re.findall(r"DESCRIPTOR\((\w+)\)", text)
    defined |= {f"cudnn{verb}{kind}Descriptor" for kind in kinds for verb in ("Create", "Destroy")}
    return defined | set(re.findall(r"^NEEDS_NOTHING\((\w+)", text, re.MULTILINE))


def _runtime_stub(name: str) -> str:
    library = re.match(r"_*[a-z]+", name)
    code = _NOT_SUPPORTED.get(library[0] if library else "", _DRIVER_NOT_SUPPORTED)
    if _MAKES_A_HANDLE.fullmatch(name):
        return f"int {name}(void **out) {{ *out = new_handle(); return 0; }}\n"
    if _ANSWERS.search(name):
        return f'int {name}(void) {{ return not_served("{name}", {code}); }}\n'
    if _COMPUTES_NOTHING.fullmatch(name):
        return f"int {name}(void) {{ return 0; }}\n"
    return f"int {name}(void) {{ kernel_ran(); return 0; }}\n"


def _driver_stub(name: str) -> str:
    return f'int {name}(void) {{ return not_served("{name}", {_DRIVER_NOT_SUPPORTED}); }}\n'


def _soname(torch: TorchBuild, library: str) -> str:
    """Return the name by which *library* is looked up: NVRTC's has CUDA's version, and gives that name to its symbols too."""
    return f"{library}.{torch.cuda_major}" if library == NVRTC else library


def _compile(torch: TorchBuild, compiler: str, output: Path, sources: list[Path], *, soname: str) -> None:
    versions = output.with_suffix(".versions")
    versions.write_text(f"{soname} {{ global: *; }};\n", encoding="utf-8")
    command = [
        *(compiler, "-shared", "-fPIC", "-O1", "-w", f"-I{SOURCES}", f"-Wl,-soname,{soname}"),
        *(f"-DCUDA_MAJOR={torch.cuda_major}", f"-DCUDNN_VERSION={torch.cudnn_version}"),
        *((f"-Wl,--version-script={versions}",) if output.name == NVRTC else ()),
        *(*map(str, sources), "-o", str(output), "-ldl", "-lpthread"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = "\n".join(result.stderr.splitlines()[:5])
        raise MissingError(
            f"{compiler} could not build the stand-in device: {said}", hint="try another compiler: CC=clang memplan rehearse …"
        )

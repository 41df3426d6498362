"""Building the simulated GPU: three shared libraries, compiled once for each PyTorch and kept.

The C files beside this one serve what matters; every other function that PyTorch wants becomes one that does nothing, where its name says
that nobody expects more (a kernel of a library), or else says that it is not served. No CUDA header is needed: only a C compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from memplan.errors import MissingError
from memplan.hardware.cache_dir import default_cache, private_cache, temporary_folder
from memplan.hardware.torch_install import TorchBuild

SOURCES = Path(__file__).with_name("csrc")
RUNTIME, DRIVER, NVML, NVRTC = "libstandin.so", "libcuda.so.1", "libnvidia-ml.so.1", "libnvrtc.so"
_PARTS = {
    RUNTIME: (
        *("card.c", "contents.c", "checks.c", "memory.c", "attributes.c", "device.c", "streams.c", "graphs.c", "libraries.c", "solvers.c"),
        *("backend.c", "rnn.c", "nccl.c", "python.c"),
    ),
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

# What becomes of a function that the C files do not serve. It is answered with success only where its name says that nothing more is
# expected of it than what happens on the device: it computes there, it sets or ends something, or it makes a handle. Every other one, as
# any that a new PyTorch brings, says that it is not served, and no number comes of that rehearsal: success would leave its caller with
# garbage where it gave a place for an answer, with a callback that is never called, or with host memory that nobody wrote. So a pattern is
# only added here after a look at the function's declaration in CUDA's headers; tests/standin/test_build.py looks at them too.

# Ends of functions that make a sparse matrix, which is more than a handle: products ask how large it is (solvers.c).
_SPARSE_MATRIX = r"(Const)?(Coo|Csr|Csc|Bsr|\w+Ell)$"

# Functions that answer on the host, whatever else their names say.
_ANSWERS = re.compile(
    rf"cusparseCreate{_SPARSE_MATRIX}"
    r"|Get|Query|Find|Import|Export|Open|MakePlan|Estimate|Managed|Conditional|bufferSize|[sS]izes?(2|Ext|_v8)?$|PlanInit"
    r"|zeroPivot|[nN]nz|SpVV|SpGEMM_(workEstimation|compute|estimateMemory)|gesvd[ap]|Search"
    r"|cublas\w*(dot[cu]?|nrm2|asum|amax|amin|rotm?g|Dotc?Ex|Nrm2Ex|AsumEx|Iam\w+Ex|Rotm?gEx)(_v2)?(_64)?$"
)
# Functions that make a handle and return it by their first argument.
_MAKES_A_HANDLE = re.compile(
    rf"(cublas|cusolver|cusparse|cudnn)\w*Create(?!Identity|{_SPARSE_MATRIX})\w*|cublasLt\w*Create|cusparse\w+_createDescr"
)
# Functions after which the device holds what it held: settings, destruction, waiting, what compiled code registers.
_COMPUTES_NOTHING = re.compile(
    r"(cublas|cusolver|cusparse(?!Lt)|cudnn|cufft)\w*(Set|Destroy|destroyDescr)\w*"
    r"|cudaEvent(Destroy|Record\w*|Synchronize)|cudaStream(Destroy|WaitEvent|SetAttribute|CopyAttributes|UpdateCaptureDependencies\w*)"
    r"|cudaGraph(Exec)?Destroy|cudaGraphUpload"
    r"|cudaFuncSet\w+|cudaKernelSetAttributeForDevice|cudaDeviceSet(Limit|CacheConfig|SharedMemConfig)|cudaSetDeviceFlags"
    r"|cudaDevice(En|Dis)ablePeerAccess|cudaLibraryUnload|cudaProfiler(Start|Stop)|cudaCtxResetPersistingL2Cache|__cudaRegister\w+"
)
# Functions that read and write the device's memory and nothing else. (cublasCsscal is one, cublasSetStream and cusparseSetStream are not.)
_COMPUTES = re.compile(
    r"cublas[SDCZ][a-z]\w*|cublasGemm\w+|cublas(Axpy|Scal|Rot)Ex|cublasLtMatmul|cublasLtMatrixTransform"
    r"|cusolverDn[SDCZX][a-z]\w*"
    r"|cusparse[SDCZX][a-z]\w*|cusparse(SpMM|SpMV|SpSM|SpSV|SpGEMM|SDDMM)\w*|cusparseCreateIdentityPermutation"
    r"|cudnn\w+(Forward|Backward)\w*|cudnnCTCLoss(_v8)?|cudnn(Transform|Add|Scale)Tensor\w*|cudnnRestoreDropoutDescriptor"
    r"|cufft(Xt)?Exec\w*"
    r"|cudaLaunch\w*Kernel\w*|cudaMemcpyToSymbol(Async)?"
)
_NOT_SUPPORTED = {"cudnn": 3000, "cufft": 16, "cusolver": 9, "cusparse": 10, "cublas": 15, "nccl": 5}
_DRIVER_NOT_SUPPORTED = 801


def build(torch: TorchBuild, cache: Path | None = None) -> Path:
    """
    Return the folder with the device's libraries for *torch*, compiling them where they are not there yet.

    Two processes may build at once: each compiles into a folder of its own and the first to finish gives it its name. Where *cache* cannot
    be written, they are built for this process alone. Raises MissingError when there is no C compiler, or it fails.
    """
    return path_for_variables(_built(torch, cache or default_cache()))


def _built(torch: TorchBuild, cache: Path) -> Path:
    name = f"standin-{_fingerprint(torch)}"
    if _is_folder(cache / name):
        return cache / name
    compiler = _compiler()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    except OSError:
        cache = private_cache()
        if _is_folder(cache / name):
            return cache / name
        working = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        _compile_all(torch, compiler, working)
    except BaseException:  # Ctrl-C too: half a device is of no use to anybody
        shutil.rmtree(working, ignore_errors=True)
        raise
    try:
        working.rename(cache / name)
    except OSError:  # another process was first
        shutil.rmtree(working)
    return cache / name


_SEPARATORS = re.compile("[:;$]")
"""What LD_LIBRARY_PATH is split at or expanded at (ld.so(8)), and PYTHONPATH at its colon: neither can quote."""


def path_for_variables(folder: Path) -> Path:
    """Return a path of *folder* that LD_LIBRARY_PATH and PYTHONPATH can hold: itself, or a link to it of this process."""
    if not _SEPARATORS.search(str(folder)):
        return folder
    link = _links() / folder.name
    with contextlib.suppress(FileExistsError):  # made before
        link.symlink_to(folder.absolute())
    return link


@lru_cache(maxsize=1)
def _links() -> Path:
    """Return a folder for links, of this process alone, whose path those variables can hold."""
    places = [place for place in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm") if not _SEPARATORS.search(place)]
    for place in places:
        with contextlib.suppress(OSError):
            return temporary_folder("memplan-links-", place)
    raise MissingError(
        "the path of memplan's cache has one of `:`, `;` and `$`, and so has that of every folder for temporary files",
        hint="set XDG_CACHE_HOME to a folder whose path has none of them",
    )


def _is_folder(path: Path) -> bool:
    """Say whether *path* is a folder that this user can see: `Path.is_dir` of some Pythons raises below a folder of another user."""
    try:
        return path.is_dir()
    except OSError:
        return False


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
        found = (shutil.which(name) or shutil.which(name.split()[0])) if name.strip() else None  # "gcc -m64", "/opt/my tools/gcc"
        if found:
            return found
    raise MissingError("no C compiler to build the simulated GPU with", hint="install one (`apt install gcc`), or name it in CC")


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

    triton = torch.libraries.parents[1] / "triton"
    folders = (triton / "backends" / "nvidia", triton / "runtime" / "backends")  # the second before Triton 3
    return driver_functions(callers) | functions_in_sources(sorted(path for folder in folders for path in folder.glob("*.c")))


def _defined(paths: Iterable[Path]) -> set[str]:
    """Return the functions that the C files define: each begins a line with its type, or with the macro that makes it or them."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    defined = set(re.findall(r"^(?:int|void|void \*\*|size_t|unsigned|char|const char \*) ?\*{0,2}(\w+)\(", text, re.MULTILINE))
    kinds = re.findall(r"DESCRIPTOR\((\w+)\)", text)
    defined |= {f"cudnn{verb}{kind}Descriptor" for kind in kinds for verb in ("Create", "Destroy")}
    for names in re.findall(r"^OF_FOUR_TYPES\((\w+), (\w+)", text, re.MULTILINE):  # of real matrices, and of complex ones
        defined |= {f"cusolverDn{letter}{name}" for letters, name in zip(("SD", "CZ"), names, strict=True) for letter in letters}
    return defined | set(re.findall(r"^[A-Z_]+\((cu\w+)", text, re.MULTILINE))


def _runtime_stub(name: str) -> str:
    if _MAKES_A_HANDLE.fullmatch(name):
        return f"int {name}(void **out) {{ *out = new_handle(); return 0; }}\n"
    if not _ANSWERS.search(name) and _COMPUTES_NOTHING.fullmatch(name):
        return f"int {name}(void) {{ return 0; }}\n"
    if not _ANSWERS.search(name) and _COMPUTES.fullmatch(name):
        return f"int {name}(void) {{ kernel_ran(); return 0; }}\n"
    library = re.match(r"_*[a-z]+", name)
    code = _NOT_SUPPORTED.get(library[0] if library else "", _DRIVER_NOT_SUPPORTED)
    return f'int {name}(void) {{ return not_served("{name}", {code}); }}\n'


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
        *(("-Xlinker", f"--version-script={versions}") if output.name == NVRTC else ()),  # -Wl would split its path at a comma
        *(*map(str, sources), "-o", str(output), "-ldl", "-lpthread"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = "\n".join(result.stderr.splitlines()[:5])
        raise MissingError(
            f"{compiler} could not build the simulated GPU: {said}", hint="try another compiler: CC=clang memplan rehearse …"
        )

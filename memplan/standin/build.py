"""Building the simulated GPU: three shared libraries, compiled once for each PyTorch and kept.

The C files beside this one serve what matters; every other function that PyTorch wants becomes one that does nothing, where its name says
that nobody expects more (a kernel of a library), or else says that it is not served. No CUDA header is needed: only a C compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from memplan.hardware.cache_dir import default_cache
from memplan.hardware.torch_install import TorchBuild
from memplan.standin.compiled_libraries import compile_library, find_compiler, made_once, path_for_variables

SOURCES = Path(__file__).with_name("csrc")
RUNTIME, DRIVER, NVML, NVRTC = "libstandin.so", "libcuda.so.1", "libnvidia-ml.so.1", "libnvrtc.so"
_PARTS = {
    RUNTIME: (
        *(
            "card.c",
            "addresses.c",
            "contents.c",
            "checks.c",
            "memory.c",
            "attributes.c",
            "device.c",
            "streams.c",
            "clock.c",
            "graphs.c",
            "libraries.c",
        ),
        *("products.c", "solvers.c", "backend.c", "cudnn.c", "rnn.c", "nccl.c", "python.c"),
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
ASKED_CUDNN = range(91_900, 92_500)
"""
The versions of cuDNN that are asked without a GPU which kernel they would take: 9.19 (PyTorch 2.11) to 9.24 (2.14), which were tried.

They can be from 9.11 on (cudnn-frontend, samples/cpp/misc/deviceless_aot_compilation.cpp); what a later one wants of the driver is not
known.
"""

# What its kernels that are compiled at run time look up in the driver, besides what is served: they complain of what is not there.
_NAMED_BY_CUDNN = {"cuStreamGetCtx", "cuLinkCreate", "cuLinkDestroy", "cuOccupancyMaxPotentialClusterSize"}

_NOT_SUPPORTED = {"cudnn": 3000, "cufft": 16, "cusolver": 9, "cusparse": 10, "cublas": 15, "nccl": 5}
_DRIVER_NOT_SUPPORTED = 801


def build(torch: TorchBuild, cache: Path | None = None) -> Path:
    """
    Return the folder with the device's libraries for *torch*, compiling them where they are not there yet.

    Where *cache* cannot be written, they are built for this process alone. Raises MissingError when there is no C compiler, or it fails.
    """
    return path_for_variables(_built(torch, cache or default_cache()))


def _built(torch: TorchBuild, cache: Path) -> Path:
    return made_once(f"standin-{_fingerprint(torch)}", cache, lambda folder: _compile_all(torch, find_compiler(), folder))


class _AskedCudnn(NamedTuple):
    """A cuDNN that can be asked without a GPU."""

    graph: Path
    """Its library of graphs, which loads the others."""
    cublas_lt: Path
    """What its kernels look up, by that name, for matrix products: the simulated GPU's runtime takes its place."""


def _asked_cudnn(torch: TorchBuild) -> _AskedCudnn | None:
    """Return the cuDNN beside *torch* where it is one that can be asked for its kernels, and lies where PyTorch's wheels put it."""
    packages = torch.libraries.parents[1]
    graph = packages / "nvidia" / "cudnn" / "lib" / "libcudnn_graph.so.9"
    cublas_lt = sorted(packages.glob(f"nvidia/*/lib/libcublasLt.so.{torch.cuda_major}"))
    is_asked = torch.cudnn_version in ASKED_CUDNN and graph.exists() and bool(cublas_lt)
    return _AskedCudnn(graph, cublas_lt[0]) if is_asked else None


def _fingerprint(torch: TorchBuild) -> str:
    versions = (torch.version, torch.cuda_major, torch.cudnn_version, platform.machine(), _asked_cudnn(torch))
    digest = hashlib.sha256(repr(versions).encode())
    for path in _extensions(torch) + _triton_sources(torch):
        digest.update(f"{path} {path.stat().st_mtime_ns}".encode())
    parts = (Path(__file__).with_name(name) for name in ("build.py", "compiled_libraries.py", "symbols.py"))
    for path in (*sorted(SOURCES.iterdir()), *parts):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile_all(torch: TorchBuild, compiler: str, folder: Path) -> None:
    from memplan.standin.symbols import defined_symbols, runtime_functions  # noqa: PLC0415  (a reader of libraries, which nobody else needs)

    asked = _asked_cudnn(torch)
    callers = [torch.libraries / name for name in _CALLERS if (torch.libraries / name).exists()] + _extensions(torch)
    sources = {library: [SOURCES / name for name in names] for library, names in _PARTS.items()}
    served = {library: _defined(paths) for library, paths in sources.items()}
    wanted = runtime_functions(callers) - served[RUNTIME]
    of_cublas_lt = {name for name in defined_symbols(asked.cublas_lt) if name.startswith("cublasLt")} if asked else set()
    others = of_cublas_lt - wanted - served[RUNTIME]  # libcublas.so is bound to all of them when it is loaded, and calls none
    stubs = {
        RUNTIME: "".join([*map(_runtime_stub, sorted(wanted)), *map(_not_served_stub, sorted(others))]),
        DRIVER: "".join(map(_driver_stub, sorted(_driver_functions(torch, callers) - served[DRIVER]))),
    }
    for library, text in stubs.items():
        path = folder / f"{library}.stubs.c"
        path.write_text('#include "card.h"\n' + text, encoding="utf-8")
        sources[library].append(path)
    with ThreadPoolExecutor() as pool:
        compiling = [pool.submit(_compile, torch, compiler, folder / library, paths) for library, paths in sources.items()]
        for each in compiling:
            each.result()
    (folder / "libcuda.so").symlink_to(DRIVER)  # the name that Triton links with


def _extensions(torch: TorchBuild) -> list[Path]:
    """Return the libraries of other packages, beside PyTorch, that call CUDA."""
    packages = torch.libraries.parents[1]
    return sorted(path for pattern in _EXTENSIONS for path in packages.glob(pattern.format(cuda=torch.cuda_major)))


def _driver_functions(torch: TorchBuild, callers: list[Path]) -> set[str]:
    from memplan.standin.symbols import driver_functions, functions_in_sources  # noqa: PLC0415

    of_cudnn = _NAMED_BY_CUDNN if _asked_cudnn(torch) else set()
    return driver_functions(callers) | functions_in_sources(_triton_sources(torch)) | of_cudnn


def _triton_sources(torch: TorchBuild) -> list[Path]:
    """Return the C files of the Triton beside PyTorch, which calls the driver."""
    triton = torch.libraries.parents[1] / "triton"
    folders = (triton / "backends" / "nvidia", triton / "runtime" / "backends")  # the second before Triton 3
    return sorted(path for folder in folders for path in folder.glob("*.c"))


def _defined(paths: Iterable[Path]) -> set[str]:
    """Return the functions that the C files define: each begins a line with its type, or with the macro that makes it or them."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    defined = set(re.findall(r"^(?:int|void|void \*\*|size_t|unsigned|char|const char \*) ?\*{0,2}(\w+)\(", text, re.MULTILINE))
    kinds = re.findall(r"DESCRIPTOR\((\w+)\)", text)
    defined |= {f"cudnn{verb}{kind}Descriptor" for kind in kinds for verb in ("Create", "Destroy")}
    for names in re.findall(r"^OF_FOUR_TYPES\((\w+), (\w+)", text, re.MULTILINE):  # of real matrices, and of complex ones
        defined |= {f"cusolverDn{letter}{name}" for letters, name in zip(("SD", "CZ"), names, strict=True) for letter in letters}
    for letter, wide in re.findall(r"\bOF_ONE_TYPE\((\w), \w+, \w+, (\w*)\)", text):
        defined |= {f"cublas{letter}gemm{kind}{wide}" for kind in ("_v2", "StridedBatched")}
    for wide in re.findall(r"\bOF_ANY_TYPE\(\w+, (\w*)\)", text):
        defined |= {f"cublas{kind}{wide}" for kind in ("GemmEx", "SgemmEx", "GemmStridedBatchedEx")}
    return defined | set(re.findall(r"^[A-Z_]+\((cu\w+)", text, re.MULTILINE))


def _runtime_stub(name: str) -> str:
    if _MAKES_A_HANDLE.fullmatch(name):
        return f"int {name}(void **out) {{ *out = new_handle(); return 0; }}\n"
    if not _ANSWERS.search(name) and _COMPUTES_NOTHING.fullmatch(name):
        return f"int {name}(void) {{ return 0; }}\n"
    if not _ANSWERS.search(name) and _COMPUTES.fullmatch(name):
        return f"int {name}(void) {{ kernel_ran(); return 0; }}\n"
    return _not_served_stub(name)


def _not_served_stub(name: str) -> str:
    library = re.match(r"_*[a-z]+", name)
    code = _NOT_SUPPORTED.get(library[0] if library else "", _DRIVER_NOT_SUPPORTED)
    return f'int {name}(void) {{ return not_served("{name}", {code}); }}\n'


def _driver_stub(name: str) -> str:
    return f'int {name}(void) {{ return not_served("{name}", {_DRIVER_NOT_SUPPORTED}); }}\n'


def _soname(torch: TorchBuild, library: str) -> tuple[str, str]:
    """
    Return the name by which *library* is looked up, and which of its symbols have that name as their version.

    NVRTC is looked up with CUDA's version. Where cuDNN is asked, the runtime is cuBLASLt to it, whose functions its kernels look up there.
    """
    if library == NVRTC:
        return f"{library}.{torch.cuda_major}", "*"
    if library == RUNTIME and _asked_cudnn(torch):
        return f"libcublasLt.so.{torch.cuda_major}", "cublasLt*"
    return library, ""


def _compile(torch: TorchBuild, compiler: str, output: Path, sources: list[Path]) -> None:
    soname, versioned = _soname(torch, output.name)
    versions = output.with_suffix(".versions")
    versions.write_text(f"{soname} {{ global: {versioned}; }};\n", encoding="utf-8")
    asked = _asked_cudnn(torch)
    options = [
        *("-O1", f"-I{SOURCES}", f"-Wl,-soname,{soname}"),
        *(f"-DCUDA_MAJOR={torch.cuda_major}", f"-DCUDNN_VERSION={torch.cudnn_version}"),
        *((f"-DCUDNN_GRAPH={_c_string(str(asked.graph))}",) if asked else ()),
        *(("-Xlinker", f"--version-script={versions}") if versioned else ()),  # -Wl would split its path at a comma
    ]
    compile_library(compiler, output, sources, *options)


def _c_string(text: str) -> str:
    """Return *text* as C writes it: what is no letter, digit or usual sign of a path by its number."""
    plain = re.compile(rb"[A-Za-z0-9/._+-]")
    return '"' + "".join(chr(byte) if plain.match(bytes([byte])) else f"\\{byte:03o}" for byte in os.fsencode(text)) + '"'

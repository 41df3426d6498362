"""Building the device."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memplan.errors import MissingError
from memplan.hardware.torch_install import TorchBuild
from memplan.standin.build import DRIVER, NVML, RUNTIME, SOURCES, _defined, _runtime_stub, build
from memplan.standin.symbols import driver_functions, functions_in_sources, runtime_functions, undefined_symbols


def test_it_is_built_once_and_kept(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Three libraries, and the second call finds them."""
    folder = build(torch_build, tmp_path)
    built = (folder / RUNTIME).stat().st_mtime_ns

    assert build(torch_build, tmp_path) == folder
    assert (folder / RUNTIME).stat().st_mtime_ns == built
    assert {RUNTIME, DRIVER, NVML} <= {path.name for path in folder.iterdir()}
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.heavy
def test_two_processes_may_build_at_once(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Both get the same folder, and nothing half made is left."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom memplan.hardware.torch_install import find_torch\n"
        "from memplan.standin.build import build\nprint(build(find_torch(), Path(sys.argv[1])))"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {process.communicate(timeout=120)[0].strip() for process in running}

    assert len(answers) == 1
    assert [str(path) for path in tmp_path.iterdir()] == list(answers)


def test_a_cache_that_cannot_be_written_is_done_without(torch_build: TorchBuild, tmp_path: Path) -> None:
    """The device is built for this run alone."""
    blocked = tmp_path / "file"
    blocked.write_text("no folder")

    folder = build(torch_build, blocked / "cache")

    assert (folder / RUNTIME).exists()


def test_every_function_that_torch_wants_is_there(torch_build: TorchBuild, tmp_path: Path) -> None:
    """The libraries define what PyTorch's want of the runtime, cuBLAS, cuDNN, cuSPARSE, cuSOLVER and cuFFT."""
    wanted = runtime_functions([torch_build.libraries / "libtorch_cuda.so", torch_build.libraries / "libc10_cuda.so"])
    listing = subprocess.run(["nm", "-D", "--defined-only", str(build(torch_build) / RUNTIME)], capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("nm is not here to look with")

    assert len(wanted) > 300
    assert wanted <= {line.split()[-1].partition("@")[0] for line in listing.stdout.splitlines() if line}


def test_undefined_symbols_are_read_off_a_library(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Of a library that calls two functions of CUDA, one of the driver by name, and defines one."""
    source = tmp_path / "caller.c"
    source.write_text(
        "int cudaMalloc(); int cublasCreate_v2(); int printf();\n"
        'const char *looked_up = "cuMemCreate";\nint cudaDefinedHere(void) { return cudaMalloc() + cublasCreate_v2() + printf("x"); }\n'
    )
    library = tmp_path / "caller.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", str(source), "-o", str(library)], check=True)

    assert {"cudaMalloc", "cublasCreate_v2", "printf"} <= set(undefined_symbols(library))
    assert runtime_functions([library]) == {"cudaMalloc", "cublasCreate_v2"}
    assert driver_functions([library]) == {"cuMemCreate"}
    assert {"cuMemCreate", "cuMemCreate_v2"} <= functions_in_sources([source])  # the second where cuda.h renames it


def test_what_the_c_files_define_is_found(tmp_path: Path) -> None:
    """By their first lines, and through the macros that make functions."""
    source = tmp_path / "some.c"
    source.write_text(
        "int cudaOne(int a) { return 0; }\nvoid **__cudaTwo(void) {}\nDESCRIPTOR(Tensor)\n"
        "NEEDS_NOTHING(cudnnThree, void *h)\nstatic int own(void) {}\nOF_FOUR_TYPES(orgqr, ungqr, n, int n, int *out)\n"
    )
    of_four_types = {"cusolverDnSorgqr", "cusolverDnDorgqr", "cusolverDnCungqr", "cusolverDnZungqr"}

    named = {"cudaOne", "__cudaTwo", "cudnnCreateTensorDescriptor", "cudnnDestroyTensorDescriptor", "cudnnThree"}
    assert _defined([source]) == named | of_four_types


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("cublasSgemm_v2", "kernel_ran"),
        ("cublasGemmEx", "kernel_ran"),
        ("cudnnConvolutionForward", "kernel_ran"),
        ("cusparseSpMM", "kernel_ran"),
        ("cusolverDnSpotrf", "kernel_ran"),
        ("cufftXtExec", "kernel_ran"),
        ("cudaLaunchCooperativeKernel", "kernel_ran"),
        ("cublasSetStream_v2", "{ return 0; }"),
        ("cusparseDestroySpMat", "{ return 0; }"),
        ("cudaEventRecord", "{ return 0; }"),
        ("cusparseSpSV_createDescr", "new_handle"),  # by its first argument, as cusparseCreateDnMat
        ("cusparseCreateDnMat", "new_handle"),
        ("cusparseCreateConstBsr", "not_served"),  # a sparse matrix, which products ask for its size
        ("cusparseCreateIdentityPermutation", "kernel_ran"),
        ("cudaMemcpyBatchAsync", "not_served"),  # what would be copied
        ("cudaMemcpy3DAsync", "not_served"),
        ("cudaMemPrefetchAsync", "not_served"),
        ("cudaGraphAddNode", "not_served"),  # a node
        ("cudaUserObjectCreate", "not_served"),  # a callback
        ("cudaLibraryLoadData", "not_served"),  # a library
        ("cusparseXcsrgeam2Nnz", "not_served"),  # how many elements
        ("cusparseXbsrsv2_zeroPivot", "not_served"),  # where
        ("cusparseSpGEMM_workEstimation", "not_served"),  # a size
        ("cublasSnrm2_v2_64", "not_served"),  # a norm
        ("cudaSomethingOfTomorrow", "not_served"),
        ("cudnnSomethingOfTomorrow", "not_served"),
        ("cublasLtSomethingOfTomorrow", "not_served"),
    ],
)
def test_a_function_succeeds_only_where_its_name_says_that_nothing_more_is_expected(name: str, what: str) -> None:
    """A kernel, a setting or a handle; whatever else is not served, so that no caller is left with garbage."""
    assert what in _runtime_stub(name)


HOST = re.compile(r"(?<!\w)(size_t|\w+_t|struct \w+|enum \w+) ?\*|Callback|\(\*|\bh_\w+|HostPtr|position")
"""A place for an answer on the host, or a function to call, in a declaration of CUDA's headers: what is only read says `const`."""


def test_no_function_that_succeeds_gives_an_answer_to_the_host(torch_build: TorchBuild) -> None:
    """By CUDA's own headers, which lie beside some PyTorch: those that are made up take nothing but what is on the device."""
    packages = torch_build.libraries.parents[1] / "nvidia"
    headers = [path.read_text(errors="replace") for path in packages.glob("*/include/*.h")]
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", "\n".join(headers), flags=re.DOTALL)
    if "cudaMemcpy2DAsync(" not in text or "cusparseSpMM(" not in text:
        pytest.skip("CUDA's headers are not here")
    stubs = (build(torch_build) / f"{RUNTIME}.stubs.c").read_text()
    made_up = re.findall(r"^int (\w+)\(void\) \{ (?:kernel_ran\(\); )?return 0; \}$", stubs, re.MULTILINE)
    first: dict[str, str] = {}
    for found in re.finditer(r"\b(cu\w+|nvrtc\w+) ?\(([^;{]*?)\) ?[;{]", text):
        first.setdefault(found[1], found[2])
    declared = {name: first[name] for name in made_up if name in first}

    answering = {
        name: argument.strip()
        for name, arguments in declared.items()
        for argument in arguments.split(",")
        if HOST.search(argument) and "const" not in argument
    }
    on_the_host = {name for name, arguments in declared.items() if name.startswith("cublas") and re.search(r"\b(info|result)\b", arguments)}

    assert len(declared) > 250
    answering.pop("cudaStreamUpdateCaptureDependencies", None)  # reads the nodes that it is given
    assert answering == {}
    assert on_the_host == {f"cublas{kind}getrfBatched" for kind in "SDCZ"}  # of these `info` is on the device (cuBLAS documentation)


def _shape(arguments: str) -> str:
    """Return a letter for each argument: a pointer, 64 bits, or less. CUDA's objects are pointers, its other types are enumerations."""
    objects, wide = r"\*|\w+(Handle|Info|Params|Descr)_t\b", r"long long|int64_t|size_t"
    return "".join("p" if re.search(objects, one) else "l" if re.search(wide, one) else "i" for one in arguments.split(","))


def test_the_solvers_take_the_arguments_that_cudas_headers_say(torch_build: TorchBuild) -> None:
    """One of the wrong size, or too many or few, would put an answer somewhere else. What this CUDA does not have is not looked at."""
    packages = torch_build.libraries.parents[1] / "nvidia"
    headers = [path.read_text(errors="replace") for path in packages.glob("*/include/cus*.h")]
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", "\n".join(headers), flags=re.DOTALL)
    if "cusolverDnSgeqrf_bufferSize(" not in text or "cusparseSpMM(" not in text:
        pytest.skip("CUDA's headers are not here")
    solvers = subprocess.run(["cc", "-E", "-P", str(SOURCES / "solvers.c")], capture_output=True, text=True, check=True).stdout
    served = dict(re.findall(r"\bint (cu(?:solver|sparse)\w+)\(([^{]*?)\) ?\{", solvers))
    declared = {name: arguments for name, arguments in re.findall(r"\b(cu\w+) ?\(([^;{]*?)\) ?;", text) if name in served}

    assert len(declared) > 60
    assert {name: _shape(served[name]) for name in declared} == {name: _shape(arguments) for name, arguments in declared.items()}


def test_without_a_compiler_it_says_what_to_install(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cc, gcc or clang anywhere."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    with pytest.raises(MissingError, match="no C compiler"):
        build(torch_build, tmp_path / "cache")


def test_a_compiler_that_fails_is_quoted(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own first words, and nothing of the attempt is left."""
    broken = tmp_path / "mycc"
    broken.write_text("#!/bin/sh\necho 'mycc: out of luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))

    with pytest.raises(MissingError, match="mycc: out of luck"):
        build(torch_build, tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.heavy
@pytest.mark.parametrize("value", ["{folder}/my cc", "cc -O0", " "])
def test_the_compiler_may_have_a_blank_in_its_path_and_options(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """CC is a path or a command; a blank alone names none."""
    (tmp_path / "my cc").symlink_to(shutil.which("cc") or "")
    monkeypatch.setenv("CC", value.format(folder=tmp_path))

    assert (build(torch_build, tmp_path / "cache") / RUNTIME).exists()


def test_without_a_home_the_cache_is_this_processs(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Neither HOME nor an entry in the list of users: built once in a folder of its own, which goes with it."""
    script = (
        "import pwd\npwd.getpwuid = lambda number: {}[number]\nfrom memplan.hardware.cache_dir import default_cache\n"
        "from memplan.hardware.torch_install import find_torch\nfrom memplan.standin.build import build\n"
        "first = build(find_torch())\nassert build(find_torch()) == first and first.parent == default_cache()\n"
        "print(first.parent)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}

    done = subprocess.run(
        [sys.executable, "-c", script], env=environment | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True
    )

    assert Path(done.stdout.strip()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_looked_into_is_done_without(torch_build: TorchBuild, tmp_path: Path) -> None:
    """The system refuses to say whether there is such a folder: its name is too long. Below the home of another user it is the same."""
    refused = tmp_path / ("x" * 300)

    first, second = build(torch_build, refused / "cache"), build(torch_build, refused / "cache")

    assert (first / RUNTIME).exists()
    assert first == second  # built once for this process

"""Functions of the device whose callers rely on more than what happens there: they are asked directly, without PyTorch."""

from __future__ import annotations

from pathlib import Path

from memplan.execution.device_log import read_device_log
from memplan.hardware.torch_install import TorchBuild
from tests.standin.calls import on_device
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]


def test_a_streams_callback_is_called(torch_build: TorchBuild) -> None:
    """With the stream, success, and the data; but not while the stream captures, which CUDA refuses."""
    on_device(
        torch_build,
        """
called = []
CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_void_p)
callback = CALLBACK(lambda *arguments: called.append(arguments))
stream, graph = c_void_p(), c_void_p()
assert cuda.cudaStreamCreate(byref(stream)) == 0
assert cuda.cudaStreamAddCallback(stream, callback, c_void_p(77), c_uint(0)) == 0
assert called == [(stream.value, 0, 77)]
assert cuda.cudaStreamBeginCapture(stream, 0) == 0
assert cuda.cudaStreamAddCallback(stream, callback, c_void_p(77), c_uint(0)) == 900  # cudaErrorStreamCaptureUnsupported
assert len(called) == 1
""",
    )


def test_managed_memory_is_the_hosts_and_told(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Both sides may use it at one address, and its pages leave a GPU that is full: no allocation fails for them."""
    log = tmp_path / "log"
    on_device(
        torch_build,
        """
taken, attributes = [], (c_ulonglong * 8)()
for size in (2**20, 20 * 2**30):  # more than the GPU has
    pointer = c_void_p()
    assert cuda.cudaMallocManaged(byref(pointer), c_size_t(size), c_uint(1)) == 0
    taken.append(pointer)
ctypes.memset(taken[0], 7, 16)
device = malloc(16)
copy(device, taken[0].value, 16)
assert read(device, 16) == bytes([7]) * 16
assert cuda.cudaPointerGetAttributes(attributes, c_void_p(taken[0].value + 8)) == 0
assert attributes[0] & 0xFFFFFFFF == 3  # cudaMemoryTypeManaged
assert cuda.cudaMemPrefetchAsync(taken[0], c_size_t(2**20), c_int(0), None) == 0
free(malloc(14 * 2**30))
free(taken[0].value)
""",
        MEMPLAN_LOG=str(log),
    )

    assert read_device_log(log).managed_bytes == 20 * 2**30 + 2**20
    assert not read_device_log(log).not_served


def test_a_threads_capture_mode_is_exchanged(torch_build: TorchBuild) -> None:
    """The new one goes in, the one before comes out; each thread has its own."""
    on_device(
        torch_build,
        """
import threading
mode = c_int(2)
assert cuda.cudaThreadExchangeStreamCaptureMode(byref(mode)) == 0
assert mode.value == 0
other = threading.Thread(target=lambda: cuda.cudaThreadExchangeStreamCaptureMode(byref(mode)))
other.start(), other.join()
assert mode.value == 0
assert cuda.cudaThreadExchangeStreamCaptureMode(byref(mode)) == 0
assert mode.value == 2
""",
    )


def test_matrices_and_vectors_go_to_the_device(torch_build: TorchBuild) -> None:
    """Columns with a leading dimension on both sides, elements with a step."""
    on_device(
        torch_build,
        """
p = malloc(4096)
fill(p, 0xEE, 64)
assert cuda.cublasSetMatrixAsync(2, 3, 2, b"aabb..ccdd..eeff..", 3, c_void_p(p), 4, None) == 0
assert read(p, 24) == b"aabb" + b"\\xee" * 4 + b"ccdd" + b"\\xee" * 4 + b"eeff" + b"\\xee" * 4
assert cuda.cublasSetVectorAsync(3, 2, b"11..22..33", 2, c_void_p(p), 1, None) == 0
assert read(p, 8) == b"112233" + b"\\xee" * 2
""",
    )


def test_matrices_and_vectors_come_back(torch_build: TorchBuild) -> None:
    """As they went there."""
    on_device(
        torch_build,
        """
p, back = malloc(4096), ctypes.create_string_buffer(b"." * 12, 12)
write(p, b"aabb__ccdd__")
assert cuda.cublasGetMatrixAsync(2, 2, 2, c_void_p(p), 3, back, 2, None) == 0
assert back.raw == b"aabbccdd...."
assert cuda.cublasGetVector(2, 2, c_void_p(p), 2, back, 1) == 0
assert back.raw == b"aa__ccdd...."
""",
    )


def test_a_number_that_a_library_gives_the_host_is_a_read(torch_build: TorchBuild) -> None:
    """A norm, a dot product of doubles, an index; on the device it is as unknown as anything computed."""
    on_device(
        torch_build,
        """
cuda.memplan_on_read(reader)
p, result = malloc(4096), ctypes.create_string_buffer(b"." * 16, 16)
assert cuda.cublasSnrm2_v2(None, 4, c_void_p(p), 1, result) == 0
assert cuda.cublasDdot_v2(None, 4, c_void_p(p), 1, c_void_p(p), 1, byref(result, 4)) == 0
assert result.raw == b"\\x77" * 12 + b"...."
assert cuda.cublasIsamax_v2(None, 4, c_void_p(p), 1, byref(result, 12)) == 0
assert cuda.cublasDotEx(None, 4, c_void_p(p), 2, 1, c_void_p(p), 2, 1, result, 2, 0) == 0  # CUDA_R_16F
assert asked == [4, 8, 4, 2]
write(p, b"known")
assert cuda.cublasSnrm2_v2(None, 4, c_void_p(p + 64), 1, c_void_p(p)) == 0
assert read(p, 5) == b"\\x77" * 4 + b"n"
""",
    )


def test_batched_solvers_say_that_their_arguments_are_right(torch_build: TorchBuild) -> None:
    """`info` is the host's: 0."""
    on_device(
        torch_build,
        """
info = c_int(-7)
assert cuda.cublasSgeqrfBatched(None, 4, 4, None, 4, None, byref(info), 1) == 0
assert info.value == 0
""",
    )


def test_a_tensors_descriptor_tells_what_it_was_set_to(torch_build: TorchBuild) -> None:
    """Type, dimensions and strides."""
    on_device(
        torch_build,
        """
Ints = c_int * 3
tensor, kind, count, dims, strides = c_void_p(), c_int(), c_int(), Ints(), Ints()
assert cuda.cudnnCreateTensorDescriptor(byref(tensor)) == 0
assert cuda.cudnnSetTensorNdDescriptor(tensor, 2, 3, Ints(2, 3, 4), Ints(12, 4, 1)) == 0
assert cuda.cudnnGetTensorNdDescriptor(tensor, 3, byref(kind), byref(count), dims, strides) == 0
assert (kind.value, count.value, list(dims), list(strides)) == (2, 3, [2, 3, 4], [12, 4, 1])
""",
    )


def test_a_graphs_picture_is_written(torch_build: TorchBuild) -> None:
    """A program that asks for the file finds one; where it cannot be written, that is an error."""
    on_device(
        torch_build,
        """
import pathlib, tempfile
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "graph.dot")
    assert cuda.cudaGraphDebugDotPrint(None, bytes(path), 0) == 0
    assert path.read_text().startswith("digraph")
    assert cuda.cudaGraphDebugDotPrint(None, bytes(path / "below"), 0) != 0
""",
    )


def test_an_unknown_question_writes_nothing(torch_build: TorchBuild) -> None:
    """Of a pointer's attributes the device's address is served; another is refused, and its place is left as it was."""
    on_device(
        torch_build,
        """
answer = ctypes.create_string_buffer(b"." * 8, 8)
assert driver.cuPointerGetAttribute(answer, 2, c_ulonglong(malloc(4096))) == 801
assert answer.raw == b"." * 8
assert driver.cuPointerGetAttribute(answer, 3, c_ulonglong(0x700000000000)) == 0
assert int.from_bytes(answer.raw, sys.byteorder) == 0x700000000000
""",
    )


def test_a_factorizations_workspace_is_told_in_elements_or_bytes(torch_build: TorchBuild) -> None:
    """768·1024 values and 128 bytes for 100 x 10, as an H100 asked for (tests/accuracy/recordings).

    For eigenvectors 3n² + 768n + 2^16 values and some: 2393616 bytes were recorded of n = 179. 2**31 - 1 at most. The newer function
    for the QR decomposition says the same number always, the others nothing where no allowance is wanted.
    """
    on_device(
        torch_build,
        """
import os
elements, on_device, on_host = c_int(-1), c_size_t(7), c_size_t(7)
assert cuda.cusolverDnSgeqrf_bufferSize(None, 100, 10, None, 100, byref(elements)) == 0
assert elements.value == 0
rows, columns, n, sizes = *map(ctypes.c_int64, (100, 10, 179)), (byref(on_device), byref(on_host))
assert cuda.cusolverDnXgeqrf_bufferSize(None, None, rows, columns, 0, None, rows, 0, None, 0, *sizes) == 0  # CUDA_R_32F
assert (on_device.value, on_host.value) == (3 * 2**20 + 128, 0)
os.environ["MEMPLAN_WORKSPACES"] = "1"
for kind, width in {"S": 4, "D": 8, "C": 8, "Z": 16}.items():
    assert getattr(cuda, f"cusolverDn{kind}geqrf_bufferSize")(None, 100, 10, None, 100, byref(elements)) == 0
    assert elements.value == 768 * 1024 + 128 // width
assert cuda.cusolverDnXsyevd_bufferSize(None, None, 1, 0, n, 1, None, n, 1, None, 1, *sizes) == 0  # CUDA_R_64F
assert 2393616 <= on_device.value <= 2393616 * 1.001
assert on_host.value == 0
assert cuda.cusolverDnZheevd_bufferSize(None, 1, 0, 30_000, None, 30_000, None, byref(elements)) == 0
assert elements.value == 2**31 - 1
""",
    )


def test_a_long_fourier_transform_of_a_large_prime_factor_takes_what_was_recorded(torch_build: TorchBuild) -> None:
    """155 of 11402, 2 x 5701 (tests/accuracy/recordings), an odd number as an allowance; of 2^14 nothing."""
    on_device(
        torch_build,
        """
import os
os.environ["MEMPLAN_WORKSPACES"] = "1"
for length, wanted in {11402: 57139200 - 1, 16384: 0}.items():
    n, work = (ctypes.c_longlong * 1)(length), c_size_t(7)
    one, batch = ctypes.c_longlong(1), ctypes.c_longlong(155)
    assert cuda.cufftXtMakePlanMany(1, 1, n, None, one, one, 4, None, one, one, 4, batch, byref(work), 4) == 0  # CUDA_C_32F
    assert work.value == wanted
""",
    )


def test_jacobis_method_takes_what_was_seen(torch_build: TorchBuild) -> None:
    """cusolverDnCheevjBatched, CUDA 11: what it said of matrices of 4 x 4 (cupy/cupy#7261)."""
    on_device(
        torch_build,
        """
import os
os.environ["MEMPLAN_WORKSPACES"] = "1"
elements = c_int()
for batch, seen in {1: 2077, 2: 3126, 4: 5224, 8: 9420, 16: 17812, 32: 34596, 64: 68164, 128: 135300, 256: 269572}.items():
    assert cuda.cusolverDnCheevjBatched_bufferSize(None, 1, 0, 4, None, 4, None, byref(elements), None, batch) == 0
    assert elements.value == seen
""",
    )


def test_an_approximate_svd_tells_residuals(torch_build: TorchBuild) -> None:
    """On the host, one for each matrix: none."""
    on_device(
        torch_build,
        """
residuals = (ctypes.c_double * 3)(7, 7, 7)
row, square = ctypes.c_longlong(4), ctypes.c_longlong(16)
sizes = 1, 4, 4, 4, None, 4, square, None, row, None, 4, square, None, 4, square
assert cuda.cusolverDnSgesvdaStridedBatched(None, *sizes, None, 0, None, residuals, 2) == 0
assert list(residuals) == [0, 0, 7]
""",
    )


def test_a_sparse_matrix_tells_its_size(torch_build: TorchBuild) -> None:
    """Rows, columns and elements, of both layouts."""
    on_device(
        torch_build,
        """
Long = ctypes.c_int64
matrix, told = c_void_p(), (Long(), Long(), Long())
size, places = (Long(3), Long(4), Long(5)), (None, None, None)
assert cuda.cusparseCreateCsr(byref(matrix), *size, *places, 2, 2, 0, 0) == 0
assert cuda.cusparseSpMatGetSize(matrix, *map(byref, told)) == 0
assert [number.value for number in told] == [3, 4, 5]
assert cuda.cusparseDestroySpMat(matrix) == 0
assert cuda.cusparseCreateCoo(byref(matrix), *size, *places, 3, 0, 1) == 0
assert cuda.cusparseSpMatGetSize(matrix, *map(byref, told)) == 0
assert [number.value for number in told] == [3, 4, 5]
""",
    )

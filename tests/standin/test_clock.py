"""The device's clock: events tell what the work between them would take."""

from __future__ import annotations

from memplan.hardware.torch_install import TorchBuild
from tests.standin.calls import on_device
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

CLOCK = """
from ctypes import c_float, c_int64, c_longlong
GIB = 2**30
HALF, SINGLE = 2, 0

def milliseconds(work):
    start, end, found = c_void_p(), c_void_p(), c_float()
    for event in (start, end):
        assert cuda.cudaEventCreate(byref(event)) == 0
    assert cuda.cudaEventRecord(start, None) == 0
    work()
    assert cuda.cudaEventRecord(end, None) == 0
    assert cuda.cudaEventElapsedTime(byref(found), start, end) == 0
    assert cuda.cudaEventDestroy(start) == cuda.cudaEventDestroy(end) == 0
    return found.value

def product(m, n, k, type, *, a=FIRST, ldc=None, compute=68):
    assert cuda.cublasGemmEx(None, 0, 0, m, n, k, None, c_void_p(a), type, m, c_void_p(FIRST), type, k, None, c_void_p(FIRST), type,
                             ldc or m, compute, 0) == 0
"""


def clock(torch_build: TorchBuild, code: str, *, gpu: str = "a100-80") -> None:
    """Run *code* on that GPU, with the functions above."""
    on_device(torch_build, "FIRST = 0x700000000000\n" + CLOCK + code, gpu=gpu)


def test_copies_take_their_bytes_at_the_cards_bandwidth(torch_build: TorchBuild) -> None:
    """2,039 GB/s of an A100 with 80 GB, of which 80% is reached; a copy on the device reads and writes."""
    clock(
        torch_build,
        """
a, b = malloc(GIB), malloc(GIB)
assert abs(milliseconds(lambda: copy(a, b, GIB)) - 2 * GIB / (2039e6 * 0.8)) < 0.01
assert abs(milliseconds(lambda: fill(a, 0, GIB)) - GIB / (2039e6 * 0.8)) < 0.01
""",
    )


def test_between_two_events_there_is_some_time(torch_build: TorchBuild) -> None:
    """Benchmarks divide by it."""
    clock(torch_build, "assert 0 < milliseconds(lambda: None) < 0.01\n")


def test_products_take_their_multiply_adds_at_the_cards_throughput(torch_build: TorchBuild) -> None:
    """312 TFLOPS of an A100 in 16 bits, 156 in tf32, 19.5 in fp32 (its data sheet), of which 70% are reached; or what its bytes take."""
    clock(
        torch_build,
        """
def teraflops(type, **options):
    return 2 * 8192**3 / milliseconds(lambda: product(8192, 8192, 8192, type, **options)) / 1e9
assert abs(teraflops(HALF) - 312 * 0.7) < 2
assert abs(teraflops(SINGLE, compute=77) - 156 * 0.7) < 1
assert abs(teraflops(SINGLE) - 19.5 * 0.7) < 0.2
assert abs(milliseconds(lambda: product(2**26, 1, 8, HALF)) - 2**26 * 9 * 2 / (2039e6 * 0.8)) < 0.02
""",
    )


def test_rows_that_are_not_aligned_take_tensor_cores_longer(torch_build: TorchBuild) -> None:
    """By the distance of rows, or by where a matrix begins; fp32 without tensor cores does not mind."""
    clock(
        torch_build,
        """
def slower(type, **options):
    aligned, other = (milliseconds(lambda: product(4096, 4096, 4096, type, **given)) for given in ({}, options))
    return round(other / aligned, 1)
assert slower(HALF, ldc=4104) == 1
assert slower(HALF, ldc=4098) == 2
assert slower(HALF, ldc=4097) == 4
assert slower(HALF, a=FIRST + 2) == 4
assert slower(SINGLE, ldc=4097) == 1
""",
    )


def test_a_graph_takes_as_long_as_what_was_captured(torch_build: TorchBuild) -> None:
    """Each time that it is launched; capturing it takes nothing."""
    clock(
        torch_build,
        """
stream, graph, ready = c_void_p(64), c_void_p(), c_void_p()
a = malloc(GIB)

def capture():
    assert cuda.cudaStreamBeginCapture(stream, 0) == 0
    fill(a, 0, GIB)
    assert cuda.cudaStreamEndCapture(stream, byref(graph)) == 0

assert milliseconds(capture) < 0.01
assert cuda.cudaGraphInstantiate(byref(ready), graph, c_ulonglong(0)) == 0
assert cuda.cudaGraphDestroy(graph) == 0
once = milliseconds(lambda: cuda.cudaGraphLaunch(ready, stream))
assert abs(once - milliseconds(lambda: fill(a, 0, GIB))) < 0.01
assert cuda.cudaGraphExecDestroy(ready) == 0
""",
    )


def test_each_kind_of_gpu_has_its_own_throughput(torch_build: TorchBuild) -> None:
    """A T4 has 65 TFLOPS in 16 bits and 8.1 in fp32."""
    clock(
        torch_build,
        """
def teraflops(type):
    return 2 * 4096**3 / milliseconds(lambda: product(4096, 4096, 4096, type)) / 1e9
assert abs(teraflops(HALF) - 65 * 0.7) < 1
assert abs(teraflops(SINGLE) - 8.1 * 0.7) < 0.1
""",
        gpu="t4",
    )

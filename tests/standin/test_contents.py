"""What is known of the device's memory: what the host wrote there and reads back, byte for byte, until a kernel runs."""

from __future__ import annotations

from memplan.hardware.torch_install import TorchBuild
from tests.standin.calls import on_device
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]


def test_a_newer_copy_wins_over_an_older_one(torch_build: TorchBuild) -> None:
    """Byte for byte: 64 bytes, and 8 and 4 others within them, read whole, in part and across an end."""
    on_device(
        torch_build,
        """
p = malloc(4096)
write(p, range(64))
write(p + 8, b"newer in")
write(p + 62, b"over")
expected = bytes(range(8)) + b"newer in" + bytes(range(16, 62)) + b"over"
assert read(p, 66) == expected, read(p, 66)
assert [read(p + at, 4) for at in (6, 14, 60, 62)] == [expected[at:at + 4] for at in (6, 14, 60, 62)]
""",
    )


def test_what_is_set_is_known_and_what_a_kernel_leaves_is_not(torch_build: TorchBuild) -> None:
    """cudaMemset of any size, cuMemsetD32Async of a word, over what was copied there; after a kernel it all reads zero."""
    on_device(
        torch_build,
        """
p = malloc(1 << 24)
write(p, range(16))
fill(p + 4, 0xAB, 1 << 23)
assert read(p, 16) == bytes(range(4)) + b"\\xab" * 12
assert read(p + (1 << 22), 1 << 20) == b"\\xab" * (1 << 20)
assert read(p + (1 << 23) + 4, 4) == bytes(4)
assert driver.cuMemsetD32Async(c_ulonglong(p + 8), c_uint(0x04030201), c_size_t(2), None) == 0
assert read(p + 4, 16) == b"\\xab" * 4 + bytes([1, 2, 3, 4] * 2) + b"\\xab" * 4
kernel()
assert read(p, 32) == bytes(32)
""",
    )


def test_a_copy_on_the_device_takes_along_what_is_known(torch_build: TorchBuild) -> None:
    """And what is not known of its source is not known where it goes, whatever was there."""
    on_device(
        torch_build,
        """
p, q = malloc(4096), malloc(4096)
write(p, b"known")
write(q, b"older than that")
copy(q + 2, p, 8)
cuda.memplan_on_read(reader)
assert read(q, 15) == b"olknown" + b"\\x77" * 3 + b" that"
copy(p + 2, p, 5)  # onto itself
assert read(p, 7) == b"knknown"
assert asked == [15]
""",
    )


def test_what_is_given_back_is_lost(torch_build: TorchBuild) -> None:
    """By cudaFree, and where an expandable segment takes a page out and puts another in at the same address."""
    on_device(
        torch_build,
        """
cuda.memplan_on_read(reader)
p = malloc(4096)
write(p, b"stale")
free(p)
assert read(p, 5) == b"\\x77" * 5
address, handle, page = c_ulonglong(), c_ulonglong(), c_size_t(2 << 20)
assert driver.cuMemAddressReserve(byref(address), page, c_size_t(0), c_ulonglong(0), c_ulonglong(0)) == 0
for _ in range(2):
    assert driver.cuMemCreate(byref(handle), page, (c_int * 8)(1, 0, 1, 0), c_ulonglong(0)) == 0
    assert driver.cuMemMap(address, page, c_size_t(0), handle, c_ulonglong(0)) == 0
    assert read(address.value, 5) == b"\\x77" * 5
    write(address.value, b"stale")
    assert read(address.value, 5) == b"stale"
    assert driver.cuMemUnmap(address, page) == 0
    assert driver.cuMemRelease(handle) == 0
""",
    )


def test_what_is_known_in_part_is_asked_for_and_right_in_that_part(torch_build: TorchBuild) -> None:
    """The recorder answers for the whole of a read; bytes that are known stay as they are."""
    on_device(
        torch_build,
        """
cuda.memplan_on_read(reader)
p = malloc(4096)
write(p, b"known")
assert read(p, 5) == b"known"
assert asked == []
assert read(p, 8) == b"known\\x77\\x77\\x77"
assert asked == [8]
""",
    )


def test_rows_are_copied_as_single_copies_would(torch_build: TorchBuild) -> None:
    """cudaMemcpy2D: to the device, there, and back, with other pitches; a read of rows is one read. A pitch below the width is an error."""
    on_device(
        torch_build,
        """
def copy_2d(to, to_pitch, from_, from_pitch, width, height, kind, call="cudaMemcpy2D", *stream):
    sizes = map(c_size_t, (width, height))
    return getattr(cuda, call)(to, c_size_t(to_pitch), from_, c_size_t(from_pitch), *sizes, kind, *stream)

p, q = malloc(4096), malloc(4096)
assert copy_2d(c_void_p(p), 16, bytes(range(30)), 10, 4, 3, HOST_TO_DEVICE, "cudaMemcpy2DAsync", None) == 0
assert [read(p + 16 * row, 4) for row in range(3)] == [bytes(range(10 * row, 10 * row + 4)) for row in range(3)]
assert copy_2d(c_void_p(q), 8, c_void_p(p), 16, 4, 3, DEVICE_TO_DEVICE) == 0
back = ctypes.create_string_buffer(b"." * 15, 15)
assert copy_2d(back, 5, c_void_p(q), 8, 4, 3, DEVICE_TO_HOST) == 0
assert back.raw == bytes([0, 1, 2, 3]) + b"." + bytes([10, 11, 12, 13]) + b"." + bytes([20, 21, 22, 23]) + b"."
assert copy_2d(back, 5, b"abcdefghi", 3, 2, 3, 0) == 0
assert back.raw == b"ab\\x02\\x03.de\\x0c\\x0d.gh\\x16\\x17."

kernel()
cuda.memplan_on_read(reader)
write(p + 17, b"!")
assert copy_2d(back, 5, c_void_p(p), 16, 4, 3, DEVICE_TO_HOST) == 0
assert back.raw == b"\\x77" * 4 + b"." + b"\\x77!\\x77\\x77." + b"\\x77" * 4 + b"."
assert asked == [12]

assert copy_2d(back, 3, c_void_p(p), 16, 4, 3, DEVICE_TO_HOST) == cuda.cudaGetLastError() == 12  # cudaErrorInvalidPitchValue
""",
    )


def test_copies_between_peers_are_copies(torch_build: TorchBuild) -> None:
    """There is one device."""
    on_device(
        torch_build,
        """
p, q = malloc(4096), malloc(4096)
write(p, b"known")
assert cuda.cudaMemcpyPeerAsync(c_void_p(q), 0, c_void_p(p), 0, c_size_t(5), None) == 0
assert read(q, 5) == b"known"
""",
    )


def test_any_sequence_of_copies_is_as_memory_would_have_it(torch_build: TorchBuild) -> None:
    """
    Twenty thousand writes, settings, copies, frees and kernels at random places, overlapping as they come, against a model of each byte.

    What the device reads is what the model knows, and the recorder's answer where it knows nothing; past 256 pieces all may be forgotten.
    """
    on_device(
        torch_build,
        """
cuda.memplan_on_read(reader)
chance, size = random.Random(7), 512
for round in range(40):
    base, model = malloc(size), [None] * size
    for step in range(500):
        at, count, other = chance.randrange(size), chance.randrange(1, 40), chance.randrange(size)
        count = min(count, size - at, size - other)
        action = chance.choice(["write"] * 4 + ["fill", "copy", "copy", "read", "read", "read"] + ["kernel"] * (step % 50 == 0))
        if action == "write":
            content = chance.randbytes(count)
            write(base + at, content)
            model[at : at + count] = content
        elif action == "fill":
            fill(base + at, step % 256, count)
            model[at : at + count] = [step % 256] * count
        elif action == "copy":
            copy(base + at, base + other, count)
            model[at : at + count] = model[other : other + count]
        elif action == "kernel":
            kernel()
            model = [None] * size
        else:
            assert read(base + at, count) == bytes(0x77 if byte is None else byte for byte in model[at : at + count])
    free(base)
    assert read(base, size) == b"\\x77" * size
many = malloc(1 << 20)
for number in range(1000):
    write(many + 2 * number, bytes([number % 256]))
for number in range(1000):
    assert read(many + 2 * number, 1)[0] in (number % 256, 0x77)
""",
    )


def test_threads_may_copy_at_the_same_time(torch_build: TorchBuild) -> None:
    """Each reads what it wrote, while others write, copy and free elsewhere."""
    on_device(
        torch_build,
        """
import threading
cuda.memplan_on_read(reader)
wrong = []

def work(number):
    for step in range(300):
        p = malloc(64)
        write(p, bytes([number]) * 8)
        copy(p + 8, p, 8)
        if read(p, 16) not in (bytes([number]) * 16, b"\\x77" * 16):
            wrong.append(number)
        free(p)

running = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
[thread.start() for thread in running]
[thread.join() for thread in running]
assert wrong == []
""",
    )


def test_the_last_large_copy_is_kept_for_a_recorder_until_a_kernel_runs(torch_build: TorchBuild) -> None:
    """128 KiB, whole: not a part of it, not what was overwritten in part, and nothing before somebody wants it. Reads do not see it."""
    on_device(
        torch_build,
        """
size = 1 << 17
p, data = malloc(size), bytes(range(256)) * (size // 256)
def last(at, size=size):
    out = (c_int * (size // 4))()
    return bytes(out) if cuda.memplan_last_copy(c_void_p(at), out, c_size_t(size)) else None
write(p, data)
assert last(p) is None
cuda.memplan_keep_last_copy()
write(p, data)
assert last(p) == data
assert (last(p, size - 4), last(p + 4)) == (None, None)
assert read(p, 4) == bytes(4)
write(p + 5, b"other")
assert last(p) is None
write(p, data)
kernel()
assert last(p) is None
""",
    )

"""
What is read from the device while an operation runs, in the values pass: how many elements of a mask are set, the numbers that it copies.

An operation whose values the host knows says first what its kernels are going to read; the read that then happens takes of that the first
that has as many bytes. Each is noted for the memory pass, by line and turn.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memplan.child.device_reads import Reads
from memplan.child.recorded_values import ValueWriter

Awaited = bool | int | bytes | torch.Tensor
"""
What a read gets: the bytes themselves, or those of a tensor of the host, a count in as many bytes as are asked for, or a yes or no.

Most kernels read nothing, and a mask of a large batch has hundreds of MiB: its bytes are copied when they are asked for.
"""

_UNIQUE = {"_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}

_READS_IN_A_MODE = {"_ctc_loss_backward"}
"""Operations that read only while a mode follows: without one, PyTorch reads the lengths once and hands numbers on."""


class AwaitedReads:
    """Answers the reads of the operations that are run through it, each thread its own."""

    def __init__(self, reads: Reads, writer: ValueWriter) -> None:
        self._writer = writer
        self._now = threading.local()
        reads.keep_last_copy()
        reads.known = self._next
        reads.known_dtype = lambda: getattr(self._now, "dtype", None)
        reads.on_answer = self._note

    def run(
        self,
        run: Callable[[], Any],
        awaited: Iterable[Awaited],
        assumption: str | None = None,
        *,
        repeats: bool = False,
        dtype: torch.dtype | None = None,
        name: str = "",
    ) -> Any:
        """
        Return what *run* does, whose reads get *awaited*, each once, or as often as it likes where it *repeats*.

        *assumption*: what the answers stand on, where that is not the program's data; *dtype*: of what is read; *name*: the operation's.
        """
        self._now.values, self._now.assumption, self._now.repeats = deque(awaited), assumption, repeats
        self._now.dtype, self._now.name = dtype, name
        try:
            return run()
        finally:
            self._now.values = self._now.dtype = None
            self._now.name = ""

    def _next(self, size: int) -> tuple[bytes, str | None] | None:
        """Return what the read that happens now gets, where that is known: of what is awaited the first that has so many bytes."""
        awaited: deque[Awaited] = getattr(self._now, "values", None) or deque()
        for at, value in enumerate(awaited):
            content = _encoded(value, size)
            if content is not None:
                if not self._now.repeats:
                    del awaited[at]
                return content, self._now.assumption
        return None

    def _note(self, place: str, size: int, content: bytes | None, assumption: str | None, dtype: str | None) -> None:
        """Note what was read, for the memory pass: by turn, so that what is read in this pass only does not count."""
        if getattr(self._now, "name", "") not in _READS_IN_A_MODE:
            self._writer.add(place, size, content, assumption, dtype)


def awaited_by(name: str, host_args: Any, found: Any) -> tuple[list[Awaited], bool]:
    """Return what the kernel of operation *name* reads while it runs, and whether it reads that as often as it likes."""
    if name in _UNIQUE:
        dim = host_args[1] if name in ("unique_dim", "unique_dim_consecutive") else 0
        return [found[0].shape[dim]], True
    if name.lstrip("_").startswith("to_sparse") and found.layout in (torch.sparse_coo, torch.sparse_csr):
        return [found._nnz()], True
    if name == "repeat_interleave":
        return [True, found.numel()], False  # is none negative? and how many are there together?
    if name == "bincount":
        return [int(host_args[0].min()), int(host_args[0].max())] if host_args[0].numel() else [], False
    if name == "equal":
        return [bool(found)], True
    if name == "histc" and host_args[0].numel():
        ends = host_args[0].aminmax()
        return [ends.min, ends.max], False
    sizes: list[Awaited] = [value for value in host_args if isinstance(value, torch.Tensor) and not value.is_floating_point()]
    return (sizes if len(sizes) == 1 else [], False)


def _encoded(value: Awaited, size: int) -> bytes | None:
    """Return *value* in *size* bytes; None where it is of another size: a yes or no has one byte, a count more."""
    if isinstance(value, torch.Tensor):
        return bytes_of(value) if value.numel() * value.element_size() == size else None
    if isinstance(value, bytes):
        return value if len(value) == size else None
    if isinstance(value, bool) != (size == 1) or size not in (1, 2, 4, 8):
        return None
    return int(value).to_bytes(size, sys.byteorder, signed=size > 1)


def bytes_of(value: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of the host, in the order of its elements."""
    if value.dtype is torch.bool and value.numel() == 1:
        return struct.pack("?", bool(value))
    dense = value.detach().resolve_neg().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size()) if dense.numel() else b""

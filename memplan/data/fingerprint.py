"""
What a dataset is made of, as one short text: its class, the code of that class, its attributes, and the same of a transform.

It decides whether a cache on disk is of this dataset. It cannot see what the attributes only name: the files behind a list of paths.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import io
import pickle
import types
from typing import Any

import torch
from torch import Tensor

from memplan.errors import UsageError


def fingerprint_of(*objects: Any) -> str:
    """
    Return the same text for the same *objects*, in this process and the next.

    Raises UsageError for what cannot be pickled: an open file, a connection, a lock.
    """
    digest = hashlib.sha256()
    stream = _Digesting(digest)
    try:
        for each in objects:
            _Pickler(stream, protocol=4).dump(each)
    except Exception as error:  # whatever the user's classes raise
        raise UsageError(
            f"the dataset or its transform cannot be identified: {type(error).__name__}: {error}",
            hint='name what they are made of: `fingerprint="imagenet-train-224-v1"`',
        ) from error
    return digest.hexdigest()[:32]


def buffer_of(tensor: Tensor) -> memoryview:
    """Return the bytes of *tensor*, which is contiguous and on the host, without a copy."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


class _Digesting(io.RawIOBase):
    """A file that keeps nothing of what is written but its digest."""

    def __init__(self, digest: hashlib._Hash) -> None:
        super().__init__()
        self._digest = digest

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._digest.update(data)
        return len(data)


class _Pickler(pickle.Pickler):
    """Pickles functions and classes with their code: by name alone, one that was changed would be the same."""

    def reducer_override(self, value: Any, /) -> Any:
        if isinstance(value, Tensor):  # its own pickle has an address in it
            content = hashlib.sha256(buffer_of(value.detach().cpu().contiguous())).hexdigest()
            return str, (f"{value.dtype} {tuple(value.shape)} {content}",)
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return str, (f"{value.__module__}.{value.__qualname__} {_source_of(value)}",), (value.__defaults__, value.__kwdefaults__, cells)
        if isinstance(value, type) and not _is_of_a_library(value):
            code = [_source_of(each) for each in value.__mro__ if not _is_of_a_library(each)]
            return str, (f"{value.__module__}.{value.__qualname__} {code}",)
        if isinstance(value, torch.Generator):
            return str, (f"a generator on {value.device}",)
        return NotImplemented


def _is_of_a_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("builtins", "typing", "torch", "numpy")


def _source_of(value: Any) -> str:
    """Return the code of a function or class; of one whose source is not there, what it was compiled to."""
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # defined at a prompt, by exec, or in C
        if isinstance(value, type):
            return "".join(_source_of(getattr(each, "__func__", each)) for each in vars(value).values() if hasattr(each, "__get__"))
        code = getattr(value, "__code__", None)
        return "" if code is None else f"{code.co_code!r} {code.co_names} {[each for each in code.co_consts if not inspect.iscode(each)]}"

"""
A sample as somebody describes it: typed, or in a file whose header tells its shapes and types. No value of a file is read.

safetensors begins with the length of its header in 8 bytes, then the header as JSON; .npy with a mark, its version, the length, then a
dict of Python (the formats' own documents: the README of safetensors, and NumPy's `numpy.lib.format`).
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, BinaryIO

from memplan.analysis.dataset_memory import SampleValue
from memplan.dtypes import StoredDType, stored_dtype
from memplan.errors import ConfigError, UsageError, reason_of

SUFFIXES = (".safetensors", ".npy")
"""Of the files that can be read."""

_LARGEST_HEADER_BYTES = 100_000_000
"""Of safetensors, which refuses larger ones itself."""

_SAFETENSORS: dict[str, StoredDType] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "C64": "complex64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16",
    "U8": "uint8", "BOOL": "bool",
}  # fmt: skip

_NUMPY: dict[str, StoredDType] = {
    "f8": "float64", "f4": "float32", "f2": "float16", "c16": "complex128", "c8": "complex64", "i8": "int64", "i4": "int32", "i2": "int16",
    "i1": "int8", "u8": "uint64", "u4": "uint32", "u2": "uint16", "u1": "uint8", "b1": "bool",
}  # fmt: skip

_TYPED = re.compile(r"(?:(?P<name>[^=:]+)=)?(?P<shape>\d+(?:x\d+)*|scalar):(?P<dtype>[\w.]+)")


def sample_value_from(text: str) -> SampleValue:
    """Return the value that *text* describes: "3x224x224:bf16", "label=scalar:int64". Raises UsageError where it makes no sense."""
    match = _TYPED.fullmatch(text.strip().replace("×", "x"))
    if match is None:
        raise UsageError(
            f"{text!r} does not describe a value of a sample", hint="write its shape and type, as 3x224x224:bf16 or label=scalar:int64"
        )
    dtype = stored_dtype(match["dtype"])
    if dtype is None:
        raise UsageError(f"unknown type: {match['dtype']!r}", hint="types are fp32, bf16, fp16, int64, int32, uint8, bool, and so on")
    shape = () if match["shape"] == "scalar" else tuple(map(int, match["shape"].split("x")))
    return SampleValue(name=match["name"] or "", shape=shape, dtype=dtype)


def sample_values_in(path: Path) -> tuple[SampleValue, ...]:
    """Return the values of the sample in the file at *path*. Raises ConfigError for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return _numpy_values(file) if path.suffix == ".npy" else _safetensors_values(file)
    except OSError as error:
        raise ConfigError(reason_of(error), file=path, hint="give a sample that was saved with safetensors or numpy.save") from error
    except (ValueError, LookupError, TypeError, AttributeError, SyntaxError) as error:
        hint = "give a sample that was saved with safetensors or numpy.save"
        raise ConfigError(f"not a sample in the format of {path.suffix} files", file=path, hint=hint) from error


def _safetensors_values(file: BinaryIO) -> tuple[SampleValue, ...]:
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= _LARGEST_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return tuple(
        SampleValue(name=name, shape=tuple(told["shape"]), dtype=_SAFETENSORS[told["dtype"]]) for name, told in sorted(header.items())
    )


def _numpy_values(file: BinaryIO) -> tuple[SampleValue, ...]:
    mark, major = file.read(6), file.read(2)[0]
    if mark != b"\x93NUMPY":
        raise ValueError("no mark of NumPy")
    length = int.from_bytes(file.read(2 if major == 1 else 4), "little")
    told = ast.literal_eval(file.read(min(length, _LARGEST_HEADER_BYTES)).decode("latin1").strip())
    return (SampleValue(shape=told["shape"], dtype=_NUMPY[told["descr"].lstrip("<>|=")]),)

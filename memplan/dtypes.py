"""Element types, by torch's names, and what the training precisions make of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

DType = Literal["float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool"]

ELEMENT_BYTES: dict[DType, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

StoredDType = Literal[
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "complex128", "complex64",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
]  # fmt: skip
"""What the samples of a dataset can be of."""

_STORED_BYTES: Mapping[str, int] = {name: size for name, size in ELEMENT_BYTES.items()} | {  # noqa: C416  (of any names from here on)
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex128": 16,
    "complex64": 8,
    "int16": 2,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
}  # fmt: skip

SHORT_NAMES: dict[str, StoredDType] = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
}
"""What people write for them besides."""


def stored_dtype(name: str) -> StoredDType | None:
    """Return the type that *name* means, as "bf16", "torch.bfloat16" or "bfloat16"; None where it means none."""
    plain = name.strip().lower().removeprefix("torch.")
    return next((dtype for dtype in get_args(StoredDType) if dtype == plain), SHORT_NAMES.get(plain))


def bytes_of_element(dtype: StoredDType) -> int:
    """Return the bytes of one element."""
    return _STORED_BYTES[dtype]


Precision = Literal["fp32", "fp16-mixed", "bf16-mixed", "fp16", "bf16"]
"""fp32; autocast over fp32 weights (-mixed); or weights, gradients and optimizer state all in the short type."""


def parameter_dtype(precision: Precision) -> DType:
    """Return the type that the weights are kept in: autocast leaves them fp32."""
    return {"fp16": "float16", "bf16": "bfloat16"}.get(precision, "float32")  # type: ignore[return-value]


def compute_dtype(precision: Precision) -> DType:
    """Return the type that matrix products run in."""
    return "float32" if precision == "fp32" else "bfloat16" if precision.startswith("bf16") else "float16"


def is_mixed(precision: Precision) -> bool:
    """Say whether autocast is on."""
    return precision.endswith("-mixed")

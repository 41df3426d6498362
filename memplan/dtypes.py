"""Element types, by torch's names, and what the training precisions make of them."""

from __future__ import annotations

from typing import Literal

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

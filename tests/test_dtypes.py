"""Element types, and what a training precision keeps and computes in."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from memplan.dtypes import ELEMENT_BYTES, DType, Precision, compute_dtype, is_mixed, parameter_dtype


@pytest.mark.parametrize(
    ("precision", "parameters", "compute", "mixed"),
    [
        ("fp32", "float32", "float32", False),
        ("fp16-mixed", "float32", "float16", True),
        ("bf16-mixed", "float32", "bfloat16", True),
        ("fp16", "float16", "float16", False),
        ("bf16", "bfloat16", "bfloat16", False),
    ],
)
def test_autocast_shortens_products_and_not_parameters(precision: Precision, parameters: DType, compute: DType, mixed: bool):
    """-mixed is torch.autocast over fp32 weights; without it the weights are in the type that is computed in."""
    assert (parameter_dtype(precision), compute_dtype(precision), is_mixed(precision)) == (parameters, compute, mixed)


def test_every_precision_has_types_with_a_size():
    """No precision can be chosen whose elements nobody can count."""
    types = {of(precision) for precision in get_args(Precision) for of in (parameter_dtype, compute_dtype)}

    assert types <= ELEMENT_BYTES.keys()


@pytest.mark.parametrize("dtype", sorted(set(get_args(DType)) - {"bfloat16"}))
def test_an_element_is_as_large_as_numpy_says(dtype: DType):
    """numpy shares torch's names, except for bfloat16, which is the upper half of a float32."""
    assert ELEMENT_BYTES[dtype] == np.dtype(dtype).itemsize
    assert ELEMENT_BYTES["bfloat16"] * 2 == ELEMENT_BYTES["float32"]

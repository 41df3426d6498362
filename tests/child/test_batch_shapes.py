"""Which tensors a batch has, whatever its class: what is not known is not called, and a program goes on."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from memplan.child.batch_shapes import shapes_in, tensors_in

TENSOR = torch.zeros(2)


class Pair(NamedTuple):
    """A batch of two."""

    inputs: Any
    labels: Any


class Frame:
    """As pandas has one: its values are an array, and no method."""

    def __init__(self) -> None:
        self.inner = TENSOR

    @property
    def values(self) -> Any:
        """Return what is in it."""
        return TENSOR.numpy()


class Jagged(Frame):
    """As torchrec has one: a method that returns a tensor, whose truth nobody can say."""

    def values(self) -> Any:  # type: ignore[override]
        """Return what is in it."""
        return TENSOR


class Series(Frame):
    """A method that takes arguments."""

    def values(self, unit: str) -> Any:  # type: ignore[override]
        """Return what is in it."""
        return unit


@pytest.mark.parametrize(
    "batch",
    [TENSOR, [TENSOR], (1, TENSOR), Pair(TENSOR, 3), {"inputs": {"ids": TENSOR}}, UserDict(ids=TENSOR), Frame(), Jagged(), Series()],
    ids=lambda batch: type(batch).__name__,
)
def test_a_tensor_is_found_in_whatever_holds_it(batch: Any) -> None:
    """In collections, and in what an object has as attributes."""
    assert [id(tensor) for tensor in tensors_in(batch)] == [id(TENSOR)]


@pytest.mark.parametrize("batch", [None, 3, "text", b"bytes", torch.Tensor, {"kind": torch.Tensor}, [dict, list], {}, []], ids=repr)
def test_classes_and_plain_values_hold_none(batch: Any) -> None:
    """A class has methods, and no content."""
    assert list(tensors_in(batch)) == []


def test_the_shapes_of_a_batch_are_those_of_its_arrays_of_numbers_too() -> None:
    """A program may move NumPy's arrays to the GPU itself; one of texts never goes there."""
    batch = [("id", np.zeros((16, 80)), TENSOR, np.array(["a", "b"]))]

    assert list(shapes_in(batch)) == [(16, 80), (2,)]
    assert len(list(tensors_in(batch))) == 1

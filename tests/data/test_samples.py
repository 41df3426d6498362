"""What a sample is made of, and how it is put together again; PyTorch's `default_collate` says what a batch looks like."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from memplan.data.samples import SampleStructure
from memplan.errors import UsageError


class Pair(NamedTuple):
    """A named tuple of a user's."""

    left: Any
    right: Any


DTYPES = ["float32", "float64", "float16", "int64", "int32", "int16", "uint8", "bool"]


def values_alike(value: Any, number: int) -> Any:
    """A value of the same kind, shape and type as *value*, that tells its sample."""
    if isinstance(value, np.ndarray):
        return np.full_like(value, number % 2)
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, number % 2)
    return f"{value}{number}" if isinstance(value, str) else type(value)(number)


def sample_alike(sample: Any, number: int) -> Any:
    """A sample of the same structure as *sample*."""
    if isinstance(sample, dict):
        return type(sample)({key: sample_alike(inner, number) for key, inner in sample.items()})
    if isinstance(sample, Pair):
        return Pair(*(sample_alike(inner, number) for inner in sample))
    if isinstance(sample, (tuple, list)):
        return type(sample)(sample_alike(inner, number) for inner in sample)
    return values_alike(sample, number)


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
arrays = st.builds(np.zeros, shapes, st.sampled_from(DTYPES))
tensors = st.builds(lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype)), shapes, st.sampled_from([*DTYPES, "bfloat16"]))
numbers = st.sampled_from([1, 1.5, True, np.float32(2), np.int16(3)])
leaves = st.one_of(arrays, tensors, numbers, st.text(max_size=3))
samples = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(OrderedDict),
    ),
    max_leaves=6,
)


def alike(one: Any, other: Any) -> bool:
    """Whether two samples or batches are the same, types included; texts of a batch may be in a list or a tuple."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        is_of_texts = bool(one) and isinstance(one[0], str)
        return (is_of_texts or type(one) is type(other)) and len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def has_tensor(sample: Any) -> bool:
    """Whether something of it goes to the device."""
    if isinstance(sample, dict):
        return any(map(has_tensor, sample.values()))
    return any(map(has_tensor, sample)) if isinstance(sample, (tuple, list)) else not isinstance(sample, str)


@settings(max_examples=150, deadline=None)
@given(samples.filter(has_tensor), st.integers(1, 4))
def test_a_batch_is_that_of_default_collate(sample: Any, size: int) -> None:
    """Containers, types and values, of any structure."""
    structure = SampleStructure(sample)
    many = [sample_alike(sample, number) for number in range(size)]
    found = [structure.values_of(each) for each in many]

    tensors = [torch.stack([values.tensors[part] for values in found]) for part in range(len(structure.parts))]
    host = [[values.host[part] for values in found] for part in range(len(structure.host_names))]

    assert alike(structure.batch_from(tensors, host), default_collate(many))


@settings(max_examples=100, deadline=None)
@given(samples.filter(has_tensor))
def test_a_sample_comes_back_in_its_containers(sample: Any) -> None:
    """Taken apart twice it is the same."""
    structure = SampleStructure(sample)
    values = structure.values_of(sample)
    made = structure.sample_from(*values)

    assert [part.shape for part in SampleStructure(made).parts] == [part.shape for part in structure.parts]
    assert alike(SampleStructure(made).sample_from(*structure.values_of(made)), made)
    assert type(made) is type(sample) or not isinstance(sample, (dict, tuple, list))


def test_ids_and_masks_never_become_floats() -> None:
    """A type for floating-point values is for these alone."""
    sample = {"image": torch.zeros(3), "ids": np.zeros(2, "int32"), "mask": torch.ones(2, dtype=torch.bool), "label": 3, "weight": 0.5}

    structure = SampleStructure(sample, torch.bfloat16)

    assert {part.name: part.dtype for part in structure.parts} == {
        "['image']": torch.bfloat16,
        "['ids']": torch.int32,
        "['mask']": torch.bool,
        "['label']": torch.int64,
        "['weight']": torch.bfloat16,
    }
    assert structure.sample_bytes == 3 * 2 + 2 * 4 + 2 * 1 + 8 + 2


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (object(), r"sample\['x'\] is a object, which is no tensor, array, number or text"),
        ({1, 2}, r"sample\['x'\] is a set"),
        (torch.zeros(3, 3).to_sparse(), r"sample\['x'\] is a sparse or nested tensor"),
        (np.array(["a", "b"]), r"sample\['x'\] is an array of <U1"),
        (np.array([1], np.longdouble), r"sample\['x'\] is an array of float128, which PyTorch does not have"),
        (2**70, r"sample\['x'\] is 1180591620717411303424, which is too large for torch.int64"),
    ],
)
def test_what_cannot_be_kept_is_named(value: Any, error: str) -> None:
    """With the place where it is in a sample."""
    with pytest.raises(UsageError, match=error):
        SampleStructure({"x": value, "y": 1})


def test_a_number_that_the_type_lacks_is_refused() -> None:
    """It would be infinity in float16; infinity itself stays what it is."""
    structure = SampleStructure({"x": torch.ones(3)}, torch.float16)

    assert structure.values_of({"x": torch.tensor([1.0, 65504.0, float("inf")])}).host == []
    with pytest.raises(UsageError, match=r"sample\['x'\] has 70000, and torch.float16 ends at 65504"):
        structure.values_of({"x": torch.tensor([1.0, -70000.0, float("nan")])})


def test_a_sample_of_texts_alone_has_nothing_for_the_device() -> None:
    """That is a mistake, not an empty dataset on the GPU."""
    with pytest.raises(UsageError, match="a sample has no tensor, array or number"):
        SampleStructure({"text": "a", "none": None})


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"x": torch.zeros(3, 5), "t": "b"}, r"sample\['x'\] has shape \(3, 5\), and not \(3, 4\)"),
        ({"x": torch.zeros(3, 4, dtype=torch.int64), "t": "b"}, r"sample\['x'\] is torch.int64, and not torch.float32"),
        ({"x": torch.zeros(1), "t": "b"}, r"sample\['x'\] has shape \(1,\), and not \(3, 4\)"),  # which would be broadcast
        ({"x": torch.zeros(3, 4)}, r"it lacks sample\['t'\]"),
        ({"x": torch.zeros(3, 4), "t": "b", "u": 1}, r"it has sample\['u'\]"),
        ({"x": torch.zeros(3, 4), "t": 5}, r"sample\['t'\] is a int, and not a text"),
        ({"x": None, "t": "b"}, r"sample\['x'\] is None, and not a tensor"),
        ({"t": "b", "x": torch.zeros(3, 4)}, "it has its values in another order"),
    ],
)
def test_a_sample_unlike_the_first_is_refused(other: Any, error: str) -> None:
    """Naming the value, and both shapes or types."""
    structure = SampleStructure({"x": torch.zeros(3, 4), "t": "a"})

    with pytest.raises(UsageError, match=error):
        structure.values_of(other)


def test_arrays_that_pytorch_does_not_take_are_copied() -> None:
    """Of another byte order, backwards, and read-only: PyTorch warns of the last."""
    read_only = np.arange(3, dtype="float32")
    read_only.flags.writeable = False
    sample = (np.arange(3, dtype=">i4"), np.arange(3)[::-1], read_only)

    structure = SampleStructure(sample)

    assert [tensor.tolist() for tensor in structure.values_of(sample).tensors] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]
    assert [part.dtype for part in structure.parts] == [torch.int32, torch.int64, torch.float32]

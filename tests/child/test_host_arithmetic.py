"""What the host computes in place of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memplan.child.host_arithmetic import MOST_COMPUTED, MOST_COPIED, at_places, computed, is_cheap, num_places

aten = torch.ops.aten


@given(rows=st.lists(st.integers(0, 6), min_size=1, max_size=30), data=st.data())
def test_places_of_a_sparse_tensor_are_as_many_as_coalesce_leaves(rows: list[int], data: st.DataObject) -> None:
    """Whichever stand several times."""
    columns = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    sparse = torch.sparse_coo_tensor(torch.tensor([rows, columns]), torch.ones(len(rows)), (7, 5), check_invariants=True)

    assert num_places(sparse) == sparse.coalesce()._nnz()
    assert num_places(sparse.coalesce()) == sparse.coalesce()._nnz()


def test_sparse_tensors_are_joined_as_the_device_does() -> None:
    """One behind the other, places that stand in both twice."""
    places = torch.tensor([[0, 2]])
    first, second = (torch.sparse_coo_tensor(places, torch.ones(2), (4,), check_invariants=True) for _ in range(2))

    found = computed(torch.ops.aten.sub.Tensor, (first, second), {"alpha": 3})

    assert found._indices().tolist() == [[0, 2, 0, 2]]
    assert found._values().tolist() == [1, 1, -3, -3]


def test_places_without_values_take_no_memory_for_these() -> None:
    """A row of an embedding's gradient has as many as its dimension."""
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 1000), (4, 1000), check_invariants=True)

    found = at_places(sparse._indices(), sparse)

    assert found.shape == sparse.shape
    assert found._values().untyped_storage().nbytes() == 4


def test_of_what_repeats_one_is_computed() -> None:
    """A mask for each head and query is the same along both."""
    keys = torch.arange(512)
    mask = keys.view(1, 1, 1, 512).expand(4, 8, 512, 512)

    found = computed(torch.ops.aten.lt.Scalar, (mask, 100), {})

    assert found.shape == mask.shape
    assert found.untyped_storage().nbytes() == 512
    assert bool((found == (mask < 100)).all())


@pytest.mark.parametrize(
    ("func", "dtype", "num_elements", "is_done"),
    [
        (aten.add.Tensor, torch.int64, MOST_COPIED + 1, True),
        (aten.add.Tensor, torch.float32, MOST_COMPUTED, True),
        (aten.add.Tensor, torch.float32, MOST_COMPUTED + 1, False),
        (aten.lt.Tensor, torch.float32, MOST_COMPUTED + 1, True),
        (aten.lt.Tensor, torch.float32, MOST_COPIED + 1, False),
        (aten.mm.default, torch.float32, 4, False),
    ],
)
def test_integers_are_computed_and_floats_that_are_few_or_compared(func: Any, dtype: torch.dtype, num_elements: int, is_done: bool) -> None:
    """What a model's own operations give depends on weights."""
    assert is_cheap(func, [torch.empty(num_elements, dtype=dtype)]) == is_done


@pytest.mark.parametrize(("func", "is_done"), [(aten.add.Tensor, True), (aten.constant_pad_nd.default, False)])
def test_what_repeats_counts_once_where_an_operation_goes_element_by_element(func: Any, *, is_done: bool) -> None:
    """A mask for each head and query: SDPA pads its keys to a multiple of eight, in each layer."""
    mask = torch.zeros(32, 1, 1, 1024).expand(32, 1, 1024, 1024)

    assert is_cheap(func, [mask]) == is_done
    assert is_cheap(func, [mask[:1, :, :512]])


def test_a_mask_in_numbers_is_computed_where_it_is_small() -> None:
    """Attention makes it of one in booleans and two numbers, in each layer; of what repeats one is computed."""
    zero, least = torch.zeros((), dtype=torch.float16), torch.full((), -torch.inf, dtype=torch.float16)
    large = torch.empty(17, 1, 1024, 1024, dtype=torch.bool)

    assert large.numel() > MOST_COPIED
    assert not is_cheap(aten.where.self, [large, zero, least])
    assert is_cheap(aten.where.self, [large[:16], zero, least])
    assert is_cheap(aten.where.self, [large[:, :, :1].expand(17, 1, 1024, 1024), zero, least])
    assert is_cheap(aten.logical_and.default, [large, large])

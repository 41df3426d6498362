"""What the host computes of an operation of the device, in the values pass: what is cheap, and as the device would leave it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from memplan.child.assumed_values import COMPARISONS, FINITE
from memplan.child.shadows import HOST, MANY, once

MOST_COPIED = 2**24
"""Elements of a float tensor from the host that is followed: ground truth and times, not images and weights."""

MOST_COMPUTED = 2**20
"""Elements up to which float arithmetic is done on the host."""

_HEAVY = {
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "convolution", "convolution_backward", "native_layer_norm",
    "native_batch_norm", "native_group_norm", "_softmax", "_log_softmax", "grid_sampler_2d", "_cdist_forward", "_fft_r2c", "_fft_c2c",
}  # fmt: skip
"""Operations of a model: what comes of them depends on weights."""


def is_cheap(func: Any, values: Sequence[Any]) -> bool:
    """
    Say whether the host should do it: whatever has integers, and of floats what decides or is small.

    What is the same along a dimension counts once. But an operation that does not go element by element, as padding, goes through all. What
    comes of a few floats may be large too: a mask in numbers, as attention makes it of one in booleans in each layer.
    """
    name = func.overloadpacket.__name__
    if name in _HEAVY:
        return False
    floats = [value for value in values if value.is_floating_point() or value.is_complex()]
    limit = MOST_COPIED if name in COMPARISONS or name in FINITE else MOST_COMPUTED
    if not all((value if value.is_sparse else once(value)).numel() <= limit for value in floats):
        return False
    if not _goes_by_element(func):
        return all(value.numel() <= MOST_COPIED for value in floats)
    return name in COMPARISONS or not floats or any(value.is_sparse for value in values) or _num_different(values) <= MOST_COPIED


def _goes_by_element(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags and not func._schema.is_mutable


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what *func* gives on the host; element by element, of those that are the same for all its tensors one is computed."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
    if func.overloadpacket.__name__ == "histc" and not args[0].is_floating_point():  # of integers only the GPU has a kernel
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    if func.overloadpacket.__name__ in ("add", "sub") and [tensor.is_sparse for tensor in tensors] == [True, True]:
        return _joined(tensors[0], tensors[1], kwargs.get("alpha", 1) * (-1 if func.overloadpacket.__name__ == "sub" else 1))
    if not _goes_by_element(func) or any(tensor.layout is not torch.strided for tensor in tensors):
        return func(*args, **kwargs)
    shape, repeated = _shape_of(tensors)
    if not repeated or math.prod(shape) < MANY:
        return func(*args, **kwargs)

    def narrowed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for at in repeated:
                if -at <= value.dim():
                    value = value.narrow(at, 0, 1)
        return value

    args, kwargs = tree_map(narrowed, (args, kwargs))
    found = func(*args, **kwargs)
    return found.expand(shape) if isinstance(found, torch.Tensor) else tuple(each.expand(shape) for each in found)


def _shape_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Size, list[int]]:
    """Return the shape that *tensors* are brought to together, and the dimensions along which all are the same, counted from the last."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return shape, [at for at in range(-len(shape), 0) if shape[at] > 1 and all(_repeats(tensor, at) for tensor in tensors)]


def _num_different(tensors: Sequence[torch.Tensor]) -> int:
    """Return how many elements an operation on *tensors* computes, of those that are the same one."""
    shape, repeated = _shape_of(tensors)
    return math.prod(shape) // math.prod(shape[at] for at in repeated)


def _repeats(tensor: torch.Tensor, at: int) -> bool:
    """Say whether *tensor* is the same along the dimension *at*, counted from its last."""
    return -at > tensor.dim() or tensor.shape[at] == 1 or tensor.stride(at) == 0


# sparse tensors


def num_places(sparse: torch.Tensor) -> int:
    """Return how many different places there are of those of *sparse*, which may stand several times."""
    if sparse.is_coalesced():
        return int(sparse._nnz())
    places = sparse._indices()
    row_of = torch.zeros(places.shape[1], dtype=torch.int64, device=HOST)
    for size, along in zip(sparse.shape, places, strict=False):
        row_of = row_of * size + along
    return int(row_of.unique().numel())


def at_places(places: torch.Tensor, sparse: Any) -> torch.Tensor:
    """Return a tensor of the host that has *places* and the shape of *sparse*, without values of its own."""
    values = torch.zeros((), device=HOST).expand(sparse._values().shape)
    return torch.sparse_coo_tensor(places, values, sparse.shape, is_coalesced=sparse.is_coalesced(), check_invariants=False)


def _joined(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:
    """Return the first and a *share* of the second sparse tensor as the device adds them, one behind the other: the host merges some."""
    places = torch.cat([first._indices(), second._indices()], 1)
    values = torch.cat([first._values(), share * second._values()])
    return torch.sparse_coo_tensor(places, values, first.shape, check_invariants=False)

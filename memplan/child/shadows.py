"""
What the storages of the device hold, as far as it is known: for each a *shadow* of the same bytes on the host.

A tensor's values are the same view of the shadow as the tensor is of its storage. So views and changes in place need no rule of their own.

Where a program writes what nobody knows into a part of a storage, that part has no values, and the rest keeps its own. Where it puts
numbers that are known beside others into one tensor (the class beside the box that a model found), nan stands for those that are not.

A mask for attention is the same for each query: what repeats along a dimension is kept once for as long as the storage is read whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memplan.traces.read_basis import ONE_DRAW

SWEEP_EVERY = 4096
"""Operations between two looks for shadows whose storage has gone."""

HOST = torch.device("cpu")
"""Where the values are: named with every tensor that is made for them, since a program may have made the GPU the default."""


MANY = 2**16
"""Elements from which on what repeats is kept once."""

MOST_PARTS = 64
"""Parts of a storage that may be unknown while the rest is known."""


class Shadow:
    """What a storage of the device holds."""

    def __init__(self, storage: torch.UntypedStorage, fill: int | None, assumption: str | None) -> None:
        self.of = StorageWeakRef(storage)
        self.num_bytes = storage.nbytes()
        self.assumption = assumption
        self._fill = fill
        self._repeated: tuple[Any, torch.Tensor] | None = None  # a view of the storage, and its values, in place of the bytes
        self._content: torch.UntypedStorage | None = None
        self._unknown: list[range] = []
        """Bytes that were overwritten by what nobody knows."""
        self.is_mixed = False
        """Numbers that are nan stand for what nobody knows."""

    def knows(self, tensor: Any) -> bool:
        """Say whether the values of *tensor* are known, all of them."""
        place = _place_of(tensor)
        return not any(_overlap(place, part) for part in self._unknown)

    def forget(self, tensor: Any) -> None:
        """Keep that nobody knows what *tensor* holds now."""
        place = _place_of(tensor)
        near = [part for part in self._unknown if part.start <= place.stop and place.start <= part.stop]
        joined = range(min(part.start for part in (place, *near)), max(part.stop for part in (place, *near)))
        self._unknown = [*(part for part in self._unknown if part not in near), joined]

    @property
    def knows_little(self) -> bool:
        """Say whether it is not worth keeping: all of it is unknown, or it is in too many parts."""
        return len(self._unknown) > MOST_PARTS or any(part == range(self.num_bytes) for part in self._unknown)

    def write(self, tensor: Any, values: torch.Tensor) -> None:
        """Keep that *tensor* holds *values*."""
        view = self.view(tensor, is_written=True)
        (torch._neg_view(view) if tensor.is_neg() else view).copy_(values)
        if tensor.is_contiguous():  # else there may be something between its elements
            place = _place_of(tensor)
            left = (
                (range(part.start, min(part.stop, place.start)), range(max(part.start, place.stop), part.stop)) for part in self._unknown
            )
            self._unknown = [part for parts in left for part in parts if part]

    def repeat(self, tensor: Any, values: torch.Tensor) -> None:
        """Keep that *tensor*, which is all of the storage, holds *values*, of which many are the same."""
        self._content, self._repeated = None, (_geometry(tensor), once(values).to(tensor.dtype, copy=True).expand(values.shape))

    def view(self, tensor: Any, *, is_written: bool) -> torch.Tensor:
        """Return the values of *tensor*, which lies in the storage; those that are to be written to each have a place of their own."""
        if self._repeated is not None and not is_written and self._repeated[0] == _geometry(tensor):
            return self._repeated[1]
        return _viewed(self._bytes(), _geometry(tensor))

    def _bytes(self) -> torch.UntypedStorage:
        """Return the bytes; those that are the same everywhere take memory of the host only when somebody looks."""
        if self._content is None:
            self._content = torch.full((self.num_bytes,), self._fill or 0, dtype=torch.uint8, device=HOST).untyped_storage()
            if self._repeated is not None:
                _viewed(self._content, self._repeated[0]).copy_(self._repeated[1])
                self._repeated = None
        return self._content


def _place_of(tensor: Any) -> range:
    """Return the bytes of its storage from the first to the last that are of *tensor*."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width = tensor.element_size()
    return range(first * width, (last + 1) * width) if tensor.numel() else range(first * width, first * width)


def _overlap(some: range, others: range) -> bool:
    return some.start < others.stop and others.start < some.stop


def _geometry(tensor: Any) -> tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def _viewed(content: torch.UntypedStorage, geometry: tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
    dtype, offset, shape, strides = geometry
    return torch.empty(0, dtype=dtype, device=HOST).set_(content, offset, shape, strides)


def once(values: torch.Tensor) -> torch.Tensor:
    """Return *values* with one element of each dimension along which all are one and the same."""
    for dim, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
        if size > 1 and stride == 0:
            values = values.narrow(dim, 0, 1)
    return values


class Shadows:
    """The shadows of all storages whose content is known."""

    def __init__(self) -> None:
        self._kept: dict[int, Shadow] = {}
        self._num_operations = 0

    def of(self, tensor: Any) -> Shadow | None:
        """Return the shadow of the storage that *tensor* (of a sparse one: its places) lies in; None where its content is not known."""
        parts = parts_of(tensor)
        return self._kept.get(parts[0].untyped_storage()._cdata) if parts else None

    def may_know(self, tensor: Any) -> bool:
        """Say whether anything may be known of what *tensor* holds."""
        return tensor.layout is not torch.strided or tensor.untyped_storage()._cdata in self._kept

    def values(self, tensors: Sequence[Any]) -> list[torch.Tensor] | None:
        """Return the values of *tensors*, as `value`; None where they are not known of all: no bytes are made for the others then."""
        if not all(map(self._may_be_known, tensors)):
            return None
        found = [self.value(tensor) for tensor in tensors]
        known = [value for value in found if value is not None]
        return known if len(known) == len(found) else None

    def _may_be_known(self, tensor: Any) -> bool:
        shadow = self.of(tensor)
        return shadow is not None and (tensor.layout is not torch.strided or shadow.knows(tensor))

    def value(self, tensor: Any, *, is_written: bool = False) -> torch.Tensor | None:
        """Return the values of *tensor*, a view of what is kept, which may be *written* to; None where they are not known."""
        if tensor.layout is torch.sparse_coo:
            places, values = map(self.value, parts_of(tensor))
            if places is None or values is None:
                return None
            return torch.sparse_coo_tensor(places, values, tensor.shape, is_coalesced=tensor.is_coalesced(), check_invariants=False)
        shadow = self.of(tensor)
        if shadow is None or shadow.num_bytes != tensor.untyped_storage().nbytes() or not shadow.knows(tensor):
            return None
        view = shadow.view(tensor, is_written=is_written)
        if shadow.is_mixed and (not view.is_floating_point() or bool(view.isnan().any())):
            return None
        return torch._neg_view(view) if tensor.is_neg() else view

    def known_part(self, tensor: Any) -> torch.Tensor | None:
        """Return the values of *tensor*, with nan where they are not known; None where none is."""
        shadow = self.of(tensor)
        if shadow is None or not shadow.is_mixed or not tensor.is_floating_point() or not shadow.knows(tensor) or tensor.is_neg():
            return self.value(tensor)
        view = shadow.view(tensor, is_written=False)
        return None if view.isnan().all() else view

    def learn_part(self, tensor: Any, value: torch.Tensor, assumption: str | None) -> None:
        """Keep what is known of *tensor*, which has a storage of its own: *value*, but for those of its numbers that are nan."""
        self.learn(tensor, value, assumption, is_new=True)
        shadow = self.of(tensor)
        if shadow is not None:
            shadow.is_mixed = True

    def learn(self, tensor: Any, value: torch.Tensor, assumption: str | None = None, *, is_new: bool = False) -> None:
        """Keep that *tensor* has the content *value*; where it *is_new*, nothing else lies in its storage."""
        if tensor.layout is torch.sparse_coo and value.layout is torch.sparse_coo:
            for part, known in zip(parts_of(tensor), parts_of(value), strict=True):
                self.learn(part, known, assumption, is_new=is_new)
        if tensor.layout is not torch.strided or tuple(tensor.shape) != tuple(value.shape):
            return
        storage = tensor.untyped_storage()
        is_whole = tensor.numel() * tensor.element_size() == storage.nbytes() and tensor.is_contiguous() and not tensor.is_neg()
        repeats = is_whole and value.numel() >= MANY and once(value).numel() < value.numel()
        before = self.of(tensor)
        is_there = before is not None and before.num_bytes == storage.nbytes() and not (is_new and not before.knows(tensor))
        if repeats or not is_there:
            if not is_new and tensor.numel() * tensor.element_size() < storage.nbytes():  # a part of something that is not known
                return
            self._kept[storage._cdata] = Shadow(storage, 0, assumption or (before.assumption if before is not None else None))
        shadow = self._kept[storage._cdata]
        if repeats:
            shadow.repeat(tensor, value)
            return
        shadow.write(tensor, value)
        shadow.assumption = assumption or shadow.assumption

    def fill(self, tensor: Any, byte: int, assumption: str | None = None) -> None:
        """Keep that every byte of *tensor*, which has a storage of its own, is *byte*."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = Shadow(storage, byte, assumption)

    def forget(self, tensor: Any) -> None:
        """Keep that nobody knows what *tensor* holds now."""
        for part in parts_of(tensor):
            shadow = self.of(part)
            if shadow is not None:
                shadow.forget(part)
                if shadow.knows_little or shadow.num_bytes != part.untyped_storage().nbytes():
                    self._kept.pop(part.untyped_storage()._cdata, None)

    def sweep(self) -> None:
        """Let go, from time to time, of shadows whose storage has gone; to be called with each operation."""
        self._num_operations += 1
        if self._num_operations % SWEEP_EVERY == 0:
            for key, shadow in list(self._kept.items()):  # other threads go on
                if shadow.of.expired() and self._kept.get(key) is shadow:
                    self._kept.pop(key, None)

    def assumption_of(self, tensors: Iterable[Any]) -> str | None:
        """Return the assumption that what *tensors* hold stands on; None where it stands on none."""
        shadows = (self.of(tensor) for tensor in tensors)
        found = [shadow.assumption for shadow in shadows if shadow is not None and shadow.assumption is not None]
        return max(found, key=lambda assumption: assumption == ONE_DRAW, default=None)  # the one that has no ends


def parts_of(tensor: Any) -> list[Any]:
    """Return the tensors with a storage that *tensor* consists of: itself, or the places and the values of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout is torch.strided else []

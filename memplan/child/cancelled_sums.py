"""
What is added and taken away again: `hard + soft - soft.detach()` has the values of `hard`, and the gradient of `soft`.

One-hot actions and codes are made so (straight-through, a hard Gumbel softmax). Neither sum is known while `soft` comes from a model, and
yet what comes of both is: an environment that gets the action checks it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memplan.child.shadows import HOST, Shadows

MOST_KEPT = 64
"""Sums that are waited for: the other half follows soon."""


class _Place(NamedTuple):
    """Where in which storage a tensor lies."""

    storage: StorageWeakRef
    offset: int
    shape: tuple[int, ...]

    def is_that_of(self, tensor: Any) -> bool:
        """Say whether *tensor* lies there."""
        same = not self.storage.expired() and self.storage.cdata == tensor.untyped_storage()._cdata
        return same and (self.offset, self.shape) == (tensor.storage_offset(), tuple(tensor.shape))


class _Sum(NamedTuple):
    """A sum of something that is known, and something that is not."""

    place: _Place
    known: torch.Tensor
    unknown: _Place
    sign: int
    """Of what is not known."""
    assumption: str | None
    """That what is known stands on."""


class Left(NamedTuple):
    """What is left of a sum when what is not known is taken away again."""

    value: torch.Tensor
    assumption: str | None


class CancelledSums:
    """Looks for sums from which what was not known is taken away again."""

    def __init__(self, shadows: Shadows) -> None:
        self._shadows = shadows
        self._kept: list[_Sum] = []

    @property
    def are_waited_for(self) -> bool:
        """Say whether there is one from which something may be taken away."""
        return bool(self._kept)

    def left_by(self, sign: int, left: Any, right: Any, made: Any) -> Left | None:
        """Return what *made*, which is *left* plus *sign* times *right*, holds, where what is not known in it is gone; else keep it."""
        for total, other, of_total, of_other in ((left, right, 1, sign), (right, left, sign, 1)):
            for kept in self._kept:
                if kept.place.is_that_of(total) and kept.unknown.is_that_of(other) and kept.sign * of_total + of_other == 0:
                    return Left(kept.known if of_total == 1 else -kept.known, kept.assumption)
        if sign == -1 and _place(left).is_that_of(right):
            return Left(torch.zeros((), dtype=left.dtype, device=HOST).expand(left.shape), None)
        values = self._shadows.value(left), self._shadows.value(right)
        if (values[0] is None) != (values[1] is None) and left.shape == right.shape:
            known: Any = values[0] if values[1] is None else sign * values[1]
            unknown, of_unknown = (left, 1) if values[0] is None else (right, sign)
            assumption = self._shadows.assumption_of([right if values[0] is None else left])
            self._kept = [*self._kept[1 - MOST_KEPT :], _Sum(_place(made), known.clone(), _place(unknown), of_unknown, assumption)]
        return None


def _place(tensor: Any) -> _Place:
    return _Place(StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tuple(tensor.shape))

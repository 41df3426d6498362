"""
Whether a program without an optimizer of PyTorch's has updated what it trains.

Each of its backward passes counts as a step. One that accumulates gradients over several, and then updates its parameters itself, makes the
state of its optimizer in that update, which a rehearsal of a few steps is to see.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from memplan.child.live_objects import is_whole, objects_of

MOST_STEPS_WITHOUT = 32
"""How many steps more than asked for are run to see an update that has not come yet: few programs accumulate over more."""


class OwnUpdates:
    """Watches the leaves that are trained, from the first backward on."""

    def __init__(self) -> None:
        self._versions: list[tuple[weakref.ref[Any], int]] = []
        self._first = 0
        """The number of backward passes before the first update; 0: there has been none."""

    def begin(self) -> None:
        """Keep what is to be trained as it is now."""
        leaves = (tensor for tensor in filter(is_whole, objects_of(torch.Tensor)[0]) if tensor.is_leaf and tensor.requires_grad)
        self._versions = [(weakref.ref(tensor), tensor._version) for tensor in leaves]

    def look(self, num_backwards: int) -> None:
        """Look, as the next backward begins, whether there has been an update since the first of *num_backwards*."""
        if not self._first and self._were_seen(num_backwards):
            self._first = num_backwards

    def lack_one(self, num_backwards: int, *, asked: int) -> bool:
        """
        Say whether more than the *asked* steps are needed: until the first update, and then as many again.

        The state that it made is there while gradients are accumulated anew.
        """
        return num_backwards < (2 * self._first if self._first else asked + MOST_STEPS_WITHOUT)

    @property
    def is_none(self) -> bool:
        """Say whether no update was seen."""
        return not self._first

    def _were_seen(self, num_backwards: int) -> bool:
        """
        Say whether a parameter is another, or gradients were cleared.

        A parameter that is changed by its `data` looks the same. A gradient that is there is changed once by each backward, and once more
        where it is set to zero.
        """
        left = [(tensor, version) for reference, version in self._versions if (tensor := reference()) is not None]
        gradients = [tensor.grad for tensor, _ in left if tensor.grad is not None]
        return (
            not gradients
            or any(tensor._version != version for tensor, version in left)
            or any(gradient._version > num_backwards for gradient in gradients)
        )

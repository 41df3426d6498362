"""
What stands in for what a model computes from its weights, and for what is drawn at random, in the values pass.

Such numbers have no value on the host. Where they choose (a router, a threshold), one variant has everything pass and each of the choices
get an equal share; in the other nothing passes, and the last choices get all: a place that is a length is the largest that it can be.
What is drawn is drawn on the host; a few draws at once are put to the ends of their range, since a long training meets those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from memplan.child.shadows import HOST
from memplan.child.tensor_types import has_memory
from memplan.traces.read_basis import DRAWN, ONE_DRAW

Variant = Literal["all", "most", "none", "redrawn"]
"""
What passes where floats decide; most: all but one of each row of many; redrawn: all, and what is drawn at random on the device is drawn
otherwise.
"""

ALL_PASS: Mapping[str, str] = {"all": "everything passes", "none": "nothing passes"}
MANY_IN_A_ROW = 64
"""Places of a row of which one may be left out: what hangs on the others has all but one part in so many."""
SHARES: Mapping[str, str] = {"all": "each of the choices gets an equal share", "none": "the last choices get all"}

COMPARISONS = {
    "eq", "ne", "lt", "le", "gt", "ge", "isclose", "logical_not", "logical_and", "logical_or", "logical_xor", "bitwise_not", "bitwise_and",
    "bitwise_or",
}  # fmt: skip
FINITE = {"isnan": False, "isinf": False, "isposinf": False, "isneginf": False, "isfinite": True}
"""What is said of numbers as an ordinary training has them."""

CHOICES = {"topk": 1, "sort": 1, "argsort": 0, "argmax": 0, "argmin": 0, "max": 1, "min": 1, "multinomial": 0, "kthvalue": 1, "median": 1}
"""Operations that say where something is, and at which place of their results."""

A_VOCABULARY = 1000
"""Choices from which on what is chosen is a token of a text or the like, of which the first and the last often mean that it ends."""

FEW_DRAWN = 8
"""Random numbers that are drawn at once, up to which both ends of their range are likely in a long training: one that decides a branch."""

OTHER_END_EVERY = 8
"""Each so many of such draws is at the other end: a loop may wait for it."""


def is_for_ordinary_numbers(name: str, args: Any) -> bool | None:
    """
    Return what a comparison of a tensor with itself or with infinity gives where all numbers are finite; None for other operations.

    PyTorch makes `isnan`, `isfinite` and `isinf` of these.
    """
    if name not in ("eq", "ne", "lt", "gt") or len(args) < 2:
        return None
    left, right = args[0], args[1]
    if isinstance(right, float) and math.isinf(right):
        return name == "ne" or (name == "lt" and right > 0) or (name == "gt" and right < 0)
    is_same = has_memory(left) and has_memory(right) and left.is_set_to(right)
    return name == "eq" if is_same and name in ("eq", "ne") else None


# what is chosen


def choices_in(name: str, result: Any) -> Any:
    """Return the tensor among the *result* of operation *name* that says which were chosen; None where none does."""
    if name not in CHOICES:
        return None
    is_alone = isinstance(result, torch.Tensor)  # of `max` without a dimension the largest value, which is no place
    if is_alone != (CHOICES[name] == 0):
        return None
    choices = result if is_alone else result[CHOICES[name]]
    return choices if has_memory(choices) and choices.dtype == torch.int64 and choices.numel() else None


def chosen(name: str, choices: Any, args: Any, variant: Variant) -> torch.Tensor:
    """
    Return what stands in for *choices*, the places that operation *name* chose among scores: each equally often, or always the last.

    Of a single place that is the first or the last one.
    """
    scores = args[0]
    numbers = [value for value in args[1:] if isinstance(value, int) and not isinstance(value, bool)]
    given = numbers[1] if name == "topk" and len(numbers) > 1 else numbers[0] if numbers and name not in ("topk", "multinomial") else -1
    dim = given % max(1, scores.dim())
    num_choices = max(1, scores.shape[dim] if choices.dim() else scores.numel())  # of all, where no dimension is named
    aside = num_choices // 3 if num_choices >= A_VOCABULARY else 0  # so that what is generated does not end before its time
    if choices.dim() != scores.dim() or not choices.dim():
        rows = torch.arange(choices.numel(), device=HOST).view(choices.shape)
        return (aside + rows) % num_choices if variant == "all" else torch.full_like(rows, num_choices - 1 - aside)
    num_chosen = choices.shape[dim]
    order = torch.arange(num_chosen, device=HOST)
    rows = torch.arange(choices.numel() // max(1, num_chosen), device=HOST).unsqueeze(1)
    if num_chosen == num_choices:
        rows, aside = torch.zeros_like(rows), 0
    elif variant == "none":
        rows, aside = torch.zeros_like(rows), num_choices - num_chosen - aside
    elif num_chosen > 1:
        aside = aside or 1  # a program that divides by each of its places, as by the strongest frequencies, never chooses the first
    wanted = aside + rows * num_chosen + order
    others = (size for at, size in enumerate(choices.shape) if at != dim)
    return (wanted % num_choices).view(*others, num_chosen).movedim(-1, dim)


# what is drawn


class Draws:
    """The random numbers that the host draws in place of the device; *is_again*: for a second time, otherwise."""

    def __init__(self, *, is_again: bool) -> None:
        self.generator = torch.Generator(HOST).manual_seed(int(is_again))
        self._is_again, self._num_few = is_again, 0

    def seed(self) -> int:
        """Return the seed of the next draw."""
        return int(torch.randint(2**31, (), generator=self.generator, device=HOST))

    def settle(self, name: str, args: Any, found: Any) -> str:
        """Return what *found* stands on, which operation *name* drew: few are put to an end of their range, and of many it is one draw."""
        is_few = isinstance(found, torch.Tensor) and found.numel() <= FEW_DRAWN
        ends = _ends_of(name, args, found.dtype) if is_few else None
        if ends is None:
            return ONE_DRAW
        self._num_few += 1
        is_highest = self._is_again == (self._num_few % OTHER_END_EVERY == 0)
        found.fill_(ends[is_highest])
        return f"{DRAWN}: the {'highest' if is_highest else 'lowest'} that can be"


def _ends_of(name: str, args: Any, dtype: torch.dtype) -> tuple[float, float] | None:
    """Return the lowest and the highest number that operation *name* draws; None where it has no ends, or none that are known here."""
    numbers = [value for value in args if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if name in ("randint", "randint_like", "random_") and numbers and None not in args:
        low, high = (0, *numbers)[-2:]
        return low, high - 1
    if name in ("rand", "rand_like", "uniform_"):
        low, high = numbers if len(numbers) == 2 else (*numbers, 1.0) if numbers else (0.0, 1.0)
        return low, high - (high - low) * torch.finfo(dtype).eps / 2  # the end itself is not drawn
    if name in ("bernoulli", "bernoulli_") and numbers and 0 < numbers[0] < 1:
        return 0, 1
    if name == "bernoulli" and not numbers and bool(((args[0] > 0) & (args[0] < 1)).all()):
        return 0, 1
    return None

"""
Numbers that PyTorch draws again until all of them lie between two bounds: `nn.init.trunc_normal_`, from 2.13 on.

It asks the device each time whether any lies outside. Nothing is drawn there, so how often a GPU would draw is worked out from how likely
a number is outside; twice tells of all, since each further time takes what the second does.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MOST_REDRAWS = 2


class _Redraws(TorchFunctionMode):
    """Answers whether any number lies outside: so often that some do, and then that none does."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        found = func(*args, **(kwargs or {}))
        if func is not torch.Tensor.any:
            return found
        self._left -= 1
        return torch.tensor(self._left >= 0, device="cpu")


def end_redraws() -> None:
    """Have `nn.init.trunc_normal_` draw numbers of the device as often as a GPU would, or twice."""
    draw = torch.nn.init._no_grad_trunc_normal_

    @functools.wraps(draw)
    def drawn(tensor: Any, mean: float, std: float, a: float, b: float, *more: Any, **named: Any) -> Any:
        if not tensor.is_cuda:
            return draw(tensor, mean, std, a, b, *more, **named)
        with _Redraws(num_redraws(tensor.numel(), mean, std, a, b)):
            return draw(tensor, mean, std, a, b, *more, **named)

    torch.nn.init._no_grad_trunc_normal_ = drawn


def num_redraws(count: int, mean: float, std: float, lowest: float, highest: float) -> int:
    """
    Return how often *count* normal numbers are drawn again until all are expected between the bounds; at most `MOST_REDRAWS`.

    Each time those are drawn again that lie outside, of which the same share lies outside again.
    """
    inside = (math.erf((highest - mean) / std / math.sqrt(2)) - math.erf((lowest - mean) / std / math.sqrt(2))) / 2
    outside, left = 1 - inside, float(count)
    for redraws in range(MOST_REDRAWS):
        left *= outside
        if left < 1:
            return redraws
    return MOST_REDRAWS

"""
Mixtures of experts on a device that computes nothing.

Which tokens go to which expert is decided by numbers: a router's scores. They do not exist here, and read as zeros they would send no token
to any expert, which is the least memory that such a step can take. Each token is taken to go to as many experts as it does in truth, and
each expert to get its share of them. What the experts keep together is the same however the tokens are spread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class BalancedExperts(TorchFunctionMode):
    """
    Answers the questions that models of transformers put to a table of who goes where (modeling_mixtral.py and its like, 4.57).

    ``nonzero`` of a row with an entry for each expert, which experts have any token: all. ``where`` of an expert's table, tokens by choices
    or choices by tokens, which tokens it has: its share. ``tolist`` of a row, how many each has: its share. The tables are made by
    ``one_hot`` or ``scatter``, which say how many experts and choices there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_experts = 0
        self._choices = 0
        """Experts that a token goes to."""
        self._routed = 0
        """Tokens times choices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("one_hot", "scatter") and args[0].is_cuda:
            return self._remember(name, func(*args, **(kwargs or {})), args)
        if self._num_experts and args and isinstance(args[0], Tensor) and args[0].is_cuda:
            table = args[0]
            if name == "nonzero" and table.numel() == self._num_experts:
                return torch.arange(self._num_experts)[:, None].expand(-1, table.dim())
            if name == "where" and len(args) == 1 and self._choices in table.shape and table.dim() <= 2:
                count = -(-table.numel() // self._num_experts)
                return tuple(torch.zeros(count, dtype=torch.long, device=table.device) for _ in range(table.dim()))
            if name == "tolist" and table.shape == (self._num_experts,):
                share, rest = divmod(self._routed, self._num_experts)
                return [share + 1] * rest + [share] * (self._num_experts - rest)
        return func(*args, **(kwargs or {}))

    def _remember(self, name: str, table: Tensor, args: Any) -> Tensor:
        """Keep what a *table* of who goes where tells, where it is one: (..., choices, experts), or (tokens, experts) from choices."""
        indices = args[0] if name == "one_hot" else args[2]
        if indices.dim() > 1 and (name == "one_hot" or (args[1] == 1 and table.shape[0] == indices.shape[0])):
            self._num_experts, self._choices, self._routed = table.shape[-1], indices.shape[-1], indices.numel()
        return table

"""Which tensors have memory; one step more: the element type of every tensor that an operator returns, and the line that asked for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.child.program_frames import place_in

LEAST_BYTES = 2**20
"""Smaller tensors are no finding."""


class TypeRecorder(TorchDispatchMode):
    """Notes the type of every tensor of the device, as [address, allocations so far, type, bytes, place]."""

    supports_higher_order_operators = True

    def __init__(self, num_allocations: Callable[[], int]) -> None:
        super().__init__()
        self._num_allocations = num_allocations
        self.seen: list[tuple[int, int, str, int, str | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if type(tensor) is torch.Tensor and tensor.is_cuda and tensor.layout is torch.strided and tensor.nbytes >= LEAST_BYTES:
                address = tensor.untyped_storage().data_ptr()
                dtype = str(tensor.dtype).removeprefix("torch.")
                self.seen.append((address, self._num_allocations(), dtype, tensor.nbytes, place_in(sys._getframe())))
        return result


def has_memory(tensor: Any) -> bool:
    """Say whether *tensor* has memory of its own; one whose class stands for operations may describe a tensor, as torch.compile does."""
    return isinstance(tensor, torch.Tensor) and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__

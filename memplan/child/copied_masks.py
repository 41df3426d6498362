"""
Masks that a program copies to the device: whether all of their elements are set, as the host knew when it copied them.

Models of transformers ask in every forward whether a mask has padding, and take another kernel of attention where it has none. Nothing else
of a batch may be asked for: that one bit is known here, without a values pass.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from memplan.child.not_compiled import not_followed
from memplan.child.source_lines import mask_asked_for

_COPIES = ("to", "cuda", "bool", "int", "long")
"""Methods that copy a tensor to the device, or to another type there."""

MOST_ELEMENTS = 2**24
"""Of what is looked at: 2,048 sequences of 8,192 tokens."""


class _Noted(NamedTuple):
    """What is known of a tensor of the device."""

    are_set: bool
    """No element is zero."""
    are_ones: bool
    version: int
    """That of the tensor then: what changes it in place, by a kernel too, counts it up."""


_noted = WeakTensorKeyDictionary()


def note_masks(is_wanted: Callable[[], bool]) -> None:
    """Look at what is copied to the device from here on, where it *is_wanted*."""
    for name in _COPIES:
        setattr(torch.Tensor, name, _noting(getattr(torch.Tensor, name), is_wanted))


def is_all_set(frame: FrameType) -> bool | None:
    """Return the answer to what *frame* asks of a mask; None where it asks for something else, or where that is not known."""
    asked = mask_asked_for(frame)
    mask = None if asked is None else _local(frame, asked.name)
    noted = _of(mask)
    if asked is None or noted is None:
        return None
    return noted.are_ones if asked.is_for_ones else noted.are_set


def _of(tensor: Any) -> _Noted | None:
    """Return what is known of *tensor* as it is now."""
    noted: _Noted | None = _noted.get(tensor) if type(tensor) is torch.Tensor else None
    return noted if noted is not None and noted.version == tensor._version else None


def _local(frame: FrameType, name: str) -> Any:
    """Return what the variable has; the others of *frame* are not held for longer than it holds them."""
    variables = frame.f_locals
    found = variables.get(name)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()  # a copy, which the frame would keep
    return found


def _noting(method: Callable[..., Any], is_wanted: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = method(self, *arguments, **keywords)
        if type(result) is torch.Tensor and result is not self and result.is_cuda and not result.is_floating_point() and is_wanted():
            _note(self, result)
        return result

    return not_followed(call)


def _note(source: Any, result: torch.Tensor) -> None:
    """Note what *result*, a copy of *source*, has."""
    if type(source) is not torch.Tensor or result.is_inference() or source.is_floating_point() or source.numel() > MOST_ELEMENTS:
        return
    version = result._version
    if not source.is_cuda:
        values = source.to(result.dtype)
        _noted[result] = _Noted(bool((values != 0).all()), bool((values == 1).all()), version)
    elif (noted := _of(source)) is not None and result.dtype == torch.bool:
        _noted[result] = _Noted(noted.are_set, noted.are_set, version)
    elif noted is not None and (noted.are_ones or result.dtype == source.dtype):  # other numbers may be zero in a smaller type
        _noted[result] = noted._replace(version=version)

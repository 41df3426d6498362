"""
The structure of a sample: which of its values go to the device, which stay on the host, and how they are put together again.

A sample is a value, or dicts, tuples, named tuples and lists of values. Tensors, NumPy arrays and numbers go to the device, in the type
that they have: integers and booleans stay integers and booleans. Texts, bytes and None stay on the host. Batches have the structure that
PyTorch's `default_collate` gives them.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memplan.errors import UsageError

HostValue = str | bytes | None
"""What stays on the host."""


class TensorPart(NamedTuple):
    """A value of each sample that is kept on the device."""

    name: str
    """Where it is in a sample, as Python reads it: "['image']", "[0]"; empty where the sample is the value itself."""
    shape: tuple[int, ...]
    """Of the value in one sample: without a dimension for the samples."""
    dtype: torch.dtype
    """The type that it is kept in."""
    read_dtype: torch.dtype
    """The type that the dataset returns it in; another only where floating-point values are kept in a type of the user's choice."""

    @property
    def sample_bytes(self) -> int:
        """Return the bytes of the value in one sample."""
        return math.prod(self.shape) * self.dtype.itemsize


class SampleValues(NamedTuple):
    """The values of one sample, in the order of the structure."""

    tensors: list[Tensor]
    """What goes to the device, where and as it was returned."""
    host: list[HostValue]
    """What stays on the host."""


class SampleStructure:
    """
    What all samples of a dataset have in common, taken from one of them.

    Args:
        sample: The sample.
        dtype: The type in which floating-point values are kept; None: that of each. Other values always keep their own.

    Raises:
        UsageError: If a value is none that can be kept, or there is none for the device.

    """

    def __init__(self, sample: Any, dtype: torch.dtype | None = None) -> None:
        parts, host_names, self._places = [], [], []
        for name, value in _named_values(sample):
            tensor = _tensor_of(name, value)
            self._places.append(tensor is None)
            if tensor is None:
                host_names.append(name)
            else:
                kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                parts.append(TensorPart(name, tuple(tensor.shape), kept, tensor.dtype))
        if not parts:
            raise UsageError("a sample has no tensor, array or number: there is nothing to keep on the device", hint=_WHAT_GOES)
        self.parts: tuple[TensorPart, ...] = tuple(parts)
        """What goes to the device."""
        self.host_names: tuple[str, ...] = tuple(host_names)
        """What stays on the host."""
        self._skeleton = _without_values(sample)
        self._names = [name for name, _ in _named_values(sample)]

    @property
    def sample_bytes(self) -> int:
        """Return the bytes of one sample on the device."""
        return sum(part.sample_bytes for part in self.parts)

    def values_of(self, sample: Any) -> SampleValues:
        """Return the values of *sample*. Raises UsageError where it has others, or in other shapes or types."""
        named = list(_named_values(sample))
        self._check_names([name for name, _ in named])
        found = SampleValues([], [])
        for (name, value), is_on_host in zip(named, self._places, strict=True):
            tensor = _tensor_of(name, value)
            if (tensor is None) != is_on_host:
                raise UsageError(f"{_place(name)} is {_kind(value)}, and not {'a text' if is_on_host else 'a tensor'}", hint=_ALIKE)
            if tensor is None:
                found.host.append(value)
            else:
                _check_alike(self.parts[len(found.tensors)], tensor)
                found.tensors.append(tensor)
        return found

    def sample_from(self, tensors: Sequence[Tensor], host: Sequence[Any]) -> Any:
        """Return a sample with these values, in the containers that the dataset returns."""
        return _filled(self._skeleton, self._in_order(tensors, host), is_batch=False)

    def batch_from(self, tensors: Sequence[Tensor], host: Sequence[Any]) -> Any:
        """Return a batch with these values, each of several samples; tuples become lists, as in `default_collate`."""
        return _filled(self._skeleton, self._in_order(tensors, host), is_batch=True)

    def _in_order(self, tensors: Sequence[Tensor], host: Sequence[Any]) -> Iterator[Any]:
        on_device, on_host = iter(tensors), iter(host)
        return (next(on_host) if is_on_host else next(on_device) for is_on_host in self._places)

    def _check_names(self, names: list[str]) -> None:
        if names == self._names:
            return
        more, fewer = set(names) - set(self._names), set(self._names) - set(names)
        if not more and not fewer:
            raise UsageError("it has its values in another order", hint=_ALIKE)
        told = [f"it {verb} {', '.join(map(_place, sorted(some)[:3]))}" for verb, some in (("has", more), ("lacks", fewer)) if some]
        raise UsageError(" and ".join(told), hint=_ALIKE)


_WHAT_GOES = "tensors, NumPy arrays and numbers go to the device; texts, bytes and None stay on the host; `transform` can make them"
_ALIKE = "all samples need the same values, shapes and types: pad or resize them in the dataset or in `transform`"


def _check_alike(part: TensorPart, tensor: Tensor) -> None:
    if tuple(tensor.shape) != part.shape:
        raise UsageError(f"{_place(part.name)} has shape {tuple(tensor.shape)}, and not {part.shape}", hint=_ALIKE)
    if tensor.dtype != part.read_dtype:
        raise UsageError(f"{_place(part.name)} is {tensor.dtype}, and not {part.read_dtype}", hint=_ALIKE)
    if part.dtype != part.read_dtype:
        _check_range(part, tensor)


def _check_range(part: TensorPart, tensor: Tensor) -> None:
    """Raise UsageError for a number that would become infinity in the type that it is kept in."""
    largest = torch.finfo(part.dtype).max
    if 2 * largest > torch.finfo(part.read_dtype).max:  # float32 and bfloat16 end at nearly the same number
        return
    finite = tensor[tensor.isfinite()]
    if finite.numel() and finite.abs().max() > largest:
        raise UsageError(
            f"{_place(part.name)} has {finite.abs().max().item():g}, and {part.dtype} ends at {largest:g}", hint="`dtype=torch.bfloat16`"
        )


def _place(name: str) -> str:
    return f"sample{name}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _named_values(sample: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of *sample*, each with the expression that reads it."""
    if isinstance(sample, Mapping):
        for key, inner in sample.items():
            yield from _named_values(inner, f"{name}[{key!r}]")
    elif _is_named_tuple(sample):
        for field, inner in zip(sample._fields, sample, strict=True):
            yield from _named_values(inner, f"{name}.{field}")
    elif isinstance(sample, (tuple, list)):
        for index, inner in enumerate(sample):
            yield from _named_values(inner, f"{name}[{index}]")
    else:
        yield name, sample


def _without_values(sample: Any) -> Any:
    """Return the containers of *sample* with None for each value: what is kept of it must not keep its tensors alive."""
    if isinstance(sample, Mapping):
        return _mapping_like(sample, {key: _without_values(inner) for key, inner in sample.items()})
    if _is_named_tuple(sample):
        return type(sample)(*map(_without_values, sample))
    if isinstance(sample, (tuple, list)):
        inner = [_without_values(each) for each in sample]
        return inner if isinstance(sample, list) else tuple(inner)
    return None


def _filled(skeleton: Any, values: Iterator[Any], *, is_batch: bool) -> Any:
    """Return the containers of *skeleton* with the next of *values* for each of its own."""
    if isinstance(skeleton, Mapping):
        return _mapping_like(skeleton, {key: _filled(inner, values, is_batch=is_batch) for key, inner in skeleton.items()})
    if _is_named_tuple(skeleton):
        return type(skeleton)(*[_filled(inner, values, is_batch=is_batch) for inner in skeleton])
    if isinstance(skeleton, (tuple, list)):
        inner = [_filled(each, values, is_batch=is_batch) for each in skeleton]
        return inner if is_batch or isinstance(skeleton, list) else tuple(inner)
    return next(values)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _mapping_like(whole: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return *items* as a mapping of the type of *whole*, where that can be made; else as a dict. As `default_collate` does."""
    if type(whole) is dict:
        return items
    try:
        if isinstance(whole, MutableMapping):
            made = copy.copy(whole)
            made.update(items)
            return made
        return type(whole)(items)  # type: ignore[call-arg]  # a class of the user's
    except TypeError:
        return items


def _tensor_of(name: str, value: Any) -> Tensor | None:
    """Return *value* as a tensor, in the type that `default_collate` gives it; None for what stays on the host."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested:
            raise UsageError(f"{_place(name)} is a sparse or nested tensor", hint="only dense tensors can be kept: use `to_dense()`")
        return value.detach()
    if value is None or isinstance(value, (str, bytes)):
        return None
    numpy = sys.modules.get("numpy")  # who has an array has imported it
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _tensor_of_array(name, value, numpy)
    for kind, dtype in ((bool, torch.bool), (int, torch.int64), (float, torch.float64), (complex, torch.complex128)):
        if isinstance(value, kind):
            return _tensor_of_number(name, value, dtype)
    raise UsageError(f"{_place(name)} is {_kind(value)}, which is no tensor, array, number or text", hint=_WHAT_GOES)


def _tensor_of_number(name: str, value: complex, dtype: torch.dtype) -> Tensor:
    try:
        return torch.tensor(value, dtype=dtype)
    except (RuntimeError, ValueError) as error:  # the one of PyTorch 2.1, the other of 2.13
        raise UsageError(f"{_place(name)} is {value}, which is too large for {dtype}", hint=_WHAT_GOES) from error


def _tensor_of_array(name: str, value: Any, numpy: Any) -> Tensor:
    array = numpy.asarray(value)
    if array.dtype.kind not in "biufc":
        raise UsageError(f"{_place(name)} is an array of {array.dtype}", hint=_WHAT_GOES)
    if not (array.flags.writeable and array.dtype.isnative and min(array.strides, default=0) >= 0):  # what torch.from_numpy does not take
        array = numpy.array(array, dtype=array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array)
    except TypeError as error:  # float128
        raise UsageError(f"{_place(name)} is an array of {array.dtype}, which PyTorch does not have", hint=_WHAT_GOES) from error

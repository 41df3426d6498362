"""Objects of this process: its modules, optimizers and tensors, and where those of the device lie."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from memplan.child.tensor_types import has_memory
from memplan.child.tracked_objects import objects_of_classes

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The classes of most tensors: a model has thousands, which are looked at in each step."""


def objects_of(*kinds: type) -> list[list[Any]]:
    """Return the objects of this process that are of each kind. Their classes are looked up first: a million objects take no second."""
    found: dict[type, list[Any]] = {}
    lists: list[list[Any]] = []
    for kind in kinds:
        lists.append([])
        for known in (kind, *subclasses(kind)):
            found[known] = lists[-1]
    for candidate in objects_of_classes(found):
        found[type(candidate)].append(candidate)
    return lists


def subclasses(kind: type) -> set[type]:
    """Return every class that is derived from *kind*."""
    direct: set[type] = set(type.__subclasses__(kind))
    return direct.union(*(subclasses(known) for known in direct))


def trained_by(optimizers: Iterable[Any]) -> list[Any]:
    """Return what *optimizers* train: of one that wraps another, and is none itself, nothing perhaps."""
    return [parameter for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def states_of(optimizers: Iterable[Any]) -> list[Any]:
    """Return the values of the states of *optimizers*."""
    return [value for optimizer in optimizers for state in getattr(optimizer, "state", {}).values() for value in tensors_of(state)]


def state_share(optimizers: Iterable[Any]) -> float:
    """Return how many bytes of state *optimizers* have for a byte of the parameters for which they have any."""
    parameter_bytes = state_bytes = 0
    for optimizer in optimizers:
        for parameter, state in getattr(optimizer, "state", {}).items():
            if isinstance(parameter, torch.Tensor) and state:
                parameter_bytes += parameter.numel() * parameter.element_size()
                state_bytes += sum(each.numel() * each.element_size() for each in tensors_of(state) if isinstance(each, torch.Tensor))
    return state_bytes / parameter_bytes if parameter_bytes else 0.0


def addresses(tensors: Iterable[Any]) -> set[int]:
    """Return where those of *tensors* that lie on the device begin."""
    found = set()
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in itertools.chain.from_iterable(map(_inner, tensors)):
            if (
                (type(tensor) in PLAIN or has_memory(tensor))
                and tensor.is_cuda
                and tensor.layout is torch.strided
                and not _is_wrapped(tensor)
            ):
                found.add(tensor.untyped_storage().data_ptr())
    return found


def _inner(tensor: Any) -> Iterable[Any]:
    """Return what *tensor* consists of: of a DTensor what lies here, of a quantised one its codes and scales; itself, where it is plain."""
    return (tensor,) if type(tensor) in PLAIN else _flattened(tensor)


def _flattened(tensor: Any) -> Iterator[Any]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _inner(getattr(tensor, name))


def shapes_of(modules: list[Any]) -> set[torch.Size]:
    """Return the shapes of the parameters and buffers of *modules*, but for scalars."""
    weights = (weight for module in modules for weight in (*own_parameters(module), *own_buffers(module)))
    return {weight.shape for weight in weights if weight.dim()}


# What modules have is looked up where PyTorch keeps it: a class may have a `parameters` or `named_modules` of its own, which takes or gives
# something else.


def own_parameters(module: Any) -> Iterator[Any]:
    """Yield the parameters of *module*, without those of its parts."""
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)


def own_buffers(module: Any) -> Iterator[Any]:
    """Yield the buffers of *module*, without those of its parts."""
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def named_parameters(module: Any, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of *module* and all its parts, each part once, by their dotted names."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield from ((prefix + name, parameter) for name, parameter in module._parameters.items() if parameter is not None)
    for name, part in module._modules.items():
        if part is not None:
            yield from named_parameters(part, f"{prefix}{name}.", seen)


def possible_weights(modules: list[Any], tensors: list[Any], *, apart_from: Iterable[Any] = ()) -> dict[int, weakref.ref[Any]]:
    """Return those of *tensors* that look like weights, by their identity, and do not lie where one of *apart_from* does."""
    shapes, others = shapes_of(modules), addresses(apart_from)
    found = (tensor for tensor in filter(is_whole, tensors) if _may_be_weight(tensor, shapes))
    return {id(tensor): weakref.ref(tensor) for tensor in found if addresses([tensor]).isdisjoint(others)}


def those_of_both(before: dict[int, weakref.ref[Any]], now: dict[int, weakref.ref[Any]]) -> list[Any]:
    """Return what was there before and is there now."""
    found = ((before[key](), reference()) for key, reference in now.items() if key in before)
    return [tensor for earlier, tensor in found if tensor is not None and tensor is earlier]


def _may_be_weight(tensor: Any, shapes: set[torch.Size]) -> bool:
    """Say whether *tensor* has one of *shapes*, those of the weights, or is itself what gradients are accumulated for."""
    with torch._C.DisableTorchFunctionSubclass():
        if not has_memory(tensor) or not tensor.is_cuda or not tensor.is_floating_point() or not tensor.is_leaf:
            return False
        return tensor.requires_grad or tensor.shape in shapes


def is_whole(tensor: Any) -> bool:
    """Say whether *tensor* has a content: one that is being made or has been given up, by another thread perhaps, is an object without."""
    try:
        _ = tensor.is_leaf
    except RuntimeError:
        return False
    return True


def may_matter(tensor: Any) -> bool:
    """Say whether *tensor* is on the device, or may be trained or of a kind of its own: a dataset may be 100,000 tensors of the host."""
    return type(tensor) is not torch.Tensor or (is_whole(tensor) and (tensor.is_cuda or tensor.requires_grad))


def is_part_of_leaf(tensor: Any) -> bool:
    """Say whether *tensor* is a part of one that nothing computed, and autograd goes on from it, as parameters are of a flat one."""
    return is_whole(tensor) and tensor.grad_fn is not None and tensor._is_view() and tensor._base.is_leaf


def _is_wrapped(tensor: Any) -> bool:
    """Say whether *tensor* stands for another, as torch.compile and torch.func have them: it has no memory of its own."""
    return bool(torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def parts_of(gradient: Any) -> tuple[Any, ...]:
    """Return the tensors that hold *gradient*: that of an embedding may be sparse, its rows and which they are."""
    return (gradient._indices(), gradient._values()) if gradient.layout is torch.sparse_coo else (gradient,)


def tensors_of(state: Any) -> Iterable[Any]:
    """Return the values of an optimizer's state for one parameter, those of lists in it as well."""
    values = list(state.values()) if isinstance(state, dict) else []
    return [inner for value in values for inner in (value if isinstance(value, (list, tuple)) else (value,))]


def names_of(missed: set[int], modules: list[Any]) -> set[str]:
    """Return the names of the parameters whose id is in *missed*, as the models that are no part of another call them."""
    inner = {id(child) for module in modules for child in module._modules.values()}
    models = [module for module in modules if id(module) not in inner]
    return {name for model in models for name, parameter in named_parameters(model) if id(parameter) in missed}

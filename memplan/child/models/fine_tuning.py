"""
What a fine-tuning makes of a model of transformers: low-rank adapters as PEFT puts them in, frozen layers as bitsandbytes keeps them.

What counts is what is allocated and kept, operator by operator (read in peft 0.18, tuners/lora/layer.py and bnb.py, and in bitsandbytes
0.50, autograd/_functions.py); the values do not matter, so that nothing is really quantized. Neither package has to be installed.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memplan.child.failures import OwnModelError
from memplan.workload.model import ALL_LINEAR_LAYERS, is_pattern

if TYPE_CHECKING:
    from memplan.workload.model import Adapters, HuggingFaceModel

BLOCK = 64
"""Elements that share a scale in 4 bits."""

OUTER_BLOCK = 256
"""Scales that share a scale of their own, where scales are quantized too."""


class AdaptedLinear(nn.Module):
    """A frozen linear layer of PEFT with a low-rank adapter beside it."""

    def __init__(self, base: nn.Module, adapters: Adapters, inputs: int, outputs: int) -> None:
        super().__init__()
        dtype = getattr(torch, adapters.dtype)
        self.base = base
        self.dropout = nn.Dropout(adapters.dropout) if adapters.dropout else nn.Identity()
        self.down = nn.Linear(inputs, adapters.rank, bias=False, dtype=dtype)
        self.up = nn.Linear(adapters.rank, outputs, bias=False, dtype=dtype)
        self.is_four_bit = isinstance(base, FourBitLinear)
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's answer and the adapter's, in the type of the first."""
        result: Tensor = self.base(x)
        if not self.is_on:
            return result
        kept = result.dtype
        if self.is_four_bit:
            result = result.clone()
        is_cast = not isinstance(self.base, QuantizedLinear) or not torch.is_autocast_enabled()
        x = x.to(self.down.weight.dtype) if is_cast else x
        return (result + self.up(self.down(self.dropout(x))) * 2.0).to(kept)


class TrainedCopy(nn.Module):
    """A copy of a frozen module that is trained in its place, as PEFT's ModulesToSaveWrapper: both stay in memory."""

    def __init__(self, kept: nn.Module, dtype: str | None) -> None:
        super().__init__()
        self.kept = kept
        self.trained = copy.deepcopy(kept).requires_grad_(True)
        if dtype is not None:
            self.trained.to(getattr(torch, dtype))
        self.is_on = True

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the copy's answer."""
        return (self.trained if self.is_on else self.kept)(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        """Return what the copy has under *name*, as its weight, which Liger's losses read of a head."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("trained"), name)


@contextlib.contextmanager
def without_copies(inner: nn.Module) -> Iterator[None]:
    """Have *inner* as transformers made it, with the frozen modules where copies of them are trained: it ties those, and no copies."""
    copies = [(name, module) for name, module in inner.named_modules() if isinstance(module, TrainedCopy)]
    for name, module in copies:
        inner.set_submodule(name, module.kept)
    try:
        yield
    finally:
        for name, module in copies:
            inner.set_submodule(name, module)


@contextlib.contextmanager
def without_adapters(inner: nn.Module) -> Iterator[None]:
    """Have *inner* answer as it did before it was tuned, as PEFT's `disable_adapter`."""
    tuned = [module for module in inner.modules() if isinstance(module, (AdaptedLinear, TrainedCopy))]
    for module in tuned:
        module.is_on = False
    try:
        yield
    finally:
        for module in tuned:
            module.is_on = True


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose weights are kept in few bits, and made whole for each product."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features, self.dtype = base.out_features, base.in_features, base.weight.dtype
        self.bias = None if base.bias is None else nn.Parameter(base.bias.detach(), requires_grad=False)

    @property
    def num_elements(self) -> int:
        """Return the elements of the weight."""
        return self.out_features * self.in_features

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (outputs, inputs) in *dtype*, made anew."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of *x* (…, inputs) with the weight, computed in the weight's type and told in that of *x*."""
        return self.product(x.to(self.dtype), self.bias).to(x.dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product of *x* (…, inputs) with the weight, for which nothing but the weight is kept."""
        answer: Tensor = _WholeForEachProduct.apply(x, self, bias)
        return answer


class FourBitLinear(QuantizedLinear):
    """Two weights a byte, and a scale for each 64."""

    def __init__(self, base: nn.Linear, *, is_double: bool) -> None:
        super().__init__(base)
        self.is_double = is_double
        scales = -(-self.num_elements // BLOCK)
        self.register_buffer("packed", torch.empty((self.num_elements + 1) // 2, 1, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8 if is_double else torch.float32))
        self.register_buffer("code", torch.empty(16, dtype=torch.float32))
        if is_double:
            self.register_buffer("outer_scales", torch.empty(-(-scales // OUTER_BLOCK), dtype=torch.float32))
            self.register_buffer("outer_code", torch.empty(256, dtype=torch.float32))
            self.register_buffer("offset", torch.empty((), dtype=torch.float32))

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, its scales made whole before it."""
        scales: Any = self.scales
        if self.is_double:
            scales = torch.empty(scales.shape, dtype=torch.float32, device=scales.device)
            scales += self.offset
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=scales.device).to(dtype)


class EightBitLinear(QuantizedLinear):
    """A byte for each weight, and a scale for each row; the product is of bytes too (LLM.int8)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        self.register_buffer("rows", torch.empty(self.out_features, self.in_features, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(self.out_features, dtype=torch.float32))

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return the weight: the rows in *dtype*, multiplied in place."""
        rows, scales = self.rows, self.scales
        assert isinstance(rows, Tensor)
        assert isinstance(scales, Tensor)
        return rows.to(dtype).mul_(scales.unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of *x* (…, inputs) with the weight, in the type of *x*."""
        answer: Tensor = _ProductOfBytes.apply(x, self, self.bias)
        return answer


class _WholeForEachProduct(torch.autograd.Function):
    """x times a quantized weight: nothing of *x* is kept, the weight is made whole again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.whole(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ ctx.layer.whole(grads[0].dtype), None, None


class _ProductOfBytes(_WholeForEachProduct):
    """x times a weight of bytes: *x* is kept, its bytes are made by way of fp16, and the product is of 32 bits before it is scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.kept = layer, x
        rows = x.reshape(-1, x.shape[-1])
        quantized = torch.empty_like(rows.to(torch.float16), dtype=torch.int8)
        product = torch.empty(rows.shape[0], layer.out_features, dtype=torch.int32, device=x.device)
        answer = torch.empty(*x.shape[:-1], layer.out_features, dtype=x.dtype, device=x.device)
        del quantized, product, bias
        return answer


def prepare_fine_tuning(inner: nn.Module, model: HuggingFaceModel) -> None:
    """Change *inner*, a model of transformers, into what *model* describes: layers quantized, norms in their type, adapters put in."""
    put_in_layers(inner, model.adapters, base_of=lambda layer, _: _quantized(layer, model.quantization), head=_head_of(inner))
    if model.adapters is not None:
        _train_copies(inner, model.adapters)
    if model.norm_dtype is not None:
        for name, module in inner.named_modules():
            if "norm" in name.rpartition(".")[2].lower():
                module.to(getattr(torch, model.norm_dtype))
    if model.embeddings_dtype is not None:
        for part in (_part_of(inner, "get_input_embeddings"), _head_of(inner)):
            if part is not None:
                part.to(getattr(torch, model.embeddings_dtype))


def put_in_layers(
    inner: nn.Module, adapters: Adapters | None, *, base_of: Callable[[nn.Linear, bool], nn.Module], head: nn.Module | None
) -> None:
    """
    Put what *base_of* makes of each linear layer but the *head* in its place, beside *adapters* where those are for it, which it is told.

    With adapters all else is frozen. Raises OwnModelError for a target beside which no adapter was put.
    """
    layers = [(name, layer) for name, layer in inner.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    if adapters is not None:
        inner.requires_grad_(False)
    for name, layer in layers:
        is_adapted = adapters is not None and _is_target(name, adapters.targets)
        base = base_of(layer, is_adapted)
        if adapters is not None and is_adapted:
            base = AdaptedLinear(base, adapters, layer.in_features, layer.out_features)
        if base is not layer:
            inner.set_submodule(name, base)
    if adapters is not None:
        _check_targets(inner, adapters.targets)


def _train_copies(inner: nn.Module, adapters: Adapters) -> None:
    """Put a copy that is trained in the place of each module that *adapters* name. Raises OwnModelError for a name that no module has."""
    names = [name for name, _ in inner.named_modules()]
    for wanted in adapters.trained_modules:
        found = [name for name in names if _ends_with(name, wanted)]
        if not found:
            raise OwnModelError(f"{type(inner).__name__} has no module {wanted} to train beside its adapters")
        for name in found:
            kept = inner.get_submodule(name)
            if any(isinstance(part, (AdaptedLinear, QuantizedLinear)) for part in kept.modules()):
                raise OwnModelError(f"{name} is to be trained whole, and has adapters or quantized weights")
            inner.set_submodule(name, TrainedCopy(kept, adapters.trained_dtype))


def _check_targets(inner: nn.Module, targets: tuple[str, ...]) -> None:
    """Raise OwnModelError for a target beside which no adapter was put: there is no such layer, or it is an embedding or the head."""
    adapted = [name for name, module in inner.named_modules() if isinstance(module, AdaptedLinear)]
    missing = [target for target in targets if not any(_is_target(name, (target,)) for name in adapted)]
    if missing:
        names = " or ".join(missing)
        raise OwnModelError(f"{type(inner).__name__} has no linear layer {names} beside its head, where memplan's own model has adapters")


def _head_of(inner: nn.Module) -> nn.Module | None:
    return _part_of(inner, "get_output_embeddings")


def _part_of(inner: nn.Module, getter: str) -> nn.Module | None:
    """Return what the method *getter* of a model of transformers returns; None where it has no such method, or no such part."""
    found: nn.Module | None = getattr(inner, getter, lambda: None)()
    return found


def _is_target(name: str, targets: tuple[str, ...]) -> bool:
    """Say whether the layer *name* is one of *targets*, each its name, the end of it, or a regular expression, as PEFT matches them."""
    return ALL_LINEAR_LAYERS in targets or any(
        re.fullmatch(target, name) is not None if is_pattern(target) else _ends_with(name, target) for target in targets
    )


def _ends_with(name: str, end: str) -> bool:
    """Say whether *name* is *end*, or the name of a part of something that is called so."""
    return name == end or name.endswith(f".{end}")


def _quantized(layer: nn.Linear, quantization: str | None) -> nn.Module:
    if quantization is None:
        return layer
    return EightBitLinear(layer) if quantization == "8bit" else FourBitLinear(layer, is_double=quantization == "4bit-double")

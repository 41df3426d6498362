"""The optimizers of a workload, from torch.optim and transformers; of Lion and bitsandbytes, which are not needed, what they keep."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from memplan.workload.optimizer import (
    BITSANDBYTES,
    OPTIMIZER_PACKAGES,
    PAGED_FROM,
    QUANTIZED_BLOCK,
    QUANTIZED_FROM,
    BitsAndBytes,
    Optimizer,
)

RATE = 1e-4

_TORCH = {
    "sgd": ("SGD", {}), "sgd_momentum": ("SGD", {"momentum": 0.9}), "adam": ("Adam", {}), "adamw": ("AdamW", {}), "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}), "rmsprop": ("RMSprop", {}), "adagrad": ("Adagrad", {}), "adadelta": ("Adadelta", {}),
}  # fmt: skip


class Lion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675): one moment, and the sign of a mean for a step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter, one after the other."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter)
                moment = state["moment"]
                parameter.add_(moment.lerp(parameter.grad, 0.1).sign_(), alpha=-RATE)
                moment.lerp_(parameter.grad, 0.01)


class OfBitsAndBytes(torch.optim.Optimizer):
    """
    What bitsandbytes' optimizers keep and take.

    Of 8 bits a byte for each moment and an fp32 maximum for each block of 256; of tensors below 4096 elements, and of the *exempt*, which
    are given by identity, fp32 moments (bitsandbytes 0.50, optim/optimizer.py: min_8bit_size, blocksize, GlobalOptimManager). Its kernel
    updates in place. Of large tensors a paged one has its moments in managed memory, which the allocator knows nothing of.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], kept: BitsAndBytes, *, exempt: Collection[int], is_paged: bool) -> None:
        super().__init__(parameters, {"lr": RATE})
        self.kept, self.exempt, self.is_paged = kept, exempt, is_paged
        self.tables: list[torch.Tensor | None] = [None] * kept.num_moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state of every parameter that has a gradient; the update itself takes no memory."""
        del closure
        if self.kept.num_bits == 8 and self.tables[0] is None:  # what a byte stands for, a table for each moment
            device = self.param_groups[0]["params"][0].device
            self.tables = [torch.zeros(256, device=device) for _ in self.tables]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or self.state[parameter]:
                    continue
                is_whole = self.kept.num_bits == 32 or parameter.numel() < QUANTIZED_FROM or id(parameter) in self.exempt
                kind = torch.float32 if is_whole else torch.uint8
                blocks = -(-parameter.numel() // QUANTIZED_BLOCK)
                for number, table in enumerate(self.tables):
                    self.state[parameter][f"qmap{number + 1}"] = table
                    is_on_host = self.is_paged and parameter.numel() >= PAGED_FROM
                    self.state[parameter][f"state{number + 1}"] = None if is_on_host else torch.zeros_like(parameter, dtype=kind)
                    if not is_whole:
                        self.state[parameter][f"absmax{number + 1}"] = torch.zeros(blocks, device=parameter.device)


def make_optimizer(optimizer: Optimizer, parameters: list[nn.Parameter], root: nn.Module) -> torch.optim.Optimizer:
    """
    Return *optimizer* over *parameters* of *root*.

    Raises ModuleNotFoundError, naming the package, where it comes from one that is missing.
    """
    if optimizer.name in _TORCH:
        name, options = _TORCH[optimizer.name]
        kind = {"foreach": {"foreach": True}, "for_loop": {"foreach": False}, "fused": {"fused": True}}[optimizer.implementation]
        made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=RATE, **options, **kind)
        return made
    if optimizer.name == "lion":
        return Lion(parameters)
    if optimizer.name in BITSANDBYTES:
        embeddings = {id(module.weight) for module in root.modules() if isinstance(module, nn.Embedding)}
        exempt = () if optimizer.quantizes_embeddings else embeddings
        return OfBitsAndBytes(parameters, BITSANDBYTES[optimizer.name], exempt=exempt, is_paged=optimizer.is_paged)
    package = OPTIMIZER_PACKAGES[optimizer.name]
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise ModuleNotFoundError(f"the optimizer {optimizer.name} is that of {package}, which is not installed") from error
    factored: torch.optim.Optimizer = module.Adafactor(parameters, lr=RATE, relative_step=False)
    return factored

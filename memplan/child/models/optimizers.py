"""The optimizers of a workload, from torch.optim, transformers and bitsandbytes."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from memplan.workload.optimizer import OPTIMIZER_PACKAGES, Optimizer

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


def make_optimizer(optimizer: Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return *optimizer* over *parameters*. Raises ModuleNotFoundError, naming the package, where it comes from one that is missing."""
    if optimizer.name in _TORCH:
        name, options = _TORCH[optimizer.name]
        kind = {"foreach": {"foreach": True}, "for_loop": {"foreach": False}, "fused": {"fused": True}}[optimizer.implementation]
        made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=RATE, **options, **kind)
        return made
    if optimizer.name == "lion":
        return Lion(parameters)
    package = OPTIMIZER_PACKAGES[optimizer.name]
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise ModuleNotFoundError(f"the optimizer {optimizer.name} is that of {package}, which is not installed") from error
    if optimizer.name == "adafactor":
        factored: torch.optim.Optimizer = module.Adafactor(parameters, lr=RATE, relative_step=False)
        return factored
    eight_bit: torch.optim.Optimizer = getattr(module.optim, {"adam8bit": "AdamW8bit", "lion8bit": "Lion8bit"}[optimizer.name])(
        parameters, lr=RATE
    )
    return eight_bit

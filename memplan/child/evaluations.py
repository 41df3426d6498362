"""When the program evaluates: what it trains is in eval mode, and no backward follows before it is back in training mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from memplan.child.live_objects import named_parameters, trained_by
from memplan.child.not_compiled import not_compiled, not_followed


class Evaluations:
    """Says when a module with most of the parameters that an optimizer trains is put into eval mode, and back: *on_change* takes which."""

    def __init__(self, on_change: Callable[[bool], None]) -> None:
        self._on_change = not_compiled(on_change)
        self._trained: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()
        self._depth = 0

    def attach(self) -> None:
        """Follow every optimizer and every module from here on."""
        make = Optimizer.__init__

        @functools.wraps(make)
        def made(*arguments: Any, **keywords: Any) -> None:
            make(*arguments, **keywords)
            self._trained[arguments[0]] = {id(parameter) for parameter in trained_by(arguments[:1])}

        Optimizer.__init__ = made  # type: ignore[method-assign]
        change = torch.nn.Module.train

        @functools.wraps(change)
        def changed(module: Any, mode: bool = True) -> Any:
            self._depth += 1  # its parts are changed by the same method
            try:
                return change(module, mode)
            finally:
                self._depth -= 1
                if self._depth == 0 and self._has_most(module):
                    self._on_change(not mode)

        torch.nn.Module.train = not_followed(changed)  # type: ignore[method-assign]

    def _has_most(self, module: Any) -> bool:
        """
        Say whether *module* has half of what one optimizer trains or more: not a layer whose statistics are frozen, or a teacher.

        A generator has an optimizer of its own, and may be smaller than its discriminator.
        """
        own = {id(parameter) for _, parameter in named_parameters(module)}
        return any(trained and 2 * len(own & trained) >= len(trained) for trained in self._trained.values())

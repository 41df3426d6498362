"""
The state that a forward and backward change besides gradients: random number generators, and buffers of modules.

    with StepState() as state:
        try:
            forward_and_backward()
        except torch.OutOfMemoryError:
            state.restore()

Which modules a step runs is known only when it calls them. So while a StepState is open, PyTorch's global module hooks keep a clone of the
buffers of each module in training mode when it is called, and drop those that its forward did not change: batch normalization's running
statistics are kept until the step ends, a causal mask only during the call.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

# `buffer.data.mul_()` changes values, and not the buffer's version. So clones up to this size are kept whatever the version says: running
# statistics are smaller, and those of a model take little memory. Larger buffers can be whole quantized weights.
_SMALL_BYTES = 64 * 2**10

_NUMBER = (bool, int, float, str, type(None))


class StepState:
    """
    Keeps what :meth:`restore` puts back, while it is open as a context manager.

    Restored are PyTorch's random number generators (of the CPU and of all CUDA devices), and the buffers of modules in training mode as far
    as the modules' own forward changes them. If a forward puts another tensor into a buffer (a cache that grows), the numbers among the
    module's attributes are restored too, since they may say how large the buffer is.

    Modules that run inside a compiled function, or inside a module that was compiled in place (``module.compile()``) and is called from no
    other module, are not seen. Modules inside ``torch.compile(module)`` are.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _KeptBuffer] = {}
        self._replaced: dict[int, _ModuleBuffers] = {}
        self._calls: dict[int, list[_ModuleBuffers]] = {}
        self._cpu_generator = torch.get_rng_state()
        self._cuda_generators = [generator.get_state() for generator in torch.cuda.default_generators]  # none before CUDA is initialized

    def __enter__(self) -> StepState:
        _install(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _uninstall(self)
        for kept in (self._kept, self._replaced, self._calls):
            kept.clear()

    def restore(self) -> None:
        """Put back the generators, and the buffers that have changed. Needs no memory of the device."""
        for kept in reversed(self._kept.values()):  # of buffers that share memory, the first clone has the values before the step
            if kept.clone is not None:
                with torch.no_grad():
                    kept.buffer.copy_(kept.clone)
        for before in self._replaced.values():
            before.restore()
        torch.set_rng_state(self._cpu_generator)
        for index, generator in enumerate(torch.cuda.default_generators):
            if index < len(self._cuda_generators):
                generator.set_state(self._cuda_generators[index])
            else:  # CUDA was initialized during the step
                generator.manual_seed(generator.initial_seed())

    def before_forward(self, called: nn.Module) -> None:
        """Keep the buffers of *called*. Raises torch.OutOfMemoryError if there is no memory for a clone."""
        for module in _with_unseen(called):
            if module.training and module._buffers:
                before = _ModuleBuffers.of(module)
                self._calls.setdefault(id(module), []).append(before)
                for buffer in before.tensors():
                    kept = self._kept.get(id(buffer))
                    if kept is None:
                        kept = self._kept[id(buffer)] = _KeptBuffer(buffer)
                    kept.enter()

    def after_forward(self, called: nn.Module) -> None:
        """Drop the clones of buffers that the forward of *called* did not change."""
        for module in _with_unseen(called):
            calls = self._calls.get(id(module))
            if calls:  # the module may have changed to training mode during its call
                before = calls.pop()
                for buffer in before.tensors():
                    if id(buffer) in self._kept:  # not where memory ran out for an earlier one
                        self._kept[id(buffer)].leave()
                if before.is_replaced():
                    self._replaced.setdefault(id(module), before)


class _KeptBuffer:
    """A buffer, with a clone of its values at the first call in which they may have changed."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.clone: Tensor | None = None
        self._version = buffer._version
        self._num_calls = 0

    def enter(self) -> None:
        self._num_calls += 1
        if self.clone is None and self.buffer._version == self._version:
            self.clone = self.buffer.detach().clone()

    def leave(self) -> None:
        self._num_calls -= 1
        is_small = self.buffer.numel() * self.buffer.element_size() <= _SMALL_BYTES
        if self._num_calls == 0 and self.buffer._version == self._version and not is_small:
            self.clone = None


class _ModuleBuffers(NamedTuple):
    """Which tensors were a module's buffers before a call, and the numbers among its attributes."""

    module: nn.Module
    buffers: dict[str, Tensor | None]
    numbers: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> _ModuleBuffers:
        numbers = {name: value for name, value in vars(module).items() if isinstance(value, _NUMBER)}
        return cls(module, dict(module._buffers.items()), numbers)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the buffers that can change: not those without memory yet (lazy modules), nor those that autograd could not change."""
        for buffer in self.buffers.values():
            if buffer is not None and not nn.parameter.is_lazy(buffer) and not buffer.is_inference():
                yield buffer

    def is_replaced(self) -> bool:
        now = self.module._buffers
        return set(now.keys()) != set(self.buffers) or any(now[name] is not buffer for name, buffer in self.buffers.items())

    def restore(self) -> None:
        now = self.module._buffers
        for name in set(now.keys()) - set(self.buffers):
            delattr(self.module, name)
        for name, buffer in self.buffers.items():
            now[name] = buffer
        for name, value in self.numbers.items():
            if isinstance(vars(self.module).get(name), _NUMBER):
                setattr(self.module, name, value)


def _with_unseen(module: nn.Module) -> Iterator[nn.Module]:
    """Yield *module*, and the modules inside it that run without hooks: in TorchScript, or compiled."""
    yield module
    runs_without_hooks = isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules  # the latter: torch.compile(module)
    for child in module._modules.values():
        if child is not None and (runs_without_hooks or child._compiled_call_impl is not None):
            yield from child.modules()


# The hooks are set while any StepState is open. They are functions of this module under a key that never changes, in the dictionaries that
# register_module_forward_pre_hook() writes to. Its own keys count up, and torch.compile, which guards on key and function, would compile
# again in each step.
_KEY: Any = "memplan.training.step_state"
_open_states: list[StepState] = []
_COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"  # they are these, and may run once more
_lock = threading.Lock()
_is_compiling = torch.compiler.is_compiling if hasattr(torch.compiler, "is_compiling") else torch._utils.is_compiling  # the latter in 2.1


def _before_forward(module: nn.Module, _inputs: Any) -> None:
    if _is_compiling():  # inside a compiled region, which keeps nothing but tensors
        return
    for state in _open_states:
        state.before_forward(module)


def _after_forward(module: nn.Module, _inputs: Any, _output: Any) -> None:
    if _is_compiling():
        return
    for state in _open_states:
        state.after_forward(module)


def _install(state: StepState) -> None:
    with _lock:
        _open_states.append(state)
        hooks._global_forward_pre_hooks[_KEY] = _before_forward
        hooks._global_forward_hooks[_KEY] = _after_forward
        hooks._global_forward_hooks_always_called[_KEY] = True
        if (
            "torch._dynamo" in sys.modules
            and ("ignore", re.compile(_COMPILE_WARNING, re.IGNORECASE), UserWarning, None, 0) not in warnings.filters
        ):
            warnings.filterwarnings("ignore", _COMPILE_WARNING, UserWarning)  # only once: each new filter lets old warnings show again


def _uninstall(state: StepState) -> None:
    with _lock:
        _open_states.remove(state)
        if not _open_states:
            for registered in (hooks._global_forward_pre_hooks, hooks._global_forward_hooks, hooks._global_forward_hooks_always_called):
                del registered[_KEY]

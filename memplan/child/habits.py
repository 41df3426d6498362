"""
What a program does in its steps that costs time or memory without need: `memplan doctor` asks for it, ordinary rehearsals do not.

Calls of PyTorch's own functions are counted by the line of the program that makes them, and by step. Lines of installed packages are left
out: nobody can change them. On request a call is changed (an `empty_cache` that does nothing, gradients that are set to None), so that a
second rehearsal shows what the change would save. MEMPLAN_HABITS is JSON: `{"changes": {}}` changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from memplan.child.batch_shapes import tensors_in
from memplan.child.not_compiled import not_compiled, not_followed
from memplan.child.program_frames import frames_from, named, program_frame, reads_itself
from memplan.child.source_lines import line_at, line_of

HABITS = "MEMPLAN_HABITS"
"""The variable that asks for this."""

MOST_SHAPES = 64
"""Shapes that are kept of what one convolution gets."""

_READS = ("item", "tolist", "__float__", "__int__", "__bool__")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_STDLIB = str(Path(os.__file__).parent) + os.sep
_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)  # from 2.3 on


class Habits:
    """
    Counts the habits of this process.

    Args:
        step: Says which step it is; 0 while the model is built.
        num_backwards: Says how many backwards have begun.

    """

    def __init__(self, step: Callable[[], int], num_backwards: Callable[[], int]) -> None:
        self._step, self._num_backwards = step, num_backwards
        self._changes: dict[str, Any] = json.loads(os.environ[HABITS])["changes"]
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        self._autocasts: dict[str, str] = {}
        self._scalers: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        """Those that are in use: whether they have scaled a loss since their last update."""
        self._has_scaled = False
        self._optimizers: dict[int, dict[str, Any]] = {}
        self._stepping: WeakSet[Any] = WeakSet()
        self._stepped_at, self._is_stepping = 0, False
        self._divisors: set[float | None] = set()
        """What the losses were divided by whose gradients no step has used yet."""
        self._scaled_divisor: float | None = None
        self._used: Counter[tuple[int, float | None, str]] = Counter()
        self._evaluated: dict[int, str] = {}
        """The place of each forward in eval mode that autograd followed, as long as no gradient came back."""
        self._num_evaluated = self._depth = 0
        self._watched: WeakSet[Any] = WeakSet()
        self._convolutions: dict[int, dict[str, Any]] = {}
        self._loaders: dict[int, dict[str, Any]] = {}

    def attach(self) -> None:
        """Count from here on."""
        self._around(torch.cuda, "empty_cache", self._emptied, skips="empty_cache" in self._changes)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            _set_everywhere(torch.nn.utils, name, self._around(torch.nn.utils.clip_grad, name, self._clipped))
        for name in _READS:
            self._around(torch.Tensor, name, self._read)
        for name in ("to", "cuda", "copy_"):
            self._around(torch.Tensor, name, functools.partial(self._copied, name))
        self._around(torch.amp.autocast_mode.autocast, "__enter__", self._entered_autocast)
        self._around(DataLoader, "__iter__", self._iterates)
        self._watch_scalers()
        self._watch_optimizers()
        self._watch_evaluation()
        for kind in (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d):
            self._around(kind, "_conv_forward", self._convolves)

    def seen(self) -> dict[str, Any]:
        """Return what was seen."""
        for place, count in Counter(self._evaluated.values()).items():
            file, _, line = place.rpartition(":")
            self._found["evaluation_with_gradient", place] = {"text": line_at(file, int(line)), "count": count, "steps": set()}
        found = [
            {"kind": kind, "place": place, "text": habit["text"], "count": habit["count"], "num_steps": len(habit["steps"])}
            for (kind, place), habit in self._found.items()
        ]
        return {
            "found": found,
            "autocasts": self._autocasts,
            "has_scaled": self._has_scaled,
            "optimizers": list(self._optimizers.values()),
            "optimizer_steps": [
                {"num_backwards": num_backwards, "divisor": divisor, "place": place, "count": count}
                for (num_backwards, divisor, place), count in self._used.items()
            ],
            "num_backwards_left": self._num_backwards() - self._stepped_at if self._optimizers else 0,
            "convolutions": [{**each, "shapes": sorted(each["shapes"])} for each in self._convolutions.values()],
            "loaders": list(self._loaders.values()),
            "recompilations": _recompilations(),
            "settings": _settings(),
        }

    def _around(self, owner: Any, name: str, note: Callable[..., None], *, skips: bool = False) -> Callable[..., Any]:
        """Have *note* told of each call of *owner*'s function *name* that is no part of what torch.compile follows; *skips*: only that."""
        function, told = getattr(owner, name), not_compiled(note)

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not _is_compiling():
                told(*arguments, **keywords)
                if skips and self._step():
                    return None
            return function(*arguments, **keywords)

        setattr(owner, name, call)
        return call

    def backward_begins(self, roots: Any) -> None:
        """Note, before it is counted, what the loss of a backward was divided by: *roots* are the tensors that it starts from."""
        if not self._is_stepping and self._num_backwards() > self._stepped_at and self._are_cleared():
            self._use_gradients()
        tensors = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        has_scaled = any(self._scalers.values())
        divisor = self._scaled_divisor if has_scaled else _divisor(tensors[0].grad_fn) if len(tensors) == 1 else None
        self._divisors.add(divisor)

    def _note(self, kind: str) -> None:
        """Count *kind* for the line of the program that is at it, in this step."""
        frame = program_frame(frames_from(sys._getframe()))
        if frame is None or _is_installed(frame.f_code.co_filename):
            return
        key = kind, named(frame)
        habit = self._found.get(key) or self._found.setdefault(key, {"text": line_of(frame), "count": 0, "steps": set()})
        habit["count"] += 1
        habit["steps"].add(self._step())

    # calls

    def _emptied(self) -> None:
        if self._step():
            self._note("empty_cache")

    def _read(self, tensor: Any, *_: Any, **__: Any) -> None:
        frames = frames_from(sys._getframe())
        place = program_frame(frames)
        if self._step() and tensor.is_cuda and place is not None and reads_itself(frames, place):
            self._note("read")

    def _copied(self, name: str, tensor: Any, *arguments: Any, non_blocking: bool = False, **keywords: Any) -> None:
        source = arguments[0] if name == "copy_" and arguments else tensor
        if not non_blocking or not self._step() or not isinstance(source, torch.Tensor) or source.device.type != "cpu":
            return
        to = tensor.device if name == "copy_" else "cuda" if name == "cuda" else keywords.get("device", next(iter(arguments), None))
        if _is_cuda(to) and not source.is_pinned():
            self._note("unpinned_copy")

    def _entered_autocast(self, context: Any) -> None:
        if self._step() and context._enabled and context.device == "cuda":
            dtype = str(context.fast_dtype).removeprefix("torch.")
            self._autocasts[dtype] = self._autocasts.get(dtype) or _users_place()

    def _iterates(self, loader: Any) -> None:
        known = self._loaders.setdefault(id(loader), {
            "place": _users_place(),
            "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            "pin_memory": bool(loader.pin_memory),
            "num_workers": loader.num_workers,
            "backwards_before": self._num_backwards(),
        })  # fmt: skip
        known["iterated"] = known.get("iterated", 0) + 1

    def _convolves(self, module: Any, given: Any, *_: Any, **__: Any) -> None:
        if not self._step() or not given.is_cuda or not module.training:
            return
        known = self._convolutions.get(id(module))
        if known is None:
            known = {"kind": type(module).__name__, "shapes": set(), "count": 0, "num_half": 0, "num_channels_last": 0}
            self._convolutions[id(module)] = known
        known["count"] += 1
        known["num_half"] += module.weight.dtype != torch.float32 or torch.is_autocast_enabled()
        if given.dim() == 4 and known["num_channels_last"] == 0:  # one is enough to know that the program knows of it
            known["num_channels_last"] += _is_channels_last(given) or _is_channels_last(module.weight)
        if len(known["shapes"]) < MOST_SHAPES:
            known["shapes"].add(tuple(given.shape))

    # the gradient scaler

    def _watch_scalers(self) -> None:
        kind = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # the first is there from 2.3 on
        self._around(kind, "scale", self._scaled)
        self._around(kind, "update", self._updated)

    def _scaled(self, scaler: Any, outputs: Any, *_: Any, **__: Any) -> None:
        if scaler.is_enabled():
            self._scalers[scaler] = self._has_scaled = True
            self._scaled_divisor = _divisor(outputs.grad_fn) if isinstance(outputs, torch.Tensor) else None

    def _updated(self, scaler: Any, *_: Any, **__: Any) -> None:
        if scaler in self._scalers:
            self._scalers[scaler] = False

    def _clipped(self, *_: Any, **__: Any) -> None:
        """Note a clipping of gradients that are still scaled: none of the scaler's optimizers has been unscaled."""
        for scaler, has_scaled in self._scalers.items():
            stages = [state["stage"].name for state in scaler._per_optimizer_states.values()]
            if has_scaled and "UNSCALED" not in stages:
                self._note("clipped_before_unscale")

    # optimizers

    def _watch_optimizers(self) -> None:
        zero, build = Optimizer.zero_grad, Optimizer.__init__
        is_forced, is_fused = "set_to_none" in self._changes, "fused" in self._changes
        zeroed = not_compiled(self._zeroed)

        @functools.wraps(zero)
        def zero_grad(optimizer: Any, set_to_none: bool = True) -> Any:
            zeroed(optimizer, set_to_none)
            return zero(optimizer, set_to_none=set_to_none or is_forced)

        @functools.wraps(build)
        def built(optimizer: Any, params: Any, defaults: dict[str, Any]) -> None:
            if is_fused and "fused" in defaults:
                defaults |= {"fused": True, "foreach": False}
            build(optimizer, params, defaults)

        setattr(Optimizer, "zero_grad", zero_grad)  # noqa: B010  (a method, as mypy sees it)
        setattr(Optimizer, "__init__", built)  # noqa: B010
        register_optimizer_step_pre_hook(not_compiled(self._will_step))
        register_optimizer_step_post_hook(not_compiled(self._stepped))

    def _zeroed(self, optimizer: Any, set_to_none: bool) -> None:
        if not self._step():
            return
        if not set_to_none:
            self._note("zeroed_in_place")
        left = self._num_backwards() - self._stepped_at
        if left and not self._is_stepping and len(self._optimizers) == 1 and id(optimizer) in self._optimizers:
            self._note("dropped_gradients")
            self._use_gradients()

    def _will_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        del arguments, keywords
        self._is_stepping = True
        self._stepping.add(optimizer)
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = _described(optimizer)

    def _stepped(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Note that a step has ended, and the backwards that it used: its closure's among them."""
        del optimizer, arguments, keywords
        self._is_stepping = False
        num_backwards = self._num_backwards() - self._stepped_at
        if num_backwards:  # none: another optimizer has stepped with them
            divisor = next(iter(self._divisors)) if len(self._divisors) == 1 else None
            self._used[num_backwards, divisor, _users_place()] += 1
        self._use_gradients()

    def _are_cleared(self) -> bool:
        """Say whether no weight of an optimizer has a gradient: they were set to None, by whatever."""
        groups = [group for optimizer in self._stepping for group in optimizer.param_groups]
        return bool(groups) and all(parameter.grad is None for group in groups for parameter in group["params"])

    def _use_gradients(self) -> None:
        """Count backwards anew: the gradients of those before have been used, or dropped."""
        self._stepped_at = self._num_backwards()
        self._divisors.clear()

    # evaluation

    def _watch_evaluation(self) -> None:
        """Follow the forwards of what the program puts into eval mode by its outermost call."""
        train, evaluates = torch.nn.Module.train, not_compiled(self._evaluates)

        @functools.wraps(train)
        def trains(module: Any, mode: bool = True) -> Any:
            if self._depth == 0 and not mode:
                evaluates(module)
            self._depth += 1
            try:
                return train(module, mode)
            finally:
                self._depth -= 1

        setattr(torch.nn.Module, "train", trains)  # noqa: B010

    def _evaluates(self, module: Any) -> None:
        if module in self._watched:
            return
        self._watched.add(module)
        module.register_forward_hook(_Hook(self._evaluated_forward))
        places = self._changes.get("no_grad")
        if places:
            module.register_forward_pre_hook(_Hook(lambda module, _: self._turn_gradient_off(module, places)))
            module.register_forward_hook(_Hook(lambda *_: self._turn_gradient_on()), always_call=True)

    def _evaluated_forward(self, module: Any, given: Any, result: Any) -> None:
        del given
        if module.training or not torch.is_grad_enabled():
            return
        frame = program_frame(frames_from(sys._getframe()))
        followed = [tensor for tensor in tensors_in(result) if tensor.is_cuda and tensor.requires_grad]
        if not followed or frame is None or _is_installed(frame.f_code.co_filename):
            return
        self._num_evaluated += 1
        number = self._num_evaluated
        self._evaluated[number] = named(frame)

        def came_back(_: Any) -> None:
            self._evaluated.pop(number, None)

        for tensor in followed:
            tensor.register_hook(came_back)

    def _turn_gradient_off(self, module: Any, places: list[str]) -> None:
        frame = program_frame(frames_from(sys._getframe()))
        if not module.training and torch.is_grad_enabled() and frame is not None and named(frame) in places:
            self._is_off = True
            torch.set_grad_enabled(False)

    def _turn_gradient_on(self) -> None:
        if self.__dict__.pop("_is_off", False):
            torch.set_grad_enabled(True)


class _Hook:
    """A hook on a model of the program, which may copy or save it: the copy has one that does nothing, and nothing of this package."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = not_compiled(function)

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments and returns None


not_followed(_Hook.__call__)


def habits_asked_for(step: Callable[[], int], num_backwards: Callable[[], int]) -> Habits | None:
    """Return what counts habits, where somebody asked for that."""
    return Habits(step, num_backwards) if os.environ.get(HABITS) else None


def _set_everywhere(module: Any, name: str, function: Callable[..., Any]) -> None:
    """Give *module* the *function* too, which it has from another one."""
    if hasattr(module, name):
        setattr(module, name, function)


def _users_place() -> str:
    """Return the line of the user's own that is at it, through whichever packages; an empty text where there is none."""
    frames = (program_frame([frame]) for frame in frames_from(sys._getframe()))
    return next((named(frame) for frame in frames if frame is not None and not _is_installed(frame.f_code.co_filename)), "")


def _is_installed(filename: str) -> bool:
    """Say whether a source file is an installed package's or Python's own."""
    return filename.startswith(_STDLIB) or any(part in filename for part in _INSTALLED)


def _is_channels_last(tensor: Any) -> bool:
    """Say whether *tensor* is in that memory format for sure: a kernel of 1×1, and an image of one channel, is in both."""
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _described(optimizer: Any) -> dict[str, Any]:
    """Return what decides how *optimizer* runs: its implementation, and the types of what it trains."""
    group = optimizer.param_groups[0]
    sizes: Counter[str] = Counter()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return {
        "name": type(optimizer).__name__,
        "can_be_fused": "fused" in group,
        "is_fused": bool(group.get("fused")),
        "foreach": group.get("foreach"),
        "num_parameters": dict(sizes),
        "num_in_matrices": sum(parameter.numel() for parameter in parameters if parameter.dim() == 2),
    }


def _divisor(grad_fn: Any) -> float | None:
    """Return the number that a loss was divided by last, 1 for none; None where only the GPU knows it."""
    divisor = 1.0
    while type(grad_fn).__name__ in ("DivBackward0", "MulBackward0"):
        if getattr(grad_fn._raw_saved_other, "unpack_hook", None) is not None:  # reading it could compute a checkpointed region again
            return None
        other = grad_fn._saved_other
        if other is None or other.dim() or other.device.type != "cpu" or not other:
            return None
        divisor *= float(other) if type(grad_fn).__name__ == "DivBackward0" else 1 / float(other)
        grad_fn = grad_fn.next_functions[0][0]
    return round(divisor, 6)  # 1 / 0.1 is no whole number


def _recompilations() -> list[dict[str, Any]]:
    """Return the functions that torch.compile compiled again because a shape changed, each with how often."""
    failures = getattr(sys.modules.get("torch._dynamo.utils"), "guard_failures", {})
    by_shape = {
        code: [str(reason) for reason in reasons if "size mismatch" in str(reason) or ".size()" in str(reason)]
        for code, reasons in failures.items()
    }
    return [
        {"place": f"{code.co_filename}:{code.co_firstlineno}", "name": code.co_name, "count": len(reasons), "reason": reasons[-1]}
        for code, reasons in by_shape.items()
        if reasons
    ]


def _settings() -> dict[str, Any]:
    """Return PyTorch's own switches, as the program has set them."""
    backends = torch.backends
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program uses the newer names, and the two exclude each other
        precision = "high" if getattr(backends.cuda.matmul, "fp32_precision", "") == "tf32" else "highest"
    return {
        "matmul_precision": precision,
        "cudnn_benchmark": bool(backends.cudnn.benchmark),
        "is_deterministic": bool(backends.cudnn.deterministic) or torch.are_deterministic_algorithms_enabled(),
    }

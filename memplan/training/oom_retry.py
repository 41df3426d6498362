"""
`memplan.fits_or_smaller`: training steps, or a whole training function, that run again with a smaller micro-batch when memory runs out.

    fitting = memplan.fits_or_smaller()
    for batch in loader:
        loss = fitting.step(loss_of, batch, optimizer)

`step` splits the batch into micro-batches, weights the loss of each by its share of what the loss averages over, and steps the optimizer
once. So the gradient is that of the whole batch. The exceptions are losses that compare the samples of a batch with one another (in-batch
negatives), and batch normalization: they see the micro-batch only.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from memplan.errors import UsageError, is_out_of_memory
from memplan.training.batch_parts import Batch, named_tensors, num_samples, part_of
from memplan.training.step_state import StepState

logger = logging.getLogger("memplan")

P = ParamSpec("P")
Result = TypeVar("Result")

IGNORE_INDEX = -100
"""The label that PyTorch's losses leave out by default (torch 2.13, nn/functional.py: cross_entropy, nll_loss)."""


class FittingSteps:
    """
    Training steps with the largest micro-batch that does not run out of memory; what :func:`fits_or_smaller` returns.

    Use its :meth:`step`, inside a ``with`` block or without, or use it as a decorator (:meth:`__call__`).
    """

    def __init__(self, micro_batch_size: int | None = None, *, grow_after: int | None = 32) -> None:
        _check_count(
            micro_batch_size,
            f"micro_batch_size={micro_batch_size!r} is not valid",
            hint="use 1 or more, or leave it out to start with whole batches",
        )
        _check_count(grow_after, f"grow_after={grow_after} is not a number of steps", hint="use 1 or more; None never grows")
        self.micro_batch_size = micro_batch_size
        """Limit of the samples in one forward and backward; None: no limit, whole batches."""
        self.num_retries = 0
        """How many times memory ran out and a smaller micro-batch was tried."""
        self._first_size = micro_batch_size
        self._steps_until_growth = grow_after
        # Steps without running out of memory, since it last ran out or the limit last grew.
        self._num_good_steps = 0
        # Set until the larger limit has worked for as many steps as were waited for it.
        self._size_before_growth: int | None = None
        self._largest_batch = 0

    def __enter__(self) -> FittingSteps:
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing: a step leaves nothing open."""

    def step(
        self,
        loss_of: Callable[[Batch], Tensor],
        batch: Batch,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None = None,
        *,
        weight_of: Callable[[Batch], float | int | Tensor] | None = None,
    ) -> Tensor:
        """
        Run one training step on *batch*: zero the gradients, forward and backward, step *optimizer*. Return the mean loss, detached.

        If memory runs out in forward or backward, the step starts again with half the micro-batch, from the state before the step:
        gradients are dropped, and the random number generators of PyTorch (CPU and CUDA devices) and the buffers that modules in training
        mode change in their forward (such as batch normalization's running statistics) are restored. Other state that *loss_of* changes
        is not, and buffers in compiled code not always: see `memplan.training.step_state.StepState`.

        Args:
            loss_of: Gets a part of the batch and returns its mean loss. The part has containers of its own, so *loss_of* may add and remove
                entries; it must not change tensors of the batch in place.
            batch: A tensor, or tuples, lists, mappings, NamedTuples and dataclasses of tensors, whose first dimension is the samples. Other
                lists and tuples are split if they have as many elements. It is not changed. See `memplan.training.batch_parts.part_of`.
            optimizer: One optimizer, or a sequence of all that together hold every parameter that gets a gradient.
            scaler: The gradient scaler of a training in fp16.
            weight_of: Gets a part of the batch and returns what its loss averages over, if that is not samples: a count of 0 or more. For
                a loss over tokens: ``lambda part: (part["labels"][..., 1:] != -100).sum()``. A part of weight 0 is left out. If all
                parts have weight 0, the optimizer is not stepped, and the loss is NaN. A weight on a GPU is copied to the CPU.

        Raises:
            torch.OutOfMemoryError: If a single sample does not fit, with the state put back; or if the optimizer's own step runs out of
                memory, which may have changed parameters by then.
            UsageError: If the batch has no samples, or its tensors do not agree on how many; if a batch has to be split, its parts have
                different shares of labels that are -100, and *weight_of* is not given; if *weight_of* does not return a count; with
                several processes.

        """
        _check_single_process()
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        size = num_samples(batch)
        self._largest_batch = max(self._largest_batch, size)
        num_retries = self.num_retries
        while True:
            micro = min(self.micro_batch_size or size, size)
            done = _try_step(loss_of, batch, size, micro, optimizers, scaler, weight_of)
            if done is not None:
                break
            self._shrink(micro, size)
        if done.has_gradients:
            _step_optimizers(optimizers, scaler)
            if self.num_retries == num_retries:
                self._count_good_step()
        return done.loss

    def __call__(self, function: Callable[Concatenate[int, P], Result]) -> Callable[P, Result]:
        """
        Return *function* without its first parameter, which will be the micro-batch size.

        A call runs *function* with the current size. If memory runs out, it is called again with half the size, until it returns. It begins
        anew each time, and nothing is restored between two calls: *function* has to make its model, optimizer and data loader itself.
        Later calls start with the size that worked; it does not grow.

        Raises UsageError here if no micro-batch size was given or *function* has no parameter for it. A call raises UsageError if it passes
        the size itself, or with several processes, and torch.OutOfMemoryError if a micro-batch of 1 does not fit.
        """
        name = getattr(function, "__name__", "function")
        if self.micro_batch_size is None:
            raise _decorator_without_size()
        signature = inspect.signature(function)
        size_name = _size_parameter(signature, name)

        @functools.wraps(function)
        def call_with_size(*args: P.args, **kwargs: P.kwargs) -> Result:
            _check_call(signature, name, size_name, args, kwargs)
            while True:
                _check_single_process()
                size = self.micro_batch_size or 1
                try:
                    return function(size, *args, **kwargs)
                except RuntimeError as error:
                    if size == 1 or not is_out_of_memory(error):
                        raise
                # Here the error is gone, and with its traceback the frames and tensors of the failed call.
                self._halve(size)
                logger.warning(
                    "%s() ran out of memory with a micro-batch of %d: calling it again with %d", name, size, self.micro_batch_size
                )

        parameters = list(signature.parameters.values())
        if parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            del parameters[0]
        call_with_size.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what callers pass
        return call_with_size

    def _shrink(self, micro: int, size: int) -> None:
        """Lower the limit after *micro* samples of a batch of *size* ran out of memory."""
        before_growth, self._size_before_growth, self._num_good_steps = self._size_before_growth, None, 0
        if before_growth is not None and micro > before_growth:
            assert self._steps_until_growth is not None
            self._steps_until_growth *= 2
            self._continue_with(before_growth)
            then = f"the next larger one is tried after {self._steps_until_growth} steps"
        else:
            self._halve(micro)
            then = "`memplan.plan()` or `memplan.find_batch()` finds the size beforehand"
        limit = self.micro_batch_size or size
        logger.warning(
            "out of memory with a micro-batch of %d: continuing with %d, %d to an optimizer step; the effective batch stays %d; %s",
            micro,
            limit,
            -(-size // limit),
            size,
            then,
        )

    def _halve(self, size: int) -> None:
        self._continue_with((size + 1) // 2)

    def _continue_with(self, smaller: int) -> None:
        self.micro_batch_size = smaller
        self.num_retries += 1
        gc.collect()  # frames of the failed try may hold each other
        torch.cuda.empty_cache()

    def _count_good_step(self) -> None:
        """Count a step that did not run out of memory, and double the limit after enough of them, up to where it began."""
        self._num_good_steps += 1
        if self._steps_until_growth is None or self._num_good_steps < self._steps_until_growth:
            return
        self._num_good_steps = 0
        self._size_before_growth = None
        limit = self.micro_batch_size
        if limit is None or limit == self._first_size:
            return
        reaches_first = 2 * limit >= min(self._first_size or self._largest_batch, self._largest_batch)
        self.micro_batch_size = self._first_size if reaches_first else 2 * limit
        self._size_before_growth = limit
        logger.info(
            "%d steps without running out of memory: trying %s instead of a micro-batch of %d",
            self._steps_until_growth,
            "whole batches" if self.micro_batch_size is None else f"a micro-batch of {self.micro_batch_size}",
            limit,
        )


def fits_or_smaller(micro_batch_size: int | None = None, *, grow_after: int | None = 32) -> FittingSteps:
    """
    Return what runs training steps, with a smaller micro-batch after memory has run out.

    It is used in one of three ways. As an object, or as a context manager, whose :meth:`~FittingSteps.step` keeps the effective batch::

        fitting = memplan.fits_or_smaller()
        loss = fitting.step(loss_of, batch, optimizer)

        with memplan.fits_or_smaller() as fitting:
            loss = fitting.step(loss_of, batch, optimizer)

    As a decorator, which calls a whole function again with half the size::

        @memplan.fits_or_smaller(micro_batch_size=128)
        def train(micro_batch_size, epochs): ...


        train(epochs=3)

    Args:
        micro_batch_size: Samples in one forward and backward to start with. None: whole batches; the decorator needs a number.
        grow_after: After this many steps without running out of memory, `step` doubles a limit that had to shrink, up to where it began.
            If the larger one runs out within as many steps, the limit goes back, and the number of steps until the next attempt doubles.
            None: a limit that had to shrink stays.

    Raises:
        UsageError: If a number is below 1.

    >>> import memplan, torch
    >>> model = torch.nn.Linear(4, 1)
    >>> fitting = memplan.fits_or_smaller()
    >>> loss = fitting.step(lambda part: model(part).square().mean(), torch.randn(8, 4), torch.optim.SGD(model.parameters()))
    >>> loss.shape, fitting.num_retries
    (torch.Size([]), 0)

    """
    if callable(micro_batch_size):
        raise _decorator_without_size()  # `@memplan.fits_or_smaller`, without parentheses
    return FittingSteps(micro_batch_size, grow_after=grow_after)


class _Done(NamedTuple):
    """A forward and backward of the whole batch."""

    loss: Tensor
    has_gradients: bool


def _try_step(
    loss_of: Callable[[Batch], Tensor],
    batch: Batch,
    size: int,
    micro: int,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
    weight_of: Callable[[Batch], float | int | Tensor] | None,
) -> _Done | None:
    """Run forward and backward of all parts of *batch*. Return None, with the state put back, if a smaller micro-batch may fit."""
    _drop_gradients(optimizers)
    total: Tensor | None = None
    with StepState() as state:
        try:
            shares = _shares_of(batch, size, micro, weight_of)
            for part, share in zip(_parts_of(batch, size, micro), shares, strict=True):
                if share:
                    loss = loss_of(part) * share
                    (loss if scaler is None else scaler.scale(loss)).backward()
                    total = loss.detach() if total is None else total + loss.detach()
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and so is what CUDA's libraries raise
            _drop_gradients(optimizers)
            if not is_out_of_memory(error):
                raise
            state.restore()
            if micro == 1:
                raise
            return None  # without the error, whose traceback holds the tensors of the failed try
    if total is None:
        logger.warning("weight_of is 0 for a whole batch: the optimizer is not stepped")
        return _Done(torch.tensor(math.nan), has_gradients=False)
    return _Done(total, has_gradients=True)


def _parts_of(batch: Batch, size: int, micro: int) -> Iterator[Batch]:
    """Yield the micro-batches, each made when it is needed: what `loss_of` puts into one (a copy on the GPU) goes with it."""
    for begin in range(0, size, micro):
        yield part_of(batch, begin, min(begin + micro, size), size)


def _shares_of(batch: Batch, size: int, micro: int, weight_of: Callable[[Batch], float | int | Tensor] | None) -> list[float]:
    """Return the share of each micro-batch in the mean loss of *batch*; all 0 if `weight_of` is 0 for all."""
    if weight_of is None:
        if micro < size:
            _check_ignored_labels(batch, size, micro)
        return [len(samples) / size for samples in _ranges(size, micro)]
    weights = [_checked_weight(weight_of(part)) for part in _parts_of(batch, size, micro)]
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def _ranges(size: int, micro: int) -> list[range]:
    return [range(size)[begin : begin + micro] for begin in range(0, size, micro)]


def _checked_weight(weight: float | int | Tensor) -> float:
    try:
        number = math.nan if isinstance(weight, Tensor) and weight.numel() != 1 else float(weight)
    except (TypeError, ValueError):  # not a number: None, if `weight_of` returns nothing
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            f"weight_of returned {weight!r}, which is not a count",
            hint='return what the loss of the part averages over, for example `(part["labels"] != -100).sum()`',
        )
    return number


def _check_ignored_labels(batch: Any, size: int, micro: int) -> None:
    """Raise UsageError if parts weighted by samples would be weighted wrongly: they have unequal shares of ignored labels."""
    for name, tensor in named_tensors(batch):
        is_signed_integer = tensor.dtype.is_signed and not tensor.is_floating_point() and not tensor.is_complex()
        if not is_signed_integer or not tensor.dim() or not tensor.numel():
            continue
        counts = (tensor != IGNORE_INDEX).reshape(size, -1).sum(1).tolist()
        counted = [(sum(counts[samples.start : samples.stop]), len(samples)) for samples in _ranges(size, micro)]
        first_count, first_size = counted[0]
        if any(count * first_size != first_count * samples for count, samples in counted):
            raise UsageError(
                f"the batch has to be split into parts of {micro} samples, and `{name}` has unequal shares of {IGNORE_INDEX} in them, the "
                "label that PyTorch's losses ignore: if the loss is a mean of the other labels, its gradient would be wrong",
                hint=f"pass what the loss averages over to step(): `weight_of=lambda part: ({name} != {IGNORE_INDEX}).sum()`, for a causal "
                f"language model `weight_of=lambda part: ({name}[..., 1:] != {IGNORE_INDEX}).sum()`; if it is the mean of the samples, "
                f"`weight_of=lambda part: len({name})`",
            )


def _step_optimizers(optimizers: Sequence[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None) -> None:
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()


def _drop_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def _check_count(number: int | None, message: str, *, hint: str) -> None:
    if number is not None and (not isinstance(number, int) or number < 1):
        raise UsageError(message, hint=hint)


def _decorator_without_size() -> UsageError:
    return UsageError(
        "as a decorator, fits_or_smaller needs the micro-batch size to start with",
        hint="write `@memplan.fits_or_smaller(micro_batch_size=128)`",
    )


def _check_single_process() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise UsageError(
            "fits_or_smaller works in a single process: if one of several ran its step again, the others would wait forever",
            hint="find the size beforehand: `memplan.find_batch()`, or `plan.profile()` under torchrun",
        )


def _size_parameter(signature: inspect.Signature, name: str) -> str | None:
    """Return the name of the parameter that gets the size; None if it has none. Raises UsageError if there is no such parameter."""
    first = next(iter(signature.parameters.values()), None)
    takes_position = first is not None and first.kind not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    if first is None or not takes_position or first.name in {"self", "cls"}:
        raise UsageError(
            f"the first parameter of {name}() has to be the micro-batch size",
            hint=f"write `def {name}(micro_batch_size, ...)`; inside a class, decorate a function in the method",
        )
    return first.name if first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else None


def _check_call(signature: inspect.Signature, name: str, size_name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise UsageError if the caller passes the size: by name, or as one argument more than there is place for."""
    if size_name in kwargs or (not _takes(signature, (0, *args), kwargs) and _takes(signature, args, kwargs)):
        raise UsageError(
            f"{name}() was called with the micro-batch size, which fits_or_smaller passes itself",
            hint=f"leave out the first argument: write `{name}({', '.join([*map(str, list(signature.parameters)[1:])])})`",
        )


def _takes(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True

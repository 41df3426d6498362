"""
`memplan.fits_or_smaller`: a training step that runs out of memory goes on with a smaller micro-batch, and the same effective batch.

    with memplan.fits_or_smaller() as fitting:
        for batch in loader:
            loss = fitting.step(loss_of, batch, optimizer)

A `with` block cannot run again, a step can: `step` splits the batch into micro-batches, weighs the loss of each by its share of the
samples, and steps the optimizer once. So the gradient is that of the whole batch, where the loss is a mean over samples. A loss that
compares the samples of a batch with one another (in-batch negatives), and batch normalisation, see the micro-batch only.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memplan.errors import UsageError, is_out_of_memory

logger = logging.getLogger("memplan")


class Fitting:
    """Steps with the largest micro-batch that has not run out of memory yet."""

    def __init__(self, micro_batch_size: int | None) -> None:
        self.micro_batch_size = micro_batch_size
        """Samples in one forward and backward; None: all of a batch."""
        self.num_retries = 0
        """How often memory has run out."""

    def step(
        self,
        loss_of: Callable[[Any], Tensor],
        batch: Any,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scaler: Any = None,
    ) -> Tensor:
        """
        Run one whole step on *batch*: zero the gradients, forward and backward, step *optimizer*; return the mean loss, of shape ().

        *loss_of* gets a part of the batch and returns the mean loss of its samples. *batch* is a tensor, or tuples, lists and mappings of
        tensors, whose first dimension is the samples; a list of as many texts or numbers is split too. *optimizer*: one, or all that
        together have every parameter that gets a gradient: those of others would keep what a failed try has added. *scaler*: a
        torch.amp.GradScaler, for fp16. Where memory runs out in forward or backward, the gradients are dropped and the step begins anew
        with half the micro-batch.

        Raises torch.OutOfMemoryError where a single sample does not fit, or where the optimizer's own step runs out of memory, which
        may have changed parameters by then; UsageError for a batch without samples, or whose tensors do not agree on how many, and under
        several processes, where one that tries again would leave the others waiting.
        """
        _check_alone()
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        size = _num_samples(batch)
        while True:
            micro = min(self.micro_batch_size or size, size)
            loss = self._tried(loss_of, batch, size, micro, optimizers, scaler)
            if loss is not None:
                break
            self._shrink(micro, size)
        for each in optimizers:
            if scaler is None:
                each.step()
            else:
                scaler.step(each)
        if scaler is not None:
            scaler.update()
        return loss

    def _tried(
        self, loss_of: Callable[[Any], Tensor], batch: Any, size: int, micro: int, optimizers: Sequence[torch.optim.Optimizer], scaler: Any
    ) -> Tensor | None:
        """Return the mean loss of *batch* with its gradients made; None, and none made, where a smaller micro-batch may do."""
        _drop_gradients(optimizers)
        total: Tensor | None = None
        try:
            for begin in range(0, size, micro):
                end = min(begin + micro, size)
                loss = loss_of(batch if micro == size else part_of(batch, begin, end, size)) * ((end - begin) / size)
                (loss if scaler is None else scaler.scale(loss)).backward()
                total = loss.detach() if total is None else total + loss.detach()
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and so is what CUDA's libraries raise
            _drop_gradients(optimizers)
            if micro == 1 or not is_out_of_memory(error):
                raise
            return None  # without the error, which holds what the failed step had made
        return total

    def _shrink(self, micro: int, size: int) -> None:
        self.micro_batch_size = (micro + 1) // 2
        self.num_retries += 1
        gc.collect()  # frames of the failed step may hold each other
        torch.cuda.empty_cache()
        steps = -(-size // self.micro_batch_size)
        logger.warning(
            "memory ran out with a micro-batch of %d: going on with %d, %d to an optimizer step; the effective batch stays %d. "
            "`memplan --auto` or `memplan find-batch` finds the size beforehand",
            micro,
            self.micro_batch_size,
            steps,
            size,
        )


@contextmanager
def fits_or_smaller(micro_batch_size: int | None = None) -> Iterator[Fitting]:
    """
    Give what runs steps, with a smaller micro-batch after memory has run out; see `Fitting.step`.

    *micro_batch_size* is where it begins; None: with whole batches. Raises UsageError for one below 1.
    """
    if micro_batch_size is not None and micro_batch_size < 1:
        raise UsageError(f"a micro-batch of {micro_batch_size} has no sample", hint="leave it out to begin with whole batches")
    yield Fitting(micro_batch_size)


def _drop_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def _num_samples(batch: Any) -> int:
    """Return how many samples *batch* has. Raises UsageError where that is not to be seen."""
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    hint = "give a tensor, or tuples or mappings of them; what is no sample, as a table, belongs outside of the batch"
    if len(sizes) > 1:
        counts = " and ".join(map(str, sorted(sizes)))
        raise UsageError(f"the tensors of the batch do not agree on its samples: their first dimensions are {counts}", hint=hint)
    if not sizes or 0 in sizes:
        raise UsageError("the batch holds no tensor whose first dimension is the samples", hint=hint)
    return sizes.pop()


def _check_alone() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise UsageError(
            "fits_or_smaller runs in one process: one of several that tries again would leave the others waiting",
            hint="find the size beforehand: `memplan find-batch`, or `torchrun … -m memplan --auto --profile`",
        )


def batch_size_of(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in *batch*; None where it has none."""
    return next((tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()), None)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for inner in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(inner)


def part_of(batch: Any, begin: int, end: int, size: int) -> Any:
    """
    Return samples *begin* to *end* of *batch*, which has *size*, in its own shape and types.

    Tensors are split along their first dimension, lists and tuples without such tensors where they have *size* elements; what is no sample
    stays whole.
    """
    if isinstance(batch, Tensor):
        return batch[begin:end] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return _mapped(batch, {name: part_of(inner, begin, end, size) for name, inner in batch.items()})
    if isinstance(batch, (tuple, list)):
        if any(tensor.dim() for tensor in _tensors(batch)):
            parts = [part_of(inner, begin, end, size) for inner in batch]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        return batch[begin:end] if len(batch) == size else batch
    return batch


def _mapped(batch: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """Return a copy of *batch* with *parts*, of its own type where that can be: transformers' BatchEncoding is more than a dict."""
    if type(batch) is dict:
        return parts
    made: Any = copy.copy(batch)
    try:
        for name, part in parts.items():
            made[name] = part
    except TypeError:  # it cannot be changed
        return parts
    return made

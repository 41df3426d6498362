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

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memplan.errors import UsageError

logger = logging.getLogger("memplan")


class Fitting:
    """Steps with the largest micro-batch that has not run out of memory yet."""

    def __init__(self, micro_batch_size: int | None) -> None:
        self.micro_batch_size = micro_batch_size
        """Samples in one forward and backward; None: all of a batch."""
        self.num_retries = 0
        """How often memory has run out."""

    def step(self, loss_of: Callable[[Any], Tensor], batch: Any, optimizer: torch.optim.Optimizer, scaler: Any = None) -> Tensor:
        """
        Run one whole step on *batch*: zero the gradients, forward and backward, step *optimizer*; return the mean loss, of shape ().

        *loss_of* gets a part of the batch and returns the mean loss of its samples. *batch* is a tensor, or tuples, lists and mappings of
        tensors, whose first dimension is the samples. *scaler*: a torch.amp.GradScaler, for fp16. Where memory runs out in forward or
        backward, the gradients are dropped and the step begins anew with half the micro-batch.

        Raises torch.OutOfMemoryError where a single sample does not fit, or where the optimizer's own step runs out of memory, which
        may have changed parameters by then; UsageError for a batch without tensors, and under several processes, where one that tries
        again would leave the others waiting.
        """
        _check_alone()
        size = batch_size_of(batch)
        if size is None:
            raise UsageError(
                "the batch holds no tensor whose first dimension is the samples", hint="give a tensor, or tuples or mappings of them"
            )
        while True:
            micro = min(self.micro_batch_size or size, size)
            loss, failure = self._tried(loss_of, batch, size, micro, optimizer, scaler)
            if loss is not None:
                break
            if micro == 1:
                assert failure is not None
                raise failure
            del failure  # it holds what the failed step had made
            self._shrink(micro, size)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return loss

    def _tried(
        self, loss_of: Callable[[Any], Tensor], batch: Any, size: int, micro: int, optimizer: torch.optim.Optimizer, scaler: Any
    ) -> tuple[Tensor | None, torch.OutOfMemoryError | None]:
        """Return the mean loss of *batch* with its gradients made; or none, none made, and why."""
        optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        try:
            for begin in range(0, size, micro):
                part = part_of(batch, begin, min(begin + micro, size), size)
                loss = loss_of(part) * ((min(begin + micro, size) - begin) / size)
                (loss if scaler is None else scaler.scale(loss)).backward()
                total = loss.detach() if total is None else total + loss.detach()
        except torch.OutOfMemoryError as error:
            optimizer.zero_grad(set_to_none=True)
            return None, error.with_traceback(None) if micro > 1 else error
        return total, None

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
    """Return samples *begin* to *end* of *batch*, in its own shape; what has not *size* samples stays whole."""
    if isinstance(batch, Tensor):
        return batch[begin:end] if batch.dim() and batch.shape[0] == size else batch
    if isinstance(batch, Mapping):
        return {name: part_of(inner, begin, end, size) for name, inner in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [part_of(inner, begin, end, size) for inner in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch

"""
What the arguments of a user's step function are called: `build(device, batch_size=8, accumulation=2)`.

The first is the device, unless it can be none: `build(batch_size=8)` chooses the device itself.
"""

from __future__ import annotations

BATCH_NAMES = (
    "micro_batch_size",
    "batch_size",
    "per_device_train_batch_size",
    "train_batch_size",
    "batch",
    "micro_batch",
    "micro",
    "bsz",
    "bs",
    "mbs",
    "n_samples",
    "num_samples",
    "b",
    "B",
    "n",
    "N",
)
"""What people call the number of samples in a step; the first that is there is tried smaller."""

ACCUMULATION_NAMES = (
    "gradient_accumulation_steps",
    "accumulate_grad_batches",
    "grad_accumulation_steps",
    "accumulation_steps",
    "grad_accum_steps",
    "gradient_accumulation",
    "gradient_accumulate_every",
    "grad_accum_every",
    "accumulation_iters",
    "accumulative_counts",
    "accum_steps",
    "accum_iter",
    "grad_accumulation",
    "grad_accum",
    "accumulation",
    "accumulate",
    "accum",
)
"""What people call the number of micro-batches before an optimizer step."""


def is_device(name: str, *, default: object, annotation: str) -> bool:
    """Say whether the first argument of a step function is the device, by its *name*, *default* and *annotation* as it is written."""
    is_number = isinstance(default, (bool, int, float)) or annotation in ("bool", "int", "float")
    return not is_number and name not in BATCH_NAMES and name not in ACCUMULATION_NAMES

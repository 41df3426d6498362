"""Model states: parameters, gradients, optimizer state, and what an optimizer step needs on top.

Frozen parameters have no gradient and no state. Under autocast the parameters stay fp32, and so do their gradients and moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memplan.dtypes import ELEMENT_BYTES, DType
from memplan.estimators.analytic.parameters import ParameterGroup, rounded
from memplan.workload.optimizer import BITSANDBYTES, PAGED_FROM, QUANTIZED_BLOCK, QUANTIZED_FROM, Optimizer

# Tensors of the parameter's shape and type that torch.optim (PyTorch 2.13) keeps for each trainable parameter.
_STATE_TENSORS = {
    "sgd": 0,
    "sgd_momentum": 1,  # momentum_buffer
    "adam": 2,  # exp_avg, exp_avg_sq
    "adamw": 2,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,  # square_avg (no momentum, not centered)
    "adagrad": 1,  # sum
    "adadelta": 2,  # square_avg, acc_delta
    "lion": 1,  # exp_avg
}

# One temporary set of all trainable parameters is 1 (measured on PyTorch 2.13, foreach).
_FOREACH_TEMPORARIES = {"adam": 1, "adamw": 1, "nadam": 1, "radam": 1, "rmsprop": 1, "adagrad": 2, "adadelta": 2}


def parameter_bytes(groups: Sequence[ParameterGroup], *, dtype: DType) -> int:
    """Return the bytes of all weights, frozen ones included."""
    return sum(group.size_bytes(dtype) for group in groups)


def gradient_bytes(groups: Sequence[ParameterGroup], *, dtype: DType) -> int:
    """Return the bytes of all gradients: as the weights', of the trainable ones alone."""
    return sum(group.size_bytes(dtype) for group in groups if group.is_trainable)


def optimizer_state_bytes(groups: Sequence[ParameterGroup], optimizer: Optimizer, *, dtype: DType) -> int:
    """Return the bytes of the state that *optimizer* keeps between steps. Step counters live on the host."""
    return sum(group.num_tensors * _state_of_tensor(group, optimizer, dtype) for group in groups if group.is_trainable)


def _state_of_tensor(group: ParameterGroup, optimizer: Optimizer, dtype: DType) -> int:
    shape, elements = group.shape, prod(group.shape)
    if optimizer.name == "adafactor":  # one row and one column of fp32 second moments for a matrix, all of them for a vector
        return sum(4 * side for side in shape) if len(shape) == 2 else rounded(4 * elements)
    if optimizer.name in BITSANDBYTES:
        moments, bits = BITSANDBYTES[optimizer.name]
        is_exempt = group.role == "embedding" and not optimizer.quantizes_embeddings
        is_on_host = optimizer.is_paged and elements >= PAGED_FROM
        if bits == 32 or is_exempt or elements < QUANTIZED_FROM:
            return 0 if is_on_host else moments * rounded(4 * elements)
        return moments * ((0 if is_on_host else rounded(elements)) + rounded(-(-elements // QUANTIZED_BLOCK) * 4))
    return _STATE_TENSORS[optimizer.name] * rounded(elements * ELEMENT_BYTES[dtype])


def optimizer_temporary_bytes(groups: Sequence[ParameterGroup], optimizer: Optimizer, *, dtype: DType) -> int:
    """
    Return what one optimizer step allocates and gives back.

    Measured on PyTorch 2.13: nothing for SGD and everything fused; one or two sets of all trainable parameters for foreach;
    about twice the largest parameter for what goes tensor by tensor.
    """
    if optimizer.implementation == "fused" or optimizer.name in ("sgd", "sgd_momentum", *BITSANDBYTES):
        return 0
    trainable = [group for group in groups if group.is_trainable]
    if optimizer.name in _FOREACH_TEMPORARIES and optimizer.implementation == "foreach":
        return _FOREACH_TEMPORARIES[optimizer.name] * gradient_bytes(trainable, dtype=dtype)
    if optimizer.name == "adafactor":  # transformers' Adafactor squares every gradient in turn and keeps the last's update
        return 2 * max((prod(group.shape) * 4 for group in trainable), default=0)
    return 2 * max((prod(group.shape) * ELEMENT_BYTES[dtype] for group in trainable), default=0)


def cast_bytes(groups: Sequence[ParameterGroup], *, dtype: DType) -> int:
    """
    Return the bytes of autocast's copies of the trainable linear weights, which it keeps until its region ends.

    Frozen weights are cast anew in each call and stay with the graph: `frozen_cast_bytes`
    (cached_cast, aten/src/ATen/autocast_mode.cpp: only leaves that require a gradient are cached).
    """
    return sum(group.size_bytes(dtype) for group in groups if group.is_trainable and group.role in ("linear", "head"))


def frozen_cast_bytes(groups: Sequence[ParameterGroup], *, dtype: DType) -> int:
    """Return the bytes of the casts of frozen linear weights that one call of the model leaves in the graph."""
    return sum(group.size_bytes(dtype) for group in groups if not group.is_trainable and group.role in ("linear", "head"))

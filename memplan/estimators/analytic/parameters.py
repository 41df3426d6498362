"""The parameters of a model, tensor by tensor: what they are called for, their shapes, and which of them are trained.

Counts are exact for the models of Hugging Face's transformers that a TransformerModel can describe (a test compares).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from memplan.dtypes import ELEMENT_BYTES, DType
from memplan.errors import NotEstimatedError
from memplan.traces.block_sizes import LARGE_ROUND_BYTES, MAX_SMALL_BYTES, MIN_BLOCK_BYTES, MIN_LARGE_BYTES
from memplan.workload.model import (
    COUNTED_SIDE,
    ContrastiveEncoderModel,
    HuggingFaceModel,
    Lora,
    LoraTarget,
    Model,
    ParametersModel,
    RehearsedModel,
    TransformerModel,
)

Role = Literal["linear", "embedding", "head", "vector"]


class ParameterGroup(NamedTuple):
    """*num_tensors* tensors of one shape."""

    role: Role
    """linear and head weights are cast under autocast; embeddings and vectors (biases, norms) are not, or too small to matter."""
    shape: tuple[int, ...]
    num_tensors: int
    is_trainable: bool

    @property
    def num_parameters(self) -> int:
        """Return the elements of all tensors of the group."""
        return self.num_tensors * prod(self.shape)

    def size_bytes(self, dtype: DType) -> int:
        """Return what the group takes on the device in *dtype*, each tensor rounded up as the allocator does."""
        return self.num_tensors * rounded(prod(self.shape) * ELEMENT_BYTES[dtype])


def rounded(size_bytes: int) -> int:
    """Return the block that the allocator makes for a tensor of *size_bytes* that is there to stay."""
    block_bytes = -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    if block_bytes < MIN_LARGE_BYTES:
        return block_bytes
    segment_bytes = -(-block_bytes // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES
    return segment_bytes if segment_bytes - block_bytes <= MAX_SMALL_BYTES else block_bytes


@lru_cache(maxsize=64)  # a plan asks for the same model at every size that it tries
def parameter_groups(model: Model) -> tuple[ParameterGroup, ...]:
    """Return every parameter of *model*. Raises NotEstimatedError for one that there are no formulas for."""
    if isinstance(model, TransformerModel):
        return tuple(_transformer(model))
    if isinstance(model, ContrastiveEncoderModel):
        return tuple(_contrastive(model))
    if isinstance(model, RehearsedModel):
        needed = "torch and transformers are" if isinstance(model, HuggingFaceModel) else "torch is"
        raise NotEstimatedError(
            "there are no formulas for this model", hint=f'its step is rehearsed, where {needed} installed: leave `method="analytic"` out'
        )
    return tuple(_counted(model))


def count(groups: Sequence[ParameterGroup], *, trainable_only: bool = False) -> int:
    """Return the number of parameters in *groups*."""
    return sum(group.num_parameters for group in groups if group.is_trainable or not trainable_only)


class LinearLayer(NamedTuple):
    """One linear layer of a block, as LoRA names it."""

    target: LoraTarget
    inputs: int
    outputs: int


def block_linears(model: TransformerModel) -> list[LinearLayer]:
    """Return the linear layers of one block. A fused query-key-value layer stands for all three under "query"."""
    hidden, inner, attention, key_value = model.hidden_size, model.intermediate_size, model.attention_width, model.key_value_width
    if model.has_fused_qkv:
        projections = [LinearLayer("query", hidden, attention + 2 * key_value)]
    else:
        projections = [
            LinearLayer("query", hidden, attention),
            LinearLayer("key", hidden, key_value),
            LinearLayer("value", hidden, key_value),
        ]
    gate = [LinearLayer("gate", hidden, inner)] if model.is_gated else []
    return [
        *projections,
        LinearLayer("output", attention, hidden),
        *gate,
        LinearLayer("up", hidden, inner),
        LinearLayer("down", inner, hidden),
    ]


def _transformer(model: TransformerModel) -> Iterator[ParameterGroup]:
    trained = model.lora is None
    hidden, layers = model.hidden_size, model.num_layers
    for rows in (model.vocab_size, model.num_positions, model.num_token_types):
        if rows:
            yield ParameterGroup("embedding", (rows, hidden), 1, trained)
    for linear in block_linears(model):
        yield ParameterGroup("linear", (linear.outputs, linear.inputs), layers, trained)
        if _has_bias(model, linear):
            yield ParameterGroup("vector", (linear.outputs,), layers, trained)
        yield from _adapter(model.lora, linear, layers)
    norm_tensors = 2 if model.norm == "layer_norm" else 1
    # two norms a block; one more after the last (pre-norm) or after the embeddings (post-norm)
    yield ParameterGroup("vector", (hidden,), norm_tensors * (2 * layers + 1), trained)
    if model.has_qk_norm:
        yield ParameterGroup("vector", (model.width_of_head,), 2 * layers, trained)
    yield from _head(model, trained)


def _has_bias(model: TransformerModel, linear: LinearLayer) -> bool:
    if linear.target in ("query", "key", "value") and model.has_qkv_bias is not None:
        return model.has_qkv_bias
    return model.has_linear_bias


def _adapter(lora: Lora | None, linear: LinearLayer, layers: int) -> Iterator[ParameterGroup]:
    if lora is not None and linear.target in lora.targets:
        yield ParameterGroup("linear", (lora.rank, linear.inputs), layers, True)
        yield ParameterGroup("linear", (linear.outputs, lora.rank), layers, True)


def _head(model: TransformerModel, trained: bool) -> Iterator[ParameterGroup]:
    hidden = model.hidden_size
    if model.has_pooler:
        yield ParameterGroup("linear", (hidden, hidden), 1, trained)
        yield ParameterGroup("vector", (hidden,), 1, trained)
    if model.head == "masked_language_model":  # BERT's transform (linear, norm) and the logits' bias
        yield ParameterGroup("linear", (hidden, hidden), 1, trained)
        yield ParameterGroup("vector", (hidden,), 3, trained)
        yield ParameterGroup("vector", (model.vocab_size,), 1, trained)
    if model.predicts_tokens and not model.ties_embeddings:
        yield ParameterGroup("head", (model.vocab_size, hidden), 1, trained)
    if model.head != "none" and not model.predicts_tokens:
        yield ParameterGroup("linear", (model.num_labels, hidden), 1, True)
        if model.architecture == "encoder" or model.head != "sequence_classification":
            yield ParameterGroup("vector", (model.num_labels,), 1, True)


def _contrastive(model: ContrastiveEncoderModel) -> Iterator[ParameterGroup]:
    for group in _transformer(model.encoder):
        yield ParameterGroup(group.role, group.shape, group.num_tensors * model.num_channels, group.is_trainable)
    width = model.num_channels * model.encoder.hidden_size
    if model.experts is not None:
        experts = model.experts
        yield from _linear_with_bias(width, experts.num_experts, 1)
        yield from _linear_with_bias(width, experts.hidden_size, experts.num_experts)
        yield from _linear_with_bias(experts.hidden_size, width, experts.num_experts)
    if model.projection_size is not None:
        yield from _linear_with_bias(width, model.projection_size, 1)


def _linear_with_bias(inputs: int, outputs: int, copies: int) -> Iterator[ParameterGroup]:
    yield ParameterGroup("linear", (outputs, inputs), copies, True)
    yield ParameterGroup("vector", (outputs,), copies, True)


def _counted(model: ParametersModel) -> Iterator[ParameterGroup]:
    """A count says no shapes: matrices of a usual size stand for them, which decides what goes tensor by tensor or is factored."""
    trainable = model.num_parameters if model.num_trainable_parameters is None else model.num_trainable_parameters
    for elements, is_trainable in ((trainable, True), (model.num_parameters - trainable, False)):
        matrices, rest = divmod(elements, COUNTED_SIDE**2)
        if matrices:
            yield ParameterGroup("linear", (COUNTED_SIDE, COUNTED_SIDE), matrices, is_trainable)
        if rest:
            yield ParameterGroup("linear", (rest,), 1, is_trainable)

"""What the forward of a transformer keeps for its backward: each part one formula, in bytes.

The formulas follow what PyTorch's autograd saves (torch/csrc/autograd, derivatives.yaml) for the models of transformers 4.57, read
off allocator traces under PyTorch 2.13. With T tokens in a call, H the hidden size and I the width inside the feed-forward, c the bytes of
the compute type and r those of the residual stream (4 under autocast: norms return fp32):

    a linear layer keeps its input; under autocast each layer that reads an fp32 tensor keeps a cast of its own      c·T·width
    a norm keeps its input                                                                                           r·T·H
    fused attention keeps queries, keys, values, output and a log-sum for each head; a mask becomes a bias           c·T·S a block
    dropout keeps a mask of one byte                                                                                 T·width

"Attention is all of it" formulas (34·s·b·h and the like) leave out casts, biases and masks, and so miss by half and more.
"""

from typing import Literal, NamedTuple

from memplan.dtypes import ELEMENT_BYTES, Precision, compute_dtype, is_mixed, parameter_dtype
from memplan.workload.model import LoraTarget, TransformerModel

AttentionKernel = Literal["flash", "efficient", "math", "eager"]


class Call(NamedTuple):
    """One call of the model: how many sequences, and in which types."""

    sequences: int
    sequence_length: int
    compute_bytes: int
    """Bytes of an element in matrix products (c)."""
    stream_bytes: int
    """Bytes of an element of the residual stream (r)."""
    casts: bool
    """Autocast is on: linear layers keep casts of fp32 inputs."""
    kernel: AttentionKernel

    @property
    def tokens(self) -> int:
        """Return the tokens of the call."""
        return self.sequences * self.sequence_length


def make_call(
    model: TransformerModel, *, sequences: int, sequence_length: int, precision: Precision, compute_capability: tuple[int, int] | None
) -> Call:
    """Return the call of *sequences* sequences of *model* on a GPU of that capability."""
    return Call(
        sequences=sequences,
        sequence_length=sequence_length,
        compute_bytes=ELEMENT_BYTES[compute_dtype(precision)],
        stream_bytes=ELEMENT_BYTES[parameter_dtype(precision)],
        casts=is_mixed(precision),
        kernel=attention_kernel(model, precision, compute_capability),
    )


def attention_kernel(model: TransformerModel, precision: Precision, compute_capability: tuple[int, int] | None) -> AttentionKernel:
    """
    Return the kernel that scaled_dot_product_attention picks (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, PyTorch 2.13).

    Flash needs 2-byte elements, capability 8.0 and no mask; bf16 below 8.0 has only the math kernel. A GPU whose capability is not known
    is taken for 8.0 or later.
    """
    capability = compute_capability or (8, 0)
    dtype = compute_dtype(precision)
    if model.attention == "eager":
        return "eager"
    if model.attention == "flash_attention_2":
        return "flash"
    if dtype == "bfloat16" and capability < (8, 0):
        return "math"
    if dtype != "float32" and capability >= (8, 0) and not model.has_attention_mask:
        return "flash"
    # Without a mask transformers hands grouped keys and values over as they are, and only flash takes them so.
    if model.key_value_heads < model.num_attention_heads and not model.has_attention_mask:
        return "math"
    return "efficient"


def block_bytes(model: TransformerModel, call: Call) -> int:
    """Return what one block keeps: two norms, attention, feed-forward."""
    return 2 * norm_bytes(model, call) + attention_bytes(model, call) + feed_forward_bytes(model, call)


def norm_bytes(model: TransformerModel, call: Call) -> int:
    """
    Return what one norm keeps: its input, which is a sum that nobody else keeps, and its statistics.

    LayerNorm: the input in r, mean and reciprocal deviation in fp32. Hugging Face's RMSNorm squares and scales in fp32: under r < 4 a
    copy of the input, and the normalised tensor before its weight where that is trained.
    """
    width = model.hidden_size
    if model.norm == "layer_norm":
        return call.tokens * (call.stream_bytes * width + 8)
    upcast = 4 if call.stream_bytes < 4 else 0
    normalised = call.stream_bytes if model.lora is None else 0
    return call.tokens * ((call.stream_bytes + upcast + normalised) * width + 4)


def linear_input_bytes(model: TransformerModel, call: Call, targets: tuple[LoraTarget, ...], *, width: int, is_stream: bool) -> int:
    """
    Return what linear layers that read one tensor of *width* keep of it.

    *is_stream*: the tensor is a norm's output, fp32 under autocast, so that each layer keeps its own cast. Frozen layers keep nothing;
    their adapters keep what dropout left of the input, and its mask.
    """
    readers = len(targets)
    if model.lora is None:
        copies = readers if call.casts and is_stream else 1
        return call.tokens * width * copies * call.compute_bytes
    adapted = [target for target in targets if target in model.lora.targets]
    if not adapted:
        return 0
    masks = len(adapted) if model.lora.dropout else 0
    copies = len(adapted) if model.lora.dropout or (call.casts and is_stream) else 1
    return call.tokens * (width * (copies * call.compute_bytes + masks) + len(adapted) * model.lora.rank * call.compute_bytes)


def attention_bytes(model: TransformerModel, call: Call) -> int:
    """Return what attention keeps: the projections' inputs, queries, keys and values, what the kernel keeps, dropout's mask."""
    projections: tuple[LoraTarget, ...] = ("query",) if model.has_fused_qkv else ("query", "key", "value")
    kept = linear_input_bytes(model, call, projections, width=model.hidden_size, is_stream=True)
    kept += _query_key_value_bytes(model, call) + _kernel_bytes(model, call)
    kept += _output_input_bytes(model, call)
    return kept + _dropout_mask_bytes(model, call, width=model.hidden_size)


def _query_key_value_bytes(model: TransformerModel, call: Call) -> int:
    """
    Queries, keys and values as the kernel reads them.

    Unless the kernel is flash, grouped keys and values are repeated for each query head; the math kernel multiplies 2-byte inputs in fp32.
    """
    element_bytes = 4 if call.kernel == "math" else call.compute_bytes
    is_repeated = call.kernel != "flash"
    key_value_width = model.attention_width if is_repeated else model.key_value_width
    normed = 2 * (model.attention_width + model.key_value_width) * call.stream_bytes if model.has_qk_norm else 0
    return call.tokens * ((model.attention_width + 2 * key_value_width) * element_bytes + normed)


def _kernel_bytes(model: TransformerModel, call: Call) -> int:
    """What the kernel keeps besides its inputs: output and log-sums when fused, matrices of all pairs otherwise."""
    pairs = call.tokens * call.sequence_length
    heads = model.num_attention_heads
    has_dropout = model.attention_dropout > 0 and not model.is_in_eval_mode
    if call.kernel in ("flash", "efficient"):
        output = call.tokens * (model.attention_width * call.compute_bytes + 4 * heads)
        return output + (_mask_bias_bytes(model, call) if call.kernel == "efficient" and model.has_attention_mask else 0)
    probabilities = 4 + (1 if has_dropout else 0)  # softmax in fp32, and dropout's mask
    if has_dropout or (call.kernel == "eager" and call.compute_bytes < 4):
        probabilities += 4 if call.kernel == "math" else call.compute_bytes  # what the product with the values reads
    return pairs * heads * probabilities


def _mask_bias_bytes(model: TransformerModel, call: Call) -> int:
    """
    Bytes of the bias that a mask becomes in every block.

    A decoder's boolean mask is turned into a bias in each block; an encoder's additive mask in the stream's type is cast by autocast
    in each block, and shared by all blocks otherwise.
    """
    if model.architecture == "encoder" and not call.casts:
        return 0
    return call.tokens * call.sequence_length * call.compute_bytes


def _output_input_bytes(model: TransformerModel, call: Call) -> int:
    """The output projection reads the kernel's output itself when that is fused, a copy of it otherwise."""
    is_fused = call.kernel in ("flash", "efficient")
    if model.lora is None:
        return 0 if is_fused else call.tokens * model.attention_width * call.compute_bytes
    return linear_input_bytes(model, call, ("output",), width=model.attention_width, is_stream=False)


def feed_forward_bytes(model: TransformerModel, call: Call) -> int:
    """Return what the feed-forward keeps: its input, what its nonlinearity keeps, the second layer's input, a mask."""
    readers: tuple[LoraTarget, ...] = ("gate", "up") if model.is_gated else ("up",)
    kept = linear_input_bytes(model, call, readers, width=model.hidden_size, is_stream=True)
    kept += call.tokens * model.intermediate_size * activation_bytes_per_element(model, call)
    kept += _down_input_bytes(model, call)
    return kept + _dropout_mask_bytes(model, call, width=model.hidden_size)


def activation_bytes_per_element(model: TransformerModel, call: Call) -> int:
    """
    Return what the nonlinearity keeps of each element inside the feed-forward, the second layer's input left out.

    gelu and silu keep their input, relu only its output (which is that input); `gelu_new` is a formula of tensors: x in pow, tanh,
    1 + tanh and x/2, of which autocast makes all but the last fp32. A gate adds its two factors.
    """
    compute = call.compute_bytes
    kept = {
        "relu": 0,
        "gelu": compute,
        "silu": compute,
        "gelu_new": 3 * (4 if call.casts else compute) + compute,
    }
    return kept[model.activation] + (2 * compute if model.is_gated else 0)


def _down_input_bytes(model: TransformerModel, call: Call) -> int:
    return linear_input_bytes(model, call, ("down",), width=model.intermediate_size, is_stream=False)


def _dropout_mask_bytes(model: TransformerModel, call: Call, *, width: int) -> int:
    return call.tokens * width if model.dropout and not model.is_in_eval_mode else 0


def block_input_bytes(model: TransformerModel, call: Call) -> int:
    """Return what checkpointing keeps of a block: its input, in the residual stream's type."""
    return call.tokens * model.hidden_size * call.stream_bytes


def shared_mask_bytes(model: TransformerModel, call: Call) -> int:
    """Return the mask that a call makes once for all its blocks: boolean for a decoder, in the stream's type for an encoder."""
    if not model.has_attention_mask or call.kernel == "flash":
        return 0
    return call.tokens * call.sequence_length * (1 if model.architecture == "decoder" else call.stream_bytes)


def block_backward_bytes(model: TransformerModel, call: Call) -> int:
    """
    Return the working set of a block's backward at its widest, inside the feed-forward or inside attention.

    The stream's gradient; the gradients on both sides of the nonlinearity (and of a gate's factors) with `gelu_new`'s fp32 intermediates;
    or, where attention is not fused, three matrices of all pairs in fp32, by when what the feed-forward kept is free again.
    """
    inner = call.compute_bytes * (4 if model.is_gated else 2)
    if model.activation == "gelu_new":
        inner += 2 * (4 if call.casts else call.compute_bytes)
    is_fused = call.kernel in ("flash", "efficient")
    pairs = 0 if is_fused else call.tokens * 3 * 4 * model.num_attention_heads * call.sequence_length
    widest = max(call.tokens * inner * model.intermediate_size, pairs - feed_forward_bytes(model, call))
    return call.tokens * 2 * call.stream_bytes * model.hidden_size + widest


def embedding_bytes(model: TransformerModel, call: Call) -> int:
    """Return what the embedding keeps: its dropout's mask, and with BERT's norm that norm's input. Frozen ones keep nothing."""
    if model.lora is not None:
        return 0
    norm = norm_bytes(model, call) if model.norm_position == "post" else 0
    return norm + _dropout_mask_bytes(model, call, width=model.hidden_size)


def final_norm_bytes(model: TransformerModel, call: Call) -> int:
    """Return what a pre-norm model's last norm keeps."""
    return norm_bytes(model, call) if model.norm_position == "pre" else 0


class HeadBytes(NamedTuple):
    """What the head and the loss take."""

    kept_bytes: int
    """Kept from forward to backward besides the loss's own."""
    loss_peak_bytes: int
    """Logits and what the loss makes of them, at their peak in backward."""


def head_bytes(model: TransformerModel, call: Call) -> HeadBytes:
    """
    Return what the head and cross-entropy take.

    The loss keeps log-probabilities, and backward makes two more tensors of that size. Causal models of transformers make their logits
    fp32 by hand (`.float()`); elsewhere autocast does, and backward's last tensor is in the compute type; in pure fp16 and bf16 nobody
    does. The head keeps its input; BERT's transform its input, its gelu's and its norm's.
    """
    hidden = model.hidden_size
    if model.head in ("token_classification", "question_answering"):  # the head's input, its dropout's mask, and a few logits
        mask = _dropout_mask_bytes(model, call, width=hidden)
        return HeadBytes(call.tokens * hidden * call.compute_bytes + mask, 3 * 4 * call.tokens * model.num_labels)
    if not model.predicts_tokens:  # one token of each text, if any
        return HeadBytes(0, 0)
    kept = call.tokens * hidden * call.compute_bytes
    loss_bytes = logits_gradient_bytes = 4
    if model.head == "masked_language_model":
        logits_gradient_bytes = call.compute_bytes
        loss_bytes = 4 if call.casts else call.compute_bytes
        kept += call.tokens * hidden * (2 * call.compute_bytes + call.stream_bytes) + call.tokens * 8
    logits = call.tokens * model.vocab_size
    return HeadBytes(kept, logits * (2 * loss_bytes + logits_gradient_bytes))

"""
Decoders as torchtune builds and trains them, from a Hugging Face config.json; torchtune does not have to be installed.

What counts is what is allocated and kept, operator by operator: norms and rotary positions in fp32, keys repeated for every query head,
the loss in chunks, and 4-bit weights made whole by way of 64-bit indices (read in torchtune 0.6.1, modules/ and models/, and in torchao
0.9, dtypes/nf4tensor.py). All its decoders have the same blocks; what differs between families is in the table below.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memplan.child.failures import OwnModelError
from memplan.child.models.fine_tuning import QuantizedLinear, put_in_layers
from memplan.child.models.transformer import IGNORED

if TYPE_CHECKING:
    from memplan.workload.model import TorchtuneModel

SCALE_BLOCK = 64
"""Elements that share a scale in 4 bits (torchao's `block_size`)."""

EPSILON = 1e-5
"""What norms add before they divide."""

FACTOR_BLOCK = 256
"""Scales that share a factor of their own (torchao's `scaler_block_size`)."""


class Family(NamedTuple):
    """What torchtune's decoders of one `model_type` have of their own."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    """Queries and keys are normalised head by head, before they are turned."""
    has_pairs: bool = True
    """Rotary positions turn pairs of neighbours, in fp32; otherwise halves, as in the models of transformers."""
    is_turned_in_its_type: bool = False
    """Halves are turned in the type of the weights; otherwise in fp32."""
    is_gemma: bool = False
    """Norms are made of several tensors, embeddings are scaled, and GELU gates."""
    quantizes_adapted_alone: bool = False
    """Of QLoRA: layers without an adapter stay as they are."""
    ties_embeddings: bool = False
    """What the config.json means where it does not say."""


_FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(has_qkv_bias=True, has_pairs=False, is_turned_in_its_type=True, quantizes_adapted_alone=True),
    "qwen3": Family(has_qk_norm=True, has_pairs=False, is_turned_in_its_type=True, quantizes_adapted_alone=True),
    "phi3": Family(has_pairs=False),
    "gemma": Family(is_gemma=True, ties_embeddings=True),
}


class FromTorchtune(nn.Module):
    """A decoder that makes its own batch and answers with its loss."""

    def __init__(self, model: TorchtuneModel) -> None:
        super().__init__()
        self.described = model
        self.inner = Decoder(json.loads(model.huggingface_config), model)

    def put_in_layers(self) -> None:
        """Put in adapters and 4-bit weights. Raises OwnModelError for adapters of layers that there are not."""

        def base_of(layer: nn.Linear, is_adapted: bool) -> nn.Module:
            is_quantized = self.described.quantization is not None and (is_adapted or not self.inner.family.quantizes_adapted_alone)
            return Nf4Linear(layer) if is_quantized else layer

        put_in_layers(self.inner, self.described.adapters, base_of=base_of, head=self.inner.output)

    def checkpoints(self, on: bool) -> None:
        """Switch activation checkpointing of every block on or off."""
        for block in self.inner.blocks:
            assert isinstance(block, TorchtuneBlock)
            block.is_checkpointed = on

    def make_batch(self, batch: int, length: int, device: str) -> dict[str, Tensor]:
        """Return the arguments of a forward of *batch* texts of *length* tokens, none of which is padding."""
        ids = torch.randint(0, self.inner.tokens.num_embeddings, (batch, length))
        return {"tokens": ids.to(device), "labels": ids.to(device)}

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of *tokens* (batch, sequence), each of which predicts the next of *labels*."""
        num_tokens = (labels != IGNORED).sum()
        loss: Tensor = self._loss(tokens, labels) * num_tokens
        return loss

    def _loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        kind, chunks = self.described.loss, self.described.num_loss_chunks
        if kind == "chunked_states":
            states = self.inner(tokens, chunks=None)
            return self._loss_of_states(states, _shifted(labels), chunks)
        if kind == "chunked_logits":
            parts = self.inner(tokens, chunks=chunks)
            return _loss_of_parts(parts, _shifted(labels))
        logits = self.inner(tokens, chunks=1)[0].float()
        return functional.cross_entropy(logits.reshape(-1, logits.size(-1)), _shifted(labels).reshape(-1), ignore_index=IGNORED)

    def _loss_of_states(self, states: Tensor, labels: Tensor, chunks: int) -> Tensor:
        """Return the mean over chunks of tokens, each of which has its logits for itself (LinearCrossEntropyLoss, behind version 0.6)."""
        labels, states = labels.reshape(-1), states.reshape(-1, states.shape[-1])
        kept = torch.arange(labels.shape[0], device=labels.device)  # all of them: how many are ignored, the data decides
        states, labels = states.index_select(0, kept), labels.index_select(0, kept)
        total = torch.zeros((), device=labels.device)
        for number, state in enumerate(states.tensor_split(chunks)):
            total += _loss_of_logits(self.inner.project(state), labels.tensor_split(chunks)[number])
        return total / labels.shape[0]


def _shifted(labels: Tensor) -> Tensor:
    """Return *labels* (batch, sequence) moved by one, the last of which is ignored."""
    return torch.hstack((labels[..., 1:], torch.full((labels.shape[0], 1), IGNORED, device=labels.device)))


def _loss_of_parts(parts: list[Tensor], labels: Tensor) -> Tensor:
    """Return the mean over *parts* of the logits, each of which is made fp32 for itself (CEWithChunkedOutputLoss)."""
    num_tokens = (labels != IGNORED).sum()
    wanted = [chunk.reshape(-1) for chunk in labels.chunk(len(parts), dim=1)]
    total: Tensor | float = 0.0
    for part, label in zip(parts, wanted):  # noqa: B905  (as many)
        total += _loss_of_logits(part.reshape(-1, part.size(-1)), label)
    assert isinstance(total, Tensor)
    return total / num_tokens


def _loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


class Decoder(nn.Module):
    """Embeddings, blocks, a norm, and the product with the vocabulary."""

    def __init__(self, settings: dict[str, Any], model: TorchtuneModel) -> None:
        super().__init__()
        family = _FAMILIES.get(settings["model_type"])
        if family is None:
            raise OwnModelError(f"memplan has no decoder of torchtune for {settings['model_type']}: {', '.join(_FAMILIES)}")
        if not hasattr(functional, "rms_norm"):
            raise OwnModelError(f"PyTorch {torch.__version__} has no RMSNorm, which torchtune's decoders are made of: 2.4 has one")
        self.family = family
        hidden, layers = settings["hidden_size"], settings["num_hidden_layers"]
        positions = model.positions
        self.tokens = nn.Embedding(settings["vocab_size"], hidden)
        # Llama 3.1 and later are built otherwise: their adapted blocks share the table too.
        shares_table = model.adapters is None or model.shares_positions
        table = Positions(settings, family, positions) if shares_table else None
        # The loss that takes the states is of later versions, whose norms are others too.
        make_norm = GemmaNorm if family.is_gemma else WrittenOutNorm if model.loss == "chunked_states" else Norm
        self.blocks = nn.ModuleList(
            TorchtuneBlock(settings, family, make_norm, table or Positions(settings, family, positions)) for _ in range(layers)
        )
        self.norm = make_norm(hidden)
        is_tied = settings.get("tie_word_embeddings", family.ties_embeddings)
        self.output = None if is_tied else nn.Linear(hidden, settings["vocab_size"], bias=False)

    def forward(self, tokens: Tensor, *, chunks: int | None) -> Tensor | list[Tensor]:
        """Return the logits of *tokens* in *chunks* of the sequence, or without chunks their last states (batch, sequence, hidden)."""
        x = self.tokens(tokens)
        if self.family.is_gemma:
            x = x * torch.tensor(self.tokens.embedding_dim**0.5, dtype=x.dtype)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x if chunks is None else [self.project(chunk) for chunk in x.chunk(chunks, dim=1)]

    def project(self, states: Tensor) -> Tensor:
        """Return the logits of *states*."""
        return functional.linear(states, self.tokens.weight) if self.output is None else self.output(states)


class Positions(nn.Module):
    """A table of rotary positions in fp32, and the turn by it."""

    def __init__(self, settings: dict[str, Any], family: Family, num_positions: int) -> None:
        super().__init__()
        self.family = family
        width = width_of_head(settings)
        self.register_buffer("theta", torch.empty(width // 2, dtype=torch.float32), persistent=False)
        shape = (num_positions, width // 2, 2) if family.has_pairs else (num_positions, 2 * width)
        self.register_buffer("table", torch.empty(shape, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return *x* (batch, sequence, heads, width) turned by its positions."""
        assert isinstance(self.table, Tensor)
        table = self.table[: x.size(1)]
        return self._pairs(x, table) if self.family.has_pairs else self._halves(x, table)

    def _pairs(self, x: Tensor, table: Tensor) -> Tensor:
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        turns = table.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        turned = torch.stack(
            [
                pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1],
                pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1],
            ],
            -1,
        )
        turned = turned.flatten(3)
        return turned.type_as(x)

    def _halves(self, x: Tensor, table: Tensor) -> Tensor:
        width = x.size(-1)
        turns = table.view(-1, x.size(1), 1, width * 2)
        cosine, sine = turns[..., :width], turns[..., width:]
        if self.family.is_turned_in_its_type:
            cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
        rotated = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
        return ((x * cosine) + (rotated * sine)).type_as(x)


class Norm(nn.Module):
    """RMSNorm of fp32, as PyTorch's own operator makes it (0.6)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return *x* over its root mean square, in its own type."""
        return functional.rms_norm(x.float(), normalized_shape=self.weight.shape, weight=self.weight, eps=EPSILON).to(x.dtype)


class WrittenOutNorm(Norm):
    """RMSNorm of fp32, made of several tensors, with the weight in its own type (behind 0.6)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return *x* over its root mean square, in its own type."""
        wide = x.float()
        divided = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).type_as(x)
        return divided * self.weight


class GemmaNorm(Norm):
    """RMSNorm of fp32, made of several tensors, with the weight in fp32 too."""

    def forward(self, x: Tensor) -> Tensor:
        """Return *x* over its root mean square, in its own type."""
        answer = self._divided(x.float())
        answer = answer * (1.0 + self.weight.float())
        return answer.type_as(x)

    def _divided(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


def width_of_head(settings: dict[str, Any]) -> int:
    """Return the width of one head."""
    width: int = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    return width


class TorchtuneAttention(nn.Module):
    """Causal self-attention, every query head with keys of its own."""

    def __init__(self, settings: dict[str, Any], family: Family, make_norm: type[Norm], positions: Positions) -> None:
        super().__init__()
        hidden, self.heads, self.width = settings["hidden_size"], settings["num_attention_heads"], width_of_head(settings)
        self.key_heads = settings.get("num_key_value_heads") or self.heads
        self.q_proj = nn.Linear(hidden, self.heads * self.width, bias=family.has_qkv_bias)
        self.k_proj = nn.Linear(hidden, self.key_heads * self.width, bias=family.has_qkv_bias)
        self.v_proj = nn.Linear(hidden, self.key_heads * self.width, bias=family.has_qkv_bias)
        self.output_proj = nn.Linear(self.heads * self.width, hidden, bias=False)
        self.query_norm = make_norm(self.width) if family.has_qk_norm else None
        self.key_norm = make_norm(self.width) if family.has_qk_norm else None
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token of *x* (batch, sequence, hidden) gathers from those before it."""
        batch, length, _ = x.shape
        query = self._turned(self.q_proj(x).view(batch, length, self.heads, self.width), self.query_norm)
        key, value = self.k_proj(x), self.v_proj(x)
        key = self._turned(key.view(batch, length, -1, self.width), self.key_norm)
        value = value.view(batch, length, -1, self.width).transpose(1, 2)
        if self.heads != self.key_heads:
            key, value = self._repeated(key), self._repeated(value)
        gathered = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        gathered = gathered.transpose(1, 2).contiguous().view(batch, length, -1)
        answer: Tensor = self.output_proj(gathered)
        return answer

    def _turned(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is not None:
            x = norm(x.transpose(1, 2)).transpose(1, 2)
        turned: Tensor = self.positions(x)
        return turned.transpose(1, 2)

    def _repeated(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2).expand(-1, -1, self.heads // self.key_heads, -1, -1).flatten(1, 2)


class TorchtuneFeedForward(nn.Module):
    """Two branches, one of which gates, and the layer behind them."""

    def __init__(self, settings: dict[str, Any], family: Family) -> None:
        super().__init__()
        hidden, inner = settings["hidden_size"], settings["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.activation: nn.Module = nn.GELU(approximate="tanh") if family.is_gemma else nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward of *x*."""
        inner = self.activation(self.gate_proj(x))
        inner = inner * self.up_proj(x)
        answer: Tensor = self.down_proj(inner)
        return answer


class TorchtuneBlock(nn.Module):
    """Attention and feed-forward, each with a norm before it; checkpointed as a whole where that is switched on."""

    def __init__(self, settings: dict[str, Any], family: Family, make_norm: type[Norm], positions: Positions) -> None:
        super().__init__()
        hidden = settings["hidden_size"]
        self.attention = TorchtuneAttention(settings, family, make_norm, positions)
        self.feed_forward = TorchtuneFeedForward(settings, family)
        self.attention_norm, self.feed_forward_norm = make_norm(hidden), make_norm(hidden)
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's answer to *x*."""
        answer: Tensor = checkpoint(self._forward, x, use_reentrant=False) if self.is_checkpointed else self._forward(x)
        return answer

    def _forward(self, x: Tensor) -> Tensor:
        states = self.attention_norm(x)
        gathered = self.attention(states)
        states = gathered + x
        answer = self.feed_forward(self.feed_forward_norm(states))
        return states + answer


class Nf4Linear(QuantizedLinear):
    """Two weights a byte, a scale for each 64 and a factor for each 256 of those, as torchao's NF4Tensor."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        scales = -(-self.num_elements // SCALE_BLOCK)
        scales = -(-scales // FACTOR_BLOCK) * FACTOR_BLOCK
        self.register_buffer("packed", torch.empty(self.num_elements // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(scales, dtype=torch.int8))
        self.register_buffer("factors", torch.empty(scales // FACTOR_BLOCK, dtype=self.dtype))
        self.register_buffer("mean", torch.empty((), dtype=self.dtype))
        self.register_buffer("code", torch.empty(16, dtype=self.dtype))

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (outputs, inputs) in *dtype*; all on the way to it is let go at the end."""
        packed, scales, factors, mean, code = (getattr(self, name) for name in ("packed", "scales", "factors", "mean", "code"))
        first = (packed >> 4).to(torch.long)
        second = (packed & 0b1111).to(torch.long)
        of_first, of_second = code[first], code[second]
        scale = (scales.view(-1, FACTOR_BLOCK) / factors.unsqueeze(-1)).flatten().to(self.dtype) + mean
        repeated = scale[: self.num_elements // SCALE_BLOCK].unsqueeze(-1).expand(-1, SCALE_BLOCK // 2)
        scaled_first = of_first * repeated.flatten()
        scaled_second = of_second * repeated.flatten()
        pairs = [scaled.unsqueeze(-1).transpose(0, 1) for scaled in (scaled_first, scaled_second)]
        whole: Tensor = torch.stack(pairs, dim=-1).reshape(self.out_features, self.in_features)
        return whole.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of *x* (…, inputs) with the weight; a bias is added to it."""
        answer = self.product(x)
        return answer if self.bias is None else answer + self.bias

"""
Transformers as torch modules, from their description alone.

What counts is what is allocated and kept, operator by operator, so each part computes as the models that people train do: the formula of
GPT-2's activation is many operators, RMSNorm is computed in fp32, a decoder's mask of padding is boolean and an encoder's additive. The
weights are whatever the memory holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from memplan.workload.model import Lora, TransformerModel

IGNORED = -100
"""The label that cross-entropy leaves out."""


class Adapted(nn.Module):
    """A frozen linear layer and the low-rank adapter beside it."""

    def __init__(self, base: nn.Linear, lora: Lora) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        self.down = nn.Linear(base.in_features, lora.rank, bias=False)
        self.up = nn.Linear(lora.rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's answer and the adapter's, whose scale is a number."""
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0


class GeluOfGpt2(nn.Module):
    """The tanh formula of GELU, operator by operator."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of *x*."""
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class RmsNorm(nn.Module):
    """Root mean square norm, computed in fp32 whatever comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return *x* over its root mean square, in its own type."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


_ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "gelu_new": GeluOfGpt2, "relu": nn.ReLU, "silu": nn.SiLU}


def make_norm(model: TransformerModel, width: int) -> nn.Module:
    """Return the norm of *model* over *width*."""
    return RmsNorm(width) if model.norm == "rms_norm" else nn.LayerNorm(width)


def make_linear(model: TransformerModel, target: str, inputs: int, outputs: int) -> nn.Module:
    """Return the linear layer *target* of a block, with its adapter where it has one."""
    is_projection = target in ("query", "key", "value")
    bias = model.has_qkv_bias if is_projection and model.has_qkv_bias is not None else model.has_linear_bias
    linear = nn.Linear(inputs, outputs, bias=bias)
    return Adapted(linear, model.lora) if model.lora is not None and target in model.lora.targets else linear


class Attention(nn.Module):
    """Self-attention with all its projections."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        self.model = model
        hidden, inner, key_value = model.hidden_size, model.attention_width, model.key_value_width
        if model.has_fused_qkv:
            self.query = make_linear(model, "query", hidden, inner + 2 * key_value)
        else:
            self.query = make_linear(model, "query", hidden, inner)
            self.key = make_linear(model, "key", hidden, key_value)
            self.value = make_linear(model, "value", hidden, key_value)
        if model.has_qk_norm:
            self.query_norm, self.key_norm = make_norm(model, model.width_of_head), make_norm(model, model.width_of_head)
        self.output = make_linear(model, "output", inner, hidden)

    def forward(self, x: Tensor, mask: Tensor | None, positions: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return what each token of *x* (batch, sequence, hidden) gathers from those that *mask* shows it."""
        query, key, value = self._heads(x)
        if positions is not None:
            query, key = _rotated(query, *positions), _rotated(key, *positions)
        gathered = self._eager(query, key, value, mask) if self.model.attention == "eager" else self._fused(query, key, value, mask)
        return self.output(gathered.transpose(1, 2).reshape(*x.shape[:2], -1).contiguous())

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model = self.model
        if model.has_fused_qkv:
            fused, widths = self.query(x), (model.attention_width, model.key_value_width, model.key_value_width)
            parts = fused.split([width * fused.shape[-1] // sum(widths) for width in widths], dim=-1)  # of a split matrix, its part
        else:
            parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.view(*x.shape[:2], -1, model.width_of_head) for part in parts)
        if model.has_qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        # With a mask grouped keys would leave only the kernel that keeps all pairs; up to PyTorch 2.4 no kernel takes them.
        if grouped and (mask is not None or torch.__version__ < "2.5"):
            key, value = self._repeated(key), self._repeated(value)
            grouped = False
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.model.attention_dropout if self.training else 0.0,
            is_causal=mask is None and self.model.architecture == "decoder",
            **({"enable_gqa": True} if grouped else {}),
        )

    def _eager(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        key, value = self._repeated(key), self._repeated(value)
        scores = torch.matmul(query, key.transpose(2, 3)) * self.model.width_of_head**-0.5
        if mask is not None:
            scores = scores + mask
        if self.model.norm == "rms_norm":
            shares = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        else:
            shares = functional.softmax(scores, dim=-1)
        shares = functional.dropout(shares, self.model.attention_dropout, self.training)
        return torch.matmul(shares, value)

    def _repeated(self, x: Tensor) -> Tensor:
        groups = self.model.num_attention_heads // self.model.key_value_heads
        if groups == 1:
            return x
        batch, heads, length, width = x.shape
        return x[:, :, None].expand(batch, heads, groups, length, width).reshape(batch, heads * groups, length, width)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cosine) + (turned * sine)


class FeedForward(nn.Module):
    """Two linear layers, or three where the activation gates."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        hidden, inner = model.hidden_size, model.intermediate_size
        self.gate = make_linear(model, "gate", hidden, inner) if model.is_gated else None
        self.up = make_linear(model, "up", hidden, inner)
        self.activation = _ACTIVATIONS[model.activation]()
        self.down = make_linear(model, "down", inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward of *x*."""
        if self.gate is not None:
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each with its norm before it or behind it; checkpointed as a whole, in training mode."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        self.is_pre_norm = model.norm_position == "pre"
        self.attention, self.feed_forward = Attention(model), FeedForward(model)
        self.attention_norm, self.feed_forward_norm = make_norm(model, model.hidden_size), make_norm(model, model.hidden_size)
        self.dropout = nn.Dropout(model.dropout) if model.dropout else nn.Identity()
        self.gradient_checkpointing = False

    def forward(self, x: Tensor, mask: Tensor | None, positions: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the block's answer to *x*."""
        if self.gradient_checkpointing and self.training:
            return checkpoint(self._forward, x, mask, positions, use_reentrant=False)
        return self._forward(x, mask, positions)

    def _forward(self, x: Tensor, mask: Tensor | None, positions: tuple[Tensor, Tensor] | None) -> Tensor:
        if self.is_pre_norm:
            x = self.dropout(self.attention(self.attention_norm(x), mask, positions)) + x
            return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        x = self.attention_norm(self.dropout(self.attention(x, mask, positions)) + x)
        return self.feed_forward_norm(self.dropout(self.feed_forward(x)) + x)


class Transformer(nn.Module):
    """Embeddings and blocks: token ids (batch, sequence) to hidden states (batch, sequence, hidden)."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        self.model = model
        self.tokens: nn.Module = nn.Embedding(model.vocab_size, model.hidden_size)
        self.places = nn.Embedding(model.num_positions, model.hidden_size) if model.num_positions else None
        self.types = nn.Embedding(model.num_token_types, model.hidden_size) if model.num_token_types else None
        self.norm = make_norm(model, model.hidden_size)  # behind the embeddings (post-norm) or behind the last block
        self.dropout = nn.Dropout(model.dropout) if model.dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.num_layers))
        self.length_of_input = 1
        """How many times longer the sequence is than what comes in: where that is a part of it."""
        if model.lora is not None:
            self._freeze()

    def _freeze(self) -> None:
        for name, parameter in self.named_parameters():
            if (".down." not in name and ".up." not in name) or "base" in name:
                parameter.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Adapted):
                module.down.requires_grad_(True)
                module.up.requires_grad_(True)
            elif isinstance(module, FeedForward):
                for layer in (module.gate, module.up, module.down):
                    if isinstance(layer, nn.Linear):
                        layer.requires_grad_(False)

    def checkpoints(self, on: bool) -> None:
        """Switch activation checkpointing of every block on or off."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.gradient_checkpointing = on

    def forward(self, ids: Tensor, padding: Tensor | None) -> Tensor:
        """Return the hidden states of *ids*; *padding* (batch, sequence) is 0 where a text has ended."""
        x = self._embedded(ids)
        mask = self._mask(padding, x) if padding is not None else None
        positions = self._positions(ids.shape[1] * self.length_of_input, x) if self.model.rotary else None
        for block in self.blocks:
            x = block(x, mask, positions)
        if self.model.norm_position == "pre":
            x = self.norm(x)
        return x

    def _embedded(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids))
        if self.places is not None:
            x = x + self.places(torch.arange(ids.shape[1], device=ids.device)[None])
        if self.model.norm_position == "post":
            x = self.norm(x)
        return self.dropout(x)

    def _mask(self, padding: Tensor, x: Tensor) -> Tensor:
        batch, length = padding.shape
        seen = padding[:, None, None, :]
        if self.model.architecture == "decoder":
            earlier = torch.ones(length, length, dtype=torch.bool, device=padding.device).tril()
            shown = seen.bool() & earlier
            return shown if self.model.attention != "eager" else torch.zeros_like(shown, dtype=x.dtype).masked_fill(~shown, -1e4)
        hidden = 1.0 - seen.expand(batch, 1, length, length).to(x.dtype)
        return hidden.masked_fill(hidden.to(torch.bool), torch.finfo(x.dtype).min)

    def _positions(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        half = self.model.width_of_head // 2
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            frequencies = torch.ones(half, device=x.device)
            angles = torch.arange(length, device=x.device).float()[None, :, None] * frequencies[None, None]
            both = torch.cat((angles, angles), dim=-1)
            return both.cos().to(x.dtype)[:, None], both.sin().to(x.dtype)[:, None]


class TransformerWithHead(nn.Module):
    """A transformer, its head and the head's loss: of the next or the masked token, of classes, or of nothing in particular."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        self.model = model
        self.transformer = Transformer(model)
        hidden, is_trained = model.hidden_size, model.lora is None
        self.pooler = nn.Linear(hidden, hidden).requires_grad_(is_trained) if model.has_pooler else None
        self.is_masked = model.head == "masked_language_model"
        if self.is_masked:
            transform = nn.Sequential(nn.Linear(hidden, hidden), _ACTIVATIONS[model.activation](), nn.LayerNorm(hidden))
            self.transform = transform.requires_grad_(is_trained)
        if model.predicts_tokens:
            self.logits: nn.Module = nn.Linear(hidden, model.vocab_size, bias=self.is_masked)
            self.tie()
            self.logits.requires_grad_(is_trained)
        elif model.head != "none":  # trained beside adapters too, as PEFT does
            self.logits = nn.Linear(hidden, model.num_labels, bias=has_logits_bias(model))

    def tie(self) -> None:
        """Let the logits use the embedding's weights, where they do; a stage of the model has one of them."""
        if not (self.model.predicts_tokens and self.model.ties_embeddings):
            return
        tokens = self.transformer.tokens
        if isinstance(tokens, nn.Embedding) and isinstance(self.logits, nn.Linear):
            self.logits.weight = tokens.weight

    def make_batch(self, batch: int, length: int, device: str) -> dict[str, Tensor]:
        """Return the arguments of a forward of *batch* texts of *length* tokens."""
        model = self.model
        ids = torch.randint(0, model.vocab_size, (batch, length), device=device)
        made = {"ids": ids} | ({"padding": torch.ones_like(ids)} if model.has_attention_mask else {})
        if model.predicts_tokens:
            return made | {"labels": ids}
        if model.head == "token_classification":
            return made | {"labels": torch.zeros_like(ids)}
        return made if model.head == "none" else made | {"labels": torch.zeros(batch, dtype=torch.long, device=device)}

    def encode(self, ids: Tensor, padding: Tensor | None) -> Tensor:
        """Return the hidden states (batch, sequence, hidden) of *ids*."""
        return self.transformer(ids, padding)

    def forward(self, ids: Tensor, padding: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """
        Return the loss of *labels*: (batch, sequence), or (batch) for a class or a position of a text.

        Of a stage, which has no labels: its hidden states (batch, sequence, hidden), the last one's logits. Another than the first takes
        hidden states in the place of *ids*.
        """
        x = self.transformer(ids, padding)
        if labels is None and self.model.head == "language_model":
            return self.logits(x)
        if self.is_masked:
            return self._loss(self.logits(self.transform(x)), labels)
        if self.model.head == "language_model":
            assert labels is not None
            following = _following(labels)
            return self._loss(self.logits(x).float(), following)  # a name for the logits would keep those of two bytes
        if self.model.head == "token_classification":
            return self._loss(self.logits(x), labels)
        if self.model.head == "question_answering":
            start, end = (logits.squeeze(-1).contiguous() for logits in self.logits(x).split(1, dim=-1))
            assert labels is not None
            return (functional.cross_entropy(start, labels) + functional.cross_entropy(end, labels)) / 2
        pooled = torch.tanh(self.pooler(x[:, 0])) if self.pooler is not None else None
        if self.model.head == "sequence_classification":
            return self._loss(self.logits(x[:, 0] if pooled is None else pooled), labels)
        return x.float().mean() + (pooled.float().mean() if pooled is not None else 0.0)

    def loss_of_next(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of *logits* (batch, sequence, words), each of the token after the one of *labels* in its place."""
        following = _following(labels)
        return self._loss(logits.float(), following)

    def _loss(self, logits: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=IGNORED)


def _following(labels: Tensor) -> Tensor:
    return functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()


def has_logits_bias(model: TransformerModel) -> bool:
    """Say whether the layer of a classification head has a bias: every one but a decoder's for whole texts."""
    return model.architecture == "encoder" or model.head != "sequence_classification"

"""Contrastive encoders as torch modules: one transformer for each channel, experts, a projection, and the losses over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from memplan.child.models.transformer import Transformer

if TYPE_CHECKING:
    from memplan.workload.contrastive import Contrastive
    from memplan.workload.model import ContrastiveEncoderModel, Experts

TEMPERATURE = 0.07

Texts = tuple[Tensor, Tensor]
"""Token ids and mask, each (items, channels, sequence)."""


class Mixture(nn.Module):
    """Experts that all see every item; the gate only scales what they return."""

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts.num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, experts.hidden_size), nn.GELU(), nn.Linear(experts.hidden_size, width))
            for _ in range(experts.num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the experts' answers by the gate's shares."""
        shares = self.gate(x).softmax(-1).split(1, dim=-1)
        mixed = shares[0] * self.experts[0](x)
        for share, expert in zip(shares[1:], list(self.experts)[1:], strict=True):
            mixed = mixed + share * expert(x)
        return mixed


class ContrastiveEncoder(nn.Module):
    """Texts to embeddings of length one."""

    def __init__(self, model: ContrastiveEncoderModel) -> None:
        super().__init__()
        self.channels = nn.ModuleList(Transformer(model.encoder) for _ in range(model.num_channels))
        self.has_mask = model.encoder.has_attention_mask
        self.mixture = Mixture(model.width, model.experts) if model.experts is not None else None
        self.projection = nn.Linear(model.width, model.projection_size) if model.projection_size is not None else None

    def forward(self, texts: Texts) -> Tensor:
        """Return the embeddings (items, width) of *texts*."""
        ids, mask = texts
        pooled = [self._pooled(encoder, ids[:, channel], mask[:, channel]) for channel, encoder in enumerate(self.channels)]
        x = torch.cat(pooled, dim=1)
        x = x.to(next(self.parameters()).dtype)  # means are fp32; weights are too, but where everything is in a short type
        if self.mixture is not None:
            x = self.mixture(x)
        if self.projection is not None:
            x = self.projection(x)
        return functional.normalize(x, dim=-1)

    def _pooled(self, encoder: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        states = encoder(ids, mask if self.has_mask else None)
        shares = mask.unsqueeze(-1).expand(states.shape).float()
        return (states * shares).sum(1) / shares.sum(1).clamp(min=1e-9)


def loss_of(contrastive: Contrastive, embeddings: tuple[Tensor, Tensor, Tensor], *, data_parallel_size: int) -> Tensor:
    """
    Return the loss of anchors (batch, width), positives and negatives (several for each anchor).

    With in-batch negatives each anchor is compared with the other rows' positives too, or with all their items.
    """
    anchors, positives, negatives = embeddings
    batch = anchors.shape[0]
    own = positives.view(batch, -1, anchors.shape[1])
    close = torch.einsum("bd,bpd->bp", anchors, own)
    logits = close
    if negatives.shape[0]:
        far = torch.einsum("bd,bnd->bn", anchors, negatives.view(batch, -1, anchors.shape[1]))
        logits = torch.cat([close, far], 1)
    if contrastive.in_batch_negatives != "none":
        others = {"positives": lambda: positives, "negatives": lambda: negatives, "all": lambda: torch.cat([positives, negatives])}[
            contrastive.in_batch_negatives
        ]()
        if contrastive.gathers_negatives and data_parallel_size > 1:
            gathered = torch.empty((data_parallel_size - 1) * others.shape[0], others.shape[1], dtype=others.dtype, device=others.device)
            others = torch.cat([others, gathered])
        logits = torch.cat([logits, anchors @ others.T], 1)
    return functional.cross_entropy(logits / TEMPERATURE, torch.zeros(batch, dtype=torch.long, device=anchors.device))


def cached_backward(
    encode: Callable[[Texts], Tensor],
    groups: tuple[Texts, Texts, Texts],
    loss: Callable[[tuple[Tensor, Tensor, Tensor]], Tensor],
    mini_batch: int,
) -> None:
    """
    Run forward and backward of a cached loss (GradCache, arXiv:2101.06983), with *mini_batch* items in memory at a time.

    The embeddings are computed without a graph, the loss's gradient for them is kept, and each mini-batch is encoded again to pass it on.
    """
    pieces = [list(zip(ids.split(mini_batch), mask.split(mini_batch), strict=True)) for ids, mask in groups]
    with torch.no_grad():
        embedded = [torch.cat([encode(piece) for piece in group]) for group in pieces]
    leaves = [embeddings.requires_grad_(True) for embeddings in embedded]
    loss((leaves[0], leaves[1], leaves[2])).backward()
    for group, leaf in zip(pieces, leaves, strict=True):
        assert leaf.grad is not None
        for piece, gradient in zip(group, leaf.grad.split(mini_batch), strict=True):
            encode(piece).backward(gradient)

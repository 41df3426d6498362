"""
Training on pairs of answers, as DPO and its kind: both texts of a pair in one forward, the probability of each text, and a reference.

What is allocated is that of TRL's trainers (0.25, trl/trainer/dpo_trainer.py, `concatenated_forward`) and of LLaMA-Factory's (0.9.5,
train/dpo/trainer.py), which Accelerate gives what a model returns in fp32 (1.12, `convert_outputs_to_fp32`). A reference reads a batch
behind the policy's forward, whose activations are there then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memplan.child.models.fine_tuning import without_adapters
from memplan.child.models.huggingface import FromTransformers
from memplan.workload.model import Preference

Reference = Callable[[dict[str, Tensor]], Tensor]
"""The log probability of each text of a batch, without gradients."""


class TextProbabilities(nn.Module):
    """A model of texts that tells how probable each of them is."""

    def __init__(self, model: FromTransformers, preference: Preference) -> None:
        super().__init__()
        self.model = model
        self.preference = preference
        self.kept_logits: Tensor | None = None

    def make_batch(self, pairs: int, length: int, device: str) -> dict[str, Tensor]:
        """Return the texts of that many *pairs*, the preferred ones first."""
        return self.model.make_texts(2 * pairs, length, device)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the log probability of each of the texts (texts, tokens)."""
        is_of_trl = self.preference.trainer == "trl"
        keywords: dict[str, Any] = {"output_hidden_states": True} if is_of_trl else {}
        returned = self.model.answer(input_ids=input_ids, attention_mask=attention_mask, **keywords)
        answer = {name: _in_fp32(value) for name, value in returned.items()}
        del returned
        with torch.autocast("cuda", enabled=False):  # a trainer computes its loss outside of the model's forward
            if is_of_trl:
                return _text_by_text(answer["logits"], input_ids)
            if torch.is_grad_enabled():
                self.kept_logits = answer["logits"].detach()
            return _at_once(answer["logits"], input_ids)


def _in_fp32(value: Any) -> Any:
    return tuple(each.float() for each in value) if isinstance(value, tuple) else value.float()


def _text_by_text(logits: Tensor, ids: Tensor) -> Tensor:
    labels = torch.roll(ids, shifts=-1, dims=1)
    chosen = torch.gather(logits, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
    return (chosen - torch.stack([torch.logsumexp(text, dim=-1) for text in logits])).sum(-1)


def _at_once(logits: Tensor, ids: Tensor) -> Tensor:
    probabilities = logits[:, :-1].log_softmax(-1)
    return torch.gather(probabilities, dim=2, index=ids[:, 1:].unsqueeze(2)).squeeze(2).sum(-1)


def reference_of(policy: TextProbabilities, copy: TextProbabilities | None, autocast: Callable[[], Any]) -> Reference | None:
    """Return what the loss of *policy* compares with, its *copy* or itself without adapters; None where that is nothing."""
    if policy.preference.reference == "none":
        return None
    read = policy if copy is None else copy

    def probabilities(texts: dict[str, Tensor]) -> Tensor:
        untuned = without_adapters(policy.model.inner) if copy is None else contextlib.nullcontext()
        with torch.no_grad(), autocast(), untuned:
            answer: Tensor = read(**texts)
            return answer

    return probabilities


def loss_of_pairs(policy: TextProbabilities, probabilities: Tensor, reference: Tensor | None) -> Tensor:
    """Return DPO's loss of the log *probabilities* (texts,) by *policy*, compared with those by its *reference*."""
    policy.kept_logits = None
    ratios = probabilities if reference is None else probabilities - reference
    preferred, rejected = ratios.chunk(2)
    return -functional.logsigmoid(0.1 * (preferred - rejected)).mean()

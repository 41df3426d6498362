"""The model of a Hugging Face config.json, built by transformers on the device, without weights from anywhere."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

if TYPE_CHECKING:
    from memplan.workload.model import TransformerModel

_AUTO: dict[str, Any] = {"language_model": AutoModelForCausalLM, "masked_language_model": AutoModelForMaskedLM}


class HuggingFaceModel(nn.Module):
    """Gives transformers' model the signature of this room's own."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        assert model.huggingface_config is not None
        settings = json.loads(model.huggingface_config)
        settings.pop("torch_dtype", None)
        settings.pop("dtype", None)
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        config.use_cache = False
        self.inner: Any = _AUTO[model.head].from_config(config, attn_implementation=model.attention)

    def tie(self) -> None:
        """Share what the config says is shared."""
        self.inner.tie_weights()

    def checkpoints(self, on: bool) -> None:
        """Switch activation checkpointing on or off."""
        if on:
            self.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, ids: Tensor, padding: Tensor | None, labels: Tensor) -> Tensor:
        """Return the loss of *labels*."""
        return self.inner(input_ids=ids, attention_mask=padding, labels=labels).loss

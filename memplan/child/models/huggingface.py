"""
The model of a Hugging Face config.json, built by transformers on the device, without weights from anywhere.

Which inputs a model takes is read off the signature of its forward: token ids, images, spectrograms or waveforms, each of the size that its
config says, and the labels of its head.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memplan.child.failures import OwnModelError
from memplan.child.models.experts import BalancedExperts
from memplan.child.models.fine_tuning import without_copies
from memplan.workload.model import EXPERT_COUNTS, HuggingFaceModel, TransformerModel

if TYPE_CHECKING:
    from memplan.workload.model import Head

SECOND_OF_SOUND = 16_000
"""Samples of a waveform: one second at the rate that speech models are trained with."""

_CLASS_OF_HEAD: dict[Head, str] = {
    "language_model": "AutoModelForCausalLM",
    "masked_language_model": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "none": "AutoModel",
}
_USUAL_CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForImageClassification", "AutoModel")
"""Tried in this order for a config that names no architecture."""

_NOT_OF_THE_MODEL = ("torch_dtype", "dtype", "quantization_config", "_attn_implementation", "attn_implementation", "transformers_version")
_MIXED_INPUTS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id")
_PARTS = ("text_config", "vision_config", "audio_config", "ffn_config", "encoder", "decoder")


class FromTransformers(nn.Module):
    """A model of transformers that makes its own batch and answers with its loss."""

    def __init__(self, model: TransformerModel | HuggingFaceModel) -> None:
        super().__init__()
        settings = _without_training(json.loads(model.huggingface_config or ""))
        _refuse_mixed(settings)
        self.described = model
        self.has_attention_mask = not isinstance(model, TransformerModel) or model.has_attention_mask
        self.inner: Any = _built(settings, model)
        if isinstance(model, HuggingFaceModel) and model.kernels is not None:
            _put_in_liger(self.inner)
        self.config: Any = self.inner.config
        self.parameters_of_forward = inspect.signature(self.inner.forward).parameters
        self.is_balanced = _first(self.config, *EXPERT_COUNTS) is not None

    def tie(self) -> None:
        """Share what the config says is shared; make what is neither parameter nor buffer, which `.to` leaves on the host."""
        with without_copies(self.inner):
            self.inner.tie_weights()
        for module in self.inner.modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    setattr(module, name, torch.empty_like(value, device="cpu"))

    def checkpoints(self, on: bool) -> None:
        """Switch activation checkpointing on where it is *on*. Raises ValueError for a model that has none."""
        if on:
            is_adapted = isinstance(self.described, HuggingFaceModel) and self.described.adapters is not None
            options: dict[str, Any] = {"use_reentrant": is_adapted and not self.is_balanced}  # the default of transformers' Trainer
            if self.is_balanced:  # what is recomputed runs in a thread of autograd, where the mode of the forward is not on
                options["context_fn"] = lambda: (contextlib.nullcontext(), BalancedExperts())
            self.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            if is_adapted:
                self.inner.enable_input_require_grads()  # as PEFT and its users do

    def make_batch(self, batch: int, length: int, device: str) -> dict[str, Tensor]:
        """Return the arguments of a forward of *batch* samples, texts being of *length* tokens."""
        made = self._inputs(batch, length, device)
        return made | self._labels(made, batch, length, device)

    def make_texts(self, batch: int, length: int, device: str) -> dict[str, Tensor]:
        """Return the ids of *batch* texts of *length* tokens, and where they are padding."""
        return {"input_ids": self._ids(batch, length, device), "attention_mask": _with_padding(batch, length, device)}

    def encode(self, ids: Tensor, padding: Tensor | None) -> Tensor:
        """Return the last hidden states (batch, sequence, hidden) of *ids*."""
        states: Tensor = self.inner.base_model(input_ids=ids, attention_mask=padding).last_hidden_state
        return states

    def answer(self, **inputs: Any) -> Any:
        """Return what the model itself returns."""
        with BalancedExperts() if self.is_balanced else contextlib.nullcontext():
            return self.inner(**inputs)

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the model's loss; where it has none, the mean of what it returns."""
        answer = self.answer(**inputs)
        loss: Tensor | None = getattr(answer, "loss", None)
        if loss is not None:
            return loss
        returned = [each for each in answer.to_tuple() if isinstance(each, Tensor) and each.requires_grad]
        return torch.stack([each.float().mean() for each in returned]).sum()

    def _inputs(self, batch: int, length: int, device: str) -> dict[str, Tensor]:
        takes, config = self.parameters_of_forward, self.config
        made: dict[str, Tensor] = {}
        bins: int | None = _first(config, "num_mel_bins")
        if "pixel_values" in takes and "input_ids" in takes:  # a dual encoder, whose texts are short
            length = min(length, _first(config, "max_position_embeddings") or length)
        if "input_ids" in takes:
            made["input_ids"] = self._ids(batch, length, device)
            if self.has_attention_mask and "attention_mask" in takes:
                made["attention_mask"] = _with_padding(batch, length, device)
        if "pixel_values" in takes:
            height, width = _sides(_first(config, "image_size") or 224)
            made["pixel_values"] = torch.rand(batch, _first(config, "num_channels") or 3, height, width, device=device)
        if "input_features" in takes:  # the two halves of a spectrogram's frames become one position
            frames = 2 * (_first(config, "max_source_positions") or length)
            made["input_features"] = torch.rand(batch, bins or 80, frames, device=device)
        if "input_values" in takes and "input_ids" not in takes:
            shape = (SECOND_OF_SOUND,) if bins is None else (_first(config, "max_length") or length, bins)
            made["input_values"] = torch.rand(batch, *shape, device=device)
        if not made:
            taken = ", ".join(takes)
            raise OwnModelError(f"{type(self.inner).__name__} takes none of input_ids, pixel_values, input_features, input_values: {taken}")
        return made

    def _labels(self, made: dict[str, Tensor], batch: int, length: int, device: str) -> dict[str, Tensor]:
        takes, config, name = self.parameters_of_forward, self.config, type(self.inner).__name__
        zeros = _zeros(batch, device)
        if "start_positions" in takes:
            return {"start_positions": zeros(), "end_positions": zeros()}
        if "return_loss" in takes:
            return {"return_loss": True}  # type: ignore[dict-item]  # a switch: the pairs of a dual encoder are their own labels
        if "labels" not in takes:
            needs_text = config.is_encoder_decoder and "decoder_input_ids" in takes
            return {"decoder_input_ids": self._ids(batch, length, device)} if needs_text else {}
        if name.endswith("SemanticSegmentation"):
            return {"labels": zeros(*made["pixel_values"].shape[-2:])}
        if name.endswith("TokenClassification"):
            return {"labels": zeros(length)}
        if name.endswith("Classification"):
            kind = config.problem_type or ("regression" if config.num_labels == 1 else None)
            if kind == "multi_label_classification":
                return {"labels": torch.zeros(batch, config.num_labels, device=device)}
            return {"labels": torch.zeros(batch, device=device) if kind == "regression" else zeros()}
        if "input_ids" in made:
            return {"labels": made["input_ids"]}
        return {"labels": self._ids(batch, min(length, _first(config, "max_target_positions") or length), device)}

    def _ids(self, batch: int, length: int, device: str) -> Tensor:
        return torch.randint(0, _first(self.config, "vocab_size") or 2, (batch, length), device=device)


def _without_training(settings: dict[str, Any]) -> dict[str, Any]:
    """Return *settings*, and those of the parts of the model, without what is decided elsewhere."""
    kept = {name: value for name, value in settings.items() if name not in _NOT_OF_THE_MODEL}
    return {name: _without_training(value) if name in _PARTS and isinstance(value, dict) else value for name, value in kept.items()}


def _refuse_mixed(settings: dict[str, Any]) -> None:
    """Raise OwnModelError for a model whose texts hold images or sounds: how many, its config does not say."""
    named = next((name for name in _MIXED_INPUTS if settings.get(name) is not None), None)
    if named is not None:
        raise OwnModelError(f"its texts hold images or sounds ({named}), and a config.json does not say how many")


def _built(settings: dict[str, Any], model: TransformerModel | HuggingFaceModel) -> Any:
    """Return the model of transformers. Raises OwnModelError where the installed one does not know it."""
    import transformers  # noqa: PLC0415  (takes half a second, and other models do without)

    architecture = next(iter(settings.get("architectures") or ()), None)
    attention = {} if model.attention is None else {"attn_implementation": model.attention}
    model_type = settings.pop("model_type")
    if "auto_map" in settings and model_type not in transformers.CONFIG_MAPPING:
        raise OwnModelError(f"{model_type} is code beside its weights (auto_map), which a plan does not run")
    config = transformers.AutoConfig.for_model(model_type, **settings)
    config.use_cache = False
    config.architectures = config.architectures or []  # what is None for a config that is made by hand, from_config reads as a list
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # heads for whole texts look for the last token that is not padding
    if config.is_encoder_decoder and config.decoder_start_token_id is None:
        config.decoder_start_token_id = config.pad_token_id  # T5's, whose own config.json files say so
    if isinstance(model, TransformerModel):
        return getattr(transformers, _CLASS_OF_HEAD[model.head]).from_config(config, **attention)
    if architecture is None:
        return _usual(transformers, config, attention)
    known = getattr(transformers, architecture, None)
    if known is None:
        raise OwnModelError(f"transformers {transformers.__version__} has no {architecture}")
    return known._from_config(config, **attention)


def _put_in_liger(model: Any) -> None:
    """Put Liger's kernels in, as `Trainer` of transformers 4.57 does. A model that they do not know stays as it is."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # noqa: PLC0415  (installed with it)

    _apply_liger_kernel_to_instance(model=model)


def _usual(transformers: Any, config: Any, attention: Mapping[str, str]) -> Any:
    """Return the first of the usual models that there is for *config*."""
    for name in _USUAL_CLASSES:
        known = getattr(transformers, name)
        if type(config) in known._model_mapping:
            return known.from_config(config, **attention)
    raise OwnModelError(f"transformers {transformers.__version__} has no model to train for {config.model_type}")


def _with_padding(batch: int, length: int, device: str) -> Tensor:
    """Return a mask of *batch* texts whose last token is padding, as some have in most batches: attention takes more memory with any."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[:, -1] = 0
    return mask.to(device)


def _zeros(batch: int, device: str) -> Callable[..., Tensor]:
    return lambda *shape: torch.zeros(batch, *shape, dtype=torch.long, device=device)


def _first(config: Any, *names: str) -> Any:
    """Return the first of the settings *names* that *config* has, or a part of it."""
    parts = [config, *(part for part in (getattr(config, name, None) for name in _PARTS) if part is not None)]
    found = (getattr(part, name, None) for name in names for part in parts)
    return next((value for value in found if value is not None), None)


def _sides(size: Any) -> tuple[int, int]:
    """Return height and width of an image of *size*: a number, a pair, or a mapping."""
    if isinstance(size, dict):
        size = list(size.values())
    return (size[0], size[-1]) if isinstance(size, (list, tuple)) else (size, size)

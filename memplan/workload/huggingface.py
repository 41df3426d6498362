"""A model from a Hugging Face `config.json`, without transformers installed.

Names differ by family, defaults live in each family's class: both are in the table below (read in transformers 4.57.6,
models/*/configuration_*.py). A family that is not there, or a head that a TransformerModel cannot have, is left to transformers, which
builds the model in a rehearsal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from memplan.errors import ConfigError

if TYPE_CHECKING:
    from memplan.workload.model import Head

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


class ConfigJson:
    """A config.json whose values are asked for by their type. Raises ConfigError, with the line, for a value of another type."""

    def __init__(self, values: object, path: Path, line_of: Callable[[tuple[str, ...]], int | None] = lambda _: None) -> None:
        if not isinstance(values, Mapping) or not isinstance(values.get("model_type"), str):
            problem = "is not a Hugging Face config.json: no `model_type`"
            raise ConfigError(problem, file=path, hint="name the config.json that lies beside a model's weights")
        self._path = path
        self._line_of = line_of
        self.values: Mapping[str, Any] = values
        self.model_type: str = values["model_type"]

    def integer(self, name: str, default: int) -> int:
        """Return the whole number *name*, from 1."""
        value = self.optional_integer(name)
        return default if value is None else value

    def optional_integer(self, name: str) -> int | None:
        """Return the whole number *name*, from 1; None where the file gives none."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, "a whole number from 1")
        return value

    def share(self, name: str, default: float) -> float:
        """Return the number *name*, from 0 to less than 1."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise self._wrong(name, "a number from 0 to less than 1")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return the true or false of *name*."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Return the text *name*; None where the file gives none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def activation(self, name: str, default: str) -> str | None:
        """Return the activation *name* as a TransformerModel calls it; None for one that it does not know."""
        return _ACTIVATIONS.get(self.text(name) or default)

    @property
    def architecture(self) -> str | None:
        """Return the class of transformers that the file is for, the first of `architectures`."""
        value = self.values.get("architectures")
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._wrong("architectures", "a list of class names")
        return value[0] if value else None

    @property
    def num_labels(self) -> int:
        """Return the classes of a classification head (transformers: two where nothing is said)."""
        names = self.values.get("id2label")
        return len(names) if isinstance(names, dict) and names else self.integer("num_labels", 2)

    @property
    def num_positions(self) -> int | None:
        """Return the longest text that the model takes; None where the file does not say."""
        named = ("max_position_embeddings", "n_positions", "max_target_positions")
        return next((value for value in map(self.optional_integer, named) if value is not None), None)

    def _wrong(self, name: str, wanted: str) -> ConfigError:
        problem = f"`{name}` is {self.values[name]!r}, not {wanted}"
        return ConfigError(problem, file=self._path, line=self._line_of((name,)), hint="correct the value")


def model_from_config(config: ConfigJson) -> dict[str, Any]:
    """
    Return the fields of the model that *config* describes: a TransformerModel where one can, else a HuggingFaceModel.

    Raises ConfigError for values of a wrong type.
    """
    read = _FAMILIES.get(config.model_type)
    content = json.dumps(config.values, sort_keys=True)
    fields = _transformer(config, read) if read else None
    if fields is None:
        return {"kind": "huggingface", "huggingface_config": content} | _attention(config)
    return {"kind": "transformer"} | fields | _attention(config) | {"huggingface_config": content}


def torchtune_model(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of the model that *config* describes as torchtune builds it."""
    return {"kind": "torchtune", "huggingface_config": json.dumps(config.values, sort_keys=True)}


def not_heeded(config: ConfigJson) -> list[str]:
    """Return what *config* says of a training that a plan does not follow, a sentence each."""
    told = []
    stored = config.values.get("torch_dtype") or config.values.get("dtype")
    if stored not in (None, "float32", "torch.float32", "auto"):
        told.append(f"`torch_dtype` {stored} is ignored: it is the type in which the weights are stored, and the precision decides")
    if config.values.get("quantization_config") is not None:
        told.append("`quantization_config` is ignored: planned with weights that are not quantized")
    if config.architecture is None:
        head = "its usual language model head" if config.model_type in _FAMILIES else "the first head that transformers has for it"
        told.append(f"names no `architectures`: planned with {head}")
    return told


def _attention(config: ConfigJson) -> dict[str, Any]:
    named = config.text("_attn_implementation") or config.text("attn_implementation")
    return {} if named is None else {"attention": named}


def _transformer(config: ConfigJson, family: _Family) -> dict[str, Any] | None:
    """Return the fields of a TransformerModel; None where none can be like the model of *config*."""
    head = family.head(config.architecture)
    fields = family.read(config)
    if head is None or fields["activation"] is None:
        return None
    is_pooled = fields["architecture"] == "encoder" and (head == "sequence_classification" or (head == "none" and family.has_pooler))
    return fields | {"head": head, "num_labels": config.num_labels, "has_pooler": is_pooled}


def _gpt2(config: ConfigJson) -> dict[str, Any]:
    hidden = config.integer("n_embd", 768)
    return {
        "architecture": "decoder",
        "num_layers": config.integer("n_layer", 12),
        "hidden_size": hidden,
        "num_attention_heads": config.integer("n_head", 12),
        "intermediate_size": config.integer("n_inner", 4 * hidden),
        "vocab_size": config.integer("vocab_size", 50257),
        "num_positions": config.integer("n_positions", 1024),
        "activation": config.activation("activation_function", "gelu_new"),
        "has_fused_qkv": True,
        "dropout": config.share("resid_pdrop", 0.1),
        "attention_dropout": config.share("attn_pdrop", 0.1),
        "ties_embeddings": config.flag("tie_word_embeddings", True),
    }


def _bert(config: ConfigJson, *, vocab_size: int = 30522) -> dict[str, Any]:
    return {
        "architecture": "encoder",
        "num_layers": config.integer("num_hidden_layers", 12),
        "hidden_size": config.integer("hidden_size", 768),
        "num_attention_heads": config.integer("num_attention_heads", 12),
        "intermediate_size": config.integer("intermediate_size", 3072),
        "vocab_size": config.integer("vocab_size", vocab_size),
        "num_positions": config.integer("max_position_embeddings", 512),
        "num_token_types": config.integer("type_vocab_size", 2),
        "activation": config.activation("hidden_act", "gelu"),
        "norm_position": "post",
        "dropout": config.share("hidden_dropout_prob", 0.1),
        "attention_dropout": config.share("attention_probs_dropout_prob", 0.1),
        "ties_embeddings": config.flag("tie_word_embeddings", True),
    }


def _roberta(config: ConfigJson) -> dict[str, Any]:
    return _bert(config, vocab_size=50265)


def _distilbert(config: ConfigJson) -> dict[str, Any]:
    return {
        "architecture": "encoder",
        "num_layers": config.integer("n_layers", 6),
        "hidden_size": config.integer("dim", 768),
        "num_attention_heads": config.integer("n_heads", 12),
        "intermediate_size": config.integer("hidden_dim", 3072),
        "vocab_size": config.integer("vocab_size", 30522),
        "num_positions": config.integer("max_position_embeddings", 512),
        "activation": config.activation("activation", "gelu"),
        "norm_position": "post",
        "dropout": config.share("dropout", 0.1),
        "attention_dropout": config.share("attention_dropout", 0.1),
        "ties_embeddings": config.flag("tie_word_embeddings", True),
    }


def _llama(
    config: ConfigJson, *, intermediate_size: int = 11008, vocab_size: int = 32000, num_key_value_heads: int | None = None
) -> dict[str, Any]:
    return {
        "architecture": "decoder",
        "num_layers": config.integer("num_hidden_layers", 32),
        "hidden_size": config.integer("hidden_size", 4096),
        "num_attention_heads": config.integer("num_attention_heads", 32),
        "num_key_value_heads": config.optional_integer("num_key_value_heads") or num_key_value_heads,
        "head_dim": config.optional_integer("head_dim"),
        "intermediate_size": config.integer("intermediate_size", intermediate_size),
        "vocab_size": config.integer("vocab_size", vocab_size),
        "rotary": True,
        "activation": config.activation("hidden_act", "silu"),
        "is_gated": True,
        "norm": "rms_norm",
        "has_linear_bias": config.flag("mlp_bias", False),
        "has_qkv_bias": config.flag("attention_bias", False),
        "attention_dropout": config.share("attention_dropout", 0.0),
        "ties_embeddings": config.flag("tie_word_embeddings", False),
    }


def _mistral(config: ConfigJson) -> dict[str, Any]:
    return _llama(config, intermediate_size=14336, num_key_value_heads=8)


def _qwen2(config: ConfigJson) -> dict[str, Any]:
    return _llama(config, intermediate_size=22016, vocab_size=151936, num_key_value_heads=32) | {"has_qkv_bias": True}


def _qwen3(config: ConfigJson) -> dict[str, Any]:
    fields = _llama(config, intermediate_size=22016, vocab_size=151936, num_key_value_heads=32)
    return fields | {"has_qk_norm": True, "head_dim": config.integer("head_dim", 128)}


_DECODER_HEADS: dict[str, Head] = {
    "ForCausalLM": "language_model",
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "Model": "none",
}
_GPT2_HEADS: dict[str, Head] = {"LMHeadModel": "language_model", **_DECODER_HEADS}
_ENCODER_HEADS: dict[str, Head] = {
    "ForMaskedLM": "masked_language_model",
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "Model": "none",
}


class _Family(NamedTuple):
    """The models of one `model_type`."""

    prefix: str
    """What the names of its classes begin with."""
    heads: Mapping[str, Head]
    """Its heads, by what the names of the classes end with; the first is the usual one."""
    read: Callable[[ConfigJson], dict[str, Any]]
    has_pooler: bool = False
    """The base model has a pooler."""

    def head(self, architecture: str | None) -> Head | None:
        """Return the head of the class *architecture*; None for a class that is none of these."""
        if architecture is None:
            return next(iter(self.heads.values()))
        return self.heads.get(architecture.removeprefix(self.prefix)) if architecture.startswith(self.prefix) else None


_FAMILIES: dict[str, _Family] = {
    "gpt2": _Family("GPT2", _GPT2_HEADS, _gpt2),
    "bert": _Family("Bert", _ENCODER_HEADS, _bert, has_pooler=True),
    "roberta": _Family("Roberta", _ENCODER_HEADS, _roberta, has_pooler=True),
    "xlm-roberta": _Family("XLMRoberta", _ENCODER_HEADS, _roberta, has_pooler=True),
    "distilbert": _Family("DistilBert", _ENCODER_HEADS, _distilbert),
    "llama": _Family("Llama", _DECODER_HEADS, _llama),
    "mistral": _Family("Mistral", _DECODER_HEADS, _mistral),
    "qwen2": _Family("Qwen2", _DECODER_HEADS, _qwen2),
    "qwen3": _Family("Qwen3", _DECODER_HEADS, _qwen3),
}

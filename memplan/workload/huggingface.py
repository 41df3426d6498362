"""A transformer from a Hugging Face `config.json`, without transformers installed.

Names differ by family, defaults live in each family's class: both are in the table below (read in transformers 4.57.6,
models/*/configuration_*.py). A family that is not there is refused, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memplan.errors import ConfigError

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def transformer_from_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """
    Return the fields of the TransformerModel that *config*, the content of *path*, describes, with its training head.

    Raises ConfigError for a family that is not known, or values that a family cannot have.
    """
    family = config.get("model_type")
    read = _FAMILIES.get(str(family))
    if read is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ConfigError(
            f"model_type {family!r} is not known", file=path, hint=f"known: {known}; or describe the model as kind: transformer"
        )
    fields = read(config)
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size") if not isinstance(fields[name], int)]
    if missing:
        raise ConfigError(f"does not say {', '.join(missing)} of the {family} model", file=path, hint="give the whole config.json")
    activation = _ACTIVATIONS.get(str(fields["activation"]))
    if activation is None:
        raise ConfigError(f"activation {fields['activation']!r} is not known", file=path, hint=f"known: {', '.join(_ACTIVATIONS)}")
    attention = config.get("_attn_implementation") or config.get("attn_implementation") or "sdpa"
    return (
        {"kind": "transformer"}
        | fields
        | {"activation": activation, "attention": attention, "huggingface_config": json.dumps(config, sort_keys=True)}
    )


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden = config.get("n_embd", 768)
    return {
        "architecture": "decoder",
        "num_layers": config.get("n_layer", 12),
        "hidden_size": hidden,
        "num_attention_heads": config.get("n_head", 12),
        "intermediate_size": config.get("n_inner") or 4 * hidden,
        "vocab_size": config.get("vocab_size", 50257),
        "num_positions": config.get("n_positions", 1024),
        "activation": config.get("activation_function", "gelu_new"),
        "has_fused_qkv": True,
        "dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "head": "language_model",
        "ties_embeddings": config.get("tie_word_embeddings", True),
    }


def _bert(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architecture": "encoder",
        "num_layers": config.get("num_hidden_layers", 12),
        "hidden_size": config.get("hidden_size", 768),
        "num_attention_heads": config.get("num_attention_heads", 12),
        "intermediate_size": config.get("intermediate_size", 3072),
        "vocab_size": config.get("vocab_size", 30522),
        "num_positions": config.get("max_position_embeddings", 512),
        "num_token_types": config.get("type_vocab_size", 2),
        "activation": config.get("hidden_act", "gelu"),
        "norm_position": "post",
        "dropout": config.get("hidden_dropout_prob", 0.1),
        "attention_dropout": config.get("attention_probs_dropout_prob", 0.1),
        "head": "masked_language_model",
        "ties_embeddings": config.get("tie_word_embeddings", True),
    }


def _roberta(config: Mapping[str, Any]) -> dict[str, Any]:
    return _bert({"vocab_size": 50265} | dict(config))


def _distilbert(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architecture": "encoder",
        "num_layers": config.get("n_layers", 6),
        "hidden_size": config.get("dim", 768),
        "num_attention_heads": config.get("n_heads", 12),
        "intermediate_size": config.get("hidden_dim", 3072),
        "vocab_size": config.get("vocab_size", 30522),
        "num_positions": config.get("max_position_embeddings", 512),
        "activation": config.get("activation", "gelu"),
        "norm_position": "post",
        "dropout": config.get("dropout", 0.1),
        "attention_dropout": config.get("attention_dropout", 0.1),
        "head": "masked_language_model",
        "ties_embeddings": config.get("tie_word_embeddings", True),
    }


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    biased = config.get("attention_bias", False)
    return {
        "architecture": "decoder",
        "num_layers": config.get("num_hidden_layers", 32),
        "hidden_size": config.get("hidden_size", 4096),
        "num_attention_heads": config.get("num_attention_heads", 32),
        "num_key_value_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "intermediate_size": config.get("intermediate_size", 11008),
        "vocab_size": config.get("vocab_size", 32000),
        "rotary": True,
        "activation": config.get("hidden_act", "silu"),
        "is_gated": True,
        "norm": "rms_norm",
        "has_linear_bias": config.get("mlp_bias", False),
        "has_qkv_bias": biased,
        "attention_dropout": config.get("attention_dropout", 0.0),
        "head": "language_model",
        "ties_embeddings": config.get("tie_word_embeddings", False),
    }


def _mistral(config: Mapping[str, Any]) -> dict[str, Any]:
    return _llama({"intermediate_size": 14336, "num_key_value_heads": 8} | dict(config))


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {"intermediate_size": 22016, "vocab_size": 151936, "num_key_value_heads": 32}
    return _llama(defaults | dict(config)) | {"has_qkv_bias": True}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {"intermediate_size": 22016, "vocab_size": 151936, "num_key_value_heads": 32, "head_dim": 128}
    return _llama(defaults | dict(config)) | {"has_qk_norm": True}


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "distilbert": _distilbert,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}

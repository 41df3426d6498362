"""The model: its shape, as far as memory depends on it.

Five kinds. `transformer` is an encoder or a decoder; `contrastive_encoder` joins the embeddings of several encoders; `huggingface` is any
other model that transformers builds from a config.json, and `torchtune` a decoder as torchtune builds it; `parameters` is for everything
else: plain counts that somebody measured.
"""

import json
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from memplan.description import Description

Attention = Literal["eager", "sdpa", "flash_attention_2"]
Activation = Literal["gelu", "gelu_new", "relu", "silu"]
LoraTarget = Literal["query", "key", "value", "output", "gate", "up", "down"]
Head = Literal["language_model", "masked_language_model", "sequence_classification", "token_classification", "question_answering", "none"]
Rate = Annotated[float, Field(ge=0, lt=1)]

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What the config.json of a mixture of experts calls how many there are."""

COUNTED_SIDE = 4096
"""Rows and columns of the matrices that stand for a model by counts: the width of a model of 7 billion parameters."""

ALL_LINEAR_LAYERS = "all-linear"
"""PEFT's word for every linear layer but the head."""

ALL_LINEAR: tuple[LoraTarget, ...] = ("query", "key", "value", "output", "gate", "up", "down")


class Lora(Description):
    """Low-rank adapters beside frozen linear layers."""

    rank: PositiveInt
    """Width of the adapters."""

    dropout: Rate = 0.0
    """Dropout on the adapters' input; it costs a mask and, where it is above 0, a copy of that input."""

    targets: tuple[LoraTarget, ...] = ALL_LINEAR
    """The linear layers of every block that get an adapter."""


class TransformerModel(Description):
    """A stack of attention and feed-forward blocks."""

    kind: Literal["transformer"] = "transformer"
    """Says which kind of model this is."""

    architecture: Literal["decoder", "encoder"]
    """A decoder attends to what came before; an encoder attends to everything."""

    num_layers: PositiveInt
    """Blocks."""

    hidden_size: PositiveInt
    """Width of the residual stream."""

    num_attention_heads: PositiveInt
    """Query heads."""

    num_key_value_heads: PositiveInt | None = None
    """Key and value heads; fewer than the query heads with grouped-query attention. None: as many."""

    head_dim: PositiveInt | None = None
    """Width of a head. None: hidden size over heads."""

    intermediate_size: PositiveInt
    """Width inside the feed-forward."""

    vocab_size: PositiveInt
    """Rows of the token embedding."""

    num_positions: NonNegativeInt = 0
    """Rows of a learned position embedding; 0 with rotary or no positions."""

    num_token_types: NonNegativeInt = 0
    """Rows of a token type embedding, as BERT has."""

    rotary: bool = False
    """Positions are rotations of queries and keys."""

    activation: Activation = "gelu"
    """The feed-forward's nonlinearity; `gelu_new` is GPT-2's formula of several tensors, seven times as costly as `gelu`."""

    is_gated: bool = False
    """The feed-forward multiplies two branches (SwiGLU, GeGLU)."""

    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """Normalisation; RMSNorm of Hugging Face's models is made of several tensors in fp32."""

    norm_position: Literal["pre", "post"] = "pre"
    """Before each branch (GPT, Llama) or after it (BERT)."""

    has_qk_norm: bool = False
    """Queries and keys are normalised head by head (Qwen 3)."""

    has_fused_qkv: bool = False
    """Queries, keys and values come out of one linear layer."""

    has_linear_bias: bool = True
    """Linear layers have biases."""

    has_qkv_bias: bool | None = None
    """The query, key and value layers have biases. None: as the other linear layers."""

    attention: Attention = "sdpa"
    """How attention is computed; `eager` keeps the matrix of all pairs, the others do not."""

    has_attention_mask: bool = True
    """A mask of padding reaches the attention kernel, which rules flash attention out and becomes a bias of sequence² elements."""

    dropout: Rate = 0.0
    """Dropout on embeddings and on each branch."""

    attention_dropout: Rate = 0.0
    """Dropout on attention probabilities."""

    head: Head = "none"
    """What stands on top: logits over the vocabulary, BERT's transform and logits, classes of a text or of each token, or nothing."""

    num_labels: PositiveInt = 2
    """Classes of a classification head; question answering has two, start and end."""

    has_pooler: bool = False
    """A dense layer reads the first token, as in BERT's base model and in the classification heads of encoders."""

    ties_embeddings: bool = True
    """The head shares the token embedding's weights."""

    is_in_eval_mode: bool = False
    """The model is left in eval mode while it trains, as `from_pretrained` returns it: no dropout, and Hugging Face's checkpointing off."""

    lora: Lora | None = None
    """Adapters; with them the model's own weights are frozen."""

    huggingface_config: str | None = None
    """The config.json that this was read from, as JSON: a rehearsal builds that very model through transformers, where installed."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "TransformerModel":
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}")
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads {self.key_value_heads}"
            )
        return self

    @property
    def predicts_tokens(self) -> bool:
        """Say whether the head has logits over the vocabulary."""
        return self.head in ("language_model", "masked_language_model")

    @property
    def key_value_heads(self) -> int:
        """Return the number of key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def attention_width(self) -> int:
        """Return the width of all query heads together."""
        return self.num_attention_heads * self.width_of_head

    @property
    def key_value_width(self) -> int:
        """Return the width of all key heads together."""
        return self.key_value_heads * self.width_of_head

    @property
    def width_of_head(self) -> int:
        """Return the width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class Experts(Description):
    """Experts over pooled embeddings, every one of which sees every item (routing weights only scale what it returns)."""

    num_experts: PositiveInt
    """Experts side by side."""

    hidden_size: PositiveInt
    """Width inside an expert."""

    top_k: PositiveInt = 2
    """Experts whose answer counts for an item."""

    @model_validator(mode="after")
    def _top_k_exist(self) -> "Experts":
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is more than num_experts {self.num_experts}")
        return self


class ContrastiveEncoderModel(Description):
    """One encoder for each channel of an item's text; their mean-pooled embeddings are joined, pass experts and a projection."""

    kind: Literal["contrastive_encoder"] = "contrastive_encoder"
    """Says which kind of model this is."""

    num_channels: PositiveInt
    """Encoders, each with weights of its own."""

    encoder: TransformerModel
    """One of the encoders."""

    experts: Experts | None = None
    """Experts over the joined embedding."""

    projection_size: PositiveInt | None = None
    """Width of the final embedding. None: the joined one is final."""

    @property
    def width(self) -> int:
        """Return the width of the joined embedding."""
        return self.num_channels * self.encoder.hidden_size


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


_NAMES = re.compile(r"[\w.,\s-]*")
"""What names of layers, and lists of them, are made of."""


def is_pattern(target: str) -> bool:
    """Say whether *target* of adapters is a regular expression of whole names, as PEFT has it, rather than the end of one."""
    return _NAMES.fullmatch(target) is None


def _sound_patterns(targets: tuple[str, ...]) -> tuple[str, ...]:
    for target in filter(is_pattern, targets):
        try:
            re.compile(target)
        except re.error as error:
            raise ValueError(f"{target!r} is not a regular expression: {error}") from None
    return targets


class Adapters(Description):
    """Low-rank adapters beside the linear layers of a model of transformers, as PEFT puts them in; everything else is frozen."""

    rank: PositiveInt
    """Width of the adapters."""

    dropout: Rate = 0.0
    """Dropout on the adapters' input."""

    targets: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), AfterValidator(_sound_patterns)] = (ALL_LINEAR_LAYERS,)
    """What the names of the adapted layers end with, as q_proj; `all-linear`: every linear layer but the head. A text with other signs than
    names have is a regular expression, which a whole name matches."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The adapters' own type: PEFT makes it float32 beside weights of a short type (autocast_adapter_dtype)."""

    trained_modules: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """What the names of the modules end with that are trained whole, as lm_head: PEFT's `modules_to_save`, which trains a copy of each."""

    trained_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The type of those copies. None: that of the weights."""


Kernels = Literal["liger"]

KERNEL_PACKAGES: dict[Kernels, str] = {"liger": "liger_kernel"}
"""Kernels, and the package that they are imported from."""


class Preference(Description):
    """
    Training on pairs of a preferred and a rejected answer, as in DPO: a sample is a pair, whose two texts are read in one forward.

    A loss that compares with a reference model reads them a second time, without gradients.
    """

    reference: Literal["copy", "without_adapters", "none"]
    """What the loss compares with: a frozen copy of the model; the model itself without its adapters; nothing, as where the reference's
    probabilities were computed before, or in ORPO and SimPO."""

    reference_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The type of the weights of that copy. None: that of the model's."""

    trainer: Literal["trl", "llama-factory"] = "trl"
    """Whose trainer computes the loss: TRL's has the states behind each layer returned, and reads the logits of one text after another;
    LLaMA-Factory's takes the logarithms of all probabilities at once, and keeps the policy's logits until the reference has answered."""


class HuggingFaceModel(Description):
    """Any model that the installed transformers builds from a config.json. It is rehearsed; there are no formulas for it."""

    kind: Literal["huggingface"] = "huggingface"
    """Says which kind of model this is."""

    huggingface_config: str
    """The content of the config.json, as JSON. A workload file names it: `config: path/to/config.json`, or the model: `name: ORG/MODEL`."""

    attention: Attention | None = None
    """How attention is computed. None: as transformers chooses."""

    weights_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The type that the weights are loaded in, as `torch_dtype`. None: as the precision has it, float32 under autocast."""

    norm_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The type of the norms' weights, where it is another: a training from quantized weights often makes them float32."""

    embeddings_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The type of the token embeddings and of the head, where it is another."""

    quantization: Literal["4bit", "4bit-double", "8bit"] | None = None
    """How bitsandbytes keeps the frozen linear layers: 4 bits and a scale for each 64 (`double`: scales quantized too), or LLM.int8."""

    adapters: Adapters | None = None
    """Adapters; with them the model's own weights are frozen."""

    kernels: Kernels | None = None
    """Whose kernels take the place of the model's own, as with `use_liger_kernel` of transformers' Trainer: Liger's make no logits."""

    preference: Preference | None = None
    """How it is trained on pairs of answers. None: to predict what its labels say."""

    @model_validator(mode="after")
    def _references_exist(self) -> "HuggingFaceModel":
        if self.preference is not None and self.preference.reference == "without_adapters" and self.adapters is None:
            raise ValueError("the reference is the model without its adapters, and it has none")
        if self.preference is not None and self.kernels is not None:
            raise ValueError("those kernels make no logits, which the loss of pairs reads")
        return self

    @model_validator(mode="after")
    def _quantized_weights_are_frozen(self) -> "HuggingFaceModel":
        if self.quantization is not None and self.adapters is None:
            raise ValueError("quantized weights cannot be trained: adapters are missing")
        return self

    @property
    def is_mixture_of_experts(self) -> bool:
        """Say whether a router sends each token to a few experts of many."""
        return any(name in json.loads(self.huggingface_config) for name in EXPERT_COUNTS)


class TorchtuneModel(Description):
    """A decoder as torchtune builds and trains it, in sizes of a config.json. It is rehearsed; there are no formulas for it."""

    kind: Literal["torchtune"] = "torchtune"
    """Says which kind of model this is."""

    huggingface_config: str
    """The content of the config.json, as JSON. A workload file names it: `config: path/to/config.json`, or the model: `name: ORG/MODEL`."""

    num_positions: PositiveInt | None = None
    """Rows of its table of rotary positions, which is fp32. None: as many as the config.json has positions."""

    shares_positions: bool = False
    """Blocks with adapters share one such table, as in Llama 3.1 and later; in other models each has its own. Without adapters all do."""

    quantization: Literal["nf4"] | None = None
    """How torchao keeps the frozen linear layers: 4 bits, and scales that are quantized too."""

    adapters: Adapters | None = None
    """Adapters; with them the model's own weights are frozen. Their type is that of the weights in torchtune."""

    loss: Literal["chunked_logits", "chunked_states", "whole"] = "chunked_logits"
    """Cross-entropy of chunks of the logits (CEWithChunkedOutputLoss), of chunks of the last states, each with logits of its own
    (LinearCrossEntropyLoss), or of all logits at once."""

    num_loss_chunks: PositiveInt = 8
    """How many chunks there are."""

    @property
    def positions(self) -> int:
        """Return the longest text that the model takes; 0 where nothing says it."""
        found: int = self.num_positions or json.loads(self.huggingface_config).get("max_position_embeddings", 0)
        return found

    @model_validator(mode="after")
    def _quantized_weights_are_frozen(self) -> "TorchtuneModel":
        if self.quantization is not None and self.adapters is None:
            raise ValueError("quantized weights cannot be trained: adapters are missing")
        return self


RehearsedModel = HuggingFaceModel | TorchtuneModel
"""Models that there are no formulas for."""


class ParametersModel(Description):
    """Any model, by counts that somebody measured."""

    kind: Literal["parameters"] = "parameters"
    """Says which kind of model this is."""

    num_parameters: PositiveInt
    """All parameters."""

    num_trainable_parameters: NonNegativeInt | None = None
    """Those that get gradients and optimizer state. None: all."""

    activation_bytes_per_sample: NonNegativeInt
    """Bytes that the forward keeps for the backward, for each sample."""

    batch_data_bytes_per_sample: NonNegativeInt = 0
    """Bytes of inputs and labels, for each sample."""

    overhead_bytes: NonNegativeInt = 0
    """Anything else on the device that does not grow with the batch."""

    @model_validator(mode="after")
    def _trainable_exist(self) -> "ParametersModel":
        if self.num_trainable_parameters is not None and self.num_trainable_parameters > self.num_parameters:
            raise ValueError(f"num_trainable_parameters {self.num_trainable_parameters} is more than num_parameters {self.num_parameters}")
        return self


def encoder_of(model: "Model") -> TransformerModel | None:
    """Return the transformer that decides the activations; None for a model of another kind."""
    if isinstance(model, ContrastiveEncoderModel):
        return model.encoder
    return model if isinstance(model, TransformerModel) else None


Model = Annotated[
    TransformerModel | ContrastiveEncoderModel | HuggingFaceModel | TorchtuneModel | ParametersModel, Field(discriminator="kind")
]

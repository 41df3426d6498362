"""Models that transformers builds from a config.json: the memory of the program that its users would write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from memplan.errors import NotEstimatedError, UsageError
from memplan.estimators.analytic.estimate import estimate
from memplan.estimators.rehearsed import RehearsedEstimator
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse import Rehearser
from memplan.execution.step_source import step_source_from
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.workload.huggingface import ConfigJson, model_from_config
from memplan.workload.workload import Workload
from memplan.workload.workload_file import workload_from

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

STEPS = Path(__file__).parent / "huggingface_steps.py"
TEXT = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
GPT2 = {"vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_head": 4}
MIXTRAL = TEXT | {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "masked": TEXT | {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "classes of texts": TEXT | {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_labels": 5},
    "classes of tokens": TEXT | {"model_type": "roberta", "architectures": ["RobertaForTokenClassification"]},
    "answers": TEXT | {"model_type": "bert", "architectures": ["BertForQuestionAnswering"]},
    "classes by a decoder": GPT2 | {"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]},
    "mpnet": TEXT | {"model_type": "mpnet", "architectures": ["MPNetForMaskedLM"]},
    "gemma": TEXT | {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "num_key_value_heads": 1, "head_dim": 16},
    "t5": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 1000, "d_model": 64, "d_kv": 16, "d_ff": 128,
        "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    },
    "vit": TEXT | {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 64},
    "resnet": {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "depths": [1, 1, 1, 1], "num_labels": 10},
    "whisper": {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "vocab_size": 1000, "d_model": 64,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128, "max_source_positions": 100, "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2,
        "bos_token_id": 1,
    },
}  # fmt: skip


RunStep = Callable[..., Rehearsal]


@pytest.fixture(scope="module")
def run(torch_build: TorchBuild) -> Iterator[RunStep]:
    """Rehearse one of the steps by its name, in a process that has imported transformers: each fork anew would take seconds."""
    with Rehearser(step_source_from(f"{STEPS}:build"), allow_writes=True) as rehearser:
        yield lambda name, gpu="a100-80", steps=None, **values: rehearser.rehearse(
            gpu=find_gpu(gpu), values={"name": name, **values}, steps=steps
        )


def workload_of(config: dict[str, Any], *, batch: int = 4, length: int = 64, **training: Any) -> Workload:
    """Steps of the model of *config*."""
    path = Path("config.json")
    training = {"micro_batch_size": batch, "sequence_length": length} | training
    return workload_from({"model": model_from_config(ConfigJson(config, path)), "training": training}, path)


def of_kind(kind: str) -> ParameterSet:
    """A configuration; most are asked about in the heavy suite."""
    return pytest.param(CONFIGS[kind], id=kind, marks=[] if kind == "t5" else [pytest.mark.heavy])


def json_of(workload: Workload) -> dict[str, Any]:
    return workload.model_dump(mode="json")


@pytest.mark.parametrize("config", [of_kind(kind) for kind in CONFIGS])
def test_a_config_takes_what_its_program_does(run: RunStep, config: dict[str, Any]) -> None:
    """The same weights and the same peak, to the byte, as a model that is made on the host and moved; the batch has the same shapes."""
    ours = run("built_in", workload=json_of(workload_of(config)))
    theirs = run("plain", config=json.dumps(config))

    assert ours.breakdown.parameters_bytes == theirs.breakdown.parameters_bytes
    assert ours.peak_allocated_bytes == theirs.peak_allocated_bytes


@pytest.mark.heavy
def test_checkpointing_is_that_of_transformers(run: RunStep) -> None:
    """Of a model that no formula is for."""
    config = CONFIGS["gemma"]

    with_it = run("built_in", workload=json_of(workload_of(config, activation_checkpointing=True)))
    without = run("built_in", workload=json_of(workload_of(config)))
    theirs = run("plain", config=json.dumps(config), checkpointing=True)

    assert with_it.peak_allocated_bytes == theirs.peak_allocated_bytes < without.peak_allocated_bytes


@pytest.mark.heavy
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        MIXTRAL,
        MIXTRAL | {"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"]},
        {
            "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 1000, "hidden_size": 64,
            "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "qk_nope_head_dim": 8,
        },
    ],
    ids=["mixtral", "granite", "deepseek"],
)  # fmt: skip
def test_every_token_goes_to_its_experts(run: RunStep, tmp_path: Path, config: dict[str, Any], checkpointing: bool) -> None:
    """
    The experts of a layer see together each of 128 tokens twice, in equal shares; with checkpointing they do so again in backward.

    granite splits its tokens where no hook sees it: that its step runs and learns says that the shares add up.
    """
    rows = tmp_path / "rows.json"

    run("routed", config=json.dumps(config), rows=str(rows), checkpointing=checkpointing, steps=1)

    seen = json.loads(rows.read_text())
    layers = 2 * (2 if checkpointing else 1)
    assert seen == ([] if config["model_type"] == "granitemoe" else [4 * 32 * 2 // 4] * 4 * layers)


@pytest.mark.heavy
def test_a_size_that_data_decide_is_not_taken_for_zero(torch_build: TorchBuild) -> None:
    """
    Switch transformers pick tokens by a mask of the router's: experts are taken to get equal shares.

    Of 4 texts of 64 tokens each of four gets 64.
    """
    config = {
        "model_type": "switch_transformers", "architectures": ["SwitchTransformersForConditionalGeneration"], "vocab_size": 1000,
        "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "num_experts": 4,
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    }  # fmt: skip

    seen = RehearsedEstimator()(workload_of(config), find_gpu("t4"), None)

    assert isinstance(seen, Rehearsal)
    assert seen.verdict == "fits"
    assert {read.answer for read in seen.reads} == {"64"}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": "bert", "architectures": ["BertForNothing"]}, "has no BertForNothing"),
        ({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 9}, "hold images or sounds"),
        ({"model_type": "chatglm", "architectures": ["ChatGLMModel"], "auto_map": {"AutoModel": "x.Y"}}, "code beside its weights"),
        ({"model_type": "decision_transformer"}, "takes none of input_ids"),
    ],
)
def test_what_cannot_be_built_is_said(run: RunStep, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        run("built_in", gpu="t4", workload=json_of(workload_of(config)))


def test_without_a_rehearsal_there_is_no_number() -> None:
    """A model that transformers builds has no formulas: none is better than one that is not true."""
    with pytest.raises(NotEstimatedError, match="no formulas"):
        estimate(workload_of(CONFIGS["mpnet"]), find_gpu("t4"), None)

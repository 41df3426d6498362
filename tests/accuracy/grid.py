"""
Steps over which the formulas' upper bound is fitted and checked: architectures, heads, precisions, checkpointing, lengths, GPUs, batches.

`grid_peaks.jsonl` holds what their rehearsals took, a line each (PyTorch 2.13.0+cu130, transformers 4.57.6); `-m tests.accuracy.grid`
rehearses those that it lacks. A point is drawn by its number; only its batch, which the formulas of the day chose, is recorded with it, so
that a line stays true until PyTorch changes.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

from memplan.estimators.analytic.estimate import estimate
from memplan.estimators.rehearsed import RehearsedEstimator
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.layouts.templates import template_data, templates_folder
from memplan.workload.huggingface import ConfigJson, model_from_config
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload
from memplan.workload.workload_file import workload_from

PEAKS = Path(__file__).with_name("grid_peaks.jsonl")
NUM_POINTS = 480
MODELS: dict[str, dict[str, Any]] = {
    "minilm": {
        "model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
    },
    "bert-base": {"model_type": "bert"},
    "bert-large": {
        "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    },
    "distilbert": {"model_type": "distilbert"},
    "roberta-base": {"model_type": "roberta", "max_position_embeddings": 514, "type_vocab_size": 1},
    "xlm-roberta-base": {
        "model_type": "xlm-roberta", "vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1,
    },
    "gpt2": {"model_type": "gpt2"},
    "gpt2-medium": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "smollm-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "tinyllama-1.1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000,
    },
    "qwen2-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "mistral-small": {
        "model_type": "mistral", "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 12,
        "num_key_value_heads": 4, "vocab_size": 32768,
    },
    "contrastive": {},
}  # fmt: skip
"""Published sizes, by the values of their config.json that are not transformers' defaults; and the built-in contrastive encoder."""

HEADS = {
    "language": {"gpt2": "GPT2LMHeadModel"},
    "sequence": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "none": "Model",
}
PREFIXES = {
    "bert": "Bert", "distilbert": "DistilBert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "gpt2": "GPT2", "llama": "Llama",
    "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral",
}  # fmt: skip
GPUS = ("t4", "rtx4090", "a100-40", "a100-80", "h100")


class Point(NamedTuple):
    """One step of the grid."""

    number: int
    model: str
    head: str
    gpu: GpuSpec
    workload: Workload

    @property
    def stage(self) -> Stage | None:
        return self.workload.stages[0] if self.workload.stages else None

    @property
    def is_held_out(self) -> bool:
        """Say whether the bound is checked on this point; it is fitted on the others."""
        return self.number // len(MODELS) % 2 == 1


def point(number: int, *, micro_batch_size: int | None = None) -> Point | None:
    """
    Return point *number*, with the batch that was recorded for it if there is one.

    Without one, the formulas choose a batch that fills some part of the GPU; None where a batch of 1 exceeds that.
    """
    chance = random.Random(number)
    name = list(MODELS)[number % len(MODELS)]
    gpu = find_gpu(chance.choice(GPUS))
    head = chance.choice(["language", "language", *HEADS])  # large vocabularies are what is hard
    training = {
        "precision": chance.choice(["fp32", "fp16-mixed", "bf16-mixed", "bf16-mixed", "bf16"]),
        "activation_checkpointing": chance.random() < 0.3,
        "sequence_length": chance.choice([64, 128, 256, 512, 512, 1024]),
        "gradient_accumulation_steps": chance.choice([1, 2]),
    }
    positions = 512 if MODELS[name].get("model_type") in ("bert", "distilbert", "roberta", "xlm-roberta") or name == "contrastive" else 4096
    training["sequence_length"] = min(training["sequence_length"], positions)
    optimizer = chance.choice(["adamw", "adamw", "sgd"])
    workload = _contrastive(training, chance) if name == "contrastive" else _of_config(name, head, training)
    workload = workload.model_copy(update={"optimizer": workload.optimizer.model_copy(update={"name": optimizer})})
    size = micro_batch_size or _size_that_fills(workload, gpu, share=chance.uniform(0.3, 1.0))
    return None if size is None else Point(number, name, head, gpu, workload.with_training(micro_batch_size=size))


def _size_that_fills(workload: Workload, gpu: GpuSpec, *, share: float) -> int | None:
    """Return a batch that by the formulas takes about *share* of the GPU; None where a batch of 1 takes more."""
    stage = workload.stages[0] if workload.stages else None
    limit = int(gpu.total_memory_bytes * share)
    batch = 1
    while estimate(workload.with_training(micro_batch_size=batch), gpu, stage).device_used_bytes < limit and batch < 4096:
        batch += max(1, batch // 8)
    return None if batch == 1 else batch - max(1, (batch * 8 // 9) // 8)


def _of_config(name: str, head: str, training: dict[str, Any]) -> Workload:
    model_type = MODELS[name]["model_type"]
    is_encoder = model_type in ("bert", "distilbert", "roberta", "xlm-roberta")
    language = "LMHeadModel" if model_type == "gpt2" else "ForMaskedLM" if is_encoder else "ForCausalLM"
    ending = language if head == "language" else HEADS[head]
    config = MODELS[name] | {"architectures": [f"{PREFIXES[model_type]}{ending}"]}
    path = Path("config.json")
    return workload_from({"name": name, "model": model_from_config(ConfigJson(config, path)), "training": training}, path)


def _contrastive(training: dict[str, Any], chance: random.Random) -> Workload:
    template = templates_folder() / "hydra-contrastive" / "workload.yaml"
    data = template_data(template)
    data["training"] = training
    data["model"]["encoder"]["is_in_eval_mode"] = chance.random() < 0.5
    data["stages"] = [{"name": "stage", "n_negatives": chance.choice([2, 8, 24])}]
    return workload_from(data, template)


class Peak(NamedTuple):
    """What the rehearsal of a point took."""

    point: Point
    allocated_bytes: int
    reserved_bytes: int


def peaks() -> list[Peak]:
    """Return what was recorded, each with its point."""
    found = []
    for line in _recorded():
        each = point(line["number"], micro_batch_size=line["micro_batch_size"])
        assert each is not None
        found.append(Peak(each, line["peak_allocated_bytes"], line["peak_reserved_bytes"]))
    return found


def _recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PEAKS.read_text().splitlines()] if PEAKS.exists() else []


def main() -> None:
    """Rehearse what is missing, and add it to the file."""
    known, rehearse = {line["number"] for line in _recorded()}, RehearsedEstimator()
    for number in range(NUM_POINTS):
        each = None if number in known else point(number)
        if each is None:
            continue
        training = each.workload.training
        found = rehearse(each.workload, each.gpu, each.stage)
        line = {
            "number": number, "model": each.model, "head": each.head, "gpu": each.gpu.name, "precision": training.precision,
            "checkpointing": training.activation_checkpointing, "sequence_length": training.sequence_length,
            "micro_batch_size": training.micro_batch_size, "peak_allocated_bytes": found.peak_allocated_bytes,
            "peak_reserved_bytes": found.peak_reserved_bytes,
        }  # fmt: skip
        with PEAKS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line["number"], each.model, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

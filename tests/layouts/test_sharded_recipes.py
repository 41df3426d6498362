"""Recipes whose GPUs share the model: by DeepSpeed, whose settings they name, and by the FSDP of Hugging Face's Trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from memplan.api.configuration import Configuration, read_configuration
from memplan.errors import ConfigError, UsageError
from memplan.workload.parallelism import Parallelism
from tests.layouts.test_recipes import changed


def with_deepspeed(recipes: Path, settings: dict[str, Any], *, named: str = "zero.json", place: str = "zero.json") -> Path:
    """A recipe that names a file of these settings, which lies at *place*."""
    (recipes / place).parent.mkdir(parents=True, exist_ok=True)
    (recipes / place).write_text(json.dumps({"bf16": {"enabled": "auto"}, **settings}, indent=2))
    changes = [("finetuning_type: lora", "finetuning_type: full"), ("bf16: true", f"bf16: true\ndeepspeed: {named}")]
    return changed(recipes / "llama_factory.yaml", *changes)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_deepspeed_file_that_a_recipe_names_is_read(recipes: Path, stage: int) -> None:
    """How the GPUs share the model is what stands in that file, and where it was read is told."""
    configuration = read_configuration(with_deepspeed(recipes, {"zero_optimization": {"stage": stage}})).with_gpus(8, None)
    assert configuration.reading is not None
    source = configuration.reading.sources["parallelism.strategy"]

    assert configuration.workload.parallelism == Parallelism.model_validate({"devices": 8, "strategy": f"zero{stage}"})
    assert (source.file.name, source.line, source.key) == ("zero.json", 6, "zero_optimization.stage")


def test_a_file_that_is_named_from_the_project_s_folder_is_found_there(recipes: Path) -> None:
    """Recipes below `examples/` name it as the program that is started in the project's folder finds it."""
    path = with_deepspeed(recipes, {"zero_optimization": {"stage": 2}}, named="configs/zero.json", place="configs/zero.json")
    below = recipes / "examples" / "train_full"
    below.mkdir(parents=True)
    shutil.copytree(recipes / "tiny-llama", below / "tiny-llama")
    configuration = read_configuration(path.rename(below / path.name)).with_gpus(4, None)

    assert configuration.workload.parallelism.strategy == "zero2"


def test_what_deepspeed_is_told_may_stand_in_the_recipe(recipes: Path) -> None:
    """The same keys, without a file."""
    path = changed(recipes / "axolotl.yml", ("tf32: false", "deepspeed:\n  bf16: {enabled: true}\n  zero_optimization:\n    stage: 3"))

    assert read_configuration(path).with_gpus(2, None).workload.parallelism.strategy == "zero3"


def test_on_how_many_gpus_deepspeed_trains_is_asked_for(recipes: Path) -> None:
    """A plan for one GPU would leave out the fp32 copies that its engine keeps there too."""
    configuration = read_configuration(with_deepspeed(recipes, {"zero_optimization": {"stage": 2}}))

    with pytest.raises(UsageError, match=r"zero\.json:6: `zero_optimization\.stage` is 2: .*nothing says how many there are") as refused:
        configuration.with_gpus(None, None)
    assert "num_gpus=8" in (refused.value.hint or "")


OUT_OF_REACH: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": 0}}, "`zero_optimization.stage` is 0"),
    ({}, "`zero_optimization.stage` is not set"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "is cpu: memplan's own model is not kept on the host"),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "is cpu: memplan's own optimizer is not kept on the host",
    ),
    ({"zero_optimization": {"stage": 2, "overlap_comm": True}}, "stages 1 and 2 then hold a second bucket of gradients"),
    ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e9}}, "memplan's buckets hold 5e8 elements"),
    ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}, "memplan plans the optimizer of the recipe"),
    ({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}, "the recipe says its batch itself"),
    ({"zero_optimization": {"stage": 2}, "bf16": {}}, "`bf16.enabled` is not set: the recipe trains in bf16"),
]


@pytest.mark.parametrize(("settings", "reason"), OUT_OF_REACH)
def test_what_deepspeed_would_hold_besides_is_refused(recipes: Path, settings: dict[str, Any], reason: str) -> None:
    """In the line of the file that says so."""
    with pytest.raises(ConfigError) as refused:
        read_configuration(with_deepspeed(recipes, settings))

    assert reason in refused.value.problem
    assert refused.value.file is not None
    assert refused.value.file.name == "zero.json"


def test_buckets_that_are_smaller_than_planned_are_not_refused(recipes: Path) -> None:
    """Their plan takes no less than they do."""
    settings = {"zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 2e8, "allgather_bucket_size": 5e8}}

    assert read_configuration(with_deepspeed(recipes, settings)).with_gpus(2, None).workload.parallelism.strategy == "zero2"


FSDP = """
fsdp: full_shard auto_wrap
fsdp_config:
  fsdp_transformer_layer_cls_to_wrap: [LlamaDecoderLayer]
  backward_prefetch: backward_pre
"""


def with_fsdp(recipe: Path, *changes: tuple[str, str]) -> Path:
    """A recipe of TRL that trains the whole model, and shares it."""
    quantized = "use_peft: true\nlora_r: 8\nlora_target_modules:\n  - q_proj\n  - v_proj\nload_in_4bit: true\n"
    recipe.write_text(recipe.read_text().replace(quantized, "") + FSDP)
    return changed(recipe, *changes)


@pytest.mark.parametrize(
    ("words", "parallelism"),
    [
        ("full_shard auto_wrap", Parallelism(devices=8, strategy="fsdp")),
        ("auto_wrap full_shard", Parallelism(devices=8, strategy="fsdp")),
        ("shard_grad_op auto_wrap", Parallelism(devices=8, strategy="fsdp", reshard_after_forward=False)),
        ("no_shard auto_wrap", Parallelism(devices=8, strategy="ddp")),
    ],
)
def test_the_fsdp_of_the_trainer_is_read(recipes: Path, words: str, parallelism: Parallelism) -> None:
    """Its words say what is sharded; the report says that the first version is planned as the second."""
    configuration = read_configuration(with_fsdp(recipes / "sft.yaml", ("full_shard auto_wrap", words))).with_gpus(8, None)

    assert configuration.workload.parallelism == parallelism
    assert any("FSDP's first version: planned as its second" in note for note in configuration.notes)


def test_its_settings_may_be_in_a_file_of_their_own(recipes: Path) -> None:
    """Which the recipe names; what it checkpoints is checkpointed."""
    recipe = with_fsdp(
        recipes / "sft.yaml",
        (FSDP.partition("fsdp_config:")[2], " fsdp.json\n"),
        ("gradient_checkpointing: true\n", ""),
    )
    settings = recipe.with_name("fsdp.json")
    settings.write_text('{"activation_checkpointing": true}')
    assert read_configuration(recipe).workload.training.activation_checkpointing

    settings.write_text('{"fsdp_min_num_params": 2000}')
    with pytest.raises(ConfigError, match=r"fsdp\.json:1: `fsdp_min_num_params` is 2000: memplan's own model is sharded block by block"):
        read_configuration(recipe)


def test_the_fsdp_of_llama_factory_is_that_of_the_trainer(recipes: Path) -> None:
    """Which it hands its keys to; its adapters, where nothing is said, are refused."""
    recipe = recipes / "llama_factory.yaml"
    recipe.write_text(recipe.read_text() + FSDP)
    with pytest.raises(ConfigError, match="`finetuning_type` is lora: memplan's adapters are sharded by FSDP's second version"):
        read_configuration(recipe)

    whole = read_configuration(changed(recipe, ("finetuning_type: lora", "finetuning_type: full"))).with_gpus(4, 2)
    assert whole.workload.parallelism == Parallelism(devices=4, nodes=2, strategy="fsdp")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("full_shard auto_wrap", "full_shard"), "`fsdp` is full_shard: memplan's own model is sharded block by block"),
        (("full_shard auto_wrap", "full_shard auto_wrap offload"), "memplan's own model is sharded block by block over all GPUs"),
        (("full_shard auto_wrap", "hybrid_shard auto_wrap"), "memplan's own model is sharded block by block over all GPUs"),
        (("full_shard auto_wrap", "[full_shard, auto_wrap]"), "`fsdp` is a sequence"),
        (("backward_prefetch: backward_pre", "xla: true"), "memplan plans training on GPUs"),
        (("bf16: true", "bf16: true\nuse_peft: true"), "memplan's adapters are sharded by FSDP's second version"),
        (("bf16: true", "bf16: true\nload_in_8bit: true"), "memplan's sharded model has no quantized weights"),
    ],
)
def test_what_the_trainer_would_share_otherwise_is_refused(recipes: Path, change: tuple[str, str], reason: str) -> None:
    """With the key that says so."""
    with pytest.raises(ConfigError) as refused:
        read_configuration(with_fsdp(recipes / "sft.yaml", change))

    assert reason in refused.value.problem


def test_blocks_that_are_gathered_ahead_are_a_note(recipes: Path) -> None:
    """Where the peak is, they are gathered already."""
    recipe = with_fsdp(recipes / "sft.yaml", ("backward_prefetch: backward_pre", "fsdp_forward_prefetch: true"))

    assert any("`forward_prefetch` is not followed" in note for note in read_configuration(recipe).notes)


def test_a_launcher_that_shares_the_model_too_is_refused(recipes: Path) -> None:
    """Which of the two counts is the user's to say."""
    recipe = with_fsdp(recipes / "sft.yaml")
    launch = recipe.with_name("launch.yaml")
    launch.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\nnum_processes: 8\n")

    with pytest.raises(ConfigError, match="the recipe and the launcher both say how the GPUs share the model"):
        read_configuration(recipe, launch_config=launch)

    launch.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    configuration: Configuration = read_configuration(recipe, launch_config=launch)
    assert configuration.workload.parallelism == Parallelism(devices=8, strategy="fsdp")

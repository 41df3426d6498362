"""The file of `accelerate launch --config_file` beside a recipe: on how many GPUs it trains, and how these share the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.api.configuration import Configuration, read_configuration
from memplan.api.explanations import explain
from memplan.edits.apply import prepare
from memplan.errors import ConfigError, UsageError
from memplan.layouts.writer import edits_for
from memplan.workload.parallelism import Parallelism
from tests.layouts.test_recipes import changed

FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""

ZERO = """\
distributed_type: DEEPSPEED
deepspeed_config:
  offload_optimizer_device: none
  offload_param_device: none
  zero_stage: 3
mixed_precision: bf16
num_machines: 1
num_processes: 8   # GPUs
"""

NAMED = """\
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: zero.json
num_processes: 4
"""


@pytest.fixture
def recipe(recipes: Path) -> Path:
    """A recipe that trains a whole model in bf16; of sharded models none has quantized weights."""
    quantized = ("use_peft: true\nlora_r: 8\nlora_target_modules:\n  - q_proj\n  - v_proj\nload_in_4bit: true\n", "")
    return changed(recipes / "sft.yaml", quantized)


def launched(recipe: Path, text: str, *changes: tuple[str, str]) -> Configuration:
    """The recipe with a launcher's file of *text*, with *changes*."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    launch = recipe.with_name("launch.yaml")
    launch.write_text(text)
    return read_configuration(recipe, launch_config=launch)


V1 = ("  fsdp_version: 2\n", "")
GRADIENTS_ONLY = ("  fsdp_reshard_after_forward: true", "  fsdp_sharding_strategy: SHARD_GRAD_OP")
NOT_SHARDED = ("  fsdp_reshard_after_forward: true", "  fsdp_sharding_strategy: NO_SHARD")
KEPT = ("fsdp_reshard_after_forward: true", "reshard_after_forward: false")


@pytest.mark.parametrize(
    ("text", "changes", "parallelism"),
    [
        (FSDP, [], Parallelism(devices=8, nodes=2, strategy="fsdp")),
        (FSDP, [V1], Parallelism(devices=8, nodes=2, strategy="fsdp")),
        (FSDP, [V1, GRADIENTS_ONLY], Parallelism(devices=8, nodes=2, strategy="fsdp", reshard_after_forward=False)),
        (
            FSDP,
            [V1, (GRADIENTS_ONLY[0], "  sharding_strategy: SHARD_GRAD_OP")],
            Parallelism(devices=8, nodes=2, strategy="fsdp", reshard_after_forward=False),
        ),
        (FSDP, [V1, NOT_SHARDED], Parallelism(devices=8, nodes=2, strategy="ddp")),
        (FSDP, [KEPT], Parallelism(devices=8, nodes=2, strategy="fsdp", reshard_after_forward=False)),
        (FSDP, [("num_machines: 2\n", "")], Parallelism(devices=16, strategy="fsdp")),
        (FSDP, [("FSDP", "MULTI_GPU")], Parallelism(devices=8, nodes=2)),
        (ZERO, [], Parallelism(devices=8, strategy="zero3")),
        (ZERO, [("zero_stage: 3", "zero_stage: 1")], Parallelism(devices=8, strategy="zero1")),
        (ZERO, [("  zero_stage: 3\n", "")], Parallelism(devices=8, strategy="zero2")),  # DeepSpeedPlugin's default
    ],
)
def test_it_says_on_how_many_gpus_and_how_they_share_the_model(
    recipe: Path, text: str, changes: list[tuple[str, str]], parallelism: Parallelism
) -> None:
    """As Accelerate reads it: so many processes in all, over so many machines."""
    assert launched(recipe, text, *changes).with_gpus(None, None).workload.parallelism == parallelism


def test_the_deepspeed_file_that_it_names_is_read(recipe: Path) -> None:
    """Beside it; what that says is checked as where the recipe names it."""
    zero = recipe.with_name("zero.json")
    zero.write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}))
    configuration = launched(recipe, NAMED)
    assert configuration.reading is not None

    assert configuration.workload.parallelism == Parallelism(devices=4, strategy="zero2")
    assert configuration.reading.sources["parallelism.strategy"].file.name == "zero.json"

    zero.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    with pytest.raises(ConfigError, match=r"zero\.json.*`bf16\.enabled` is not set"):
        launched(recipe, NAMED)
    zero.unlink()
    with pytest.raises(ConfigError, match=r"launch\.yaml:3: `deepspeed_config\.deepspeed_config_file` names zero\.json, which is neither"):
        launched(recipe, NAMED)


def test_every_field_says_where_it_was_read(recipe: Path) -> None:
    """The launcher's file and its line."""
    told = {field.field: field for field in explain(launched(recipe, ZERO))}

    assert [(told[f"parallelism.{name}"].line, told[f"parallelism.{name}"].why) for name in ("devices", "strategy")] == [
        (8, "since `num_processes` is 8"),
        (5, "since `deepspeed_config.zero_stage` is 3"),
    ]
    assert {told[f"parallelism.{name}"].file for name in ("devices", "strategy")} == {recipe.with_name("launch.yaml")}


def test_what_is_typed_goes_before_it(recipe: Path) -> None:
    """As `accelerate launch --num_processes` does; how the model is shared stays."""
    configuration = launched(recipe, ZERO).with_gpus(2, None)

    assert configuration.workload.parallelism == Parallelism(devices=2, strategy="zero3")
    assert configuration.reading is not None
    assert "parallelism.devices" not in configuration.reading.sources


def test_a_plan_writes_into_the_recipe_alone(recipe: Path) -> None:
    """The launcher's file has nothing that is planned."""
    configuration = launched(recipe, FSDP)
    assert configuration.reading is not None

    changes = prepare(edits_for(configuration.reading, configuration.workload.with_training(micro_batch_size=8)))

    assert [change.path.name for change in changes] == ["sft.yaml"]


def test_what_fsdp_checkpoints_is_checkpointed(recipe: Path) -> None:
    """Whatever the recipe says of checkpointing itself: Accelerate puts it around the blocks."""
    without = changed(recipe, ("gradient_checkpointing: true\n", ""))
    both = [
        launched(without, FSDP, *changes)
        for changes in ([], [KEPT, ("  fsdp_offload", "  fsdp_activation_checkpointing: true\n  fsdp_offload")])
    ]

    assert [each.workload.training.activation_checkpointing for each in both] == [False, True]


def test_its_type_is_that_of_a_recipe_that_names_none(recipes: Path) -> None:
    """TrainingArguments takes it from the launcher's variable; what the recipe says goes first."""
    recipe = changed(recipes / "llama_factory.yaml", ("finetuning_type: lora", "finetuning_type: full"), ("bf16: true\n", ""))

    assert launched(recipe, ZERO).workload.training.precision == "bf16-mixed"
    assert launched(recipe, ZERO, ("mixed_precision: bf16", "mixed_precision: 'no'")).workload.training.precision == "fp32"
    both = changed(recipe, ("disable_gradient", "fp16: true\ndisable_gradient"))
    assert launched(both, ZERO).workload.training.precision == "fp16-mixed"


def test_without_a_number_of_processes_one_gpu_is_planned(recipe: Path) -> None:
    """Accelerate counts those of the machine then; DeepSpeed on one GPU is asked for."""
    fsdp = launched(recipe, FSDP, ("num_machines: 2\nnum_processes: 16\n", ""))

    assert fsdp.workload.parallelism.data_parallel_size == 1
    assert any("`num_processes` is not set" in note for note in fsdp.notes)
    with pytest.raises(UsageError, match="nothing says how many there are"):
        launched(recipe, ZERO, ("num_processes: 8   # GPUs\n", "num_processes: -1\n")).with_gpus(None, None)


@pytest.mark.parametrize(
    ("text", "change", "reason"),
    [
        (FSDP, ("distributed_type: FSDP", "distributed_type: MEGATRON_LM"), "`distributed_type` is MEGATRON_LM"),
        (FSDP, ("bf16", "fp8"), "`mixed_precision` is fp8"),
        (FSDP, ("num_machines", "use_cpu: true\nnum_machines"), "plans training on GPUs"),
        (
            FSDP,
            ("fsdp_offload_params: false", "fsdp_offload_params: true"),
            "`fsdp_config.fsdp_offload_params` is true: memplan's own model is not kept",
        ),
        (
            FSDP,
            ("fsdp_offload_params: false", "offload_params: true"),
            "`fsdp_config.offload_params` is true: memplan's own model is not kept",
        ),
        (FSDP, ("fsdp_reshard_after_forward: true", "sharding_strategy: HYBRID_SHARD"), "shared by all GPUs"),
        (FSDP, ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"), "sharded block by block"),
        (FSDP, ("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", ""), "`fsdp_config.auto_wrap_policy` is not set"),
        (FSDP, ("fsdp_reshard_after_forward: true", "fsdp_sharding_strategy: HYBRID_SHARD"), "shared by all GPUs"),
        (FSDP, ("num_machines: 2", "num_machines: 3"), "which cannot be divided over 3 machines"),
        (FSDP, ("num_processes: 16", "num_processes: many"), "`num_processes` is 'many', which is no whole number"),
        (ZERO, ("offload_param_device: none", "offload_param_device: cpu"), "not kept on the host"),
        (ZERO, ("zero_stage: 3", "zero_stage: 0"), "stages 1 to 3"),
        (ZERO, ("zero_stage: 3", "gradient_accumulation_steps: 4"), "the recipe says its accumulation itself"),
    ],
)
def test_what_memplans_own_model_does_not_do_is_refused(recipe: Path, text: str, change: tuple[str, str], reason: str) -> None:
    """With the launcher's file and line, and what to type to plan the program itself."""
    with pytest.raises(ConfigError, match=r"launch\.yaml") as found:
        launched(recipe, text, change)

    assert reason in found.value.message
    assert "-- accelerate launch --config_file" in (found.value.hint or "") or "num_" in reason or "divided" in reason


def test_blocks_that_are_gathered_ahead_are_a_note(recipe: Path) -> None:
    """Where the peak is, they are gathered already."""
    configuration = launched(recipe, FSDP, ("fsdp_reshard_after_forward: true", "fsdp_forward_prefetch: true"))

    assert any("`forward_prefetch` is not followed" in note for note in configuration.notes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([("per_device", "load_in_4bit: true\nper_device")], "no quantized weights"),
        ([("per_device", "deepspeed: zero.json\nper_device")], "exclude each other"),
        ([("per_device", "use_peft: true\nper_device")], "by FSDP's second version"),
    ],
)
def test_what_a_recipe_may_not_have_beside_fsdp_is_refused(recipe: Path, changes: list[tuple[str, str]], reason: str) -> None:
    """A flat parameter of FSDP's first version has gradients for all that is in it; of the second version, adapters are sharded."""
    recipe.with_name("zero.json").write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}))

    with pytest.raises(ConfigError, match=reason):
        launched(changed(recipe, *changes), FSDP, V1)


def test_adapters_are_sharded_by_the_second_version(recipe: Path) -> None:
    """Which shards each parameter by itself."""
    assert launched(changed(recipe, ("per_device", "use_peft: true\nper_device")), FSDP).workload.parallelism.strategy == "fsdp"


def test_a_file_that_is_none_of_a_launcher_is_refused(recipe: Path, tree: Path) -> None:
    """With what is missing; and where nothing is launched, with what to type."""
    with pytest.raises(ConfigError, match="is not an Accelerate configuration: it lacks `distributed_type`"):
        read_configuration(recipe, launch_config=recipe)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: does not exist"):
        read_configuration(recipe, launch_config=Path("nowhere.yaml"))
    with pytest.raises(ConfigError, match="planned without a launcher's configuration"):
        read_configuration(tree, launch_config=recipe)
    with pytest.raises(UsageError, match="built-in is not a recipe"):
        read_configuration(Path("built-in"), launch_config=recipe)

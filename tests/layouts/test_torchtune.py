"""Recipes of torchtune: which model, loss and optimizer they mean, and what has to be said beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

import memplan
from memplan.api.configuration import Configuration, command_configuration, read_configuration
from memplan.errors import ConfigError
from memplan.layouts.registry import locate
from memplan.programs.command_program import CommandProgram
from memplan.workload.model import Adapters, TorchtuneModel
from memplan.workload.published_models import catalog_model
from tests.conftest import Run
from tests.layouts.test_recipes import as_edited, changed

LORA = """\
output_dir: out
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 64
  lora_dropout: 0.0
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 1024 # tokens
batch_size: 4
dataset:
  packed: False
optimizer:
  _component_: torch.optim.AdamW
  fused: True
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
gradient_accumulation_steps: 8 # times
compile: False
dtype: bf16
enable_activation_checkpointing: False
"""

FULL = LORA.replace("lora_llama3_2_1b", "llama3_2_1b")
for line in ("lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']", "apply_lora_to_mlp: True", "lora_rank: 64", "lora_dropout: 0.0"):
    FULL = FULL.replace(f"  {line}\n", "")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe for LoRA, of the versions behind 0.6."""
    path = tmp_path / "lora.yaml"
    path.write_text(LORA)
    return path


def model_of(configuration: Configuration) -> TorchtuneModel:
    model = configuration.workload.model
    assert isinstance(model, TorchtuneModel)
    return model


def test_a_recipe_of_torchtune_becomes_a_workload(recipe: Path) -> None:
    """Its model by the name that its builder has, in the sizes of the published one."""
    configuration = read_configuration(recipe)
    workload, model = configuration.workload, model_of(configuration)

    assert (workload.training.micro_batch_size, workload.training.gradient_accumulation_steps) == (4, 8)
    assert (workload.training.sequence_length, workload.training.precision) == (1024, "bf16")
    assert (workload.optimizer.name, workload.optimizer.implementation) == ("adamw", "fused")
    targets = (r".*\.(gate|up|down)_proj", "q_proj", "v_proj", "output_proj")
    assert model.adapters == Adapters(rank=64, targets=targets, dtype="bfloat16")
    assert '"hidden_size": 2048' in model.huggingface_config
    assert (model.loss, model.num_loss_chunks, model.shares_positions) == ("chunked_states", 8, True)
    assert any("are from memplan's catalogue (meta-llama/Llama-3.2-1B)" in note for note in configuration.notes)


def test_every_model_that_a_builder_stands_for_is_in_the_catalogue(recipe: Path) -> None:
    """Nothing has to be downloaded for it."""
    located = locate(recipe)
    assert located is not None
    assert located.layout.model is not None
    names = located.layout.model.names

    assert len(names) > 30
    assert [name for name in names.values() if catalog_model(name) is None] == []


def test_a_whole_model_is_trained_without_adapters(recipe: Path) -> None:
    """By the same builder's name, without its prefix."""
    recipe.write_text(FULL)
    configuration = read_configuration(recipe)

    assert configuration.located is not None
    assert configuration.located.layout.name == "torchtune-full"
    assert model_of(configuration).adapters is None


def test_later_versions_set_the_allocator(recipe: Path) -> None:
    """As they are imported; 0.6 with its own loss leaves it as it is."""
    later = read_configuration(recipe).workload.training.allocator_settings
    loss = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss\n  num_output_chunks: 4")
    earlier = read_configuration(changed(recipe, loss))

    assert later == "expandable_segments:True"
    assert earlier.workload.training.allocator_settings == ""
    assert (model_of(earlier).loss, model_of(earlier).num_loss_chunks) == ("chunked_logits", 4)


@pytest.mark.parametrize(
    "change",
    [("lora_llama3_2_1b", "qlora_llama3_2_1b"), ("  lora_rank", "  quantize_base: True\n  lora_rank")],
    ids=["builder", "argument"],
)
def test_four_bits_are_said_by_the_builder_or_an_argument(recipe: Path, change: tuple[str, str]) -> None:
    """Without them the base model is in bf16."""
    before = model_of(read_configuration(recipe)).quantization

    assert (before, model_of(read_configuration(changed(recipe, change))).quantization) == (None, "nf4")


def test_its_gpus_share_the_model(recipe: Path) -> None:
    """By FSDP2, whatever number of them is said beside the file; what a block has gathered is given up but where the recipe keeps it."""
    shares = read_configuration(recipe).with_gpus(4, None).workload.parallelism
    keeps = read_configuration(changed(recipe, ("compile: False", "fsdp_reshard_after_forward: False"))).workload.parallelism

    assert (shares.strategy, shares.num_gpus, shares.reshard_after_forward) == ("fsdp", 4, True)
    assert not keeps.reshard_after_forward


def test_builders_with_fewer_positions_than_the_published_model_are_known(recipe: Path) -> None:
    """Each block with adapters has a table of them."""
    model = model_of(read_configuration(changed(recipe, ("llama3_2.lora_llama3_2_1b", "qwen2_5.lora_qwen2_5_7b_instruct"))))
    base = model_of(read_configuration(changed(recipe, ("7b_instruct", "7b_base"))))

    assert (model.positions, base.positions) == (32_768, 131_072)
    assert not model.shares_positions


def test_the_length_of_texts_that_are_not_cut_has_to_be_said(recipe: Path) -> None:
    """Nothing else says it: most published recipes have none. What trains by data of its own can be planned as well."""
    configuration = read_configuration(changed(recipe, ("max_seq_len: 1024", "max_seq_len: null")))

    with pytest.raises(ConfigError) as refused:
        memplan.plan(recipe, gpu="rtx4090", method="rehearsed")
    assert refused.value.problem == "`tokenizer.max_seq_len` is not set: texts are not cut then, and the longest of a batch decides"
    assert refused.value.line == 10
    assert refused.value.hint == 'say it: `pins={"sequence_length": 2048}`, or set the key'
    said = configuration.with_pins({"sequence_length": 2048})
    said.refuse_unknown()
    assert said.workload.training.sequence_length == 2048
    with pytest.raises(ConfigError):
        configuration.with_pins({"micro_batch_size": 1}).refuse_unknown()


def test_an_optimizer_that_steps_in_the_backward_has_no_accumulation_to_plan(recipe: Path) -> None:
    """torchtune refuses both; the key is left alone."""
    recipe.write_text(FULL + "optimizer_in_bwd: True\n")
    configuration = read_configuration(changed(recipe, ("gradient_accumulation_steps: 8", "gradient_accumulation_steps: 1")))

    assert configuration.workload.optimizer.steps_in_backward
    assert not configuration.workload.varies("gradient_accumulation_steps")
    assert as_edited(configuration, micro_batch_size=16) == {"batch_size": 16}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("packed: False", "packed: True"), "`dataset.packed` is true: packed texts have a mask of their own"),
        (("lora_dropout: 0.0", "use_dora: True"), "`model.use_dora` is true: memplan's own model has no DoRA"),
        (("  fused: True", "  amsgrad: True"), "`optimizer.amsgrad` is true: memplan's Adam has two moments"),
        (("  packed: False", "  - packed: True"), "`dataset` is a sequence: of several datasets memplan does not look"),
        (("compile: False", "enable_fp8_training: True"), "`enable_fp8_training` is true: memplan's own model does not compute in fp8"),
        (("dtype: bf16", "dtype: fp16"), "`dtype` is fp16: torchtune trains in bf16 or fp32"),
        (("compile: False", "enable_activation_offloading: True"), "`enable_activation_offloading` is true: memplan's own model keeps"),
        (("llama3_2.lora_llama3_2_1b", "gemma2.lora_gemma2_2b"), "does not know the sizes of torchtune.models.gemma2.lora_gemma2_2b"),
        (
            ("torch.optim.AdamW", "torchao.optim.AdamWFp8"),
            "`optimizer._component_` is 'torchao.optim.AdamWFp8', which memplan does not know",
        ),
    ],
)
def test_what_memplans_own_model_is_not_true_for_is_planned_by_its_command(recipe: Path, change: tuple[str, str], reason: str) -> None:
    """The command is told."""
    with pytest.raises(ConfigError) as refused:
        read_configuration(changed(recipe, change))

    assert reason in refused.value.problem
    assert f"`-- tune run lora_finetune_single_device --config {recipe}`" in str(refused.value.hint)


def test_a_recipe_that_trains_by_preferences_has_a_layout_of_its_own(recipe: Path) -> None:
    """Its loss says so; a loss that nobody knows is no fine-tuning that is."""
    found = locate(changed(recipe, ("torchtune.modules.loss.LinearCrossEntropyLoss", "torchtune.rlhf.loss.DPOLoss")))
    other = locate(changed(recipe, ("torchtune.rlhf.loss.DPOLoss", "mine.ContrastiveLoss")))

    assert found is not None
    assert (found.layout.name, other) == ("torchtune-dpo", None)


def test_the_batch_of_its_command_is_found_as_before(recipe: Path) -> None:
    """What several layouts share counts for each."""
    program = command_configuration(["tune", "run", "lora_finetune_single_device", "--config", str(recipe)]).program

    assert isinstance(program, CommandProgram)
    assert {place.variable: place.key for place in program.places} == {
        "micro_batch_size": "batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "sequence_length": "tokenizer.max_seq_len",
    }


@pytest.mark.heavy
def test_a_recipe_is_planned_and_its_file_changed_in_place(recipe: Path) -> None:
    """The comments stay, and undo puts every byte back."""
    before = recipe.read_bytes()
    plan = memplan.plan(recipe, gpu="h100", method="rehearsed", target_effective_batch_size=96)
    plan.apply()

    assert plan.fits
    batch, steps = plan.after.training.micro_batch_size, plan.after.training.gradient_accumulation_steps
    expected = LORA.replace("batch_size: 4", f"batch_size: {batch}").replace("steps: 8 #", f"steps: {steps} #")
    assert batch * steps == 96
    assert recipe.read_text() == expected
    memplan.undo(recipe)
    assert recipe.read_bytes() == before


@pytest.mark.heavy
def test_where_nothing_fits_an_optimizer_that_steps_in_the_backward_still_accumulates_nothing(recipe: Path) -> None:
    """The least that is tried is one sample, whatever the target."""
    recipe.write_text(FULL.replace("steps: 8", "steps: 1") + "optimizer_in_bwd: True\n")
    plan = memplan.plan(recipe, gpu="t4", gpu_memory="4GiB", method="rehearsed", target_effective_batch_size=64)

    assert not plan.fits
    assert plan.reasons[0].startswith("a micro-batch of 1 takes")
    assert plan.after.training.gradient_accumulation_steps == 1


@pytest.mark.parametrize("command", [["compare", "--gpus", "t4"], ["check", "--gpu", "t4"], ["doctor", "--gpu", "t4"]])
def test_every_command_asks_for_the_length(recipe: Path, run_memplan: Run, command: list[str]) -> None:
    """None of them takes memplan's own default for it."""
    changed(recipe, ("max_seq_len: 1024", "max_seq_len: null"))
    result = run_memplan(*command, "--config-path", str(recipe))

    assert (result.returncode, result.stdout) == (2, "")
    assert "`tokenizer.max_seq_len` is not set: texts are not cut then" in " ".join(result.stderr.split())


def test_an_optimizer_in_the_backward_is_of_whole_models_alone(recipe: Path) -> None:
    """torchtune's LoRA recipes do not read the switch. A rank that is not said is 8."""
    recipe.write_text(LORA.replace("  lora_rank: 64\n", "") + "optimizer_in_bwd: True\n")
    configuration = read_configuration(recipe)
    adapters = model_of(configuration).adapters

    assert not configuration.workload.optimizer.steps_in_backward
    assert configuration.workload.training.gradient_accumulation_steps == 8
    assert adapters is not None
    assert adapters.rank == 8

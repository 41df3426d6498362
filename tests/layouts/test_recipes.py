"""Recipes of frameworks: single files of any name, recognised by their keys, read, and edited by the same table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memplan.api.configuration import Configuration, command_configuration, read_configuration
from memplan.edits.apply import prepare
from memplan.errors import ConfigError, UsageError
from memplan.layouts.registry import locate
from memplan.layouts.writer import edits_for
from memplan.programs.command_program import CommandProgram
from memplan.workload.contrastive import Contrastive
from memplan.workload.model import KERNEL_PACKAGES, Adapters, HuggingFaceModel, Preference, TransformerModel
from memplan.workload.parallelism import Parallelism
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

FSDP2 = "fsdp_version: 2\nfsdp_config:\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP"


def changed(path: Path, *changes: tuple[str, str]) -> Path:
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text)
    return path


def model_of(configuration: Configuration) -> HuggingFaceModel:
    model = configuration.workload.model
    assert isinstance(model, HuggingFaceModel)
    return model


def as_edited(configuration: Configuration, **training: Any) -> dict[str, Any]:
    """What a plan with these values would write, by key."""
    assert configuration.reading is not None
    changes = prepare(edits_for(configuration.reading, configuration.workload.with_training(**training)))
    return {edit.dotted: edit.value for change in changes for edit in change.edits}


def test_a_recipe_of_trl_becomes_a_workload(recipes: Path) -> None:
    """Adapters beside a model of 4 bits, norms in fp32 as TRL makes them, autocast over weights in bf16."""
    configuration = read_configuration(recipes / "sft.yaml")
    workload, model = configuration.workload, model_of(configuration)

    assert (workload.training.micro_batch_size, workload.training.gradient_accumulation_steps) == (2, 4)
    assert (workload.training.sequence_length, workload.training.precision) == (128, "bf16-mixed")
    assert workload.training.activation_checkpointing
    assert (workload.optimizer.name, workload.optimizer.implementation) == ("adam8bit", "foreach")
    assert model.adapters == Adapters(rank=8, dropout=0.05, targets=("q_proj", "v_proj"))
    assert (model.quantization, model.weights_dtype, model.norm_dtype, model.attention) == ("4bit", "bfloat16", "float32", "sdpa")
    assert '"hidden_size": 256' in model.huggingface_config


def test_a_recipe_says_what_memplan_does_not_follow(recipes: Path) -> None:
    """Where the sizes come from, that this is memplan's own model, and what is planned on the safe side."""
    notes = read_configuration(recipes / "sft.yaml").notes

    assert notes[0].startswith("planned with memplan's own model of it; to plan the program itself")
    assert f"`-- trl sft --config {recipes / 'sft.yaml'}`" in notes[0]
    assert f"{recipes / 'sft.yaml'}:2: the sizes of tiny-llama are from {recipes / 'tiny-llama' / 'config.json'}" in notes
    assert any("the paged optimizer's moments of large tensors are in managed memory" in note for note in notes)


def test_a_recipe_of_a_retriever_becomes_a_contrastive_workload(retriever: Path) -> None:
    """Queries and passages are cut at lengths of their own, and the file is the only stage of its training."""
    workload = read_configuration(retriever).workload

    assert workload.contrastive == Contrastive(in_batch_negatives="negatives", gathers_negatives=True, query_length=32)
    assert workload.stages == (Stage(name="rag_retrieval", n_negatives=3),)
    assert (workload.training.micro_batch_size, workload.training.gradient_accumulation_steps) == (4, 2)
    assert (workload.training.sequence_length, workload.training.precision) == (128, "fp16-mixed")
    assert workload.training.activation_checkpointing
    assert isinstance(workload.model, TransformerModel)
    assert (workload.model.num_layers, workload.model.hidden_size, workload.model.has_pooler) == (2, 128, True)


def test_the_negatives_of_a_recipe_are_written_into_it(retriever: Path) -> None:
    """Beside its batch: what a plan with more negatives changes is the line that holds them."""
    configuration = read_configuration(retriever)
    assert configuration.reading is not None
    (stage,) = configuration.workload.stages
    planned = configuration.workload.with_training(micro_batch_size=7).model_copy(
        update={"stages": (stage.model_copy(update={"n_negatives": 15}),)}
    )

    (change,) = prepare(edits_for(configuration.reading, planned))

    assert change.after == change.before.replace(b"neg_nums: 3", b"neg_nums: 15").replace(b"batch_size: 4", b"batch_size: 7")


def test_the_negatives_of_a_recipe_are_a_variable_of_its_program(retriever: Path) -> None:
    """Its command is planned with both where they are written."""
    located = locate(retriever)
    assert located is not None

    assert {field.partition(":")[2] for field in located.fields() if field.startswith("n_negatives")} == {"neg_nums"}
    assert list(located.stage_fields()) == []


def test_a_retriever_without_its_number_of_negatives_is_refused(retriever: Path) -> None:
    """And what to add is said."""
    recipe = changed(retriever, ("neg_nums: 3          # for each query\n", ""))

    with pytest.raises(ConfigError, match="has no value for `neg_nums`") as raised:
        read_configuration(recipe)

    assert str(raised.value.hint).startswith("add a line `neg_nums: 8`; to plan the program itself")


def test_a_query_that_is_too_long_is_told_where_it_stands(retriever: Path) -> None:
    """BERT has as many positions as its config.json says."""
    recipe = changed(retriever, ("query_max_len: 32", "query_max_len: 256"))

    with pytest.raises(ConfigError, match=r"`query_max_len` is 256: query_length 256 is more than the model's 128 learned positions"):
        read_configuration(recipe)


def test_a_recipe_stands_for_its_program(recipes: Path, retriever: Path, tree: Path) -> None:
    """So that its budget leaves room for what the program may take more; a tree that memplan has a trainer's model of does not."""
    assert read_configuration(retriever).workload.stands_for_a_program
    assert read_configuration(recipes / "sft.yaml").workload.stands_for_a_program
    assert not read_configuration(tree).workload.stands_for_a_program


def test_a_recipe_of_axolotl_becomes_a_workload(recipes: Path) -> None:
    """Of batch_size, micro_batch_size and gradient_accumulation_steps it has two, and the third follows."""
    configuration = read_configuration(recipes / "axolotl.yml")
    workload, model = configuration.workload, model_of(configuration)

    assert (workload.training.micro_batch_size, workload.training.gradient_accumulation_steps) == (2, 4)
    assert workload.training.target_effective_batch_size == 8
    assert (workload.optimizer.name, workload.optimizer.implementation) == ("adamw", "fused")
    assert model.adapters == Adapters(rank=16, dropout=0.05, targets=("all-linear",))
    assert (model.quantization, model.weights_dtype, workload.training.precision) == (None, "bfloat16", "bf16-mixed")


def test_a_recipe_of_axolotl_in_float16_is_of_short_weights(recipes: Path) -> None:
    """Its Trainer is told of no autocast; without an adapter the optimizer's state is short as well."""
    short = read_configuration(changed(recipes / "axolotl.yml", ("bf16: auto", "bf16: false\nfloat16: true")))

    assert (model_of(short).weights_dtype, short.workload.training.precision) == ("float16", "fp16")


@pytest.mark.parametrize(
    ("lines", "wide"),
    [
        ("flash_attention: false", "float32"),
        ("attn_implementation: sdpa", "float32"),
        ("flash_attention: true", None),
        ("attn_implementation: flash_attention_3", None),
        ("flex_attention: true", None),
        ("cut_cross_entropy: true", None),
        (FSDP2, None),
    ],
)
def test_axolotl_widens_norms_and_embeddings_where_attention_allows_it(recipes: Path, lines: str, wide: str | None) -> None:
    """Of a training of all weights; beside adapters they are made short again."""
    changes = [("flash_attention: true", lines), ("sample_packing: true", "sample_packing: false")]
    beside = model_of(read_configuration(changed(recipes / "axolotl.yml", *changes)))
    whole = model_of(read_configuration(changed(recipes / "axolotl.yml", ("adapter: lora\n", ""))))

    assert (beside.weights_dtype, beside.norm_dtype, beside.embeddings_dtype) == ("bfloat16", None, None)
    assert (whole.weights_dtype, whole.norm_dtype, whole.embeddings_dtype) == ("bfloat16", wide, wide)


def test_a_recipe_of_several_documents_is_refused(recipes: Path) -> None:
    """PyYAML's `safe_load`, by which programs read it, refuses it too."""
    with pytest.raises(ConfigError, match=r"axolotl\.yml: holds 2 documents"):
        read_configuration(changed(recipes / "axolotl.yml", ("val_set_size: 0.1", "val_set_size: 0.1\n---\nmicro_batch_size: 4")))


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    """Also where comments stand in it."""
    path = tmp_path / "recipe.yaml"
    path.write_text("# to come\n")

    with pytest.raises(ConfigError, match=r"recipe\.yaml: is empty"):
        read_configuration(path)


def test_switches_are_read_as_pyyaml_reads_them(recipes: Path) -> None:
    """`yes`, `on`, `no` and `off`; what a layout calls by such a word is that word."""
    words = [("flash_attention: true", "flash_attention: Yes"), ("gradient_checkpointing: true", "gradient_checkpointing: on")]
    known = read_configuration(changed(recipes / "axolotl.yml", ("adapter: lora\n", ""), ("sample_packing: true", "sample_packing: off")))
    written = read_configuration(changed(recipes / "axolotl.yml", *words))
    without = read_configuration(changed(recipes / "axolotl.yml", ("gradient_checkpointing: on", "gradient_checkpointing: no")))

    assert written.workload == known.workload
    assert written.workload.training.activation_checkpointing
    assert not without.workload.training.activation_checkpointing


def test_a_configuration_that_is_named_twice_is_one(recipes: Path) -> None:
    """Old recipes of axolotl name it beside the model; another one would have other sizes."""
    once = read_configuration(recipes / "axolotl.yml").workload.model
    base = "base_model: tiny-llama"
    twice = changed(recipes / "axolotl.yml", (base, f"{base}\nbase_model_config: tiny-llama"))

    assert read_configuration(twice).workload.model == once
    other = changed(twice, ("base_model_config: tiny-llama", "base_model_config: other"))
    with pytest.raises(ConfigError, match=r"`base_model_config` is other: memplan's own model has the config.json of `base_model`"):
        read_configuration(other)


def test_a_recipe_of_axolotl_says_how_gpus_share_the_model(recipes: Path) -> None:
    """By FSDP's second version, block by block; how many GPUs there are, whoever starts it says."""
    sharded = read_configuration(changed(recipes / "axolotl.yml", ("tf32: false", FSDP2))).with_gpus(8, None).workload
    kept = read_configuration(changed(recipes / "axolotl.yml", (FSDP2, f"{FSDP2}\n  reshard_after_forward: false")))

    assert sharded.parallelism == Parallelism(devices=8, strategy="fsdp")
    assert not kept.workload.parallelism.reshard_after_forward


def test_keys_of_fsdp_may_have_the_prefix_that_axolotl_strips(recipes: Path) -> None:
    """Its older examples have it, with FSDP2 too: each key means what it means without."""
    policy = FSDP2.replace("auto_wrap", "fsdp_auto_wrap")
    path = changed(
        recipes / "axolotl.yml", ("tf32: false", f"fsdp: [full_shard, auto_wrap]\n{policy}\n  fsdp_reshard_after_forward: false")
    )

    parallelism = read_configuration(path).workload.parallelism

    assert (parallelism.strategy, parallelism.reshard_after_forward) == ("fsdp", False)


def test_what_is_checkpointed_by_fsdp_is_checkpointed(recipes: Path) -> None:
    """Where `gradient_checkpointing` is not set, the blocks that are sharded may be."""
    path = changed(
        recipes / "axolotl.yml", ("tf32: false", f"{FSDP2}\n  activation_checkpointing: true"), ("gradient_checkpointing: true\n", "")
    )

    assert read_configuration(path).workload.training.activation_checkpointing


@pytest.mark.parametrize(
    "key", ["block_size: 8192", "model_max_length: 8192", "use_lora: true", "peft_enabled: true", "spectrum_config_path: x.yaml"]
)
def test_a_recipe_for_a_program_of_its_own_is_not_planned_as_one_of_trl(recipes: Path, key: str) -> None:
    """TRL knows no such key: its default of 1024 tokens would be planned, or everything trained, without a word."""
    path = changed(recipes / "sft.yaml", ("use_peft: true", key))

    with pytest.raises(ConfigError, match="is a recipe of a Hugging Face Trainer, which memplan plans through its command"):
        read_configuration(path)


def test_what_has_no_effect_in_a_recipe_is_said(recipes: Path) -> None:
    """A rank without the switch for adapters trains the whole model; and TRL's default for checkpointing changed."""
    changes = [("use_peft: true\n", ""), ("gradient_checkpointing: true\n", ""), ("load_in_4bit: true\n", "")]
    path = changed(recipes / "sft.yaml", *changes)

    notes = read_configuration(path).notes
    assert any("`lora_r` has no effect without `use_peft: true`" in note for note in notes)
    assert any("`gradient_checkpointing` is not set: planned without; TRL 1 checkpoints then" in note for note in notes)


@pytest.mark.parametrize(
    ("file", "old", "key"),
    [
        ("sft.yaml", "gradient_checkpointing: true", "use_liger_kernel"),
        ("llama_factory.yaml", "finetuning_type: lora", "enable_liger_kernel"),
    ],
)
def test_liger_s_kernels_are_planned_where_they_are_installed(
    recipes: Path, monkeypatch: pytest.MonkeyPatch, file: str, old: str, key: str
) -> None:
    """Elsewhere the plan is of the model's own, which take more, and says so."""
    path = changed(recipes / file, (old, f"{old}\n{key}: true"))
    monkeypatch.setitem(KERNEL_PACKAGES, "liger", "json")  # a package that is there, whatever is installed
    assert model_of(read_configuration(path)).kernels == "liger"

    monkeypatch.setitem(KERNEL_PACKAGES, "liger", "a_package_of_nobody")
    without = read_configuration(path)
    assert model_of(without).kernels is None
    assert any(f"`{key}` is not followed, since a-package-of-nobody is not installed here" in note for note in without.notes)


@pytest.mark.parametrize(
    ("keys", "title", "command"),
    [
        ("num_generations: 8\nreward_funcs: [accuracy]", "a recipe for GRPO with TRL", "trl grpo"),
        ("beta: 0.1\ndesirable_weight: 1.0", "a recipe for KTO with TRL", "trl kto"),
        ("beta: 0.1\nreward_model_path: m", "a recipe for preference optimization with TRL", "trl dpo"),
    ],
)
def test_a_recipe_of_another_trainer_of_trl_is_named(recipes: Path, keys: str, title: str, command: str) -> None:
    """It holds more than one model, which only its program can tell."""
    path = changed(recipes / "sft.yaml", ("use_peft: true", keys))

    with pytest.raises(ConfigError, match=title) as refused:
        read_configuration(path)
    assert f"`-- {command} --config " in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("file", "old", "new", "preference", "dropout"),
    [
        ("sft.yaml", "use_peft: true", "use_peft: true\nbeta: 0.1", {"reference": "without_adapters"}, 0.0),
        ("sft.yaml", "use_peft: true", "use_peft: true\nbeta: 0.1\ndisable_dropout: false", {"reference": "without_adapters"}, 0.05),
        ("sft.yaml", "use_peft: true", "use_peft: true\nbeta: 0.1\nprecompute_ref_log_probs: true", {"reference": "none"}, 0.0),
        ("axolotl.yml", "tf32: false", "rl: dpo", {"reference": "without_adapters"}, 0.0),
        ("llama_factory.yaml", "stage: sft", "stage: dpo", {"reference": "without_adapters", "trainer": "llama-factory"}, 0.0),
        ("llama_factory.yaml", "stage: sft", "stage: dpo\npref_loss: orpo", {"reference": "none", "trainer": "llama-factory"}, 0.0),
        (
            "llama_factory.yaml",
            "stage: sft\nfinetuning_type: lora",
            "stage: dpo\nfinetuning_type: full",
            {"reference": "copy", "reference_dtype": "bfloat16", "trainer": "llama-factory"},
            None,
        ),
    ],
)
def test_a_recipe_for_dpo_is_read(recipes: Path, file: str, old: str, new: str, preference: dict[str, str], dropout: float | None) -> None:
    """Its trainer computes the loss, and compares with the model without adapters, or with a copy where all of it is trained."""
    read = read_configuration(changed(recipes / file, (old, new)))

    model = model_of(read)
    assert model.preference == Preference.model_validate(preference)
    assert (None if model.adapters is None else model.adapters.dropout) == dropout
    assert any("a sample is a pair of texts" in note.lower() for note in read.notes)


def test_dpo_of_all_weights_compares_with_a_copy_of_them(recipes: Path) -> None:
    """TRL makes it of the model as it was loaded."""
    path = changed(recipes / "sft.yaml", ("use_peft: true", "use_peft: false\nbeta: 0.1"), ("load_in_4bit: true", "load_in_4bit: false"))

    model = model_of(read_configuration(path))

    assert model.preference == Preference(reference="copy")
    assert (model.weights_dtype, model.norm_dtype) == ("bfloat16", None)


@pytest.mark.parametrize(
    ("bits", "types"), [("load_in_4bit", ("float32", "bfloat16", "bfloat16")), ("load_in_8bit", ("float32", "float32", "float32"))]
)
def test_quantized_weights_under_dpo_have_the_types_of_peft_and_trl(recipes: Path, bits: str, types: tuple[str, ...]) -> None:
    """TRL 0.25.1 itself: a step of such a model with 8 bits takes 1,171.6 MiB with checkpointing, as ours; 955.9 with 4, ours 956.1."""
    path = changed(recipes / "sft.yaml", ("use_peft: true", "use_peft: true\nbeta: 0.1"), ("load_in_4bit", bits))

    model = model_of(read_configuration(path))

    assert model.adapters is not None
    assert (model.norm_dtype, model.embeddings_dtype, model.adapters.dtype) == types


def test_dpo_whose_model_gpus_share_is_planned_through_its_command(recipes: Path) -> None:
    """Each framework shares the copy in a way of its own."""
    path = changed(recipes / "llama_factory.yaml", ("stage: sft", "stage: dpo\ndeepspeed: zero3.json"))
    (recipes / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')

    with pytest.raises(ConfigError, match="memplan's own reference is not shared by the GPUs"):
        read_configuration(path)


@pytest.mark.parametrize("name", ["orpo.yaml", "qwen-kto.yaml", "config_simpo.yaml"])
def test_a_recipe_that_is_named_for_another_training_on_preferences_is_not_planned_as_dpo(recipes: Path, name: str) -> None:
    """Its keys may be the same."""
    changed(recipes / "sft.yaml", ("use_peft: true", "use_peft: true\nbeta: 0.1")).rename(recipes / name)

    with pytest.raises(ConfigError, match="is a recipe of a Hugging Face Trainer") as refused:
        read_configuration(recipes / name)

    assert "trl dpo" not in (refused.value.hint or "")


def test_the_global_batch_is_written_where_the_file_has_it(recipes: Path) -> None:
    """Accumulation, which the file leaves out, is not written beside it: axolotl refuses both together."""
    configuration = read_configuration(recipes / "axolotl.yml")

    assert as_edited(configuration, micro_batch_size=4, gradient_accumulation_steps=2) == {"micro_batch_size": 4}
    assert as_edited(configuration, micro_batch_size=8, gradient_accumulation_steps=2) == {"micro_batch_size": 8, "batch_size": 16}


def test_a_recipe_of_llama_factory_becomes_a_workload(recipes: Path) -> None:
    """Its switch turns checkpointing off, its list of layers is one text."""
    configuration = read_configuration(recipes / "llama_factory.yaml")
    workload, model = configuration.workload, model_of(configuration)

    assert not workload.training.activation_checkpointing
    assert model.adapters == Adapters(rank=4, targets=("q_proj", "v_proj"))
    assert as_edited(configuration, activation_checkpointing=True) == {"disable_gradient_checkpointing": False}


def test_a_switch_that_is_not_set_has_the_framework_s_default(recipes: Path) -> None:
    """LLaMA-Factory checkpoints where nothing is said."""
    path = changed(recipes / "llama_factory.yaml", ("disable_gradient_checkpointing: true\n", ""), ("lora_target: q_proj,v_proj\n", ""))
    configuration = read_configuration(path)

    assert configuration.workload.training.activation_checkpointing
    assert model_of(configuration).adapters == Adapters(rank=4)


def test_a_full_fine_tuning_has_formulas(recipes: Path) -> None:
    """Without adapters, and with weights in fp32, nothing is left to transformers."""
    configuration = read_configuration(changed(recipes / "llama_factory.yaml", ("finetuning_type: lora", "finetuning_type: full")))

    assert isinstance(configuration.workload.model, TransformerModel)


@pytest.mark.parametrize(
    ("file", "old", "new", "line", "reason"),
    [
        (
            "sft.yaml",
            "bf16: true",
            "deepspeed: zero3.json",
            16,
            "`deepspeed` names zero3.json, which is neither beside it nor below a folder",
        ),
        ("sft.yaml", "q_proj\n  - v_proj", "q_proj\n  - nothing_proj\nuse_dora: true", 14, "memplan's own model has no DoRA"),
        ("sft.yaml", "use_peft: true", "use_peft: false", 14, "weights in 4 bits are trained with `use_peft: true`"),
        ("llama_factory.yaml", "bf16: true", "bf16: true\ndo_train: false", 22, "`do_train` is false: it trains nothing"),
        (
            "axolotl.yml",
            "tf32: false",
            "fsdp:\n  - full_shard",
            18,
            "`fsdp` is a sequence: memplan's own model is not sharded by FSDP's first version",
        ),
        ("axolotl.yml", "tf32: false", "fsdp_config:\n  offload_params: false", 18, "is not sharded by FSDP's first version"),
        ("axolotl.yml", "tf32: false", f"{FSDP2}\n  offload_params: true", 20, "memplan's own model is not kept on the host"),
        ("axolotl.yml", "tf32: false", f"{FSDP2}\n  fsdp_offload_params: true", 20, "`fsdp_config.fsdp_offload_params` is true"),
        ("axolotl.yml", "tf32: false", f"fsdp: [full_shard, offload]\n{FSDP2}", 17, "`fsdp` has offload: memplan's own model is shared"),
        ("axolotl.yml", "tf32: false", FSDP2.replace("TRANSFORMER", "SIZE"), 19, "memplan's own model is sharded block by block"),
        (
            "axolotl.yml",
            "flash_attention: true",
            "flash_attention: false",
            8,
            "what a packed batch takes without flash attention or its like, memplan's own model does not tell",
        ),
        ("axolotl.yml", "tf32: false", "lisa_n_layers: 4", 17, "memplan's own model is trained whole or by adapters"),
        ("axolotl.yml", "tf32: false", "rl: kto", 17, "`rl` is kto: memplan's own model is trained by supervised fine-tuning or DPO"),
        ("axolotl.yml", "adapter: lora", "adapter: qlora\nload_in_4bit: false\npeft_use_dora: true", 5, "`peft_use_dora` is true"),
        ("axolotl.yml", "optimizer: adamw_torch_fused", "optimizer: muon", 20, "`optimizer` is 'muon', which memplan does not know"),
        (
            "llama_factory.yaml",
            "stage: sft",
            "stage: kto",
            5,
            "`stage` is kto: memplan's own model is trained by the stages sft, pt and dpo",
        ),
        ("llama_factory.yaml", "stage: sft", "stage: dpo\nenable_liger_kernel: true", 6, "memplan's own loss of pairs reads logits"),
        ("llama_factory.yaml", "stage: sft", "stage: dpo\npref_loss: other", 6, "memplan does not know this loss of pairs"),
        ("sft.yaml", "use_peft: true", "use_peft: true\nbeta: 0.1\nloss_type: [sigmoid, sft]", 11, "`loss_type` has sft"),
        (
            "sft.yaml",
            "use_peft: true",
            "use_peft: true\nbeta: 0.1\nloss_type: kto",
            11,
            "`loss_type` is kto: memplan knows the losses of DPO",
        ),
        ("sft.yaml", "use_peft: true", "use_peft: true\nbeta: 0.1\nrpo_alpha: 1.0", 11, "has no part for the preferred texts"),
        ("axolotl.yml", "tf32: false", "rl: dpo\nprecompute_ref_log_probs: true", 18, "memplan's own reference reads each batch"),
        (
            "llama_factory.yaml",
            "stage: sft",
            "stage: sft\nneat_packing: true",
            6,
            "`neat_packing` is true: neat packing has a mask that grows",
        ),
        (
            "llama_factory.yaml",
            "stage: sft",
            "stage: sft\nneat_packing: true\nflash_attn: fa2",
            6,
            "neat packing takes a per_device_train_batch_size of 1",
        ),
        ("llama_factory.yaml", "cutoff_len: 64", "cutoff_len: many", 13, "`cutoff_len` is 'many'"),
        ("sft.yaml", "max_length: 128", "max_length:", 7, "`max_length` is empty: no text is cut then, and the longest decides"),
        ("sft.yaml", "tiny-llama", "nobody/knows-this", 2, "`model_name_or_path`: unknown model: 'nobody/knows-this'"),
    ],
)
def test_what_memplan_s_model_is_not_true_for_is_refused(recipes: Path, file: str, old: str, new: str, line: int, reason: str) -> None:
    """With the file, the line, and what to type to plan the program itself."""
    path = changed(recipes / file, (old, new))

    with pytest.raises(ConfigError) as refused:
        read_configuration(path)

    assert reason in str(refused.value)
    assert refused.value.line == line
    assert "to plan the program itself, where it is installed, give its command in place of the configuration: `-- " in str(refused.value)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("axolotl.yml", "tf32: false", "plugins:\n  - some.KDPlugin", "`plugins` has some.KDPlugin: memplan does not know what it adds"),
        ("sft.yaml", 'eval_strategy: "no"', "loss_type: sigmoid", "`loss_type` is sigmoid: memplan knows the losses of supervised"),
        ("llama_factory.yaml", "bf16: true", "use_asft_loss: true", "`use_asft_loss` is true: ASFT holds a reference model"),
    ],
)
def test_what_would_take_more_than_the_model_is_refused(recipes: Path, file: str, old: str, new: str, said: str) -> None:
    """A plan of less would be called a fit."""
    with pytest.raises(ConfigError) as refused:
        read_configuration(changed(recipes / file, (old, new)))

    assert said in refused.value.problem


@pytest.mark.parametrize(
    "change", [("LlamaForCausalLM", "LlamaForSequenceClassification"), ('"model_type"', '"vision_config": {}, "model_type"')]
)
def test_a_recipe_of_something_else_than_a_decoder_of_text_is_refused(recipes: Path, change: tuple[str, str]) -> None:
    """What it reads besides, the recipe does not say."""
    changed(recipes / "tiny-llama" / "config.json", change)

    with pytest.raises(ConfigError, match="which is not a decoder of text alone"):
        read_configuration(recipes / "sft.yaml")


def test_a_list_counts_beside_what_a_rule_says(recipes: Path) -> None:
    """axolotl adapts every linear layer and those of its list besides; where there is none of the name, the rehearsal says so."""
    path = changed(recipes / "axolotl.yml", ("lora_target_linear: true", "lora_target_linear: true\nlora_target_modules: [embed_tokens]"))

    adapters = model_of(read_configuration(path)).adapters

    assert adapters is not None
    assert adapters.targets == ("all-linear", "embed_tokens")


def test_a_text_for_the_adapted_layers_is_a_regular_expression(recipes: Path) -> None:
    """PEFT reads it so, and axolotl's recipes have it with commas in it too."""
    pattern = r"model.layers.\d{1,2}.(mlp|self_attn).(up|down|q)_proj"
    path = changed(recipes / "axolotl.yml", ("lora_target_linear: true", f"lora_target_modules: '{pattern}'"))

    adapters = model_of(read_configuration(path)).adapters

    assert adapters is not None
    assert adapters.targets == (pattern,)


@pytest.mark.parametrize(
    ("file", "old", "new", "dtype"),
    [
        ("axolotl.yml", "lora_r: 16", "lora_r: 16\nlora_modules_to_save: [embed_tokens, lm_head]", None),
        ("sft.yaml", "lora_r: 8", "lora_r: 8\nlora_modules_to_save:\n  - embed_tokens\n  - lm_head", None),
        ("llama_factory.yaml", "lora_rank: 4", "lora_rank: 4\nadditional_target: embed_tokens,lm_head", "float32"),
    ],
)
def test_modules_that_are_trained_beside_adapters_are_planned(recipes: Path, file: str, old: str, new: str, dtype: str | None) -> None:
    """In the type of their weights, which LLaMA-Factory makes float32."""
    adapters = model_of(read_configuration(changed(recipes / file, (old, new)))).adapters

    assert adapters is not None
    assert (adapters.trained_modules, adapters.trained_dtype) == (("embed_tokens", "lm_head"), dtype)


def test_a_recipe_with_a_model_type_is_no_model(tmp_path: Path) -> None:
    """It has a batch, and is not read as the config.json of a model of default sizes."""
    path = tmp_path / "reranker.yaml"
    path.write_text("model_name_or_path: a/b\nmodel_type: bert\ntrain_group_size: 10\nbatch_size: 8\nmax_len: 512\n")

    with pytest.raises(ConfigError, match=r"is a RAG-Retrieval configuration \(reranker\), which memplan plans through its command"):
        read_configuration(path)


def test_a_model_that_nobody_knows_is_asked_for_by_its_name(recipes: Path) -> None:
    """The hint is a command that can be typed."""
    with pytest.raises(ConfigError, match=r"`hf download nobody/knows-this config\.json`"):
        read_configuration(changed(recipes / "sft.yaml", ("tiny-llama", "nobody/knows-this")))


@pytest.mark.parametrize("name", ["./models/gemma", "/cm/shared/llama", "~/llama", "models/google/gemma", "qwen2.5-coder:7b"])
def test_a_model_that_is_a_path_is_not_to_be_downloaded(recipes: Path, name: str) -> None:
    """Nor one by a name that the hub has none like."""
    with pytest.raises(ConfigError) as refused:
        read_configuration(changed(recipes / "sft.yaml", ("tiny-llama", name)))

    assert refused.value.hint is not None
    assert refused.value.hint.startswith("name a folder that has its config.json")


def test_a_recipe_alone_in_a_folder_is_found(recipes: Path) -> None:
    """No path, in the project's folder."""
    (recipes / "axolotl.yml").unlink()
    (recipes / "llama_factory.yaml").unlink()

    located = locate(recipes)

    assert located is not None
    assert located.main == recipes / "sft.yaml"


def test_of_several_recipes_one_has_to_be_named(recipes: Path) -> None:
    """None of them is planned in the place of the others."""
    with pytest.raises(ConfigError, match=r"has 3 recipes: .*axolotl\.yml.*llama_factory\.yaml.*sft\.yaml"):
        read_configuration(recipes)


def test_a_layout_of_the_user_s_own_goes_first(recipes: Path, tmp_path: Path) -> None:
    """And one that knows the model goes before one that only knows the command."""
    own = tmp_path / "templates" / "mine"
    own.mkdir(parents=True)
    (own / "layout.yaml").write_text(
        "name: mine\ntitle: my recipe\ndetect: {keys: [base_model]}\nmodel: {key: base_model}\n"
        "fields:\n  - {field: training.micro_batch_size, key: micro_batch_size}\n"
    )
    located = locate(recipes / "axolotl.yml", {"MEMPLAN_TEMPLATES": str(own.parent)})
    shipped = locate(recipes / "sft.yaml", {})

    assert located is not None
    assert located.layout.name == "mine"
    assert shipped is not None
    assert shipped.layout.name == "trl-sft"


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("detect: {keys: [a]}\nfields: []\n", None, "has neither `workload`, `model` nor `command`"),
        ("detect: {keys: [a]}\nmodel: {key: a}\nparts: [megatron]\nfields: []\n", None, "`parts`: there is no megatron"),
        (
            "detect: {keys: [a]}\nmodel: {key: a}\nfields: []\nrules:\n  - field: training.speed\n    cases: []\n",
            7,
            "`training.speed` is not a",
        ),
        (
            "detect: {keys: [a]}\nmodel: {key: a}\nfields: []\nrules:\n  - field: training.precision\n    cases: [{value: fast}]\n",
            8,
            "'fast' is not a value of `training.precision`",
        ),
    ],
)
def test_a_mistake_in_a_recipe_s_layout_is_told_in_the_layout(tmp_path: Path, text: str, line: int | None, problem: str) -> None:
    """Its own file and line, before any file of the user is read."""
    own = tmp_path / "templates" / "mine"
    own.mkdir(parents=True)
    (own / "layout.yaml").write_text("name: mine\ntitle: my recipe\n" + text)

    with pytest.raises(ConfigError) as refused:
        locate(tmp_path, {"MEMPLAN_TEMPLATES": str(own.parent)})

    assert problem in refused.value.problem
    assert refused.value.file == own / "layout.yaml"
    assert line is None or refused.value.line == line


def test_a_command_that_names_a_recipe_needs_no_fields(recipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its batch is written, and what makes it short, the layout says."""
    monkeypatch.chdir(recipes)
    configuration = command_configuration(["axolotl", "train", "axolotl.yml"])
    program = configuration.program

    assert isinstance(program, CommandProgram)
    assert {(str(place.file), place.key, place.variable) for place in program.places} == {
        ("axolotl.yml", "micro_batch_size", "micro_batch_size"),
        ("axolotl.yml", "batch_size", "effective_batch_size"),
        ("axolotl.yml", "sequence_len", "sequence_length"),
    }
    assert {(place.key, place.text) for place in program.shortened} == {("val_set_size", "0")}
    assert (program.training.micro_batch_size, program.training.target_effective_batch_size) == (2, 8)


def test_a_global_batch_alone_is_the_micro_batch_of_one_gpu(tmp_path: Path) -> None:
    """RecBole's train_batch_size is divided by the GPUs; accumulation is none of its variables."""
    path = tmp_path / "overall.yaml"
    path.write_text("train_batch_size: 2048\ntrain_neg_sample_args: {sample_num: 1}\n")
    configuration = command_configuration(["python", "run_recbole.py", "--config_files", str(path)], num_gpus=4)
    program = configuration.program

    assert program.training.micro_batch_size == 512
    assert program.varies("micro_batch_size")
    assert not program.varies("gradient_accumulation_steps")
    assert configuration.has_batch


@pytest.mark.parametrize(
    ("text", "num_gpus", "batches"),
    [
        ('{"num-layers": 2, "train_micro_batch_size_per_gpu": 4, "model_parallel_size": 2, "pipe_parallel_size": 0}\n', 8, 4),
        ('{"num-layers": 2, "train_micro_batch_size_per_gpu": 4, "model-parallel-size": 2, "pipe-parallel-size": 2}\n', 8, 2),
        ("tokens: {micro_batch_size: 4}\nparallelism: {dp: 2, tp: 4, pp: 1}\n", 8, 2),
        ("step_scheduler: {local_batch_size: 4, global_batch_size: 64}\ndistributed: {tp_size: 1, cp_size: 2}\n", 4, 2),
    ],
)
def test_gpus_that_split_a_model_have_one_batch(tmp_path: Path, text: str, num_gpus: int, batches: int) -> None:
    """As the recipe says: a size of none or of one splits nothing."""
    path = tmp_path / "config.yml"
    path.write_text(text)

    program = command_configuration(["python", "train.py", str(path)], num_gpus=num_gpus).program

    assert program.parallelism.data_parallel_size == batches
    assert program.training.micro_batch_size == 4


def test_a_recipe_of_olmo_is_none_of_llm_foundry(tmp_path: Path) -> None:
    """Both have a global batch and a micro-batch; what never evaluates in one divides by zero in the other."""
    olmo, foundry = tmp_path / "olmo.yaml", tmp_path / "mpt.yaml"
    batches = "global_train_batch_size: 64\ndevice_train_microbatch_size: 4\neval_interval: 1000\n"
    olmo.write_text(batches + "model: {d_model: 256, max_sequence_length: 2048}\n")
    foundry.write_text(batches + "max_seq_len: 2048\nmodel: {name: mpt_causal_lm, d_model: 256, max_seq_len: 2048}\n")

    programs = [command_configuration(["torchrun", "train.py", str(path)]).program for path in (olmo, foundry)]

    assert [(program.training.micro_batch_size, program.training.target_effective_batch_size) for program in programs] == [(4, 64)] * 2
    shortened = [{place.text for place in program.shortened} for program in programs if isinstance(program, CommandProgram)]
    assert shortened == [{"1000000000"}, {"0"}]


@pytest.mark.parametrize("key", ["local_batch_size", "batch_size"])
def test_a_job_file_of_torchtitan_is_planned_by_its_command(tmp_path: Path, key: str) -> None:
    """It is TOML; what older versions call the batch is read too."""
    path = tmp_path / "job.toml"
    path.write_text(f'[model]\nflavor = "8B"\n[training]\n{key} = 3 # each\nseq_len = 2048\n')

    program = command_configuration(["torchrun", "-m", "torchtitan.train", "--job.config_file", str(path)]).program

    assert isinstance(program, CommandProgram)
    assert program.training.micro_batch_size == 3
    assert [(place.variable, place.key) for place in program.places] == [
        ("micro_batch_size", f"training.{key}"),
        ("sequence_length", "training.seq_len"),
    ]


def test_gpus_are_those_that_are_given(recipes: Path) -> None:
    """A recipe does not say on how many it is started."""
    configuration = read_configuration(recipes / "sft.yaml").with_gpus(4, 2)

    assert configuration.workload.parallelism.data_parallel_size == 8
    assert configuration.workload.effective_batch_size == 64
    assert configuration.reading is not None
    assert edits_for(configuration.reading, configuration.workload) == []


def test_a_tree_that_says_on_how_many_gpus_it_trains_is_not_overruled(tree: Path) -> None:
    """The key is named."""
    with pytest.raises(UsageError, match=r"says on how many GPUs it trains: `training\.trainer\.devices`"):
        read_configuration(tree).with_gpus(2, None)


DPO = "optimizer: {_component_: c.d}\nloss: {_component_: torchtune.rlhf.loss.DPOLoss}\nbatch_size: 2\n"

PARTS = {
    "ds_auto.json": (
        '{"train_batch_size": "auto", "zero_optimization": {"stage": 3}}',
        "a DeepSpeed configuration whose batch the trainer",
    ),
    "accelerate.yaml": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n",
        "an Accelerate configuration, which says on how many",
    ),
    "01_stage.yaml": ("n_positives: 8\nn_negatives: 4\n", "a stage of a curriculum, a part of a tree"),
    "job.yaml": ("apiVersion: v1\nkind: Job\n---\nkind: Pod\n", "a Kubernetes manifest"),
    "trainer.yaml": ("max_epochs: 10\naccelerator: gpu\n", "settings of a Lightning Trainer, a part of a configuration"),
    "data.yaml": ("batch_size: 128\n", "a training configuration (it has `batch_size`)"),
    "urls.yaml": ("url: https://example.com\n", "describes no training that memplan recognises"),
    "backbone.yaml": ("train: {batch_size_per_gpu: 32}\nstudent: {arch: vit_large}\n", "(it has `train.batch_size_per_gpu`)"),
    "detector.yaml": ("MODEL: {META_ARCHITECTURE: RCNN}\nSOLVER: {IMS_PER_BATCH: 16}\n", "(it has `SOLVER.IMS_PER_BATCH`)"),
    "diffusion.toml": ("micro_batch_size_per_gpu = 1\ngradient_accumulation_steps = 4\n", "(it has `micro_batch_size_per_gpu`)"),
    "accumulates.toml": ("gradient_accumulation_steps = 4\n", "(it has `gradient_accumulation_steps`)"),
    "lora.yaml": (
        "model: {_component_: a.b, lora_rank: 8}\noptimizer: {_component_: c.d}\nbatch_size: 2\n",
        "`dtype` is not set: torchtune trains in bf16 or fp32",
    ),
    "lora_dpo.yaml": (
        f"model: {{_component_: a.b, lora_rank: 8}}\n{DPO}",
        "a torchtune configuration (DPO), which memplan plans through its command",
    ),
    "full_dpo.yaml": (
        f"model: {{_component_: a.b}}\n{DPO}",
        "a torchtune configuration (DPO, full), which memplan plans through its command",
    ),
    "qat.yaml": (
        "model: {_component_: a.b}\noptimizer: {_component_: c.d}\nquantizer: {_component_: e.f}\nbatch_size: 2\n",
        "a torchtune configuration (quantization-aware training), which memplan plans through its command",
    ),
    "generation.yaml": ("model: {_component_: a.b}\nprompt: hello\n", "for evaluation, generation or quantization, which trains nothing"),
    "full.yaml": (
        "checkpoint_dir: a\ndevices: 1\ntrain: {micro_batch_size: 1, global_batch_size: 16}\n",
        "a LitGPT configuration (full fine-tuning), which memplan plans through its command",
    ),
    "pretrain.yaml": (
        "model_name: a\ndevices: 1\ntrain: {micro_batch_size: 1, global_batch_size: 16}\n",
        "a LitGPT configuration (pretraining), which memplan plans through its command",
    ),
    "distill.yaml": (
        "model_name_or_path: a/b\nquery_max_len: 512\nteacher_emebedding_dim: 8\nbatch_size: 128\n",
        "a RAG-Retrieval configuration (distillation), which memplan plans through its command",
    ),
    "decoder.yaml": (
        "train_args: {num_epochs: 1}\ncontrastive_data_args: {batch_size: 128}\n",
        "a contrastors configuration, which memplan plans through its command",
    ),
    "arcface.yaml": (
        "extractor: {name: vit}\nsampler: null\nbs_train: 128\nmax_epochs: 10\ndevices: 1\n",
        "an OML configuration, which memplan plans through its command",
    ),
    "neox.yml": (
        '{"num-layers": 2, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}\n',
        "a GPT-NeoX configuration, which memplan plans through its command",
    ),
    "llama3_8b.toml": (
        '[model]\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n',
        "a torchtitan job file, which memplan plans through its command",
    ),
    "job.toml": ('[training]\nseq_len = 8192\n[job]\ndump_folder = "out"\n', "a torchtitan job file without a batch size"),
    "network.toml": (
        "[training_arguments]\ntrain_batch_size = 4\n",
        "a training configuration (it has `training_arguments.train_batch_size`)",
    ),
    "neox_model.yml": ('{"pipe_parallel_size": 1, "num_layers": 48, "hidden_size": 8192}\n', "a part of a GPT-NeoX configuration"),
    "sepformer.yaml": (
        "seed: 1\n__set_seed: !apply:torch.manual_seed [1]\nN_epochs: 200\nbatch_size: 1\n",
        "SpeechBrain hyperparameters, which memplan plans through its command",
    ),
    "slowfast.yaml": ("TEST: {BATCH_SIZE: 64}\nTRAIN: {BATCH_SIZE: 32}\n", "a training configuration (it has `TRAIN.BATCH_SIZE`)"),
    "monai.yaml": (
        "data: {batch_size: 5}\nlightning: {batch_size_per_device: '@data#batch_size'}\n",
        "a training configuration (it has `data.batch_size`)",
    ),
    "lightning.yaml": (
        "trainer: {max_epochs: 1}\nmodel: {class_path: a.Model, init_args: {hidden_size: 64}}\ndata: {class_path: b.Data}\n",
        "a LightningCLI configuration whose data module has its own batch size",
    ),
    "modernbert.yaml": (
        "global_train_batch_size: 64\nmodel: {name: flex_bert}\ntrain_loader: {name: text}\n",
        "a MosaicBERT or ModernBERT configuration for pretraining, which memplan plans through its command",
    ),
    "classification.yaml": (
        "global_train_batch_size: 64\nmodel: {name: mosaic_bert}\ntrain_loader: {split: train}\n",
        "a MosaicBERT or ModernBERT configuration for classification, which memplan plans through its command",
    ),
    "tulu.yaml": (
        "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 1\nlearning_rate: 1e-5\nwith_tracking: true\n",
        "an open-instruct configuration, which memplan plans through its command",
    ),
    "tulu_dpo.yaml": (
        "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 1\nbeta: 5\nwith_tracking: true\n",
        "an open-instruct configuration for DPO, which memplan plans through its command",
    ),
    "balance.yaml": ("name: balance\nargs: {n_labels: 8, n_instances: 4}\n", "a sampler of an OML configuration"),
    "val.yaml": ("extractor: {name: vit}\nbs_val: 128\ndevices: 1\n", "which trains nothing"),
    "AFNO.yaml": ("full_field: &f\n  lr: 1e-3\nafno_backbone:\n  <<: *f\n  batch_size: 64\n", "a FourCastNet configuration"),
    "mistral-micro.yaml": ("inherit:\n  - trainers/gpt2.yaml\neffective_bsz: 32\n", "a quinine configuration, which inherits"),
    "mcli.yaml": ("command: composer train.py\nparameters: {global_train_batch_size: 8}\n", "a run of MCLI"),
    "mnist.yaml": ("_target_: src.data.MNISTDataModule\nbatch_size: 128\n", "a data module of a Hydra configuration, a part of one"),
    "train.yaml": (
        "trainer: {max_epochs: 1}\nmodel: {}\ndata: {batch_size: 4}\n",
        "a LightningCLI configuration, which memplan plans through its",
    ),
}


@pytest.mark.parametrize(
    ("switch", "key"),
    [("", "batch_size"), ("dynamic_batching: False\n", "batch_size"), ("dynamic_batching: True\n", "max_batch_length_train")],
)
def test_the_batch_of_a_program_is_at_the_key_that_it_reads(tmp_path: Path, switch: str, key: str) -> None:
    """SpeechBrain's recipes read no batch_size where a switch has them count seconds."""
    (tmp_path / "train.yaml").write_text(
        f"__set_seed: 1\n{switch}batch_size: 16\nmax_batch_length_train: 850\ngrad_accumulation_factor: 2\n"
    )

    located = locate(tmp_path / "train.yaml")

    assert located is not None
    assert [field.rpartition(":")[2] for field in located.fields()] == [key, "grad_accumulation_factor"]


@pytest.mark.parametrize("name", ["qwen-dpo.yaml", "dpo/config.yaml", "reward_model.yaml"])
def test_a_recipe_that_is_named_for_another_training_is_none_of_fine_tuning(recipes: Path, name: str) -> None:
    """What says that there is a second model may stand in the arguments of its program alone."""
    path = recipes / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((recipes / "sft.yaml").read_bytes())

    with pytest.raises(ConfigError, match="is a recipe of a Hugging Face Trainer, which memplan plans through its command") as refused:
        read_configuration(path)

    assert refused.value.hint is not None
    assert refused.value.hint.endswith(f"`-- python train.py --config {path}`, where train.py stands for the project's own script")


@pytest.mark.parametrize(
    ("keys", "command"),
    [
        ("rpo_alpha: 1\n", "trl dpo --config"),
        ("rpo_alpha: 1\ndataset_mixer: {a: 1}\n", "python train.py"),
        ("gamma_beta_ratio: 1\n", "python train.py"),
    ],
)
def test_a_recipe_with_keys_of_another_program_is_not_said_to_be_trl_s(tmp_path: Path, keys: str, command: str) -> None:
    """TRL's own would find no data in it."""
    path = tmp_path / "config.yaml"
    path.write_text(f"model_name_or_path: gpt2\nbeta: 0.1\nper_device_train_batch_size: 2\n{keys}")

    with pytest.raises(ConfigError) as refused:
        read_configuration(path)

    assert f"`-- {command} {path}`" in str(refused.value.hint)


def test_a_file_whose_batch_stands_twice_is_recognised(tmp_path: Path) -> None:
    """Its program may read it all the same: JSON's last one counts."""
    path = tmp_path / "train.json"
    path.write_text('{"train": {"batch_size": 4, "batch_size": 8}}')

    with pytest.raises(ConfigError, match=r"looks like a training configuration \(it has `train\.batch_size`\)"):
        read_configuration(path)


@pytest.mark.parametrize("name", PARTS)
def test_what_is_no_recipe_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    """Never that it lacks a `model`, which no file of theirs has."""
    text, said = PARTS[name]
    (tmp_path / name).write_text(text)

    with pytest.raises(ConfigError) as refused:
        read_configuration(tmp_path / name)

    assert said in refused.value.problem
    assert refused.value.hint
    assert "`model`" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("gradient_accumulation_steps: 4\n", "gradient_accumulation_steps={}:gradient_accumulation_steps"),
        ("SOLVER:\n  IMS_PER_BATCH: 16\n", "effective_batch_size={}:SOLVER.IMS_PER_BATCH"),
        ("train: {global_batch_size: 16}\n", "effective_batch_size={}:train.global_batch_size"),
        ("batch_size_per_gpu: 16\n", "micro_batch_size={}:batch_size_per_gpu"),
    ],
)
def test_a_hint_says_which_variable_a_key_is(tmp_path: Path, text: str, field: str) -> None:
    """What is called an accumulation is no batch, and what all GPUs take together is no micro-batch."""
    path = tmp_path / "any.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as refused:
        read_configuration(path)

    assert f'fields=["{field.format(path)}"]' in (refused.value.hint or "")


def test_of_two_lengths_the_larger_is_planned(recipes: Path) -> None:
    """TRL reads the one or the other, as its version has it; neither was read once, and 512 tokens were planned."""
    path = changed(recipes / "sft.yaml", ("max_length: 128", "max_length: 1024\nmax_seq_length: 2048"))

    configuration = read_configuration(path)

    assert configuration.workload.training.sequence_length == 2048
    assert configuration.reading is not None
    assert any("planned for the larger" in warning for warning in configuration.reading.warnings)


def test_a_program_that_passes_over_a_key_is_not_the_recipe_s(recipes: Path) -> None:
    """`trl sft` knows no `max_seq_length` any more, and would cut texts after fewer tokens than the recipe's own program."""
    located = locate(changed(recipes / "sft.yaml", ("max_length: 128", "max_seq_length: 2048")))

    assert located is not None
    assert located.command is None
    assert located.read().workload.training.sequence_length == 2048


@pytest.mark.parametrize("file", ["axolotl.yml", "llama_factory.yaml"])
def test_workers_of_ray_are_gpus(recipes: Path, file: str) -> None:
    """The recipe says on how many it is trained."""
    path = recipes / file
    path.write_text(path.read_text() + "\nuse_ray: true\nray_num_workers: 4\n")

    assert read_configuration(path).workload.parallelism.devices == 4


def test_several_gpus_may_have_a_command_of_their_own(tmp_path: Path) -> None:
    """torchtune's recipes for one GPU do not run on several."""
    (tmp_path / "full.yaml").write_text("model: {_component_: a.b}\noptimizer: {_component_: c.d}\nbatch_size: 2\n")

    with pytest.raises(ConfigError, match="on several GPUs `-- tune run --nproc_per_node 8 full_finetune_distributed --config"):
        read_configuration(tmp_path / "full.yaml")


def test_a_workload_written_for_a_recipe_is_one(recipes: Path) -> None:
    """What was read can be written down as a workload file and read again."""
    workload = read_configuration(recipes / "sft.yaml").workload

    assert Workload.model_validate_json(workload.model_dump_json()) == workload


def test_a_key_that_looks_misspelt_is_told_with_its_line(recipes: Path) -> None:
    """What it was to say is planned as the framework's default, which may take less."""
    recipe = changed(
        recipes / "axolotl.yml",
        ("gradient_accumulation_steps:", "gradient_acumulation_steps:"),
        ("sequence_len:", "sequence_lenn:"),
    )

    (told,) = [warning for warning in read_configuration(recipe).notes if "look misspelt" in warning]

    lines = recipe.read_text().splitlines()
    for wrong, right in (("gradient_acumulation_steps", "gradient_accumulation_steps"), ("sequence_lenn", "sequence_len")):
        number = next(number for number, line in enumerate(lines, start=1) if line.startswith(f"{wrong}:"))
        assert f"`{wrong}` in line {number} (`{right}`?)" in told
    assert told.startswith(f"{recipe}: ")


@pytest.mark.parametrize(
    "line",
    ["load_in_2bit: false", "fsdp_version: 2\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "my_sequence_len_of_old: 7"],
)
def test_other_keys_are_not_called_misspelt(recipes: Path, line: str) -> None:
    """Other digits, the prefix that axolotl strips, a key of the user's own."""
    recipe = changed(recipes / "axolotl.yml", ("tf32: false", line))

    assert not [warning for warning in read_configuration(recipe).notes if "look misspelt" in warning]


def test_a_key_that_is_set_beside_the_slip_is_what_counts(recipes: Path) -> None:
    recipe = changed(recipes / "axolotl.yml", ("tf32: false", "sequence_lenn: 4096"))

    assert not [warning for warning in read_configuration(recipe).notes if "look misspelt" in warning]


@pytest.mark.parametrize(
    "lines",
    ["packing: true", "packing: true\npacking_strategy: bfd", "padding_free: true", "packing: true\nattn_implementation: sdpa"],
)
def test_a_packed_recipe_without_flash_attention_is_refused_with_its_line(recipes: Path, lines: str) -> None:
    """Its mask is as long and as wide as the whole batch: 57.5 GiB in place of 47.0 for 16 texts of 4,096 tokens (SmolLM2-135M)."""
    recipe = changed(recipes / "sft.yaml", ("attn_implementation: flash_attention_2\n", f"{lines}\n"))

    with pytest.raises(ConfigError, match="grows with its square") as error:
        read_configuration(recipe)

    assert error.value.line == 4


@pytest.mark.parametrize(
    "lines",
    ["packing: true\nattn_implementation: flash_attention_2", "packing: true\npacking_strategy: wrapped", "packing: false"],
)
def test_other_packed_recipes_are_planned(recipes: Path, lines: str) -> None:
    """Flash attention makes no mask; rows that are filled by cutting texts are as long as others."""
    recipe = changed(recipes / "sft.yaml", ("attn_implementation: flash_attention_2\n", f"{lines}\n"))

    assert read_configuration(recipe).workload.training.sequence_length == 128


@pytest.mark.parametrize(
    ("text", "title"),
    [
        (
            "base_model: tiny\nadapter: lora\ninput_features: [a]\noutput_features: [b]\ntrainer:\n  batch_size: 8\n",
            "a Ludwig configuration",
        ),
        ("model_name_or_path: tiny\ntemplate: qwen\ninfer_backend: vllm\n", "for inference or export, which trains nothing"),
        ("model_name_or_path: tiny\ntemplate: qwen\nexport_dir: out\n", "for inference or export, which trains nothing"),
        ("policy:\n  model_name: tiny\n  train_micro_batch_size: 4\n", "policy.train_micro_batch_size"),
    ],
    ids=["Ludwig", "inference", "export", "NeMo RL"],
)
def test_configurations_that_are_like_others_are_named_for_what_they_are(tmp_path: Path, text: str, title: str) -> None:
    (tmp_path / "config.yaml").write_text(text)

    with pytest.raises(ConfigError, match=title):
        read_configuration(tmp_path / "config.yaml")


def test_a_ludwig_configuration_that_names_a_model_of_the_hub_is_none_of_axolotl(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("base_model: tiny\nadapter: lora\ntrainer:\n  type: finetune\n  batch_size: 8\n")

    with pytest.raises(ConfigError, match=r"trainer\.batch_size"):
        read_configuration(tmp_path / "config.yaml")


def test_workers_of_ray_that_only_the_environment_asks_for_are_told(recipes: Path) -> None:
    """LLaMA-Factory reads USE_RAY from the environment, and no `use_ray` from the file."""
    recipe = recipes / "llama_factory.yaml"
    recipe.write_text(f"{recipe.read_text()}\nray_num_workers: 4\n")

    configuration = read_configuration(recipe)

    assert configuration.workload.parallelism.devices == 1
    assert any("`ray_num_workers` counts where the environment has USE_RAY=1" in note for note in configuration.notes)

"""Ranks that train a workload together, one of them rehearsed: what each keeps of the model, worked out by hand."""

from __future__ import annotations

import json
from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest

from memplan.errors import UsageError
from memplan.estimators.analytic.parameters import count, parameter_groups, rounded
from memplan.execution.ranks import Ranks
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.workload.workload import Workload
from tests.child.models.test_built_in import contrastive, run, small
from tests.conftest import RehearserOf, SharedRehearser

MIB = 2**20
HAS_DEEPSPEED = find_spec("deepspeed") is not None


@pytest.fixture
def rehearser(rehearser_of: RehearserOf) -> SharedRehearser:
    """One process for all."""
    return rehearser_of("memplan.child.models.built_in:build")


def on(ranks: int, strategy: str, **changes: object) -> dict[str, object]:
    """So many ranks, on machines of eight."""
    return {"devices": min(8, ranks), "nodes": max(1, ranks // 8), "strategy": strategy} | changes


def moments_bytes(workload: Workload, shards: int) -> int:
    """Adam's two moments in fp32 of the first shard of each parameter, cut along its first dimension, each in a block of its own."""
    groups = parameter_groups(workload.model)
    return 2 * sum(group.num_tensors * rounded(4 * -(-group.shape[0] // shards) * prod(group.shape[1:])) for group in groups)


@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_fsdp_keeps_a_shard_of_each_moment(rehearser: SharedRehearser, ranks: int) -> None:
    """To the byte, however many ranks: the first has the largest."""
    workload = small(parallelism=on(ranks, "fsdp"))

    found = run(rehearser, workload)

    assert found.breakdown.optimizer_state_bytes == moments_bytes(workload, ranks)
    assert (found.rank, found.num_ranks) == (0, ranks)


def test_hybrid_sharding_keeps_the_shard_of_its_group(rehearser: SharedRehearser) -> None:
    """Two copies on eight ranks: a quarter each."""
    workload = small(parallelism=on(8, "fsdp", sharding_degree=4))

    assert run(rehearser, workload).breakdown.optimizer_state_bytes == moments_bytes(workload, 4)


def test_fsdp_takes_less_than_ddp_and_more_where_blocks_stay_gathered(rehearser: SharedRehearser) -> None:
    """Eight ranks: every rank whole, whole blocks after forward, shards."""
    peaks = [
        run(rehearser, small(parallelism=on(8, strategy, **kept))).peak_allocated_bytes
        for strategy, kept in (("fsdp", {}), ("fsdp", {"reshard_after_forward": False}), ("ddp", {}))
    ]

    assert peaks == sorted(set(peaks))


@pytest.mark.heavy
def test_ddp_takes_buckets_as_large_as_its_gradients(rehearser: SharedRehearser) -> None:
    """Beside what one GPU takes, and but for rounding; the same for every number of ranks. Each rank has NCCL's buffers."""
    alone, two, many = (run(rehearser, small(parallelism=on(ranks, "ddp"))) for ranks in (1, 2, 512))
    gradients_bytes = 4 * count(parameter_groups(small().model))

    assert two.peak_allocated_bytes - alone.peak_allocated_bytes == pytest.approx(gradients_bytes, rel=0.05)
    assert many.peak_allocated_bytes == two.peak_allocated_bytes
    assert (alone.breakdown.nccl_buffers_bytes, alone.num_ranks) == (0, 1)
    assert min(two.breakdown.nccl_buffers_bytes, many.breakdown.nccl_buffers_bytes) > 0


@pytest.mark.heavy
def test_two_rehearsals_of_one_rank_are_equal(rehearser: SharedRehearser) -> None:
    """DDP makes its buckets anew in the second step, when a thread of NCCL may still hold the first ones: here it has let go of them."""
    peaks = {run(rehearser, small(parallelism=on(2, "ddp"))).peak_reserved_bytes for _ in range(6)}

    assert len(peaks) == 1


def test_fsdp_keeps_whole_gradients_between_micro_batches(rehearser: SharedRehearser) -> None:
    """As Accelerate has it: they are reduced with the last one. They are told as gradients, 4 bytes a parameter."""
    once, twice = (
        run(rehearser, small({"gradient_accumulation_steps": steps, "precision": "bf16-mixed"}, parallelism=on(8, "fsdp")))
        for steps in (1, 2)
    )
    gradients_bytes = 4 * count(parameter_groups(small().model))

    assert twice.breakdown.gradients_bytes >= gradients_bytes
    assert twice.peak_allocated_bytes - once.peak_allocated_bytes == pytest.approx(gradients_bytes, rel=0.1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(small({"precision": "fp16-mixed", "activation_checkpointing": True}), id="fp16"),
        pytest.param(small(model={"lora": {"rank": 4}}), id="adapters"),
        pytest.param(small(model={"ties_embeddings": True}), id="tied"),
        pytest.param(contrastive(), id="contrastive"),
        pytest.param(contrastive(contrastive={"cached_loss_mini_batch_size": 4}), id="cached loss", marks=pytest.mark.heavy),
    ],
)
def test_what_trains_on_one_gpu_trains_on_eight(rehearser: SharedRehearser, workload: Workload, strategy: str) -> None:
    """Three steps, none above the second; where what DDP makes anew in the second is much, a fourth shows that it stays."""
    parallelism = type(workload.parallelism).model_validate(on(8, strategy))

    found = run(rehearser, workload.model_copy(update={"parallelism": parallelism}))

    assert len(found.steps) in ({3, 4} if strategy == "ddp" else {3})
    assert found.breakdown.nccl_buffers_bytes > 0


def test_a_model_by_counts_is_sharded_in_parts(rehearser: SharedRehearser) -> None:
    """An eighth of its moments, and of its weights; gathered is a part at a time."""
    counted = {"kind": "parameters", "num_parameters": 64 * MIB, "activation_bytes_per_sample": 2**20}
    workload = Workload.model_validate({"model": counted, "parallelism": on(8, "fsdp")})

    found = run(rehearser, workload).breakdown

    assert found.optimizer_state_bytes == 8 * 64 * MIB // 8
    assert found.parameters_bytes < 4 * 64 * MIB // 3


def test_a_machine_has_at_most_64_gpus(rehearser: SharedRehearser) -> None:
    """More are more machines."""
    with pytest.raises(UsageError, match="at most 64 GPUs"):
        run(rehearser, small(parallelism={"devices": 65}))


def zero(rehearser: SharedRehearser, stage: int, ranks: int, **training: object) -> Rehearsal:
    return run(rehearser, small({"precision": "bf16-mixed"} | training, parallelism=on(ranks, f"zero{stage}")))


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed")
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_keeps_a_share_of_moments_and_of_the_fp32_weights(rehearser: SharedRehearser, stage: int, ranks: int) -> None:
    """Two bytes a parameter, in stage 3 the rank's share of those, and its share of 4 and of Adam's 8."""
    parameters = count(parameter_groups(small().model))
    found = zero(rehearser, stage, ranks)

    assert found.breakdown.optimizer_state_bytes == pytest.approx(8 * parameters / ranks, rel=0.01)
    least = (2 * parameters / (ranks if stage == 3 else 1)) + 4 * parameters / ranks
    assert found.breakdown.parameters_bytes >= 0.99 * least
    if stage < 3:
        assert found.breakdown.parameters_bytes == pytest.approx(least, rel=0.01)


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed")
def test_zero_has_a_bucket_of_half_a_billion_elements(rehearser: SharedRehearser) -> None:
    """DeepSpeed's default, whatever the model's size."""
    assert all(zero(rehearser, stage, 8).peak_allocated_bytes > 2 * 500_000_000 for stage in (1, 2, 3))


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "use_cache": False,
}  # fmt: skip

BY_HAND = """
import sys
import torch
from transformers import AutoConfig, LlamaForCausalLM

torch.distributed.init_process_group("nccl")
torch.cuda.set_device(0)
settings = {settings}
config = AutoConfig.for_model(settings.pop("model_type"), **settings)
if sys.argv[1] == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(LlamaForCausalLM._from_config(config).cuda(), device_ids=[0])
else:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in reversed(model.model.layers):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

def step():
    ids = torch.randint(0, 8000, (4, 256), device="cuda")
    mask = torch.ones(4, 256, dtype=torch.int64)
    mask[:, -1] = 0
    mask = mask.to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

for _ in range(3):
    step()
"""


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_weights_that_are_loaded_short_are_sharded_in_fp32_under_mixed_precision(rehearser: SharedRehearser) -> None:
    """As Accelerate has it: with them the moments, which a bf16 load would halve."""
    moments = [
        run(
            rehearser,
            Workload.model_validate({
                "model": {"kind": "huggingface", "huggingface_config": json.dumps(LLAMA), "weights_dtype": loaded},
                "training": {"precision": "bf16-mixed", "sequence_length": 64},
                "parallelism": on(8, "fsdp"),
            }),
        ).breakdown.optimizer_state_bytes
        for loaded in ("bfloat16", "float32")
    ]  # fmt: skip

    assert moments[0] == moments[1] > 0


@pytest.mark.heavy
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_workload_takes_what_the_same_training_by_hand_does(
    rehearser: SharedRehearser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """A command program with the same model of transformers on eight GPUs: the same peaks and model states, to the byte."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BY_HAND.replace("{settings}", repr(LLAMA)))
    described = {
        "model": {"kind": "huggingface", "huggingface_config": json.dumps(LLAMA)},
        "training": {"precision": "bf16-mixed", "micro_batch_size": 4, "sequence_length": 256},
        "parallelism": on(8, strategy),
    }

    by_hand = rehearse_script(["train.py", strategy], gpu=find_gpu("a100-80"), ranks=Ranks(8), context_bytes=0)
    workload = run(rehearser, Workload.model_validate(described))

    assert workload.peak_allocated_bytes == by_hand.peak_allocated_bytes
    assert workload.peak_reserved_bytes == by_hand.peak_reserved_bytes
    assert workload.breakdown.nccl_buffers_bytes == by_hand.breakdown.nccl_buffers_bytes
    for states in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert getattr(workload.breakdown, states) == getattr(by_hand.breakdown, states)

"""Programs for several GPUs as people write them, of which one rank is run: what they ask the ranks that are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.execution.ranks import Ranks
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_ranks import Which, rehearse_ranks
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

BEGIN = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
def make(width=512):
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(4)]).cuda()
def batch():
    return torch.randn(64, 512, device="cuda")
"""
"""What the programs share."""

Program = Callable[..., Rehearsal]


@pytest.fixture
def program(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return what rehearses the text of a program as one rank of two, or of as many as asked."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *, num_gpus: int = 2, rank: int = 0, which: Which = "one") -> Rehearsal:
        Path("train.py").write_text(BEGIN + text, encoding="utf-8")
        words = ["torchrun", f"--nproc-per-node={num_gpus}", "train.py"]
        return rehearse_ranks(words, ranks=Ranks(num_gpus, 1, rank), which=which, gpu=find_gpu("h100"), timeout_seconds=300)

    return run


@pytest.mark.heavy
def test_the_ranks_join_when_this_one_has_no_more_inputs(program: Program) -> None:
    """`Join` asks how many still train, and waits until none does."""
    found = program("""
from torch.distributed.algorithms.join import Join
model = torch.nn.parallel.DistributedDataParallel(make())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Join([model]):
    for _ in range(3):
        model(batch()).sum().backward()
        optimizer.step()
""")

    assert (found.verdict, len(found.steps)) == ("fits", 3)


@pytest.mark.heavy
def test_a_size_that_another_rank_sends_is_not_what_was_there_before(program: Program) -> None:
    """Rank 0 says how many elements come; what the tensor held before it came is no answer."""
    found = program(
        """
count = torch.zeros(1, dtype=torch.long, device="cuda")
if rank == 0:
    dist.send(count + 10**6, 1)
else:
    dist.recv(count, 0)
    received = torch.empty(1000 + count.item(), device="cuda")
""",
        rank=1,
    )

    assert found.verdict == "unknown"
    assert found.lower_bound_reasons[0].startswith("sizes were guessed as zero")


@pytest.mark.heavy
def test_a_state_that_other_ranks_have_parts_of_is_said_so(program: Program) -> None:
    """ZeroRedundancyOptimizer gathers what each rank has of the state: copies of this rank have other parts."""
    found = program("""
from torch.distributed.optim import ZeroRedundancyOptimizer
model = torch.nn.parallel.DistributedDataParallel(make())
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
model(batch()).sum().backward()
optimizer.step()
optimizer.consolidate_state_dict()
""")

    assert found.verdict == "unknown"
    assert "gathers the optimizer's state, of which rank 1 has another part" in found.failure.message


@pytest.mark.heavy
def test_each_rank_saves_and_loads_its_own_pieces(program: Program) -> None:
    """Together the copies of one rank have a part of each tensor only; a checkpoint is written and read all the same."""
    found = program(
        """
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
model = fully_shard(make())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    kept = {"model": weights, "optimizer": moments}
    checkpoint.save(kept, checkpoint_id="kept")
    checkpoint.load(kept, checkpoint_id="kept")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
""",
        num_gpus=4,
    )

    assert (found.verdict, found.failure, len(found.steps)) == ("fits", None, 2)


PIPELINE = """
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
widths = [(512, 512), (512, 256), (256, 512), (512, 128)]
parts = {stage: torch.nn.Linear(*widths[stage], bias=False).cuda() for stage in (rank, rank + 2)}
stages = [PipelineStage(part, stage, 4, torch.device("cuda")) for stage, part in parts.items()]
schedule = ScheduleInterleaved1F1B(stages, 4, lambda output, target: (output - target).square().mean())
optimizer = torch.optim.SGD([weight for part in parts.values() for weight in part.parameters()], lr=0.1)
for _ in range(2):
    schedule.step(*([batch()] if rank == 0 else []), **({"target": torch.zeros(64, 128, device="cuda")} if rank == 1 else {}))
    optimizer.step()
"""


@pytest.mark.heavy
def test_what_is_saved_meanwhile_decides_no_size(program: Program) -> None:
    """`async_save` copies all states to the host, biases and counts of steps too: sizes that data decide are found beside it."""
    found = program("""
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
host = dist.new_group(backend="gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(3):
    kept = batch()[torch.arange(64).cuda() % 9 > 2]
    model(kept).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.async_save(states, checkpoint_id=f"step-{number}", process_group=host).result()
""")

    assert (found.verdict, found.lower_bound_reasons) == ("fits", ())
    assert {read.answer for read in found.reads if read.basis == "data"} == {"42"}


@pytest.mark.heavy
def test_stages_of_a_pipeline_that_pass_shapes_to_and_fro(program: Program) -> None:
    """Four stages on two ranks: each waits twice for the other in a forward, and is run again when that has got further."""
    found = program(PIPELINE, which="kinds")

    assert [(each.rank, each.verdict) for each in found.rank_peaks] == [(0, "fits"), (1, "fits")]
    assert found.lower_bound_reasons == ()


BROADCAST = """
count = torch.tensor([1 << 20 if rank == 0 else 1]{device})
dist.broadcast(count, 0{group})
kept = torch.empty(count.item(), 8, device="cuda")
model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    (model(batch()).sum() + kept.sum()).backward()
    optimizer.step()
"""


@pytest.mark.heavy
def test_a_size_that_another_rank_broadcasts_is_not_what_this_one_had(program: Program) -> None:
    """Nobody knows it on the GPU: what the second rank takes is at least what it is with none."""
    found = program(BROADCAST.format(device=', device="cuda"', group=""), rank=1)

    assert found.verdict == "unknown"
    assert "guessed" in found.lower_bound_reasons[0]


@pytest.mark.heavy
def test_a_size_that_another_rank_broadcasts_on_the_host_is_its_own(program: Program) -> None:
    """The first rank is run for it: 2^20 rows of 32 bytes."""
    found = program(BROADCAST.format(device="", group=", group=dist.new_group(backend='gloo')"), rank=1)

    assert found.verdict == "fits"
    assert found.peak_allocated_bytes > 2**25


@pytest.mark.heavy
def test_what_the_ranks_share_is_counted_beside_the_allocator(program: Program) -> None:
    """Asynchronous tensor parallelism writes to each other's memory, which is none of PyTorch's allocator; the second of two ranks."""
    found = program(
        """
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
name = dist.group.WORLD.group_name
enable_symm_mem_for_group(name)
own = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
weight = torch.nn.Parameter(torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.SGD([weight])
gathered, (result,) = torch.ops.symm_mem.fused_all_gather_matmul(own, [weight.detach()], gather_dim=0, group_name=name)
assert (gathered.shape, result.shape) == ((2048, 4096), (2048, 256))
weight.grad = torch.zeros_like(weight)
optimizer.step()
""",
        rank=1,
    )

    assert found.verdict == "fits"
    assert found.breakdown.symmetric_memory_bytes == 10 << 20  # 1024 x 4096 of two bytes, and a page of 2 MiB for signals
    assert found.breakdown.reserved_bytes == found.peak_reserved_bytes
    assert found.device_used.expected_bytes == found.breakdown.total_bytes


@pytest.mark.heavy
def test_a_group_of_the_host_takes_a_timeout(program: Program) -> None:
    """As torchtitan sets one for every group after the first step."""
    found = program("""
model = torch.nn.parallel.DistributedDataParallel(make())
optimizer = torch.optim.SGD(model.parameters())
dist.distributed_c10d._set_pg_timeout(__import__("datetime").timedelta(seconds=9), dist.new_group(backend="gloo"))
model(batch()).sum().backward()
optimizer.step()
""")

    assert (found.verdict, len(found.steps)) == ("fits", 1)


@pytest.mark.heavy
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_keeps_the_optimizer_on_the_host(program: Program, stage: int) -> None:
    """
    Of 4 million parameters the GPU has 2 bytes each (8 MiB), gradients and a bucket while a step lasts, and cuBLAS's workspaces; of Adam's
    12 bytes each, nothing. In stage 3 those are gathered, and a half of them is this rank's shard.
    """
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    found = program(f"""
import deepspeed
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)])
zero = {{"stage": {stage}, "offload_optimizer": {{"device": "cpu"}}, "reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000}}
config = {{"train_micro_batch_size_per_gpu": 4, "bf16": {{"enabled": True}}, "zero_optimization": zero,
          "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4}}}}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(3):
    loss = engine(torch.randn(4, 1024, device=engine.device, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
""")

    assert (found.verdict, len(found.steps)) == ("fits", 3)
    assert (found.breakdown.parameters_bytes, found.breakdown.optimizer_state_bytes) == ((8 if stage == 2 else 12) * 2**20, 0)
    assert found.peak_allocated_bytes - found.breakdown.workspaces_bytes < 32 * 2**20


@pytest.mark.heavy
def test_deepspeed_s_own_adam_needs_no_compiler(program: Program) -> None:
    """Its kernel is compiled by CUDA's toolkit, and allocates nothing: beside 4 million parameters are their two moments, in fp32."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    found = program("""
import deepspeed
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)])
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
assert type(engine.optimizer).__name__ == "FusedAdam"
for _ in range(3):
    engine.backward(engine(torch.randn(4, 1024, device=engine.device)).square().mean())
    engine.step()
""")

    assert (found.verdict, len(found.steps)) == ("fits", 3)
    assert (found.breakdown.parameters_bytes, found.breakdown.optimizer_state_bytes) == (16 * 2**20, 32 * 2**20)


@pytest.mark.heavy
def test_ray_train_starts_the_ranks(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers answer Ray, each as a rank of its own; the one that is asked for is told. DDP has gradients, and buckets as large."""
    pytest.importorskip("ray.train", exc_type=ImportError, reason="the extra ray is not installed, or Ray's own for training is not")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("""
import torch, ray.train.torch
from ray.train import ScalingConfig
def loop(config):
    model = ray.train.torch.prepare_model(torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)]))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(16, 1024, device=ray.train.torch.get_device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ray.train.report({"batch": 16})
ray.train.torch.TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2, use_gpu=True)).fit()
""")

    found = rehearse_ranks(["train.py"], ranks=Ranks(2, 1, 1), which="one", gpu=find_gpu("h100"), timeout_seconds=300)

    assert (found.verdict, found.rank, len(found.steps)) == ("fits", 1, 3)
    assert found.breakdown.parameters_bytes == 8 * 4 * 2**20
    assert found.peak_allocated_bytes >= 5 * 8 * 4 * 2**20

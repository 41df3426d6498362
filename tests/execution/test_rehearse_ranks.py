"""One rank of many: programs that train on several GPUs, of which one process is run and the others are taken for copies of it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import UsageError
from memplan.execution.ranks import Ranks
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_ranks import _all_found, rehearse_ranks
from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.reports.rehearsal_view import view_rehearsal
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

MIB = 2**20

Program = Callable[..., Rehearsal]


@pytest.fixture
def program(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Rehearse the lines of a program as `train.py`: one rank of it, or with *which* those that differ."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, ranks: Ranks, *words: str, which: Any = None, gpu: str = "a100-40") -> Rehearsal:
        (tmp_path / "train.py").write_text(text)
        rehearse = functools.partial(rehearse_ranks, which=which) if which else rehearse_script
        found = rehearse([*words, "train.py"], gpu=find_gpu(gpu), ranks=ranks, timeout_seconds=200)
        assert found.failure is None, found.failure
        assert found.exit_code == 0
        return found

    return run


BEGIN = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, size, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)

def make():
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda()

def train(model, steps=3):
    update = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        update.step()
        update.zero_grad()
"""
"""A model of 32 MiB, trained with Adam."""

DDP = (
    BEGIN
    + """
assert (rank, size, local, torch.cuda.device_count()) == (5, 8, 1, 4), (rank, size, local)
assert os.environ["LOCAL_WORLD_SIZE"] == "4" and os.environ["GROUP_RANK"] == "1"
train(torch.nn.parallel.DistributedDataParallel(make(), device_ids=[local]))
"""
)


@pytest.mark.heavy
def test_torchrun_starts_one_rank_of_several_machines(program: Program) -> None:
    """The sixth of eight, on the second machine, whose head is nowhere: 32 MiB of weights, of gradients and of buckets, 64 of moments."""
    words = ("torchrun", "--nnodes", "2", "--nproc-per-node", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "nowhere.invalid:29500")

    rehearsal = program(DDP, Ranks(4, 2, 5), *words)

    found = rehearsal.breakdown
    assert (found.parameters_bytes, found.gradients_bytes, found.optimizer_state_bytes) == (32 * MIB, 32 * MIB, 64 * MIB)
    assert found.workspaces_bytes >= 32 * MIB
    assert (rehearsal.rank, rehearsal.num_ranks) == (5, 8)
    assert found.nccl_buffers_bytes > 0


@pytest.mark.heavy
def test_without_a_launcher_a_program_finds_the_environment_of_torchrun(program: Program) -> None:
    """The same program, alone."""
    rehearsal = program(DDP, Ranks(4, 2, 5))

    assert rehearsal.breakdown.gradients_bytes == 32 * MIB
    assert "rank 5 of 8" in dict(view_rehearsal(rehearsal, find_gpu("a100-40")).facts)["ranks"]


SPAWNED = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, size):
    dist.init_process_group("nccl", init_method="tcp://localhost:29511", rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024 * (rank + 1), bias=False).to(rank), device_ids=[rank])
    for _ in range(2):
        model(torch.randn(8, 1024, device=rank)).sum().backward()

if __name__ == "__main__":
    mp.spawn(work, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
"""


@pytest.mark.heavy
def test_of_processes_that_the_program_spawns_one_is_the_rank(program: Program) -> None:
    """The third of three, whose layer is 12 MiB; the others wait for its end."""
    rehearsal = program(SPAWNED, Ranks(3, 1, 2))

    assert rehearsal.breakdown.parameters_bytes == 12 * MIB


SHARDED = (
    BEGIN
    + """
from torch.distributed.fsdp import fully_shard
model = make()
for layer in model:
    fully_shard(layer)
fully_shard(model)
train(model)
"""
)


@pytest.mark.heavy
def test_a_sharded_model_takes_its_share(program: Program) -> None:
    """Of 32 MiB each of four ranks keeps 8, and 16 of moments; at the peak three layers of 4 MiB are on their way."""
    rehearsal = program(SHARDED, Ranks(4))

    found = rehearsal.breakdown
    assert (found.parameters_bytes, found.optimizer_state_bytes) == (8 * MIB, 16 * MIB)
    assert found.gradients_bytes >= 8 * MIB
    assert found.activations_bytes <= 13 * MIB
    assert found.batch_data_bytes < MIB
    assert rehearsal.findings == ()


SHARDED_MASKED = SHARDED.replace(
    "train(model)",
    """
labels = torch.arange(64, device="cpu").remainder(4)
for _ in range(2):
    output = model(torch.randn(64, 1024, device="cuda"))
    output[labels.cuda() == 0].sum().backward()
""",
)


@pytest.mark.heavy
def test_the_data_of_a_program_with_a_sharded_model_is_known(program: Program) -> None:
    """DTensor asks by tensors without memory how an operation is sharded: those are not followed."""
    rehearsal = program(SHARDED_MASKED, Ranks(4))

    assert rehearsal.verdict == "fits"
    assert [read.basis for read in rehearsal.reads] == ["data"]


CHECKED = BEGIN + "train(torch.nn.parallel.DistributedDataParallel(make(), device_ids=[local]))\n"


@pytest.mark.heavy
def test_what_each_rank_of_a_large_world_sends_is_known(program: Program) -> None:
    """DDP reads how many parameters each of 512 ranks has: they have as many as this one, and nothing is looked for."""
    assert program(CHECKED, Ranks(8, 64)).reads == ()


FUNCTIONAL = (
    BEGIN
    + """
import torch.distributed._functional_collectives as funcol
group = dist.group.WORLD
number = (torch.arange(100, device="cuda") < 25).sum()
total = funcol.wait_tensor(funcol.all_reduce(number, "sum", group))
most = funcol.all_reduce(number, "max", group)
lengths = funcol.all_gather_tensor(torch.full((2,), 3, device="cuda") + 1, 0, group)
parts = funcol.reduce_scatter_tensor(torch.arange(2 * size, device="cuda") + 1, "sum", 0, group)
sizes = [int(total), int(most), int(lengths.sum()), int(parts.sum())]
assert sizes in ([0] * 4, [25 * size, 25, 8 * size, size * ((2 * rank + 1) + (2 * rank + 2))]), sizes
kept = torch.empty(sum(sizes), 1 << 18, device="cuda")
weight = torch.nn.Parameter(torch.ones(1 << 18, device="cuda"))
(kept * weight).sum().backward()
"""
)


@pytest.mark.heavy
def test_what_functional_collectives_return_is_followed(program: Program) -> None:
    """As DTensor and torchtitan reduce their counts: each rank sends what this one does."""
    rehearsal = program(FUNCTIONAL, Ranks(4))

    assert (rehearsal.verdict, rehearsal.lower_bound_reasons) == ("fits", ())
    assert {read.answer for read in rehearsal.reads} == {"100", "25", "32", "12"}


VALUES = (
    BEGIN
    + """
import torch.distributed as dist
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": rank}] * size, objects
total = torch.tensor([3], device="cuda")
dist.all_reduce(total)
assert total.item() == 3 * size
host = dist.new_group(backend="gloo")
count = torch.tensor([2, 5])
dist.all_reduce(count, group=host)
assert count.tolist() == [2 * size, 5 * size]
dist.all_reduce(count, op=dist.ReduceOp.MAX, group=host)
assert count.tolist() == [2 * size, 5 * size]
parts = [torch.zeros(1) for _ in range(size)]
dist.all_gather(parts, torch.tensor([7.0]), group=host)
assert [part.item() for part in parts] == [7.0] * size
own = torch.zeros(1)
dist.scatter(own, [torch.tensor([float(number)]) for number in range(size)] if rank == 0 else None, group=host)
swapped = torch.zeros(size)
dist.all_to_all_single(swapped, torch.arange(float(size)), group=host)
assert swapped.tolist() == [float(rank)] * size
dist.monitored_barrier(group=host)
dist.barrier()
pair = dist.new_group([0, 1])
if rank < 2:
    total = torch.tensor([3 * size], device="cuda")
    dist.all_reduce(total, group=pair)
    assert total.item() == 6 * size
mask = torch.arange(100, device="cuda") < 25
number = mask.sum()
dist.all_reduce(number)  # as many as all ranks have together
kept = torch.empty(int(number), 1 << 18, device="cuda")
weight = torch.nn.Parameter(torch.ones(1 << 18, device="cuda"))
(kept * weight).sum().backward()
"""
)


@pytest.mark.heavy
def test_what_the_others_send_is_what_this_rank_sends(program: Program) -> None:
    """Objects, tensors of the GPU and of the host; a size that four ranks sum up is that of all: 100 rows of a MiB."""
    rehearsal = program(VALUES, Ranks(4))

    assert rehearsal.peak_allocated_bytes > 100 * MIB
    assert rehearsal.verdict == "fits"


CHAIN = (
    BEGIN
    + """
got = [{"width": 1024}]
if rank:
    got = [None]
    dist.recv_object_list(got, src=rank - 1)
width = got[0]["width"]
layer = torch.nn.Linear(1024, width, bias=False).cuda()
if rank < size - 1:
    dist.send_object_list([{"width": width * 2}], dst=rank + 1)
name = [f"run {rank}"] if rank == 0 else [None]
dist.broadcast_object_list(name, src=0)
assert name == ["run 0"], name
part = [None]
dist.scatter_object_list(part, [number * 10 for number in range(size)] if rank == 0 else None, src=0)
assert part == [rank * 10], part
for _ in range(2):
    layer(torch.randn(8, 1024, device="cuda")).sum().backward()
"""
)


@pytest.mark.heavy
def test_ranks_that_send_each_other_are_all_run_and_the_largest_is_told(program: Program) -> None:
    """Three, each of which makes its layer twice as wide as the one before says: 4, 8 and 16 MiB."""
    rehearsal = program(CHAIN, Ranks(3), which="kinds")

    assert rehearsal.rank == 2
    assert rehearsal.breakdown.parameters_bytes == 16 * MIB
    assert [(peaks.rank, peaks.verdict) for peaks in rehearsal.rank_peaks] == [(0, "fits"), (1, "fits"), (2, "fits")]


@pytest.mark.heavy
def test_a_rank_by_itself_is_as_among_all(program: Program) -> None:
    """To the byte."""
    alone = [program(SHARDED, Ranks(2, 1, rank), which="one") for rank in range(2)]
    together = program(SHARDED, Ranks(2), which="node")

    assert [(each.rank, each.peak_allocated_bytes, each.peak_reserved_bytes) for each in alone] == [
        (each.rank, each.peak_allocated_bytes, each.peak_reserved_bytes) for each in together.rank_peaks
    ]


@pytest.mark.heavy
def test_a_checkpoint_of_the_whole_optimizer_is_made(program: Program) -> None:
    """FullyShardedDataParallel gathers it from ranks that have other parameters than this one."""
    text = (
        BEGIN
        + """
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
model = FSDP(make(), device_id=local, use_orig_params=True)
update = torch.optim.Adam(model.parameters())
model(torch.randn(8, 1024, device="cuda")).sum().backward()
update.step()
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
    assert len(model.state_dict()) == 8
    assert len(FSDP.optim_state_dict(model, update)["state"]) == 8
"""
    )

    rehearsal = program(text, Ranks(4))

    assert rehearsal.peak_allocated_bytes > 32 * MIB


@pytest.mark.heavy
def test_a_program_that_waits_for_others_says_so_where_one_gpu_is_rehearsed(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody comes; it does not hang."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch; torch.zeros(1, device='cuda')\n" + BEGIN)
    words = ["RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "MASTER_ADDR=localhost", "MASTER_PORT=29512", "train.py"]

    rehearsal = rehearse_script(words, gpu=find_gpu("t4"), timeout_seconds=100)

    assert rehearsal.verdict == "unknown"
    assert rehearsal.failure is not None
    assert "waits for 2 processes, and one GPU is rehearsed" in rehearsal.failure.message


@pytest.mark.heavy
def test_a_tensor_of_the_host_that_only_another_rank_has_is_not_made_up(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program fails there, and there is no verdict."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BEGIN + "train(make(), 1)\ndist.recv(torch.zeros(1), 1, group=dist.new_group(backend='gloo'))\n")

    rehearsal = rehearse_script(["train.py"], gpu=find_gpu("t4"), ranks=Ranks(2), timeout_seconds=100)

    assert rehearsal.failure is not None
    assert "waits for a tensor of rank 1" in rehearsal.failure.message


def test_there_is_no_such_rank(torch_build: TorchBuild) -> None:
    """Before anything is started."""
    with pytest.raises(UsageError, match="no rank 9 of 8"):
        rehearse_script(["train.py"], gpu=find_gpu("t4"), ranks=Ranks(8, 1, 9))


@pytest.mark.heavy
def test_at_a_prompt_the_launcher_says_how_many(torch_build: TorchBuild, tmp_path: Path) -> None:
    """`torchrun --nproc-per-node 2` is two; the report says which was run, as text and as JSON."""
    (tmp_path / "train.py").write_text(BEGIN + "train(torch.nn.parallel.DistributedDataParallel(make(), device_ids=[local]))\n")
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--format", "json", "--", "torchrun", "--nproc-per-node", "2"]

    run = subprocess.run([*command, "train.py"], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False, timeout=200)

    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert (told["rank"], told["num_ranks"], told["verdict"]) == (0, 2, "fits")


UNLIKE = (
    BEGIN
    + """
import sys
name, total = torch.cuda.get_device_name(local), torch.cuda.get_device_properties(local).total_memory
assert ("A100" in name) == (local < 2) and (total > 2**34) == (local < 2), (local, name)
assert ["A100" in torch.cuda.get_device_name(number) for number in range(3)] == [True, True, False]
data = torch.empty(torch.cuda.mem_get_info(local)[0] // 2**30 - 2, 2**30, dtype=torch.uint8, device="cuda")
train(torch.nn.parallel.DistributedDataParallel(make(), device_ids=[local]))
"""
)


@pytest.mark.heavy
def test_gpus_of_one_machine_may_be_unlike(program: Program) -> None:
    """One rank on each kind is run, with its own memory; the one that takes most of it is told."""
    kinds = tuple(map(find_gpu, ("a100-40", "a100-40", "t4")))

    found = program(UNLIKE, Ranks(3, kinds=kinds), which="kinds")

    assert (found.rank, found.gpu_name) == (0, kinds[0].name)
    assert [(each.rank, each.gpu_name) for each in found.rank_peaks] == [(0, kinds[0].name), (2, kinds[2].name)]
    assert found.rank_peaks[0].peak_reserved_bytes > 2 * found.rank_peaks[1].peak_reserved_bytes
    told = dict(view_rehearsal(found, kinds[0]).facts)["ranks that were run"]
    assert "reserved on Tesla T4" in told


def test_a_rank_alone_is_told_when_it_has_run_whoever_else_still_waits() -> None:
    """Rank 0 needs an object of rank 1, which sends it and then waits for rank 0 in turn: it is not run again for that."""
    runs: list[int] = []
    num_sent = {0: 0, 1: 0}

    def run(rank: int) -> Rehearsal:
        runs.append(rank)
        has_needed = num_sent[1 - rank] > 0
        num_sent[rank] += 1
        return Rehearsal.model_construct(rank=rank, needed_rank=None if has_needed and rank == 0 else 1 - rank, peers=())

    found = _all_found(lambda: run(0), run, Ranks(2), "one", num_sent.__getitem__)

    assert [rehearsal.rank for rehearsal in found] == [0]
    assert runs == [0, 1, 0]

"""Programs that divide the batch that they are given: planned as a micro-batch, it would be another one than is trained with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memplan.api.configuration import command_configuration
from memplan.errors import UsageError
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.programs.command_line import command_program
from memplan.programs.command_program import CommandProgram
from tests.estimators.planning import planned
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

TRAINS = """
import json, os, sys
import torch

kind, config = sys.argv[1], json.load(open(sys.argv[2]))
batch, parts = config["batch_size"], config["accumulate"]
divisor = {"micro": 1, "step": parts, "gpus": int(os.environ.get("WORLD_SIZE", 1)), "halves": 2}[kind]
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    for _ in range(parts):
        inputs = torch.randn(batch // divisor, 1024).cuda()
        model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def program_of(
    folder: Path, kind: str, *launcher: str, batch_size: int = 8, accumulate: int = 2, is_global: bool = False
) -> CommandProgram:
    """Return the program of that *kind*, its batch and accumulation in a file."""
    script, config = folder / "train.py", folder / "config.json"
    script.write_text(TRAINS)
    config.write_text(f'{{"batch_size": {batch_size}, "accumulate": {accumulate}}}\n')
    batch = "effective_batch_size" if is_global else "micro_batch_size"
    fields = [f"{batch}={config}:batch_size", f"gradient_accumulation_steps={config}:accumulate"]
    num_gpus = int(launcher[-1]) if launcher else 1
    words = [*(launcher or [sys.executable]), str(script), kind, str(config)]
    program = command_configuration(words, fields=fields, num_gpus=num_gpus).program
    assert isinstance(program, CommandProgram)
    return program


def test_a_batch_that_accumulation_divides_is_told(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """With what was run, and what to say instead."""
    with pytest.raises(UsageError) as error:
        planned(program_of(tmp_path, "step"), gpu, target=4096)

    config = tmp_path / "config.json"
    assert error.value.message == (
        f"batch_size in {config} is the batch of an optimizer step, and not a micro-batch: "
        "with 8, which 2 accumulation steps divide, the program runs 4 samples at once"
    )
    assert error.value.hint == (
        f'say so: `fields=["effective_batch_size={config}:batch_size", "gradient_accumulation_steps={config}:accumulate"]`'
    )


@pytest.mark.heavy
def test_what_is_to_be_said_plans_that_program(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """Its micro-batch is the one of a program that takes it as such: 8 of 2 × 4 are 4 at once."""
    divided = program_of(tmp_path, "step", is_global=True)
    plan, _ = planned(divided, gpu, target=4096)
    (tmp_path / "other").mkdir()
    whole, _ = planned(program_of(tmp_path / "other", "micro", batch_size=4), gpu, target=4096)

    assert (divided.training.micro_batch_size, divided.effective_batch_size) == (4, 8)
    assert plan.effective_batch_size == 4096
    assert plan.after.training.gradient_accumulation_steps > 1
    assert plan.after.training == whole.after.training.model_copy(update={"target_effective_batch_size": 8})


@pytest.mark.heavy
def test_halves_that_accumulation_does_not_make_are_no_such_batch(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """Without accumulation they are halves too: pairs, or two losses of one batch."""
    plan, _ = planned(program_of(tmp_path, "halves"), gpu, target=4096)

    assert plan.fits


@pytest.mark.heavy
def test_a_batch_of_all_gpus_is_told(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """As the scripts have it that divide their batch by the number of processes."""
    launcher = ("torchrun", "--nproc-per-node", "2")
    with pytest.raises(UsageError, match=r"is the batch of all GPUs.* with \d+, which 2 GPUs divide, the program runs \d+ samples at once"):
        planned(program_of(tmp_path, "gpus", *launcher, accumulate=1), gpu, target=100_000)


@pytest.mark.heavy
def test_a_variable_of_the_environment_is_told_by_its_name(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """As it is typed."""
    text = TRAINS.replace("json.load(open(sys.argv[2]))", '{"batch_size": int(os.environ["BATCH"]), "accumulate": int(sys.argv[2])}')
    (tmp_path / "train.py").write_text(text)
    words = [sys.executable, str(tmp_path / "train.py"), "step", "{gradient_accumulation_steps}"]
    program = command_program(words, fields=["micro_batch_size=BATCH"]).with_training(micro_batch_size=8)

    with pytest.raises(UsageError, match=r"^BATCH is the batch of an optimizer step") as error:
        planned(program, gpu, target=4096)

    assert error.value.hint == 'say so: `fields=["effective_batch_size=BATCH"]`'


@pytest.mark.heavy
def test_a_word_of_the_command_is_told_by_its_placeholder(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """There is no key to name."""
    (tmp_path / "train.py").write_text(TRAINS.replace("json.load(open(sys.argv[2]))", "json.loads(sys.argv[2])"))
    values = '{"batch_size": {micro_batch_size}, "accumulate": {gradient_accumulation_steps}}'
    program = command_program([sys.executable, str(tmp_path / "train.py"), "step", values]).with_training(micro_batch_size=8)

    with pytest.raises(UsageError, match="its batch is the batch of an optimizer step") as error:
        planned(program, gpu, target=4096)

    assert error.value.hint == "write {effective_batch_size} where {micro_batch_size} is"


CUTS = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
asked = int(sys.argv[1])
batch = {"cut": min(asked, 16), "given": asked, "otherwise": 16}[sys.argv[2]]
parts = max(1, asked // 16) if sys.argv[2] == "cut" else 1
samples = TensorDataset(torch.zeros(4000, 64, 256))
model = torch.nn.Linear(256, 256).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    for number, (rows,) in enumerate(DataLoader(samples, batch_size=batch, shuffle=True), start=1):
        model(rows.cuda()).square().sum().backward()
        torch.zeros(asked, 256, device="cuda")
        if number % parts == 0:
            update.step()
            update.zero_grad()
"""


@pytest.mark.heavy
@pytest.mark.parametrize("starts_at", [1, 512], ids=["small", "large"])
def test_a_batch_that_the_program_cuts_is_as_large_as_its_parts(
    torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path, starts_at: int
) -> None:
    """As many examples of accelerate do: the plan is what is trained with at once, found in a few runs, whichever size is run first."""
    (tmp_path / "train.py").write_text(CUTS)
    program = command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}", "cut"])

    plan, told = planned(program.with_training(micro_batch_size=starts_at), gpu)

    assert (plan.fits, plan.after.training.micro_batch_size) == (True, 16)
    assert "the program trains with no more than 16 samples at once, and cuts a larger batch into parts" in plan.reasons[0]
    assert len(told) <= 5


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["given", "otherwise"])
def test_a_number_that_cuts_no_batch_is_no_limit(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path, kind: str) -> None:
    """It is the batch, or says nothing of that of the training: fewer than the batch has show which."""
    (tmp_path / "train.py").write_text(CUTS)

    plan, _ = planned(command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}", kind]), gpu)

    assert plan.after.training.micro_batch_size > 16

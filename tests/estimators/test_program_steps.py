"""Programs of the user's own, planned: they are run with other values."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest

import memplan
from memplan.errors import NotRehearsedError, SizeRefusedError
from memplan.estimators import beside
from memplan.estimators.rehearsal_cache import RehearsalCache
from memplan.estimators.rehearsed import RehearsedEstimator
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.planner.decision import FEWEST_THAT_MOST_TAKE
from memplan.planner.plan import Plan
from memplan.programs.command_line import command_program
from memplan.programs.command_program import CommandProgram
from memplan.programs.function_program import function_program
from memplan.units import MIB
from tests.estimators.planning import PROGRAM, Told, command, planned


@pytest.fixture(scope="module")
def filled(torch_build: TorchBuild, gpu: GpuSpec, cache: Path) -> tuple[Plan, Told]:
    """A plan that fills the GPU."""
    return planned(command("{micro_batch_size}", 1, 100_000, 1024), gpu, cache)


@pytest.mark.heavy
def test_what_is_planned_fits_when_it_is_rehearsed_afresh(filled: tuple[Plan, Told], gpu: GpuSpec) -> None:
    """On the GPU itself, to the byte what the plan says of it; and the next size is over the budget."""
    plan, told = filled
    size = plan.after.training.micro_batch_size
    assert isinstance(plan.after, CommandProgram)

    again = rehearse_script(plan.after.words, gpu=gpu, steps=3, is_heard=False)

    assert (plan.fits, again.verdict) == (True, "fits")
    assert again.peak_reserved_bytes == plan.stages[0].estimate.peak_reserved_bytes
    assert {size, size + 1} <= {micro for micro, _ in told}
    assert re.match(rf"micro-batch {size}: the largest that fits; {size + 1} (would be|may be up to) ", plan.reasons[0])


@pytest.mark.heavy
def test_a_few_runs_find_the_largest(filled: tuple[Plan, Told]) -> None:
    """The fewest that most programs take, one that it says fits for sure, and those about the end, where the line through both leads."""
    _, told = filled
    assert told[0] == (FEWEST_THAT_MOST_TAKE, 1)
    assert len(told) <= 6


def test_a_second_plan_runs_nothing_until_something_changes(
    filled: tuple[Plan, Told], gpu: GpuSpec, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it read a trace: that of a program which evaluates first may have millions of events."""
    plan, _ = filled
    program = command("{micro_batch_size}", 1, 100_000, 1024)
    read: list[tuple[str, int]] = []
    monkeypatch.setattr(RehearsalCache, "get_trace", lambda _, *place: read.append(place))

    again, told = planned(program, gpu, cache)

    assert (told, read) == ([], [])
    assert again.model_dump_json() == plan.model_dump_json()


COUNTS_HITS = """
import sys, torch
batch, model = int(sys.argv[1]), torch.nn.Linear(1024, 1024).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    made = model(torch.ones(batch, 1024, device="cuda"))
    made.square().mean().backward()
    update.step()
    hits = made.argmax(1).eq(torch.zeros(batch, dtype=torch.long).cuda()).sum().item()
    if hits > 3000:
        kept = torch.empty(2**30, device="cuda")
"""
"""Its hits are all or none; from 3,001 on it takes 4 GiB."""


@pytest.mark.heavy
def test_values_that_decide_nothing_are_not_found_with_each_size_that_is_tried(
    torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path
) -> None:
    """But with each that is recommended: there they may decide something."""
    (tmp_path / "train.py").write_text(COUNTS_HITS)
    program = command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"])
    estimator = RehearsedEstimator(RehearsalCache(tmp_path / "cache"), is_slow=True)

    def of(size: int) -> Rehearsal:
        return estimator(program.with_training(micro_batch_size=size), gpu, None)

    with estimator.searching():
        first, small, large = of(64), of(2000), of(4000)
    assert (first.values_effect, small.values_effect, large.values_effect) == ("nothing", "taken_for_nothing", "taken_for_nothing")
    whole, num_before, larger = of(2000), estimator.num_corrections, of(4000)

    assert (whole.values_effect, whole.device_used, num_before) == ("nothing", small.device_used, 0)
    assert (larger.values_effect, large.peak_reserved_bytes < 2**30, estimator.num_corrections) == ("sizes", True, 1)
    assert larger.peak_reserved_bytes > 2**32
    with estimator.searching():
        assert of(4000) == larger  # it is known now
        assert of(3000).values_effect == "nothing"
    again = RehearsedEstimator(RehearsalCache(tmp_path / "cache"), is_slow=True)
    assert again(program.with_training(micro_batch_size=4000), gpu, None).peak_reserved_bytes == larger.peak_reserved_bytes


@pytest.mark.heavy
def test_a_plan_is_made_again_where_values_decide_something_with_what_it_would_recommend(
    torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path
) -> None:
    """Not one size down after the other: from 65,536 to 3,000, the last with fewer hits than take 4 GiB. What is told of is run so too."""
    (tmp_path / "train.py").write_text(COUNTS_HITS)
    program = command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"])
    small = gpu.model_copy(update={"total_memory_bytes": 3 * 2**30})

    plan, told = planned(program, small, tmp_path / "cache")
    again, _ = planned(program, small, tmp_path / "cache")

    assert plan.after.training.micro_batch_size == 3000
    assert "3001 would be " in plan.reasons[0]
    assert len(told) < 60
    assert again.after.training.micro_batch_size == 3000


@pytest.mark.heavy
def test_sizes_that_read_other_samples_are_kept_too(torch_build: TorchBuild, gpu: GpuSpec, cache: Path, tmp_path: Path) -> None:
    """A larger batch reads more files than the runs before it; a size that the program refuses is not asked again either."""
    (tmp_path / "samples").mkdir()
    for number in range(64):
        (tmp_path / "samples" / f"{number}.bin").write_bytes(bytes(1024))
    (tmp_path / "train.py").write_text(READS_ITS_SAMPLES.replace("% 2", "% 4"))
    program = command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}", "20000"])

    plan, first = planned(program, gpu, cache, target=64)
    again, told = planned(program, gpu, cache, target=64)

    assert first[0] == (FEWEST_THAT_MOST_TAKE, 1)  # refused
    assert len(first) > 2
    assert told == []
    assert again.model_dump_json() == plan.model_dump_json()


@pytest.mark.heavy
@pytest.mark.parametrize("target", [8, None])
def test_where_nothing_fits_the_smallest_size_that_runs_says_by_how_much(
    torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path, target: int | None
) -> None:
    """And not that the program refuses a micro-batch of 1."""
    (tmp_path / "samples").mkdir()
    for number in range(8):
        (tmp_path / "samples" / f"{number}.bin").write_bytes(bytes(1024))
    (tmp_path / "train.py").write_text(READS_ITS_SAMPLES)

    plan, _ = planned(command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}", "200000"]), gpu, target=target)

    assert (plan.fits, plan.stages[0].planned.micro_batch_size) == (False, 2)
    assert plan.missing_bytes > 512 * MIB  # weights of 1024 x 200,000 fp32 and their gradients are 1.53 GiB


READS_ITS_SAMPLES = """
import sys
from pathlib import Path

import torch

batch = int(sys.argv[1])
assert batch % 2 == 0, "the batch has to be even"
model = torch.nn.Linear(1024, int(sys.argv[2])).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(100):
    samples = [(Path(__file__).parent / "samples" / f"{number}.bin").read_bytes() for number in range(batch)]
    model(torch.tensor([list(sample) for sample in samples], dtype=torch.float32).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


LOADS_WEIGHTS = """
import sys, torch
batch = int(sys.argv[1])
loaded = torch.empty(200 * 2**20, dtype=torch.uint8, device="cuda")
del loaded
torch.cuda.empty_cache()
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(100):
    texts = [torch.randn(1, 64, 1024, device="cuda") for _ in range(batch)]  # other calls for another batch: no size is worked out
    model(torch.cat(texts)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""At the peak of small batches weights are loaded; each sample takes some times 256 KiB."""


@pytest.mark.heavy
def test_a_peak_while_weights_are_loaded_says_nothing_of_the_steps(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """It is the same for small batches, and a line through them would say that every batch fits."""
    (tmp_path / "train.py").write_text(LOADS_WEIGHTS)

    plan, told = planned(command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"]), gpu)

    assert plan.fits
    assert max(size for size, _ in told) < 4 * plan.after.training.micro_batch_size
    assert len(told) <= 12


@pytest.mark.heavy
def test_an_error_of_many_lines_is_told_by_its_first(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """The program's own words, behind the hint, have the others, and of a long one as much."""
    text = "import torch\ntorch.zeros(1).cuda()\nraise OSError('no compiler: ' + 'x' * 5000 + '\\ncompilation terminated')\n"
    (tmp_path / "train.py").write_text(text)

    with pytest.raises(NotRehearsedError, match=r"train.py:3: OSError: no compiler: x+ …") as raised:
        planned(command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"]), gpu)

    assert "compilation terminated" in str(raised.value.hint)
    assert max(map(len, f"{raised.value.message}\n{raised.value.hint}".splitlines())) < 500


@pytest.mark.heavy
def test_a_changed_source_is_run_again(torch_build: TorchBuild, gpu: GpuSpec, cache: Path, tmp_path: Path) -> None:
    """One with a smaller network allows more."""
    copy = tmp_path / "train.py"
    shutil.copy(PROGRAM, copy)
    program = command_program([sys.executable, str(copy), "{micro_batch_size}", "1", "100000", "1024"])
    program = program.with_training(micro_batch_size=64)
    rehearsals = [RehearsedEstimator(RehearsalCache(cache), is_slow=True) for _ in range(3)]

    first = rehearsals[0](program, gpu, None)
    kept = rehearsals[1](program, gpu, None)
    copy.write_text(copy.read_text().replace("2 * features", "1 * features"))
    changed = rehearsals[2](program, gpu, None)

    assert kept.peak_allocated_bytes == first.peak_allocated_bytes
    # half of two layers of 1024 x 2048 fp32 weights, each with its gradient and two moments
    assert first.peak_allocated_bytes - changed.peak_allocated_bytes > 4 * 2 * 1024 * 1024 * 4


@pytest.mark.heavy
def test_accumulation_makes_up_the_target(torch_build: TorchBuild, gpu: GpuSpec, cache: Path) -> None:
    """It is run with two micro-batches, and counted."""
    plan, told = planned(command("{micro_batch_size}", "{gradient_accumulation_steps}", 100_000, 1024), gpu, cache, target=1024)

    assert plan.fits
    assert plan.effective_batch_size == 1024
    assert plan.after.training.gradient_accumulation_steps > 2
    assert {steps for _, steps in told} == {2}


@pytest.mark.heavy
def test_a_file_is_read_with_the_values_that_are_tried(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """The file itself stays as it is; the plan knows the present values."""
    file = tmp_path / "config.json"
    text = '{"batch_size": 8, "accumulate": 2}\n'
    file.write_text(text)
    fields = [f"micro_batch_size={file}:batch_size", f"gradient_accumulation_steps={file}:accumulate"]
    program = command_program([sys.executable, str(PROGRAM), str(file)], fields=fields)

    plan, _ = planned(program, gpu, target=64)

    assert file.read_text() == text
    assert plan.stages[0].present.micro_batch_size == 8
    assert plan.stages[0].estimate.peak_allocated_bytes > plan.stages[0].present_estimate.peak_allocated_bytes + MIB
    assert plan.effective_batch_size == 64


def test_a_guess_runs_nothing_though_the_program_has_changed_meanwhile(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """What was kept of its runs is not at hand any more. It was run again for that, with the size that the guess was for."""
    script = tmp_path / "train.py"
    shutil.copy(PROGRAM, script)
    program = command_program([sys.executable, str(script), "{micro_batch_size}", "1", "100000", "1024"])
    told: list[int] = []
    rehearsals = RehearsedEstimator(RehearsalCache(tmp_path / "cache"), lambda step: told.append(step.micro_batch_size), is_slow=True)
    for size in (64, 128):
        rehearsals(program.with_training(micro_batch_size=size), gpu, None)
    script.write_text(script.read_text() + "# changed\n")
    rehearsals(program.with_training(micro_batch_size=32), gpu, None)

    guessed = rehearsals.quick_estimate(program.with_training(micro_batch_size=256), gpu, None)

    assert told == [64, 128, 32]
    assert guessed is not None


EVALUATES_FIRST = """
import time, torch
def evaluate():
    time.sleep(4)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
evaluate()
for number in range(8):
    model(torch.randn({micro_batch_size}, 64, device="cuda")).sum().backward()
    optimizer.step()
    if number == 1:
        evaluate()
"""


@pytest.mark.heavy
def test_a_program_that_evaluates_is_told_with_the_line_that_it_is_at(
    torch_build: TorchBuild, gpu: GpuSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first step, or between two: a person sees what takes so long."""
    monkeypatch.setattr("memplan.execution.program_runs.ASKED_EVERY_SECONDS", 1.0)
    told: list[str | None] = []
    program = command_program([sys.executable, "-c", EVALUATES_FIRST])

    RehearsedEstimator(on_rehearsal=lambda step: told.append(step.where), is_slow=True)(program, gpu, None)

    assert told[0] is None
    assert "no optimizer step yet, at <string>:7, in `evaluate` of <string>:4" in told[1:]
    assert "between optimizer steps, at <string>:12, in `evaluate` of <string>:4" in told[1:]


ACCUMULATES = """
import sys, time, torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    for _ in range(int(sys.argv[1]) // {micro_batch_size}):
        model(torch.randn({micro_batch_size}, 64, device="cuda")).sum().backward()
        time.sleep(0.05)
    optimizer.step()
"""


@pytest.mark.heavy
def test_many_backward_passes_without_a_step_are_told_with_what_may_be_a_number(
    torch_build: TorchBuild, gpu: GpuSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of a whole step, which the program cuts into as many parts as it takes."""
    monkeypatch.setattr("memplan.execution.program_runs.ASKED_EVERY_SECONDS", 1.0)
    told: list[str] = []
    program = command_program([sys.executable, "-c", ACCUMULATES, "64"])

    RehearsedEstimator(on_rehearsal=lambda step: told.append(step.where or ""), is_slow=True)(program, gpu, None)

    many = [where for where in told if "`{effective_batch_size}` belongs in its place" in where]
    assert re.match(r"(no optimizer step yet|between optimizer steps) after \d+ backward passes, at <string>:\d", many[0])


TAKES_A_PORT = """
import runpy, socket, sys
taken = socket.create_server(("127.0.0.1", int(sys.argv.pop(1))))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.heavy
def test_runs_that_are_in_each_others_way_are_run_again_alone(
    filled: tuple[Plan, Told], gpu: GpuSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two at once one finds its port taken: that is no size that the program refuses."""
    monkeypatch.setattr(beside, "num_processors", lambda: 2)
    (tmp_path / "train.py").write_text(TAKES_A_PORT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, str(tmp_path / "train.py"), port, PROGRAM, "{micro_batch_size}", 1, 100_000, 1024]

    plan, told = planned(command_program(list(map(str, words))), gpu)

    assert plan.after.training.micro_batch_size == filled[0].after.training.micro_batch_size
    assert told == filled[1]


SETTLES_LATE = """
import sys, torch
model = torch.nn.Linear(1024, 1024).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    model(torch.zeros(int(sys.argv[1]) * 256, 1024).cuda()).sum().backward()
    for number in range(max(0, min(step, 5) - 2)):
        torch.empty(2**24 * (number + 1), dtype=torch.uint8, device="cuda")
    update.step()
"""


@pytest.mark.heavy
def test_a_program_whose_fourth_step_reserves_more_is_planned_with_eight(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """Here the fifth and the sixth reserve yet more: three steps would be 96 MiB below what it takes."""
    (tmp_path / "train.py").write_text(SETTLES_LATE)

    plan, _ = planned(command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"]), gpu)

    assert isinstance(plan.after, CommandProgram)
    again = rehearse_script(plan.after.words, gpu=gpu, is_heard=False)
    assert (len(again.steps), again.verdict) == (12, "fits")
    assert again.peak_reserved_bytes == plan.stages[0].estimate.peak_reserved_bytes


PADDED_BY_ITSELF = """
import sys, torch
batch = int(sys.argv[1])
model = torch.nn.Linear(1024, 1024).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for longest in (9, 5, 60, 20, 33, 7, 50, 12):
    texts = torch.zeros(batch, 64 if batch > 8 else longest, 1024).cuda()
    model(texts).square().sum().backward()
    update.step()
    update.zero_grad()
"""


@pytest.mark.heavy
def test_steps_that_differ_with_another_batch_are_told_of(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """Of many texts the longest is mostly as long: in a few steps of the answer nothing shows that a later one may be longer."""
    (tmp_path / "train.py").write_text(PADDED_BY_ITSELF)

    plan, _ = planned(command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"]), gpu)

    decided = plan.stages[0].estimate
    assert isinstance(decided, Rehearsal)
    (found,) = (finding for finding in decided.findings if finding.kind == "varying_steps")
    assert plan.after.training.micro_batch_size > 8
    assert found.message.startswith("with another batch its steps differ, for a reason that the shapes of batches do not show")
    assert len(decided.steps) == 8


OBJECTS = """
import random, torch

def build(device, batch=2):
    model = torch.nn.Linear(1024, 1024).to(device)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    rng = random.Random(0)

    def step():
        objects = sum(rng.randint(1, 40) for _ in range(batch))
        model(torch.zeros(64 * objects, 1024, device=device)).square().sum().backward()
        update.step()
        update.zero_grad()

    return step
"""


@pytest.mark.heavy
def test_the_batches_of_a_function_that_differ_are_allowed_for(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """In a large batch they differ by less than shows in three steps: with a small one it was seen. A later step is within the bound."""
    (tmp_path / "objects.py").write_text(OBJECTS)
    source = f"{tmp_path / 'objects.py'}:build"

    plan = memplan.plan(source, gpu=gpu)

    size = plan.after.training.micro_batch_size
    decided = plan.stages[0].estimate
    assert isinstance(decided, Rehearsal)
    assert plan.fits
    assert len(decided.steps) == 10
    assert any("let the function make its largest; the upper bound includes " in warning for warning in plan.warnings)
    long = memplan.rehearse(source, gpu=gpu, values={"batch": size}, steps=100)
    assert decided.device_used.expected_bytes < long.device_used.expected_bytes <= decided.device_used.high_bytes


@pytest.mark.heavy
def test_a_function_fills_the_gpu(torch_build: TorchBuild, gpu: GpuSpec) -> None:
    """Its arguments are its variables; a size is run as it would be by itself."""
    plan = memplan.plan(f"{PROGRAM}:build", gpu=gpu, pins={"features": 512})
    size = plan.after.training.micro_batch_size
    rehearsal = memplan.rehearse(f"{PROGRAM}:build", gpu=gpu, values={"batch": size, "features": 512, "accumulation": 1}, steps=3)

    assert plan.fits
    assert rehearsal.peak_reserved_bytes == plan.stages[0].estimate.peak_reserved_bytes
    assert function_program(f"{PROGRAM}:build").variables == {"micro_batch_size", "gradient_accumulation_steps", "features"}


GROWING = """
import torch
def build(device, batch=8):
    weight = torch.nn.Parameter(torch.zeros(1024, device=device))
    optimizer = torch.optim.SGD([weight])
    kept = []
    def step():
        kept.append(torch.zeros(2**20, device=device))
        (torch.ones(batch, 1024, device=device) * weight).sum().backward()
        optimizer.step()
    return step
"""


@pytest.mark.heavy
def test_a_function_that_takes_more_from_step_to_step_is_planned_with_ten(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """Of what it keeps, 4 MiB a step, all ten count."""
    (tmp_path / "grows.py").write_text(GROWING)

    plan = memplan.plan(f"{tmp_path / 'grows.py'}:build", gpu=gpu, pins={"micro_batch_size": 8})

    assert 40 * MIB < plan.stages[0].estimate.peak_allocated_bytes < 44 * MIB


PADDED = """
import sys, torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

lengths = [64 + index % 3 for index in range(600)]
lengths[500] = 4096  # one long text, late in the epoch
data = [torch.randn(length, 256) for length in lengths]
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(data, batch_size=int(sys.argv[1]), collate_fn=lambda texts: pad_sequence(texts, batch_first=True)):
    model(batch.cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.heavy
def test_the_longest_batch_of_an_epoch_decides(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """Where batches differ in shape the first few are not the largest: what is planned runs through the whole epoch."""
    script = tmp_path / "train.py"
    script.write_text(PADDED)
    plan, _ = planned(command_program([sys.executable, str(script), "{micro_batch_size}"]), gpu)
    assert isinstance(plan.after, CommandProgram)

    epoch = rehearse_script(plan.after.words, gpu=gpu, is_heard=False)

    assert plan.fits
    assert epoch.verdict == "fits"
    # what the step before left, a shorter batch or a longer one, may be there too
    assert epoch.peak_allocated_bytes == pytest.approx(plan.stages[0].estimate.peak_allocated_bytes, rel=0.01)


MASKED = """
import sys
import torch
batch = int(sys.argv[1])
class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 20
    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(index)
        return torch.zeros(64, dtype=torch.int64), torch.rand(64, generator=chance) < 0.15
model = torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.Linear(32, 50000)).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for texts, masked in torch.utils.data.DataLoader(Texts(), batch_size=batch):
    states = model[0](texts.cuda())
    torch.nn.functional.cross_entropy(model[1](states[masked.cuda()]), torch.zeros(int(masked.sum()), dtype=torch.int64).cuda()).backward()
    update.step()
    update.zero_grad()
"""


@pytest.mark.heavy
def test_batches_of_one_shape_whose_values_decide_sizes_leave_room_for_a_larger_step(
    torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path
) -> None:
    """As in a masked language model: the logits are of the tokens that are masked, and no block that is cached serves a step with more."""
    (tmp_path / "train.py").write_text(MASKED)
    program = command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"])

    plan, told = planned(program, gpu)

    decided = plan.stages[0].estimate
    assert isinstance(decided, Rehearsal)
    assert decided.later_step_cached_bytes > 0.05 * decided.peak_reserved_bytes
    assert decided.device_used.high_bytes >= decided.device_used.expected_bytes + decided.later_step_bytes
    (found,) = (finding for finding in decided.findings if finding.kind == "varying_steps")
    assert "the values in their batches, which are of one shape, decide sizes" in found.message
    assert "No block that PyTorch has cached serves a step that is larger than all before" in found.message
    runs = Counter(size for size, _ in told)
    assert max(runs.values()) <= 2  # once more where it was run before its program was known to vary


DAMAGED = """
import sys
import torch
class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        if index == 37:
            raise ValueError("bits must be between 1 and 8")
        return torch.zeros(16)
layer = torch.nn.Linear(16, 16).cuda()
update = torch.optim.SGD(layer.parameters(), lr=0.1)
for pictures in torch.utils.data.DataLoader(Pictures(), batch_size=int(sys.argv[1])):
    layer(pictures.cuda()).sum().backward()
    update.step()
"""


def test_a_sample_that_cannot_be_read_ends_a_plan_and_refuses_no_batch(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """Whatever the batch, its epoch has it: smaller ones that do not come to it in a few steps are no answer."""
    (tmp_path / "train.py").write_text(DAMAGED)
    program = command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"])

    with pytest.raises(NotRehearsedError) as raised:
        planned(program, gpu)

    assert not isinstance(raised.value, SizeRefusedError)
    assert "ValueError: bits must be between 1 and 8" in raised.value.message
    assert str(raised.value.hint).startswith("its dataset raised that for one sample, which says nothing of a batch")

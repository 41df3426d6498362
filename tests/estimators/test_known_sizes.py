"""Sizes that programs refuse, or that make no difference: they are known, and not run again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import memplan
from memplan.errors import NotRehearsedError, SizeRefusedError, UsageError
from memplan.estimators.rehearsal_cache import RehearsalCache
from memplan.estimators.rehearsed import RehearsedEstimator
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.programs.command_line import command_program
from tests.estimators.planning import PROGRAM, command, planned


@pytest.mark.heavy
def test_a_refused_size_is_no_size_that_is_too_large(torch_build: TorchBuild, gpu: GpuSpec, cache: Path) -> None:
    """The program says why; sizes beyond it are found all the same, and it is not run with that size again."""
    program = command("{micro_batch_size}", 1, 100_000, 1024)
    rehearsals = RehearsedEstimator(RehearsalCache(cache), is_slow=True)
    rehearsals(program.with_training(micro_batch_size=2), gpu, None)

    for estimator in (rehearsals, RehearsedEstimator(RehearsalCache(cache), is_slow=True)):
        with pytest.raises(memplan.MemplanError, match=r"with a micro-batch of 3 .*a batch of 3 is odd"):
            estimator(program.with_training(micro_batch_size=3), gpu, None)


@pytest.mark.heavy
def test_a_size_that_fails_before_any_has_run_is_not_run_again(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """One that runs says that it is the size, and not the program: the next plan knows that."""
    program = command("{micro_batch_size}", 1, 100_000, 1024)
    first = RehearsedEstimator(RehearsalCache(tmp_path), is_slow=True)
    with pytest.raises(memplan.MemplanError, match="a batch of 3 is odd"):
        first(program.with_training(micro_batch_size=3), gpu, None)
    first(program.with_training(micro_batch_size=2), gpu, None)

    told: list[int] = []
    second = RehearsedEstimator(RehearsalCache(tmp_path), is_slow=True, on_rehearsal=lambda step: told.append(step.micro_batch_size))
    with pytest.raises(memplan.MemplanError, match=r"with a micro-batch of 3 .*a batch of 3 is odd"):
        second(program.with_training(micro_batch_size=3), gpu, None)

    assert told == []


@pytest.mark.heavy
def test_a_program_that_never_runs_is_told_so(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """With what it said, after two sizes, and no plan; after four, where what it says may be of the size."""
    script = tmp_path / "train.py"
    script.write_text("import os\nos.environ['NOTHING_LIKE_IT']\n")

    for program, said in (
        (command_program([sys.executable, str(script), "{micro_batch_size}"]), "1 and 2 alike, .*KeyError: 'NOTHING_LIKE_IT'"),
        (
            command("{micro_batch_size}", "one", 100_000, 1024),
            "1, 2, 4 and 8 alike, the program failed before it used the GPU: .*invalid literal",
        ),
    ):
        with pytest.raises(NotRehearsedError, match=f"with micro-batches of {said}"):
            planned(program, gpu)


GUESSED = """
import sys, torch
model = torch.nn.Linear(4, 1).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    made = model(torch.ones(int(sys.argv[1]), 4).cuda())
    kept = [torch.ones(int(each), device="cuda") for each in made.flatten().long()]
    made.sum().backward()
    update.step()
"""


@pytest.mark.heavy
def test_failures_are_alike_that_differ_in_how_often_a_line_was_read(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """Once for each sample: with every size the sizes are guessed there."""
    (tmp_path / "train.py").write_text(GUESSED)
    command = command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"])

    with pytest.raises(NotRehearsedError, match=r"with micro-batches of \d+ and \d+ alike, the memory is not known: sizes were guessed"):
        planned(command, gpu)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import nothing_like_it\n", "ModuleNotFoundError: No module"),
        ("def train(:\n", "SyntaxError: "),
        ("from os import nothing_like_it\n", "ImportError: cannot import"),
        (None, ".*: can't open file"),
        ("import argparse\nargparse.ArgumentParser(prog='train.py').parse_args()\n", "train.py: error: unrecognized arguments: "),
        ("import urllib.request\nurllib.request.urlopen('https://nowhere.invalid')\n", "urllib.error.URLError: "),
    ],
)
def test_what_no_size_mends_is_told_after_one_run(
    torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path, source: str | None, error: str
) -> None:
    """A module that is not there is missing at every size, and so is the script itself."""
    if source is not None:
        (tmp_path / "train.py").write_text(source)

    with pytest.raises(NotRehearsedError, match=f"^the program failed before it used the GPU: {error}"):
        planned(command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"]), gpu)


FETCHES = """
import sys, torch, urllib.request
model = torch.nn.Linear(4, 1).cuda()
if sys.argv[1] != "2":
    urllib.request.urlopen("https://nowhere.invalid")
update = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(int(sys.argv[1]), 4).cuda()).sum().backward()
    update.step()
"""


@pytest.mark.heavy
def test_no_size_is_refused_for_a_network_that_is_not_there(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """Else the largest size would be the one that did not ask for it."""
    (tmp_path / "train.py").write_text(FETCHES)

    with pytest.raises(NotRehearsedError, match=r"^the program failed before its first step at .*: URLError: ") as raised:
        planned(command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"]), gpu)

    assert not isinstance(raised.value, SizeRefusedError)


DIVIDES = """
import sys, time, torch
batch, steps = int(sys.argv[1]), 8 // int(sys.argv[1])
open(sys.argv[2]).read()
model = torch.nn.Linear(256, 256).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for _ in range(8 // steps):
        model(torch.zeros(batch, 256).cuda()).square().sum().backward()
    update.step()
"""


@pytest.mark.heavy
def test_a_size_is_refused_where_another_has_run_whatever_the_program_reads_anew(
    torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path
) -> None:
    """As a cache that each run writes: four sizes that fail alike do not say that it never runs."""
    script, kept = tmp_path / "train.py", tmp_path / "kept.txt"
    script.write_text(DIVIDES)
    kept.write_text("0")
    program = command_program([sys.executable, str(script), "{micro_batch_size}", str(kept)])
    estimator = RehearsedEstimator(RehearsalCache(tmp_path / "cache"), is_slow=True)
    estimator(program.with_training(micro_batch_size=4), gpu, None)

    for size in (9, 12, 18, 27, 40):
        kept.write_text(str(size))
        with pytest.raises(SizeRefusedError, match=f"with a micro-batch of {size} .*ZeroDivisionError"):
            estimator(program.with_training(micro_batch_size=size), gpu, None)


A_THIRD = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
batch = int(sys.argv[1])
samples = TensorDataset(torch.zeros(4096, 64, 256))
validation = DataLoader(samples, batch_size=batch // 3)
model = torch.nn.Linear(256, 256).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, in DataLoader(samples, batch_size=batch):
    model(inputs.cuda()).square().sum().backward()
    update.step()
    update.zero_grad()
"""


@pytest.mark.heavy
def test_a_program_that_takes_no_small_batch_is_planned(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """With one sample and with two it fails alike: its validation would have none."""
    (tmp_path / "train.py").write_text(A_THIRD)

    plan, _ = planned(command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"]), gpu)

    assert plan.fits
    assert plan.after.training.micro_batch_size > 8
    assert "over the budget" in plan.reasons[0]


@pytest.mark.heavy
def test_a_value_that_nobody_reads_is_told(torch_build: TorchBuild, gpu: GpuSpec) -> None:
    """Every allocation stays as it was."""
    with pytest.raises(UsageError, match=r"was changed from 2 to [0-9]+, and every allocation stayed the same"):
        planned(command_program(["env", "UNREAD={micro_batch_size}", sys.executable, str(PROGRAM), "8", "1", "100000", "1024"]), gpu)


OVERRIDDEN = """
import sys, torch
batch = int([*open(sys.argv[1]).read().split(), *sys.argv[2:]][-1])
model = torch.nn.Linear(256, 256).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.zeros(batch * 64, 256, device="cuda")).square().sum().backward()
    update.step()
    update.zero_grad()
"""


@pytest.mark.heavy
def test_a_batch_that_is_by_chance_the_one_of_something_else_shows_nothing_of_another(
    torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path
) -> None:
    """A DataLoader of 64, whatever the file says: 64 too, and then 32."""
    script, settings = tmp_path / "train.py", tmp_path / "settings.json"
    script.write_text(ANOTHER_BATCH)
    settings.write_text('{"batch": 64}')
    words, fields = [sys.executable, str(script), str(settings)], [f"micro_batch_size={settings}:batch"]

    by_chance, _ = planned(command_program(words, fields=fields), gpu, tmp_path / "cache")
    settings.write_text('{"batch": 32}')

    assert by_chance.fits
    with pytest.raises(UsageError, match=r"was changed from .* and every allocation stayed the same"):
        planned(command_program(words, fields=fields), gpu, tmp_path / "cache")


@pytest.mark.heavy
def test_a_present_batch_that_something_overrides_is_no_fit(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """It is rehearsed alone, since it is what is wanted: a plan would be of the batch that the command gives."""
    script, settings = tmp_path / "train.py", tmp_path / "settings.yaml"
    script.write_text(OVERRIDDEN)
    settings.write_text("batch: 32\n")
    words, fields = [sys.executable, str(script), str(settings)], [f"micro_batch_size={settings}:batch"]

    read, told = planned(command_program(words, fields=fields), gpu, tmp_path / "cache")
    again, told_again = planned(command_program(words, fields=fields), gpu, tmp_path / "cache")

    assert read.after.training.micro_batch_size == again.after.training.micro_batch_size == 32
    assert (told, told_again) == ([(32, 1), (2, 1)], [])  # with 2 it asks for other memory
    for _ in range(3):  # what was found is not kept as a fit either
        with pytest.raises(UsageError, match=r"was changed from 32 to [0-9]+, and every allocation stayed the same"):
            planned(command_program([*words, "4"], fields=fields), gpu, tmp_path / "cache")


@pytest.mark.heavy
def test_a_file_that_the_program_does_not_read_is_no_place_for_its_batch(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """A slip in a name: the run shows it, and no other size has to."""
    script, settings, other = tmp_path / "train.py", tmp_path / "settings.yaml", tmp_path / "settings2.yaml"
    script.write_text(OVERRIDDEN)
    for file in (settings, other):
        file.write_text("batch: 32\n")
    program = command_program([sys.executable, str(script), str(settings)], fields=[f"micro_batch_size={other}:batch"])

    with pytest.raises(NotRehearsedError, match=r"the program does not read .*settings2\.yaml, where micro_batch_size is to be written"):
        planned(program, gpu)


ANOTHER_BATCH = """
import json, sys, torch
from torch.utils.data import DataLoader, TensorDataset
json.load(open(sys.argv[1]))
model = torch.nn.Linear(256, 256).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for batch, in DataLoader(TensorDataset(torch.zeros(9000, 256)), batch_size=64):
    model(batch.cuda()).square().sum().backward()
    update.step()
    update.zero_grad()
"""


@pytest.mark.heavy
def test_the_batch_of_something_else_is_no_batch_of_the_training(torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path) -> None:
    """Its DataLoader gives 64 samples whatever is said, which may be all that there are: fewer than those are tried."""
    script, settings = tmp_path / "train.py", tmp_path / "settings.json"
    script.write_text(ANOTHER_BATCH)
    settings.write_text('{"evaluation": 100}')
    program = command_program([sys.executable, str(script), str(settings)], fields=[f"micro_batch_size={settings}:evaluation"])

    with pytest.raises(UsageError, match=r"was changed from [0-9]+ to 32, and every allocation stayed the same"):
        planned(program, gpu, target=4096)


@pytest.mark.heavy
def test_a_dataset_that_ends_is_no_room_for_more(torch_build: TorchBuild, gpu: GpuSpec) -> None:
    """From its size on every batch is the same: larger ones are refused, not called a fit."""
    plan, _ = planned(command("{micro_batch_size}", 1, 50, 1024), gpu)

    assert plan.fits
    assert "the program seems to take no more samples than with" in plan.reasons[0]


FEW_SAMPLES = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
samples = TensorDataset(torch.zeros(90, 64, 256))
model = torch.nn.Linear(256, 256).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    for batch, in DataLoader(samples, batch_size=int(sys.argv[1]), shuffle=True):
        model(batch.cuda()).square().sum().backward()
        update.step()
        update.zero_grad()
"""


_SEEN = "the program seems to take no more samples than with 90: with more every allocation stayed the same"
_KNOWN = "an epoch of the program's DataLoader has 90 samples, and no batch has more"

OF_PARTS = """
class Graphs(torch.utils.data.Dataset):
    def __len__(self):
        return 90
    def __getitem__(self, index):
        return torch.zeros(64, 256)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("num_workers", [None, 0, 2], ids=["of rows", "of graphs", "of graphs that workers read"])
@pytest.mark.parametrize("has_own_sampler", [False, True])
def test_as_many_samples_are_planned_as_the_data_have(
    torch_build: TorchBuild, gpu: GpuSpec, tmp_path: Path, cache: Path, num_workers: int | None, *, has_own_sampler: bool
) -> None:
    """
    PyTorch's samplers say how many that is. Of one of the program's own, which may give them again and again, it is seen: not the larger
    size is planned with which every batch has as many, since with more data it would take more than is said.

    A batch of graphs has more rows than graphs.
    """
    text = FEW_SAMPLES
    if has_own_sampler:
        text = text.replace("shuffle=True", "sampler=type('Own', (torch.utils.data.RandomSampler,), {})(range(90))")
    if num_workers is not None:
        text = text.replace("samples = TensorDataset(torch.zeros(90, 64, 256))", OF_PARTS).replace("for batch,", "for batch")
        text = text.replace("DataLoader(samples", f"DataLoader(Graphs(), collate_fn=torch.cat, num_workers={num_workers}")
    (tmp_path / "train.py").write_text(text)

    for _ in ("cold", "kept"):
        plan, _ = planned(command_program([sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"]), gpu, cache=cache)

        assert (plan.fits, plan.after.training.micro_batch_size) == (True, 90)
        assert (_SEEN if has_own_sampler else _KNOWN) in plan.reasons[0]


IN_TOKENS = """
import os, signal, sys, torch
tokens, most_of_host = map(int, sys.argv[1:])
sentences = max(1, tokens // 31)
print("loading")
if sentences > most_of_host:
    os.kill(os.getpid(), signal.SIGKILL)  # as the system does where the host's memory is full
model = torch.nn.Linear(1024, 1024).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.zeros(sentences * 256, 1024).cuda()).sum().backward()
    update.step()
"""


@pytest.fixture
def in_tokens(tmp_path: Path) -> Path:
    """A program that counts its batch in tokens, 31 for a sentence of 1 MiB, and is ended with more sentences than are said."""
    script = tmp_path / "train.py"
    script.write_text(IN_TOKENS)
    return script


@pytest.mark.heavy
def test_a_few_more_tokens_may_be_no_sentence_more(torch_build: TorchBuild, gpu: GpuSpec, in_tokens: Path) -> None:
    """That is no end of the data: the largest is the last before one sentence more, and what that takes is told."""
    plan, _ = planned(command_program([sys.executable, str(in_tokens), "{micro_batch_size}", "1000000"]), gpu)

    assert plan.fits
    assert plan.after.training.micro_batch_size % 31 == 30
    assert "over the budget" in plan.reasons[0]


@pytest.mark.heavy
def test_a_size_that_the_host_has_no_memory_for_is_halved(torch_build: TorchBuild, gpu: GpuSpec, in_tokens: Path) -> None:
    """It was taken for one of the sizes that a program refuses, and those below it were tried one after the other."""
    plan, told = planned(command_program([sys.executable, str(in_tokens), "{micro_batch_size}", "8"]), gpu)

    assert plan.fits
    assert plan.after.training.micro_batch_size == 9 * 31 - 1
    assert f"with a micro-batch of {9 * 31} the program" in plan.reasons[0]
    assert "was ended by SIGKILL (did the host run out of memory?)" in plan.reasons[0]
    assert len(told) < 24  # 65,536 is halved sixteen times, and the end is seen from both sides

"""Whole scripts on the simulated GPU: Python runs them as ever, and what they did to memory is told at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memplan as memplan_package
from memplan.api.rehearsals import rehearse
from memplan.errors import MissingError, NoKernelsError, NothingSeenError, UsageError
from memplan.execution.recorded_run import WalkedBatches
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_script import rehearse_in_both_orders, rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.reports.rehearsal_view import view_rehearsal
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

MIB = 2**20

COMMON = """
import torch

def make():
    return torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)]).cuda()

def batch():
    return torch.randn(64, 512, device="cuda")
"""
"""What the scripts share: a model of 4 MiB, and its batch."""

TRAINING = """
import os, signal, sys
from common import batch, make, torch

model = make()
update = torch.optim.AdamW(model.parameters())
for number in range(3):
    model(batch()).square().mean().backward()
    update.step()
    update.zero_grad()
print("trained", flush=True)
"""
"""Three steps: 4 MiB of weights and as much of gradients, 8 MiB of Adam's moments."""

SITE = [path for path in sys.path if path.endswith("site-packages")]

Script = Callable[..., Rehearsal]


@pytest.fixture
def script(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Rehearse the lines of a script, as `train.py` beside `common.py`; a name of the working folder will do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "common.py").write_text(COMMON)

    def run(text: str, *arguments: str, timeout_seconds: float | None = 100, **options: Any) -> Rehearsal:
        (tmp_path / "train.py").write_text(text)
        return rehearse_script(["train.py", *arguments], gpu=find_gpu("t4"), timeout_seconds=timeout_seconds, **options)

    return run


def seen(rehearsal: Rehearsal) -> Rehearsal:
    """What was seen of a script that ended well."""
    assert rehearsal.exit_code == 0
    return rehearsal


def memplan(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """`memplan rehearse --gpu t4` as a shell starts it."""
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", *arguments]
    return subprocess.run(
        command, input=stdin, env=os.environ | environment, capture_output=True, text=True, check=False, errors="replace", timeout=120
    )


# how a script is started


LOGS_BELOW_TEMPORARY = f"""
import pathlib, tempfile
{TRAINING}
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "checkpoint").write_text("weights")
pathlib.Path(sys.argv[1]).open("a").write(str(folder) + chr(10))
assert (folder / "checkpoint").read_text() == "weights"
"""


@pytest.mark.parametrize("allow_writes", [False, True])
def test_temporary_files_go_with_their_run(script: Script, tmp_path: Path, allow_writes: bool) -> None:
    """A plan runs a program many times, each of which may save a checkpoint there; where writes are allowed they stay, as ever."""
    told = Path("/tmp", f"{tmp_path.name}-{os.getpid()}")  # new below /tmp, which is not held back
    try:
        seen(script(LOGS_BELOW_TEMPORARY, str(told), allow_writes=allow_writes))
        folders = [Path(line) for line in told.read_text().splitlines()]

        assert folders
        assert {folder.exists() for folder in folders} == {allow_writes}
    finally:
        told.unlink(missing_ok=True)


SHUFFLED = """
import os, random, sys
import numpy, torch
from torch.utils.data import DataLoader, Dataset

class Sentences(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        length = 1 + (index * 37 + random.randrange(50) + numpy.random.randint(50)) % 100
        return torch.ones(length, dtype=torch.long)

def padded(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

if __name__ == "__main__":
    model = torch.nn.Embedding(2, 512).cuda()
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens in DataLoader(Sentences(), 4, shuffle=True, num_workers=int(sys.argv[1]), collate_fn=padded):
        on_gpu = tokens.cuda()
        kept = model(on_gpu)[on_gpu > 0]
        assert "MEMPLAN_VALUES_FILE" not in os.environ or len(kept) in (0, int((tokens > 0).sum())), "the values are those of another batch"
        open(f"{sys.argv[2]}-{os.getpid()}", "a").write(f"{tuple(tokens.shape)}\\n")
        kept.sum().backward()
        update.step()
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_run_has_the_same_data(script: Script, tmp_path: Path, num_workers: int) -> None:
    """In the same order, and with what is drawn for each sample: the values that one run finds are those of the next one's batches."""
    told = Path("/tmp", f"{tmp_path.name}-{os.getpid()}")  # what is new below /tmp is not held back
    try:
        found = seen(script(SHUFFLED, str(num_workers), str(told), steps=4))
        shapes = [path.read_text() for path in told.parent.glob(f"{told.name}-*")]

        assert len(shapes) >= 3
        assert len(set(shapes)) == 1
        assert not found.lower_bound_reasons
        assert not found.held_back_files
    finally:
        for path in told.parent.glob(f"{told.name}-*"):
            path.unlink()


ABOUT_ITSELF = """
import json, sys
from {package}neighbour import WORD
print(json.dumps([__name__, sys.argv[1:], sys.path[0], __file__, sys.stdin.read(), WORD]))
print("to stderr", file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["script", "module", "folder"])
def test_a_script_is_started_as_python_starts_it(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Name, arguments (which may look like memplan's own), path, neighbours, standard input, and both outputs."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "neighbour.py").write_text("WORD = 'found'\n")
    name = "__main__.py" if how == "folder" else "train.py"
    (folder / name).write_text(ABOUT_ITSELF.format(package="." if how == "module" else ""))
    (folder / "__init__.py").touch()
    program = {"script": ["--", "package/train.py"], "module": ["-m", "package.train"], "folder": ["--", "package"]}[how]
    arguments = ["--gpu", "b", "--", "-m", "--format", "json"]

    result = memplan(*program, *arguments, stdin="typed in")

    as_python = [sys.executable, *(program[1:] if how != "module" else program), *arguments]
    plain = subprocess.run(as_python, input="typed in", capture_output=True, text=True, check=True)
    assert json.loads(plain.stdout)[:2] == ["__main__", arguments]
    assert result.stdout == plain.stdout
    assert result.stderr.startswith("to stderr\nError: the program ended with exit code 0 and never used the GPU")
    assert result.returncode == 3


LOADS = """
import sys
from common import batch, make, torch

model = make()
state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
held = [torch.empty(16 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(2)]
model.load_state_dict(state)
del state, held
update = torch.optim.SGD(model.parameters()) if "optimizer" in sys.argv else None
for number in range(2):
    model(batch()).square().mean().backward()
    if update is not None:
        update.step()
    for parameter in model.parameters():
        parameter.grad = None
"""
"""Before its steps it has 4 MiB of weights twice, and 32 MiB more; its steps have weights, gradients, and cuBLAS's workspaces of 16 MiB."""


def test_a_gpu_without_kernels_is_refused_before_anything_runs(script: Script, tmp_path: Path) -> None:
    """Whatever memory the program takes, it fails there; no build has kernels for capability 2.0 any more."""
    (tmp_path / "train.py").write_text("open('ran', 'w')")
    old = find_gpu("t4").model_copy(update={"name": "Tesla M2090", "compute_capability": (2, 0)})

    with pytest.raises(NoKernelsError, match="has no kernels for Tesla M2090"):
        rehearse_script(["train.py"], gpu=old, allow_writes=True)
    assert not (tmp_path / "ran").exists()


def test_a_peak_before_the_first_step_is_told_as_that(script: Script) -> None:
    """With what the steps take by themselves; nothing of it is called activations."""
    found = seen(script(LOADS, "optimizer"))
    view = view_rehearsal(found, find_gpu("t4"))

    assert (found.peak_phase, found.peak_allocated_bytes) == ("set-up before the first step", 40 * MIB)
    assert [finding.kind for finding in found.findings if "the steps themselves allocate 24" in finding.message] == ["peak_before_steps"]
    assert view.breakdown.title == "set-up at its peak"
    assert [name for name, *_ in view.breakdown.rows if name in ("activations", "other tensors")] == ["other tensors"]


@pytest.mark.heavy
def test_the_programs_python_may_have_another_memplan(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another version, whose recorder would not be that of this one: it is found by nobody."""
    (tmp_path / "others" / "memplan").mkdir(parents=True)
    (tmp_path / "others" / "memplan" / "__init__.py").write_text("raise RuntimeError('the other one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "others"))

    found = script("from common import torch\ntorch.zeros(2**20, device='cuda')\n")

    assert (found.failure, found.peak_allocated_bytes) == (None, 4 * 2**20)


def test_a_program_that_asks_for_a_gpu_by_its_number_is_told_how_it_gets_one(script: Script) -> None:
    """One is simulated; the user's own machine has more."""
    found = script("import torch\ntorch.zeros(8, device='cuda:3')\n")

    assert found.failure is not None
    assert "invalid device ordinal" in found.failure.message
    assert [finding.message for finding in found.findings if finding.kind == "missing_gpu"] == [
        "the program asks for a GPU by a number that is not among the simulated ones: `num_gpus=8` simulates as many as you have"
    ]


@pytest.mark.heavy
def test_where_set_up_ends_is_not_known_without_an_optimizer(script: Script) -> None:
    """What comes before the first backward may be its forward."""
    found = seen(script(LOADS))

    assert (found.peak_phase, found.peak_allocated_bytes) == ("forward of step 1", 40 * MIB)
    assert not [finding for finding in found.findings if finding.kind == "peak_before_steps"]


EVALUATED = """
import sys
from common import torch
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)).cuda()
update = torch.optim.AdamW(model.parameters())
number, when = int(sys.argv[1]), sys.argv[2]

@torch.no_grad()
def evaluate():
    model.eval()
    assert number
    model(torch.randn(number, 512, device="cuda"))
    model.train()

if when == "before":
    evaluate()
for step in range(3):
    model[1].eval()  # statistics that are frozen: no evaluation
    model(torch.randn(64, 512, device="cuda")).mean().backward()
    update.step()
    update.zero_grad()
    if str(step) == when:
        evaluate()
"""


@pytest.mark.parametrize(
    ("number", "when", "where"),
    [
        (40_000, "before", "Fits on Tesla T4: {} at the peak, in the evaluation before step 1"),
        (40_000, "1", "Fits on Tesla T4: {} at the peak, in the evaluation after step 2"),
        (4_000_000, "2", "Does not fit on Tesla T4: out of memory in the evaluation after step 3, at {}"),
        (0, "0", "No verdict for Tesla T4: the program failed in the evaluation after step 1 at {}"),
        (40_000, "never", "Fits on Tesla T4: {} at the peak of 3 steps"),
    ],
)
def test_what_happens_in_an_evaluation_is_told_as_that(script: Script, number: int, when: str, where: str) -> None:
    """Most of what is trained is in eval mode, without a backward before it is back: no phase of the next step."""
    rehearsal = script(EVALUATED, str(number), when)

    before, after = where.split("{}")
    headline = view_rehearsal(rehearsal, find_gpu("t4")).headline
    assert headline.startswith(before)
    assert after in headline
    assert rehearsal.has_evaluated == (when != "never")


GENERATES = """
import torch
from torch import nn

generator, critic = nn.Linear(64, 64).cuda(), nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).cuda()
updates = [torch.optim.Adam(model.parameters()) for model in (generator, critic)]
for step in range(3):
    for update in updates:
        critic(generator(torch.randn(8, 64, device="cuda"))).mean().backward()
        update.step()
        update.zero_grad()
    if step == 1:
        generator.eval()
        with torch.no_grad():
            generator(torch.randn(40_000, 64, device="cuda"))
        generator.train()
"""


def test_a_generator_that_is_evaluated_may_be_smaller_than_its_critic(script: Script) -> None:
    """It has most of what its own optimizer trains."""
    rehearsal = script(GENERATES)

    assert rehearsal.has_evaluated
    assert "in the evaluation after step 2" in view_rehearsal(rehearsal, find_gpu("t4")).headline


@pytest.mark.heavy
def test_a_model_that_is_trained_in_eval_mode_is_not_evaluated(script: Script) -> None:
    """A backward follows: it is its forward, whatever mode the model is in."""
    rehearsal = seen(script(EVALUATED.replace("model[1].eval()", "model.eval()"), "0", "never"))

    assert not rehearsal.has_evaluated
    assert rehearsal.trace is not None
    assert {mark.phase for mark in rehearsal.trace.marks} == {"build", "forward", "backward", "optimizer"}


def test_steps_that_end_a_program_say_that_no_evaluation_was_reached(script: Script) -> None:
    """It may take more than they do; where one was run, that is said."""
    facts = [
        dict(view_rehearsal(script(EVALUATED, "1", when, steps=2), find_gpu("t4")).facts)["PyTorch"].partition(", ")[2]
        for when in ("0", "2")
    ]

    assert facts == ["2 steps, and an evaluation", "2 steps; what comes after them, as an evaluation, was not run"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("line", "before", "headline"),
    [
        ("1 / 0", "update =", "the program failed before its first step"),
        ("1 / 0", "for number", "the program failed before its first step"),
        ("batch(), 1 / 0", "for number", "the program failed in step 1"),
        ("torch.empty(2**36, device='cuda')", "update =", "out of memory before the first step"),
    ],
)
def test_what_ends_a_program_before_its_first_step_is_told_as_that(script: Script, line: str, before: str, headline: str) -> None:
    """An error of its own, or a full GPU; behind the optimizer too, as long as nothing was put on the GPU since."""
    found = script(LOADS.replace(before, f"{line}\n{before}", 1), "optimizer")

    assert headline in view_rehearsal(found, find_gpu("t4")).headline


@pytest.mark.heavy
def test_the_order_of_the_module_path_is_the_programs(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a rehearsal, also where memplan's own folder is in PYTHONPATH, before others."""
    root = str(Path(memplan_package.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "first"), root, str(tmp_path / "last")]))
    script("import sys, torch\ntorch.ones(1, device='cuda')\nopen('path', 'w').write('\\n'.join(sys.path))", allow_writes=True)

    path = (tmp_path / "path").read_text().splitlines()

    assert path[1:4] == [str(tmp_path / "first"), root, str(tmp_path / "last")]


def test_a_sitecustomize_of_the_users_own_is_loaded(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours stands before it on the path."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    monkeypatch.setenv("PYTHONPATH", str(own))

    with pytest.raises(NothingSeenError, match="exit code 7"):
        script("import sys\nsys.exit(7 if customized else 1)")


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('the words')", 1),
        ("raise ValueError('the words')", 1),
        ("import os; os._exit(5)", 5),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_a_program_of_which_nothing_was_seen_has_no_figures(
    script: Script, capfd: pytest.CaptureFixture[str], text: str, exit_code: int
) -> None:
    """However it ends; its own exit code is told."""
    with pytest.raises(NothingSeenError) as raised:
        script(text)

    assert raised.value.program_exit_code == exit_code
    assert ("the words" in capfd.readouterr().err) == ("the words" in text)


LOOKS_FIRST = """
import importlib.util
assert importlib.util.find_spec("torch") is not None
assert importlib.util.find_spec("torch").origin.endswith("__init__.py")
"""


def test_a_program_that_looks_for_torch_before_it_imports_it_is_recorded(script: Script) -> None:
    """As transformers, datasets and diffusers do: looking is not importing."""
    assert len(seen(script(LOOKS_FIRST + TRAINING)).steps) == 3


IMPORTED_BY_A_THREAD = """
import sys, threading

def train():
    import trained

assert "torch" not in sys.modules
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


@pytest.mark.heavy
def test_a_torch_that_only_a_thread_imports_is_recorded(script: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The thread ends after the steps that were asked for, without a word; the main one knows nothing of all that."""
    (tmp_path / "trained.py").write_text(TRAINING)

    rehearsal = seen(script(IMPORTED_BY_A_THREAD + "print('joined')", steps=2))

    assert len(rehearsal.steps) == 2
    assert rehearsal.breakdown.optimizer_state_bytes == 8 * MIB
    assert capfd.readouterr() == ("joined\n", "")


WAITS_AT_ITS_EXIT = f"import atexit, threading\natexit.register(threading.Event().wait)\n{TRAINING}"


@pytest.mark.heavy
def test_a_program_that_waits_at_its_exit_is_ended_after_its_steps(script: Script) -> None:
    """As one that sends what it counted to a host that does not answer; it took 20 seconds to."""
    found = script(WAITS_AT_ITS_EXIT, steps=2)

    assert (found.exit_code, len(found.steps), found.verdict) == (0, 2, "fits")


@pytest.mark.heavy
def test_steps_that_a_thread_runs_end_the_program_too(script: Script, tmp_path: Path) -> None:
    """The main thread waits for something that does not come any more."""
    (tmp_path / "trained.py").write_text(TRAINING)
    waits = IMPORTED_BY_A_THREAD.replace("thread.join()", "import time\ntime.sleep(100)")

    assert len(seen(script(waits, steps=2, timeout_seconds=60)).steps) == 2


CAPTURED = """
import torch
model = torch.nn.Linear(1024, 1024, bias=False).cuda()
update = torch.optim.AdamW(model.parameters(), capturable=True)
inputs = torch.randn(8, 1024, device="cuda")
def step():
    update.zero_grad()
    model(inputs).sum().backward()
    update.step()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(2):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
graph.replay()
"""


COPIES_IN_GRAPH = """
import os, torch
model = torch.nn.Linear(1024, 1024, bias=False).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(8, 1024, device="cuda")
def step():
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        torch.cuda.synchronize()
    model(inputs).sum().backward()
step()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for _ in range(3):
    graph.replay()
    update.step()
    rows = int((torch.arange(9).cuda() * 2).max())
    model(torch.randn(rows, 1024, device="cuda")).sum().backward()
"""
"""What its eager form does is not allowed while a graph is captured, as of flex_attention."""


BY_GROUPS = """
from common import batch, make, torch
model = make()
update = torch.optim.AdamW([{"params": [layer.weight]} for layer in model])
groups = update.param_groups
for number in range(4):
    model(batch()).mean().backward()
    for group in groups:  # as DeepSpeed's ZeRO has it step
        update.param_groups = [group]
        update.step()
    update.param_groups = groups
    update.zero_grad()
    print("step", number, flush=True)
"""


@pytest.mark.heavy
@pytest.mark.parametrize(("steps", "told"), [(None, 4), (2, 2)])
def test_an_optimizer_that_steps_group_by_group_makes_one_step(
    script: Script, capfd: pytest.CaptureFixture[str], steps: int | None, told: int
) -> None:
    """No backward comes between them, and each has other parameters: four calls are one step."""
    rehearsal = script(BY_GROUPS, steps=steps)

    assert len(rehearsal.steps) == told
    assert capfd.readouterr().out.count("step ") == (told if steps is None else told - 1)  # it is ended as the next would begin
    assert rehearsal.breakdown.optimizer_state_bytes == pytest.approx(8 * MIB, abs=4 * 512)


STEPS_FIRST = """
from common import batch, make, torch
model = make()
update = torch.optim.AdamW([{"params": [layer.weight]} for layer in model])
groups = update.param_groups
for weight in model.parameters():
    weight.grad = torch.zeros_like(weight)
for group in groups:
    update.param_groups = [group]
    update.step()  # as DeepSpeed has it make its state
update.param_groups = groups
update.zero_grad()
for number in range(4):
    if HAS_BACKWARD:
        model(batch()).mean().backward()
    else:  # an evolution strategy
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
    update.step()
    update.zero_grad()
    print("trained", number, flush=True)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("has_backward", [True, False])
def test_a_step_that_only_makes_the_optimizers_state_is_none(script: Script, capfd: pytest.CaptureFixture[str], has_backward: bool) -> None:
    """It comes before any backward; of a program that has none at all the first step is not told."""
    rehearsal = script(STEPS_FIRST.replace("HAS_BACKWARD", str(has_backward)), steps=2)

    assert len(rehearsal.steps) == 2
    assert capfd.readouterr().out.count("trained ") == 1
    assert rehearsal.steps[0].allocated_bytes >= 12 * MIB


@pytest.mark.heavy
def test_what_is_captured_only_compiled_is_not_captured_where_values_are_looked_for(script: Script) -> None:
    """Nothing is compiled there: what runs in the graph runs as it is, and the sizes are known."""
    rehearsal = seen(script(COPIES_IN_GRAPH))

    assert (rehearsal.verdict, rehearsal.lower_bound_reasons) == ("fits", ())
    assert [(read.answer, read.count) for read in rehearsal.reads] == [("16", 3)]


@pytest.mark.heavy
def test_an_optimizer_may_step_within_a_graph_that_is_captured(script: Script) -> None:
    """What is not allowed there, nobody does: the program ends as it would on a GPU."""
    rehearsal = seen(script(CAPTURED))

    assert (rehearsal.verdict, len(rehearsal.steps)) == ("fits", 3)
    assert rehearsal.breakdown.optimizer_state_bytes >= 8 * MIB


TWO_TRAININGS = """
import torch
def train(is_kept):
    model = torch.nn.Linear(1024, 1024, bias=False).cuda()
    update = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        update.step()
        update.zero_grad()
    return update if is_kept else None
kept = [train(IS_KEPT) for _ in range(2)]
"""


@pytest.mark.heavy
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_training_that_follows_another_has_steps_too(script: Script, is_kept: bool) -> None:
    """Three of each, whether the first optimizer is still there or not."""
    rehearsal = seen(script(TWO_TRAININGS.replace("IS_KEPT", str(is_kept))))

    assert len(rehearsal.steps) == 6
    assert rehearsal.breakdown.optimizer_state_bytes == (16 if is_kept else 8) * MIB


@pytest.mark.parametrize("output_format", ["text", "json"])
def test_nothing_seen_is_exit_code_3_with_a_reason(torch_build: TorchBuild, tmp_path: Path, output_format: str) -> None:
    """In JSON the verdict is null: neither "fits" nor an empty output that reads as success."""
    (tmp_path / "train.py").write_text("print('nothing for the GPU')")

    result = memplan("--format", output_format, "--", str(tmp_path / "train.py"))

    assert result.returncode == 3
    assert "never used the GPU" in result.stderr
    if output_format == "json":
        answer = json.loads(result.stdout)
        assert (answer["fits"], answer["exit_code"], answer["gpu_name"]) == (None, 0, "Tesla T4")
        assert "never used the GPU" in answer["error"]


# programs that start Python in their own way


@pytest.mark.heavy
@pytest.mark.parametrize(
    "words",
    [
        [sys.executable, "-I", "train.py"],
        pytest.param([sys.executable, "-S", "-E", "train.py"], marks=pytest.mark.heavy),
        pytest.param(["env", "-u", "PYTHONPATH", sys.executable, "train.py"], marks=pytest.mark.heavy),
        ["bash", "-c", f"'{sys.executable}' -c pass; exec '{sys.executable}' train.py"],
    ],
    ids=["isolated", "without site", "without its path", "a shell"],
)
def test_the_recorder_is_there_however_python_is_started(script: Script, tmp_path: Path, words: list[str]) -> None:
    """Where Python's own start leaves it out, the simulated GPU starts it."""
    script_text = TRAINING.replace("import os, signal, sys", f"import os, signal, sys\nsys.path[:0] = {[str(tmp_path), *SITE]!r}")
    (tmp_path / "train.py").write_text(script_text)

    rehearsal = seen(rehearse_script(words, gpu=find_gpu("t4"), timeout_seconds=100))

    assert len(rehearsal.steps) == 3
    assert rehearsal.breakdown.optimizer_state_bytes == 8 * MIB


DISTRIBUTED = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False).cuda())
update = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    update.step()
    update.zero_grad()
total = torch.tensor([3.0, 4.0], device="cuda")
dist.all_reduce(total)
parts = [torch.empty(2, device="cuda")]
dist.all_gather(parts, total)
assert parts[0].tolist() == [3.0, 4.0], parts
objects = [None]
dist.all_gather_object(objects, {"steps": 3})
dist.broadcast_object_list(objects)
assert objects == [{"steps": 3}], objects
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.heavy
def test_a_launcher_with_one_process_on_nccl(script: Script, tmp_path: Path) -> None:
    """The process that trains is told of, by its command: 4 MiB of weights, as much of DDP's bucket, 8 of Adam's moments."""
    (tmp_path / "train.py").write_text(DISTRIBUTED)

    rehearsal = seen(rehearse_script(["torchrun", "--nproc-per-node", "1", "train.py"], gpu=find_gpu("t4"), timeout_seconds=200))

    assert rehearsal.process is not None
    assert rehearsal.process.endswith("train.py")
    assert (len(rehearsal.steps), rehearsal.breakdown.optimizer_state_bytes) == (3, 8 * MIB)
    assert rehearsal.peak_allocated_bytes >= 16 * MIB


@pytest.mark.heavy
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_a_program_that_uv_runs_is_the_one_told_of(script: Script, tmp_path: Path) -> None:
    """With the environment of its project, which uv finds by itself."""
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "trained"\nversion = "0"\nrequires-python = ">=3.10"\n')
    (tmp_path / ".venv").symlink_to(sys.prefix)
    words = ["uv", "run", "--no-sync", "--offline", "train.py"]

    rehearsal = seen(rehearse_script(words, gpu=find_gpu("t4"), timeout_seconds=200))

    assert (rehearsal.verdict, len(rehearsal.steps)) == ("fits", 3)
    assert rehearsal.process == f"{tmp_path / '.venv/bin/python'} train.py"


@pytest.mark.heavy
def test_several_processes_on_nccl_are_refused(script: Script, tmp_path: Path) -> None:
    """By name; there is no figure."""
    (tmp_path / "train.py").write_text(DISTRIBUTED)
    words = ["RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "MASTER_ADDR=localhost", "MASTER_PORT=0", "train.py"]
    text = DISTRIBUTED.replace(
        'dist.init_process_group("nccl")', 'dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2)'
    )
    (tmp_path / "train.py").write_text(text)

    with pytest.raises(MissingError, match="does not serve NCCL with several processes"):
        rehearse_script(words, gpu=find_gpu("t4"), timeout_seconds=100)


WAITS = TRAINING.replace(
    'print("trained", flush=True)',
    """
print("trained", flush=True)
import time
time.sleep(60)
""",
)


def heard() -> None:
    """In a process that is started: whoever started the tests may have had these ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.heavy
def test_a_signal_that_is_ignored_ends_nothing(script: Script, tmp_path: Path) -> None:
    """`nohup` has SIGHUP ignored when the terminal goes."""
    (tmp_path / "train.py").write_text(WAITS.replace("time.sleep(60)", "time.sleep(3)"))
    command = ["nohup", sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--", "train.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heard)  # noqa: PLW1509
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"

    process.send_signal(signal.SIGHUP)
    told, _ = process.communicate(timeout=60)

    assert (process.returncode, told.splitlines()[0][:16]) == (0, "Fits on Tesla T4")


def signalled(number: signal.Signals, *launcher: str) -> tuple[str, int]:
    """Rehearse train.py, and send memplan alone the signal when it has trained; return the report and the exit code."""
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--", *launcher, "train.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heard)  # noqa: PLW1509
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"
    process.send_signal(number)
    told, _ = process.communicate(timeout=60)
    return told, process.returncode


@pytest.mark.heavy
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.heavy)], ids=lambda number: number.name
)
def test_a_signal_to_memplan_alone_ends_the_program_and_what_was_seen_is_told(
    script: Script, tmp_path: Path, number: signal.Signals
) -> None:
    """As a batch system sends it; the exit code is that of the signal."""
    (tmp_path / "train.py").write_text(WAITS)

    told, exit_code = signalled(number)

    assert told.startswith("Fits on Tesla T4: ")
    assert "3 steps" in told
    assert exit_code == 128 + number


FORKS = """
import multiprocessing, signal, torch


def tell(uses_gpu):
    if uses_gpu:
        torch.zeros(1, device="cuda")
    return [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP)]


with multiprocessing.get_context("fork").Pool(2) as pool:
    print("forked", pool.map(tell, [False, False], 1), file=open("told", "w"))
with multiprocessing.get_context("fork").Pool(1) as pool:
    print("with the GPU", pool.map(tell, [True]), file=open("told", "a"))
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
model(torch.rand(2, 8, device="cuda")).sum().backward()
optimizer.step()
"""


def test_a_signal_ends_a_forked_worker_at_once_that_uses_no_gpu(script: Script, tmp_path: Path) -> None:
    """
    `multiprocessing.Pool` ends its workers so, and waits for them; a handler of Python's that runs just before a worker waits for its next
    task never ends it. One that uses the GPU has something to tell first.
    """
    seen(script(FORKS, allow_writes=True))

    assert (tmp_path / "told").read_text() == "forked [[True, True], [True, True]]\nwith the GPU [[False, False]]\n"


WITH_WORKERS = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step, (rows,) in enumerate(DataLoader(TensorDataset(torch.randn(800, 8)), batch_size=2, num_workers=2)):
    model(rows.cuda()).sum().backward()
    optimizer.step()
    if step == 3:
        print("trained", flush=True)
    if step > 3:
        time.sleep(0.5)
"""


@pytest.mark.heavy
def test_a_signal_to_the_whole_group_ends_a_program_with_workers_and_what_was_seen_is_told(script: Script, tmp_path: Path) -> None:
    """As `timeout` sends it: it ends the workers of the DataLoader too, for which that raises an error, while the report is written."""
    (tmp_path / "train.py").write_text(WITH_WORKERS)
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--", "train.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heard)  # noqa: PLW1509
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"

    os.killpg(process.pid, signal.SIGTERM)
    told, said = process.communicate(timeout=60)

    assert told.startswith("Fits on Tesla T4: "), said
    assert process.returncode == 128 + signal.SIGTERM


BY_DATA = """
import time
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.Adam(model.parameters())
kept = torch.arange(64).cuda() % 2 == 0
for _ in range(3):
    model(torch.randn(64, 8, device="cuda")[kept]).sum().backward()
    optimizer.step()
time.sleep(WAITS)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("seconds", [0, 5], ids=["while a process imports for it", "in it"])
def test_a_signal_in_a_further_run_ends_it_and_the_first_is_told_as_a_lower_bound(script: Script, tmp_path: Path, seconds: int) -> None:
    """That the values were not found is said; a batch system sees that a signal ended it."""
    (tmp_path / "train.py").write_text(BY_DATA.replace("WAITS", "0"))
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--", "train.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heard)  # noqa: PLW1509
    assert process.stderr is not None
    while "running the program again" not in process.stderr.readline():
        assert process.poll() is None
    (tmp_path / "train.py").write_text(BY_DATA.replace("WAITS", "60"))
    time.sleep(seconds)

    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=60)

    assert told.startswith("At least ")
    assert "did not succeed: " in told
    assert "ended" in told.split("did not succeed: ")[1].splitlines()[0]
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_that_a_launcher_takes_for_a_failure_is_none(script: Script, tmp_path: Path, number: signal.Signals) -> None:
    """torchrun ends its workers and itself with exit code 1: what they did until then was no failure."""
    (tmp_path / "train.py").write_text(WAITS)

    told, exit_code = signalled(number, "torchrun", "--nproc-per-node", "1")

    assert told.startswith("Fits on Tesla T4: ")
    assert "3 steps" in told
    assert exit_code == 1  # its own


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.heavy)], ids=lambda number: number.name)
def test_what_a_thread_did_is_told_when_a_signal_ends_the_program(script: Script, tmp_path: Path, number: signal.Signals) -> None:
    """The main thread never loaded torch. Ctrl-C ends that one alone, as ever; the rest of the program goes when its time is over."""
    (tmp_path / "trained.py").write_text(WAITS)
    (tmp_path / "train.py").write_text(IMPORTED_BY_A_THREAD)

    told, exit_code = signalled(number)

    assert told.startswith("Fits on Tesla T4: ")
    assert "3 steps" in told
    assert exit_code == 128 + number


@pytest.mark.heavy
def test_a_program_that_aborts_while_python_is_exiting_has_shown_all(script: Script, tmp_path: Path) -> None:
    """As the threads of PyTorch's autograd may (its issue 38228): its own exit code stays."""
    at_exit = "libc = ctypes.CDLL(None)\nlibc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)\n"

    seen = script("import ctypes\n" + at_exit + TRAINING)

    assert seen.verdict == "fits"
    assert seen.exit_code == -signal.SIGABRT
    assert "signal_at_exit" in [finding.kind for finding in seen.findings]


@pytest.mark.heavy
def test_what_ctrl_c_ended_has_not_failed_whatever_its_exit_code(script: Script, tmp_path: Path) -> None:
    """Programs leave by `os._exit` at their end, where threads would hang."""
    (tmp_path / "train.py").write_text("import atexit, os\natexit.register(os._exit, 1)\n" + WAITS)
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--", "train.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heard)  # noqa: PLW1509
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"

    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=60)

    assert told.startswith("Fits on Tesla T4: ")
    assert process.returncode == 1


PRESSES_CTRL_C = """
import threading, time

def press():
    for _ in range(60):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

threading.Thread(target=press, daemon=True).start()
time.sleep(60)
"""


@pytest.mark.heavy
def test_what_was_seen_is_told_however_often_ctrl_c_comes(script: Script) -> None:
    """The terminal and memplan may both send it; some come while the report is written."""
    rehearsal = script(TRAINING + PRESSES_CTRL_C)

    assert (rehearsal.verdict, len(rehearsal.steps), rehearsal.exit_code) == ("fits", 3, -signal.SIGINT)


READS_FOR_EVER = """
import threading

threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
value = torch.ones(1, device="cuda")
while True:
    value.item()
"""


@pytest.mark.heavy
def test_ctrl_c_ends_a_program_that_does_nothing_but_read(script: Script) -> None:
    """It comes while the recorder answers a read most likely, which C calls: what Python raises there would be lost."""
    rehearsal = script(TRAINING + READS_FOR_EVER, timeout_seconds=30)

    assert (len(rehearsal.steps), rehearsal.exit_code) == (3, -signal.SIGINT)


# what is told of a script


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        ("raise ValueError", 1),
        ("os._exit(5)", 5),
    ],
)
def test_what_it_did_is_told_however_it_ends(script: Script, end: str, exit_code: int) -> None:
    """`os._exit`, as scripts leave whose threads hang, is no exception."""
    rehearsal = script(TRAINING + end)

    assert rehearsal.exit_code == exit_code
    assert len(rehearsal.steps) == 3
    breakdown = rehearsal.breakdown
    assert (breakdown.parameters_bytes, breakdown.gradients_bytes, breakdown.optimizer_state_bytes) == (4 * MIB, 4 * MIB, 8 * MIB)


@pytest.mark.heavy
def test_what_a_signal_ends_can_tell_nothing(script: Script) -> None:
    """And the report says that it was the signal."""
    Path("train.py").write_text(TRAINING + "os.kill(os.getpid(), signal.SIGKILL)")

    result = memplan("--", "train.py")

    assert result.returncode == 3
    assert result.stdout == "trained\n"
    assert "the program was ended by SIGKILL" in result.stderr


@pytest.mark.heavy
def test_json_leaves_standard_output_to_the_report(script: Script) -> None:
    """What the script prints goes to standard error."""
    Path("train.py").write_text(TRAINING + "sys.exit(4)")

    result = memplan("--steps", "2", "--format", "json", "--", "train.py")

    assert result.returncode == 0  # it was ended after two steps, long before its own end
    assert len(json.loads(result.stdout)["steps"]) == 2
    assert "trained" not in result.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("attempt", [0, *(pytest.param(number, marks=pytest.mark.heavy) for number in range(1, 5))])
def test_a_script_whose_last_act_is_a_backward_ends_in_peace(script: Script, attempt: int) -> None:
    """A thread of autograd may still let go of its graph then."""
    last = "for _ in range(5):\n    model(batch()).square().mean().backward()\n"

    assert len(seen(script(TRAINING + last)).steps) == 3


# steps


ACCUMULATION = """
from common import batch, make, torch
model = make()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1, 100):
    model(batch()).mean().backward()
    if number % 4 == 0:
        print(number, flush=True)
        update.step()
        update.zero_grad()
"""

SCALED = """
from common import batch, make, torch
model = make()
update, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()
for number in range(1, 100):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(batch()).float().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(update)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    print(number, flush=True)
    scaler.step(update)
    scaler.update()
    update.zero_grad()
"""

ADVERSARIAL = """
from common import batch, make, torch
generator, critic = make(), make()
updates = [torch.optim.AdamW(model.parameters()) for model in (critic, generator)]
for number in range(1, 100):
    for which, update in enumerate(updates):
        fake = generator(batch())
        critic(fake if which else fake.detach()).mean().backward()
        print(number, flush=True)
        update.step()
        update.zero_grad()
"""

UNUSED = """
from common import batch, make, torch
model, spare = make(), torch.nn.Linear(8, 8).cuda()
unused, update = (torch.optim.AdamW(one.parameters()) for one in (spare, model))
for number in range(1, 1000):
    model(batch()).mean().backward()
    print(number, flush=True)
    update.step()
    update.zero_grad()
"""

SELDOM = """
from common import batch, make, torch
generator, critic = make(), torch.nn.Linear(512, 1).cuda()
update, seldom = torch.optim.AdamW(critic.parameters()), torch.optim.AdamW(generator.parameters())
for number in range(1, 1000):
    critic(batch()).mean().backward()
    print(number, flush=True)
    update.step()
    if number % 5 == 0:
        critic(generator(batch())).mean().backward()
        seldom.step()
"""

WITHOUT_OPTIMIZER = """
from common import batch, make, torch
model = make()
for number in range(1, 1000):
    print(number, flush=True)
    model(batch()).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
"""

CATCHES_ALL = """
from common import batch, make, torch
model = make()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1, 1000):
    try:
        model(batch()).mean().backward()
        print(number, flush=True)
        update.step()
    except:
        pass
"""

ON_THE_HOST = """
import torch
model = torch.nn.Linear(8, 8)
update = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1, 100):
    model(torch.randn(8, 8)).mean().backward()
    print(number, flush=True)
    update.step()
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "printed"),
    [
        pytest.param(ACCUMULATION, [4, 8], marks=pytest.mark.heavy),
        pytest.param(SCALED, [1, 2], marks=pytest.mark.heavy),
        (ADVERSARIAL, [1, 1, 2, 2]),
        pytest.param(UNUSED, list(range(1, 103)), marks=pytest.mark.heavy),
        (SELDOM, [1, 2, 3, 4, 5, 6]),
        (WITHOUT_OPTIMIZER, [1, 2, 3]),
        (CATCHES_ALL, [1, 2]),
    ],
    ids=[
        "accumulation",
        "scaled",
        "two optimizers",
        "one unused",
        "one that steps seldom",
        "without an optimizer",
        "except for everything",
    ],
)
def test_a_script_is_ended_after_the_steps_of_its_optimizers(
    script: Script, capfd: pytest.CaptureFixture[str], text: str, printed: list[int]
) -> None:
    """
    Not after its batches, not before each optimizer has stepped, and not for ever where one never does.

    Without an optimizer a step ends where the next backward begins; where the end of the steps is caught, the next one is where it ends.
    """
    rehearsal = seen(script(text, steps=2))

    assert [int(line) for line in capfd.readouterr().out.split()] == printed
    assert len(rehearsal.steps) == {UNUSED: 102, SELDOM: 6}.get(text, 2)
    assert any("never stepped" in reason for reason in rehearsal.lower_bound_reasons) == (text is UNUSED)
    if text is ADVERSARIAL:
        assert rehearsal.breakdown.optimizer_state_bytes == 16 * MIB
    if text is SELDOM:
        assert rehearsal.breakdown.optimizer_state_bytes >= 8 * MIB


@pytest.mark.heavy
def test_a_training_on_the_host_is_ended_too_and_nothing_is_reported(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    """Its steps are those of an optimizer as well."""
    with pytest.raises(NothingSeenError, match="never used the GPU"):
        script(ON_THE_HOST, steps=2)

    assert capfd.readouterr().out.split() == ["1", "2"]


@pytest.mark.heavy
def test_a_training_on_the_host_that_looks_at_the_gpu_has_no_figures(script: Script) -> None:
    """It initialises CUDA, and allocates nothing: 0 bytes would be told of as what it takes."""
    with pytest.raises(NothingSeenError, match="never used the GPU"):
        script(f"import torch\ntorch.cuda.mem_get_info()\n{ON_THE_HOST}", steps=2)


@pytest.mark.heavy
def test_a_script_without_an_optimizer_runs_to_its_end(script: Script) -> None:
    """Its one backward is its one step, and what its memory was for is known."""
    rehearsal = seen(script("from common import batch, make\nmodel = make()\nmodel(batch()).mean().backward()", steps=2))

    assert len(rehearsal.steps) == 1
    assert rehearsal.breakdown.parameters_bytes == rehearsal.breakdown.gradients_bytes == 4 * MIB


@pytest.mark.heavy
def test_many_steps_are_told_apart_as_few_are(script: Script) -> None:
    """The events of ten steps are kept; the workspaces of the libraries are known behind them too."""
    many = seen(script(TRAINING.replace("range(3)", "range(14)")))

    breakdown = many.breakdown
    assert len(many.steps) == 14
    assert (breakdown.parameters_bytes, breakdown.gradients_bytes, breakdown.optimizer_state_bytes) == (4 * MIB, 4 * MIB, 8 * MIB)
    # what is left is cuBLAS's, and the optimizer's own temporaries: no tensor of the model is alive when it steps
    assert breakdown.workspaces_bytes == many.peak_allocated_bytes - 16 * MIB


# memory that runs out


OUT_OF_MEMORY = """
from common import batch, make, torch
model = make()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(4):
    try:
        model(batch()).mean().backward()
        if number == 1:
            torch.empty(2**36, device="cuda")
    except torch.OutOfMemoryError:
        {then}
    update.step()
    update.zero_grad()
"""


@pytest.mark.heavy
def test_an_error_that_is_caught_is_told_and_the_script_goes_on(script: Script) -> None:
    """As those do that look for their batch size."""
    rehearsal = seen(script(OUT_OF_MEMORY.format(then='print("smaller")')))

    assert not rehearsal.fits
    assert rehearsal.out_of_memory is not None
    assert rehearsal.out_of_memory.is_caught
    assert rehearsal.out_of_memory.place == f"{Path('train.py').resolve()}:9"
    assert (rehearsal.out_of_memory.requested_bytes, rehearsal.out_of_memory.step) == (2**38, 2)
    assert len(rehearsal.steps) == 4


@pytest.mark.heavy
def test_an_error_that_is_not_caught_ends_the_script(script: Script) -> None:
    """With a traceback of its own, and what had been reached."""
    rehearsal = script(OUT_OF_MEMORY.format(then="raise"))

    assert rehearsal.exit_code == 1
    assert rehearsal.out_of_memory is not None
    assert not rehearsal.out_of_memory.is_caught
    assert len(rehearsal.steps) == 1
    assert rehearsal.breakdown.parameters_bytes == 4 * MIB


SMALLER = """
from common import make, torch
from torch.utils.data import DataLoader, TensorDataset
model = make()
update = torch.optim.SGD(model.parameters(), lr=0.1)
size = 2**16
while True:
    try:
        for rows, in DataLoader(TensorDataset(torch.zeros(2**18, 1)), batch_size=size):
            model(rows.cuda().expand(-1, 512)).mean().backward()
            torch.empty(rows.shape[0], 2**18, device="cuda")
            update.step()
            for rows, in DataLoader(TensorDataset(torch.zeros(32, 1)), batch_size=16):
                model(rows.cuda().expand(-1, 512))
        break
    except torch.OutOfMemoryError:
        size //= 2
"""


@pytest.mark.heavy
def test_the_batch_with_which_a_program_goes_on_is_told(script: Script) -> None:
    """As `auto_find_batch_size` does: 1 MiB a sample, of which a T4 has room for 8,192, not for 16,384; an evaluation has another."""
    rehearsal = seen(script(SMALLER, steps=2))

    assert rehearsal.verdict == "does_not_fit"
    assert rehearsal.out_of_memory is not None
    assert (rehearsal.out_of_memory.batch_size, rehearsal.out_of_memory.batch_size_after) == (2**16, 2**13)
    headline = view_rehearsal(rehearsal, find_gpu("t4")).headline
    assert "caught; the program went on with batches of 8192 instead of 65536" in headline


IN_A_THREAD = """
import threading
from common import torch
torch.ones(1, device="cuda")
def fetch():
    torch.empty(2**36, device="cuda")
thread = threading.Thread(target=fetch)
thread.start()
thread.join()
"""


@pytest.mark.heavy
def test_memory_that_runs_out_in_a_thread_is_told_with_the_line_of_the_thread(script: Script) -> None:
    """And not with that at which the main thread waits for it."""
    missing = script(IN_A_THREAD).out_of_memory

    assert missing is not None
    assert str(missing.place).endswith("train.py:6")


HALVES = """
from common import batch, make, torch
model = make()
update = torch.optim.SGD(model.parameters(), lr=0.1)
size = 32
for _ in range(3):
    while True:
        try:
            kept = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(size)]
            break
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            size //= 16
    model(batch()).mean().backward()
    update.step()
    del kept
"""


@pytest.mark.heavy
def test_what_it_takes_to_go_on_is_told_beside_what_the_failed_attempt_took(script: Script) -> None:
    """2 GiB in place of 32, of which a T4 has room for 14. The program makes its batches itself."""
    rehearsal = seen(script(HALVES))

    missing = rehearsal.out_of_memory
    assert missing is not None
    assert missing.peak_allocated_after_bytes is not None
    assert (missing.step, missing.first_step_after) == (1, 2)
    assert 2 * 2**30 < missing.peak_allocated_after_bytes < 2.1 * 2**30 < 13 * 2**30 < rehearsal.peak_allocated_bytes
    headline = view_rehearsal(rehearsal, find_gpu("t4")).headline
    assert "caught; the program went on: 2.0" in headline
    assert headline.endswith("has the attempt that failed in it")


TIGHT = """
from common import torch
kept = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(12)]
del kept[1::2]
torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")
"""


def test_what_runs_only_by_giving_memory_back_is_tight(script: Script) -> None:
    """Six pieces of 1 GiB are free, and 5 GiB in one are asked for: they are given back first."""
    rehearsal = seen(script(TIGHT))

    assert (rehearsal.verdict, rehearsal.fits, rehearsal.num_alloc_retries) == ("tight", False, 1)
    assert view_rehearsal(rehearsal, find_gpu("t4")).headline == "Tight on Tesla T4: it ran only by giving cached memory back (1 retry)"


EVALUATES_MORE = """
from common import torch
model = torch.nn.Linear(64, 64).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
model.eval()
try:
    for batch in torch.utils.data.DataLoader(torch.zeros(512, 64), batch_size=256):
        model(batch.cuda())
        torch.empty(2**40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    model.train()
for batch in torch.utils.data.DataLoader(torch.zeros(64, 64), batch_size=16):
    model(batch.cuda()).sum().backward()
    update.step()
"""


def test_batches_of_the_training_are_not_what_a_program_went_on_with_after_an_evaluation(script: Script) -> None:
    """It evaluates with 256 samples and trains with 16, whatever failed."""
    missing = seen(script(EVALUATES_MORE)).out_of_memory

    assert missing is not None
    assert (missing.is_caught, missing.is_of_workspace, missing.batch_size, missing.batch_size_after) == (True, False, 256, None)


CACHED = """
from common import torch
layer = torch.nn.Linear(8, 8).cuda()
update = torch.optim.SGD(layer.parameters(), lr=0.1)
for tenths in (30, 31, 30, 30, 32, 30, 30, 30):
    size = tenths * 2**30 // 10
    both = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    layer(torch.ones(8, 8).cuda()).sum().backward()
    update.step()
    del both
"""


def test_what_released_cached_memory_now_and_then_and_needs_less_fits(script: Script) -> None:
    """Two blocks of 3.0, 3.1, then 3.2 GiB: 12.2 GiB are cached when the last are asked for, and 6.4 would do. Twice as much does not."""
    rehearsal, large = seen(script(CACHED)), seen(script(CACHED.replace("// 10", "* 2 // 10")))

    assert (rehearsal.verdict, rehearsal.num_alloc_retries) == ("fits", 1)
    assert rehearsal.peak_reserved_bytes > 12 * 2**30
    assert rehearsal.needs is not None
    assert 6.4 * 2**30 < rehearsal.needs.low_bytes < rehearsal.needs.expected_bytes < 7 * 2**30
    view = view_rehearsal(rehearsal, find_gpu("t4"))
    assert dict(view.facts)["needs"].endswith("where PyTorch releases cached memory; it caches more while the GPU has room")
    assert any("the GPU was full of cached memory, which PyTorch released 1 time, since" in warning for warning in view.warnings)
    assert (large.verdict, large.needs) == ("tight", None)


CRASHES = """
from common import batch, make, torch
model = make()
count = torch.zeros(3, dtype=torch.int64, device="cuda").mul(torch.ones(3, dtype=torch.int64, device="cuda"))
model(batch()).mean().backward()
{end}
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("end", "message", "line"),
    [
        ("raise ValueError('no such\\nthing')", "ValueError: no such …", 6),
        ("import sys\ntry:\n    [][1]\nexcept IndexError:\n    sys.exit(1)", "IndexError: list index out of range", 8),
        ("import os; os._exit(1)", "it ended with exit code 1", None),
    ],
    ids=["an error", "an error that ends in sys.exit", "os._exit"],
)
def test_a_program_that_failed_has_no_verdict(script: Script, end: str, message: str, line: int | None) -> None:
    """Its exit code is its own; what ran before is told."""
    rehearsal = script(CRASHES.format(end=end))

    assert (rehearsal.exit_code, rehearsal.verdict, rehearsal.fits) == (1, "unknown", None)
    where = f" at {Path('train.py').resolve()}:{line}" if line else ""
    assert view_rehearsal(rehearsal, find_gpu("t4")).headline == f"No verdict for Tesla T4: the program failed in step 1{where}: {message}"
    assert "guessed" not in " ".join(view_rehearsal(rehearsal, find_gpu("t4")).warnings)
    assert rehearsal.peak_allocated_bytes >= 8 * MIB


GUESSES = """
from common import batch, make, torch
model = make()
count = model(batch()).square().sum().long().item()
torch.ones(64, device="cuda").chunk(count)
"""


@pytest.mark.heavy
def test_a_guessed_size_may_be_why_a_program_failed(script: Script) -> None:
    """No tensor can be cut into no parts: the report names the line that got the zero."""
    failed = script(GUESSES)

    headline = view_rehearsal(failed, find_gpu("t4")).headline
    assert headline.startswith("No verdict for Tesla T4: the program failed ")
    assert headline.endswith("; a guessed value may be the cause: reads answered with zero at train.py:4 (1×)")
    assert (failed.verdict, failed.exit_code) == ("unknown", 1)


NOT_SERVED = """
from common import batch, make, torch
model = make()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(3):
    model(batch()).mean().backward()
    try:
        one = torch.eye(4, device="cuda").to_sparse_csr()
        one @ one
    except RuntimeError as error:
        print(error)
    update.step()
"""


@pytest.mark.heavy
def test_a_program_that_goes_on_without_a_call_keeps_its_report(script: Script) -> None:
    """It may take more on a real GPU, which has the call."""
    rehearsal = seen(script(NOT_SERVED))

    assert (len(rehearsal.steps), rehearsal.verdict, rehearsal.fits) == (3, "unknown", None)
    assert "does not serve cusparseSpGEMM" in view_rehearsal(rehearsal, find_gpu("t4")).headline


LENGTHS = """
from common import torch
from torch.utils.data import DataLoader
embed = torch.nn.Embedding(100, 512).cuda()
update = torch.optim.SGD(embed.parameters(), lr=0.1)
for ids in DataLoader([torch.zeros(length, dtype=torch.int64) for length in (10, 700, 30, 40)], batch_size=None):
    embed(ids.cuda()).sum().backward()
    update.step()
for ids in DataLoader([torch.zeros(length, dtype=torch.int64) for length in (2, 900)], batch_size=None):
    embed(ids.cuda())
"""

ACCUMULATED = """
from common import torch
from torch.utils.data import DataLoader
embed = torch.nn.Embedding(100, 512).cuda()
update = torch.optim.SGD(embed.parameters(), lr=0.1)
batches = iter(DataLoader([torch.zeros(length, dtype=torch.int64) for length in (700, 10, 30, 40)], batch_size=None))
for _ in range(2):
    for ids in [next(batches), next(batches)]:  # as transformers' Trainer takes them
        embed(ids.cuda()).sum().backward()
    update.step()
"""


@pytest.mark.heavy
def test_batches_of_several_shapes_are_told_of(script: Script) -> None:
    """The largest of an epoch decides, and may come later where not all of one was run; those of an evaluation are not trained with."""
    whole, part = (seen(script(LENGTHS, steps=steps)).findings for steps in (None, 3))

    assert [(finding.kind, finding.message) for finding in whole] == [
        (
            "epoch_shapes",
            "the shapes of the batches differ: 10 to 700 among the 4 that were taken, a whole epoch; one in another order may have a "
            "larger batch",
        )
    ]
    assert [finding.kind for finding in part] == ["batch_shapes"]
    assert "10 to 700 among the 3 that were taken" in part[0].message


@pytest.mark.heavy
def test_batches_that_are_taken_at_once_are_all_trained_with(script: Script) -> None:
    """No backward comes between the first of them and the next."""
    (finding,) = [finding for finding in seen(script(ACCUMULATED)).findings if finding.kind == "batch_shapes"]

    assert "10 to 700 among the 4" in finding.message


MASTER = """
import torch
from torch.nn.functional import grid_sample
model = torch.nn.Conv2d(64, 2, 3, padding=1, bias=False).cuda().half()
master = torch.nn.Parameter(torch.zeros(64 * 2 * 9, device="cuda"))
large = torch.nn.Parameter(torch.zeros(2**20, device="cuda", dtype=torch.half))
of_large = torch.nn.Parameter(torch.zeros(2**20, device="cuda"))
update = torch.optim.SGD([master, of_large])
for _ in range(3):
    images = torch.randn(8, 64, 64, 64).half().cuda()
    flow = model(images)
    places = flow.detach().permute(0, 2, 3, 1) * 0.5
    (grid_sample(flow, places, align_corners=True).square().mean() + large.mean()).backward()
    master.grad, of_large.grad = model.weight.grad.flatten().float(), large.grad.float()
    del flow
    update.step()
    model.weight.grad = large.grad = None
    torch.empty(2**24, device="cuda")
"""


def test_what_a_program_makes_of_its_batch_and_of_its_gradients_is_no_batch(script: Script) -> None:
    """
    Gradients of fp32 masters, as apex has them, and positions to sample at are made without autograd.

    At the peak, behind the step: 2 MiB of weights and 4 MiB of masters with as much of gradients, the batch of 4 MiB, and the positions.
    """
    rehearsal = seen(script(MASTER))
    breakdown = rehearsal.breakdown

    assert breakdown.batch_data_bytes == 8 * 64 * 64 * 64 * 2
    assert breakdown.gradients_bytes == 4 * MIB + 64 * 2 * 9 * 4
    assert breakdown.activations_bytes == 64 * MIB + 8 * 64 * 64 * 2 * 2


@pytest.mark.heavy
def test_workspaces_that_the_program_gives_back_were_workspaces(script: Script) -> None:
    """As Lightning does at the end of a training: nothing of them is left then."""
    kept, given_back = (seen(script(TRAINING + more)).breakdown for more in ("", "torch._C._cuda_clearCublasWorkspaces()\n"))

    assert kept.workspaces_bytes > 8 * MIB  # of the forward's thread and of autograd's
    assert given_back == kept


CONVOLUTIONS = """
import torch
model = torch.nn.Conv2d(256, 256, 3, padding=1, bias=False).cuda()
update = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.randn(8, 256, 64, 64, device="cuda")).mean().backward()
    update.step()
    update.zero_grad()
"""


def test_what_is_allowed_for_a_library_is_a_workspace(script: Script) -> None:
    """At the peak, in the convolution's backward: its input and the gradient of its output, 32 MiB each; the rest is cuDNN's."""
    breakdown = seen(script(CONVOLUTIONS)).breakdown

    assert breakdown.activations_bytes < 2 * 33 * MIB
    assert breakdown.workspaces_bytes > 64 * MIB


OWN_PARAMETERS = """
from common import batch, torch
class Learner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(512, 1024))])
    def forward(self, x):
        return x @ self.weights[0]
    def parameters(self):
        return list(self.weights)
    def named_modules(self):
        return []
model = Learner().cuda()
update = torch.optim.Adam(model.parameters())
for _ in range(2):
    model(batch()).mean().backward()
    update.step()
"""


@pytest.mark.heavy
def test_a_class_may_have_parameters_of_its_own(script: Script) -> None:
    """A method of PyTorch's that it gives other arguments, as in learners of MAML: 2 MiB of weights, and what Adam keeps of them."""
    rehearsal = seen(script(OWN_PARAMETERS))

    assert rehearsal.verdict == "fits"
    assert (rehearsal.breakdown.parameters_bytes, rehearsal.breakdown.optimizer_state_bytes) == (2 * MIB, 4 * MIB)


ADAPTIVE = """
from common import batch, make, torch
model = make()
update = torch.optim.SGD(model.parameters(), lr=0.1)
end = torch.ones(()).cuda()
for _ in range(2):
    time = torch.zeros(()).cuda()
    while end > time:
        found = model(batch())
        if found.std() < 5:
            time = time + found.mean().detach().abs()
    model(batch()).mean().backward()
    update.step()
"""


@pytest.mark.heavy
def test_a_loop_that_waits_for_what_a_model_computes_has_no_upper_end(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first it ends at once; with values it begins and never ends, since no step of it is small enough, and that run is given up."""
    monkeypatch.setattr("memplan.execution.program_runs.most_seconds", lambda first: first + 5)

    rehearsal = seen(script(ADAPTIVE))

    assert (rehearsal.verdict, rehearsal.exit_code, len(rehearsal.steps)) == ("unknown", 0, 2)
    given_up, guessed = rehearsal.lower_bound_reasons
    assert given_up.startswith("the run that was to find what its data decide did not succeed: it was ended after ")
    assert guessed == "loops were guessed to end at once at train.py:8 (2×)"


FAILS_WITHOUT_ITS_LENGTH = """
import time
from common import batch, make, torch
model = make()
update = torch.optim.SGD(model.parameters(), lr=0.1)
length = torch.tensor([64]).cuda()
model(batch()).mean().backward()
update.step()
rows = batch()[: length[0].item()]
assert len(rows)
time.sleep(4)
model(rows)
"""


@pytest.mark.heavy
def test_a_run_with_values_may_take_longer_than_a_first_one_that_failed(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one failed for a length that was taken for zero, before it came to what takes its time."""
    monkeypatch.setattr("memplan.execution.program_runs.most_seconds", lambda first: 60 if first is None else 1)

    assert seen(script(FAILS_WITHOUT_ITS_LENGTH)).verdict == "fits"


@pytest.mark.heavy
def test_a_run_with_values_that_comes_first_may_take_its_time(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says yet how long the program takes; it was ended after a minute, and run without its values after all."""
    monkeypatch.setattr("memplan.execution.program_runs.most_seconds", lambda first: 60 if first is None or first > 1 else 0.5)
    (tmp_path / "runs").mkdir()
    counts = "import os\nopen(f'runs/{os.getpid()}', 'w').close()\n"

    rehearsal = seen(script(counts + FAILS_WITHOUT_ITS_LENGTH, allow_writes=True, expects_values=True))

    assert rehearsal.verdict == "fits"
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_pytorch_finds_the_folder_of_its_cache_of_kernels(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    """It compiles a kernel of its own for a rare function, and warns where the folder is not there."""
    seen(script("import torch\ntorch.special.bessel_j1(torch.ones(8, device='cuda'))\ntorch.special.airy_ai(torch.ones(8, device='cuda'))"))

    assert "cache directory" not in capfd.readouterr().err


@pytest.mark.heavy
def test_the_last_batch_of_an_epoch_is_no_other_shape(script: Script) -> None:
    """Ten samples in batches of four: two remain."""
    rehearsal = seen(
        script("""
from common import make, torch
from torch.utils.data import DataLoader
model = make()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for samples in DataLoader(torch.zeros(10, 512), batch_size=4):
        model(samples.cuda()).mean().backward()
        update.step()
""")
    )

    assert [finding.kind for finding in rehearsal.findings] == []


WORST = """
from common import torch
from torch.utils.data import DataLoader
embed = torch.nn.Embedding(100, 512).cuda()
update = torch.optim.SGD(embed.parameters(), lr=0.1)
samples = [(torch.zeros(length, dtype=torch.int64), torch.zeros(label)) for length, label in ((10, 1), (20, 9), (7000, 1), (40, 1))]
for ids, labels in DataLoader(samples, batch_size=None, num_workers=2):
    print(len(ids), len(labels), flush=True)
    embed(ids.cuda()).sum().backward()
    update.step()
"""


@pytest.mark.heavy
def test_the_largest_batches_of_an_epoch_come_after_the_first_on_request(
    script: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """That with the most elements, and those with the longest of each input; then the program's own, in their order."""
    (tmp_path / "train.py").write_text(WORST)

    rehearsal = seen(rehearse_script(["train.py"], gpu=find_gpu("t4"), steps=6, most_walked_batches=100, timeout_seconds=100))

    assert capfd.readouterr().out.splitlines() == ["10 1", "7000 1", "20 9", "20 9", "7000 1", "40 1"]
    assert rehearsal.peak_allocated_bytes >= 7000 * 512 * 4
    (finding,) = [finding for finding in rehearsal.findings if finding.kind in ("batch_shapes", "cached_shapes")]
    assert finding.kind == "cached_shapes"
    assert finding.message.startswith("the shapes of the batches differ: 10 to 7000, the largest of all; what PyTorch has cached")


STEPS_OF_SEVERAL_SIZES = """
from common import torch
layer = torch.nn.Linear(512, 512).cuda()
update = torch.optim.SGD(layer.parameters(), lr=0.1)
for rows in (64, 512, 4096):
    layer(torch.randn(rows, 512).cuda()).sum().backward()
    update.step()
    update.zero_grad()
"""


@pytest.mark.heavy
@pytest.mark.parametrize("has_evaluation", [False, True])
def test_steps_of_several_sizes_are_told_of_where_no_loader_gives_the_batches(script: Script, has_evaluation: bool) -> None:
    """Of batches that the program makes itself nobody knows the shapes; what an evaluation takes is none of a step's."""
    evaluation = "    layer.eval()\n    layer(torch.randn(9, 512).cuda())\n    layer.train()\n" if has_evaluation else ""

    found = [finding.message for finding in script(STEPS_OF_SEVERAL_SIZES + evaluation).findings if finding.kind == "varying_steps"]

    assert found == (
        []
        if has_evaluation
        else [
            "steps 2 to 3 take from 2.0 MiB to 16.0 MiB beside what lasts: they differ, and no DataLoader gives the batches, so that the "
            "largest cannot be looked for: a later step may take more"
        ]
    )


READS_BESIDE = """
import multiprocessing, sys
import torch
from torch.utils.data import DataLoader

def read():
    lengths = [int(length) for length in DataLoader([10, 20, 7000, 40], batch_size=None)]
    print(lengths, flush=True)

if __name__ == "__main__":
    reader = multiprocessing.get_context("spawn").Process(target=read)
    reader.start()
    reader.join()
    torch.zeros(10, device="cuda", requires_grad=True).sum().backward()
"""


@pytest.mark.heavy
def test_the_largest_do_not_come_first_where_a_process_only_reads(
    script: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a process without a GPU takes of a DataLoader is none of the batches that are trained with."""
    (tmp_path / "train.py").write_text(READS_BESIDE)

    found = seen(rehearse_script(["train.py"], gpu=find_gpu("t4"), most_walked_batches=100, timeout_seconds=100))

    assert capfd.readouterr().out.splitlines() == ["[10, 20, 7000, 40]"]
    assert "nothing_walked" in [finding.kind for finding in found.findings]


@pytest.mark.heavy
def test_a_batch_that_the_program_changes_in_place_comes_again_as_it_was(
    script: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As graph networks do that keep what they compute in the batch: the largest comes twice, before and after the first step."""
    text = WORST.replace("for ids, labels in", "for batch in")
    (tmp_path / "train.py").write_text(text.replace("    print(", "    ids, labels = batch.pop(0), batch.pop(0)\n    print("))

    seen(rehearse_script(["train.py"], gpu=find_gpu("t4"), steps=6, most_walked_batches=100, timeout_seconds=100))

    assert capfd.readouterr().out.splitlines() == ["10 1", "7000 1", "20 9", "20 9", "7000 1", "40 1"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("lengths", "kept", "num_runs", "largest"),
    [((10, 10, 10, 7000), "ids", 1, 10), ((10, 20, 30, 7000), "ids", 2, 7000), ((10, 20, 30, 7000), "ids[ids == 0]", 3, 7000)],
)
def test_batches_are_looked_at_where_the_first_run_shows_that_they_differ(
    script: Script, tmp_path: Path, lengths: tuple[int, ...], kept: str, num_runs: int, largest: int
) -> None:
    """A run that is made again with its values need not be made again for its batches."""
    folder = tmp_path / "runs"
    folder.mkdir()
    text = WORST.replace("((10, 1), (20, 9), (7000, 1), (40, 1))", str(tuple((length, 1) for length in lengths)))
    text = text.replace("ids.cuda()", f"(ids := ids.cuda(), {kept})[1]")
    (tmp_path / "train.py").write_text(f"import os\nopen(f'runs/{{os.getpid()}}', 'w').close()\n{text}")
    options = {"steps": 3, "allow_writes": True, "timeout_seconds": 100}

    rehearsal = rehearse_script(["train.py"], gpu=find_gpu("t4"), walks_where_they_differ=WalkedBatches(100, 3, 5), **options)

    assert len(list(folder.iterdir())) == num_runs
    assert rehearsal.peak_allocated_bytes >= largest * 512 * 4
    assert bool(rehearsal.num_walked_batches) == (num_runs > 1)


RISES = """
import os
from common import torch
from torch.optim import SGD
open(f"runs/{os.getpid()}", "w").close()
rows = [40_960] * 3 + [81_920] + [40_960] * 20
layer = torch.nn.Linear(256, 256).cuda()
update = SGD(layer.parameters(), lr=0.1)
for count in rows:
    mask = (torch.arange(count) % 8 > 0).cuda()
    layer(torch.zeros(count, 256, device="cuda"))[mask].sum().backward()
    update.step()
"""


@pytest.mark.parametrize(
    ("rows", "mask", "num_steps", "num_runs"),
    [
        pytest.param("[40_960] * 3 + [81_920]", "[mask]", 6, 3, marks=pytest.mark.heavy),
        ("[40_960] * 3 + [81_920]", "", 6, 1),
        ("[40_960] * 4", "", 4, 1),
    ],
    ids=["it needs its values", "it needs none", "it is settled"],
)
def test_a_program_whose_last_step_reserves_more_is_run_for_longer(
    script: Script, tmp_path: Path, rows: str, mask: str, num_steps: int, num_runs: int
) -> None:
    """In the same run, and each further one for as long."""
    folder = tmp_path / "runs"
    folder.mkdir()
    (tmp_path / "train.py").write_text(RISES.replace("[40_960] * 3 + [81_920]", rows).replace("[mask]", mask))

    rehearsal = rehearse_script(["train.py"], gpu=find_gpu("t4"), steps=4, late_steps=6, allow_writes=True, timeout_seconds=100)

    assert (rehearsal.verdict, len(rehearsal.steps)) == ("fits", num_steps)
    assert len(list(folder.iterdir())) == num_runs
    peaks = [step.peak_reserved_bytes for step in rehearsal.steps]
    assert (peaks[3] > peaks[2]) == (num_steps > 4)


FAILS_WITHOUT_VALUES = """
from common import torch
from torch.utils.data import DataLoader
embed = torch.nn.Embedding(100, 512).cuda()
update = torch.optim.SGD(embed.parameters(), lr=0.1)
samples = [torch.arange(length) % 100 for length in (10, 20, 30, 7000)]
for ids in DataLoader(samples, batch_size=None):
    sums = torch.zeros(int(ids.cuda().max()) + 1, 512, device="cuda").index_add(0, ids.cuda(), embed(ids.cuda()))
    assert len(sums) >= 10
    sums.sum().backward()
    update.step()
"""


@pytest.mark.heavy
@pytest.mark.parametrize("expects_values", [False, True])
def test_batches_are_looked_at_where_only_the_run_with_values_shows_that_they_differ(
    script: Script, tmp_path: Path, *, expects_values: bool
) -> None:
    """Without values the program fails in its first batch: a graph network that counts its graphs."""
    (tmp_path / "train.py").write_text(FAILS_WITHOUT_VALUES)
    options = {"steps": 3, "timeout_seconds": 100, "expects_values": expects_values}

    rehearsal = rehearse_script(["train.py"], gpu=find_gpu("t4"), walks_where_they_differ=WalkedBatches(100, 3, 5), **options)

    assert (rehearsal.verdict, rehearsal.num_walked_batches) == ("fits", 4)
    assert rehearsal.peak_allocated_bytes >= 7000 * 512 * 4


IN_EPOCHS = """
import sys
from common import torch
from torch.utils.data import *
samples, weights = TensorDataset(torch.zeros(50, 512)), torch.ones(50)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples)

class Again(SequentialSampler):
    def __iter__(self):
        while True:
            yield from super().__iter__()

model = torch.nn.Linear(512, 512).cuda()
for loader in eval(sys.argv[1]):
    for (batch,) in loader:
        model(batch.cuda()).sum().backward()
        break
"""


@pytest.mark.parametrize(
    ("loaders", "num_samples"),
    [
        ("[DataLoader(samples, 8, shuffle=True)]", 50),
        ("[DataLoader(samples, 8, num_workers=1)]", 50),
        ("[DataLoader(samples, 8, sampler=WeightedRandomSampler(weights, 70))]", 70),
        ("[DataLoader(samples, 8, sampler=SubsetRandomSampler(range(20)))]", 20),
        ("[DataLoader(samples, 8, sampler=RandomSampler(samples, replacement=True, num_samples=90))]", 90),
        ("[DataLoader(samples, 8), DataLoader(Subset(samples, range(30)), 8)]", 50),
        ("[DataLoader(samples, 8), DataLoader(Stream(), 8)]", None),
        ("[DataLoader(samples, 8, sampler=Again(samples))]", None),
        ("[DataLoader(samples, batch_sampler=[[0, 1], [2, 3]])]", None),
        ("[DataLoader(samples, None)]", None),
    ],
)
def test_how_many_samples_an_epoch_has_is_known_of_samplers_of_pytorch(script: Script, loaders: str, num_samples: int | None) -> None:
    """Of several DataLoaders the most; one of the program's own may begin anew where its data end."""
    assert seen(script(IN_EPOCHS, loaders)).num_epoch_samples == num_samples


TWO_LOADERS = """
from common import torch
from torch.utils.data import DataLoader

def lengths(*numbers):
    for at, number in enumerate(numbers):
        open("looked_at", "a").write(f"{at} ")
        yield torch.zeros(number)

class Stream(torch.utils.data.IterableDataset):
    def __init__(self, *numbers):
        self.numbers = numbers
    def __iter__(self):
        return lengths(*self.numbers)

for numbers in ((10, 40, 20, 70), (30, 60)):
    for batch in DataLoader(Stream(*numbers), batch_size=None):
        batch.cuda()
        print(len(batch))
        open("looked_at", "a").write("taken ")
        break
"""


@pytest.mark.heavy
def test_no_more_batches_of_a_dataloader_are_looked_at_than_was_asked_for(
    script: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a program that takes one batch of each, the next is the largest; how many were looked at is told for each DataLoader by itself."""
    seen(script(TWO_LOADERS, most_walked_batches=3, allow_writes=True))

    told = capfd.readouterr()
    assert told.out.split() == ["10", "60"]
    assert (tmp_path / "looked_at").read_text() == "0 1 2 0 taken 0 1 taken "
    assert [line for line in told.err.splitlines() if line.startswith("memplan: ")] == [
        "memplan: of 3 batches the largest come after the first one",
        "memplan: of 2 batches the largest come first",
    ]


@pytest.mark.heavy
def test_where_no_batch_comes_from_a_dataloader_the_largest_is_not_known(script: Script) -> None:
    """And the report says so, where it was asked for."""
    asked, unasked = (seen(script(TRAINING, most_walked_batches=most)) for most in (100, 0))

    assert [finding.kind for finding in asked.findings] == ["nothing_walked"]
    assert unasked.findings == ()


MONITORED = """
import lightning, torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, number):
        return self.layer(batch).square().mean()
    def validation_step(self, batch, number):
        self.log("score", self.layer(batch).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.DataLoader(torch.zeros(4, 8), batch_size=4)
stops = EarlyStopping("score", patience=1, stopping_threshold=-1.0)
trainer = lightning.Trainer(max_epochs=4, accelerator="gpu", devices=1, logger=False, callbacks=[stops, ModelCheckpoint(monitor="score")])
trainer.fit(Module(), data, data)
"""


@pytest.mark.heavy
def test_what_lightning_monitors_improves_and_nobody_is_told(script: Script) -> None:
    """All four epochs are trained, though no number is computed: to stop early takes less, and saves nothing."""
    pytest.importorskip("lightning")

    rehearsal = seen(script(MONITORED))

    assert (rehearsal.verdict, len(rehearsal.steps), rehearsal.findings) == ("fits", 4, ())


# scripts with settings and processes of their own


@pytest.mark.heavy
def test_settings_that_a_script_makes_before_it_imports_torch_hold(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    """Those of the allocator; the GPU is the one that was asked for, whichever it chooses."""
    settings = """
import os
os.environ |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_VISIBLE_DEVICES": "3"}
"""
    rehearsal = seen(script(settings + TRAINING + "print(torch.cuda.device_count())"))

    assert capfd.readouterr().out.split() == ["trained", "1"]
    assert rehearsal.trace is not None
    assert "M" in rehearsal.trace.actions  # segments are mapped, not allocated


WORKERS = """
from common import batch, make, torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    model = make()
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(128, 512))
    for context in ("fork", "spawn"):
        for rows, in DataLoader(data, batch_size=64, num_workers=1, pin_memory=True, multiprocessing_context=context):
            model(rows.cuda(non_blocking=True)).mean().backward()
            update.step()
            update.zero_grad()
"""


@pytest.mark.heavy
def test_workers_that_load_data_change_nothing(script: Script) -> None:
    """Forked ones and started ones: two batches of each, and the numbers are the trainer's."""
    rehearsal = seen(script(WORKERS))

    assert len(rehearsal.steps) == 4
    assert rehearsal.breakdown.parameters_bytes == 4 * MIB


LONG_STEP = """
import torch
weight = torch.nn.Parameter(torch.ones(1024, device="cuda"))
update = torch.optim.SGD([weight], lr=0.1)

def compute():
    for _ in range(1000):
        torch.empty(1, device="cuda")
    loss = weight.sum()
    loss.backward()
    return loss

for number in range(2):
    for _ in range(1200):
        compute()
    kept = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    update.step()
    update.zero_grad()
    del kept
"""


@pytest.mark.heavy
def test_a_step_of_millions_of_events_ends_with_a_report(script: Script) -> None:
    """The first two million are recorded; the peak behind them is known all the same, and where it was not."""
    rehearsal = seen(script(LONG_STEP))

    assert (rehearsal.verdict, len(rehearsal.steps)) == ("fits", 2)
    assert rehearsal.peak_allocated_bytes >= 64 * MIB
    assert rehearsal.peak_phase == "a step behind those recorded"


IN_A_CHILD = """
import multiprocessing, os, subprocess, sys
import torch

def train():
    import trained

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "subprocess":
        sys.exit(subprocess.run([sys.executable, "trained.py"]).returncode)
    if how == "exec":
        torch.ones(2**20, device="cuda")  # 4 MiB that are gone with this program
        os.execv(sys.executable, [sys.executable, "trained.py"])
    child = multiprocessing.get_context(how).Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    "how", ["spawn", *(pytest.param(how, marks=pytest.mark.heavy) for how in ("fork", "forkserver", "subprocess", "exec"))]
)
def test_the_process_that_trains_is_the_one_told_of(script: Script, tmp_path: Path, how: str) -> None:
    """Launchers start another Python for it, fork, or become it."""
    (tmp_path / "trained.py").write_text(TRAINING)

    rehearsal = seen(script(IN_A_CHILD, how))

    assert len(rehearsal.steps) == 3
    if how not in ("subprocess", "exec"):
        name = {"spawn": "SpawnProcess-1", "fork": "ForkProcess-1", "forkserver": "ForkServerProcess-1"}[how]
        assert rehearsal.process == f"{name} of train.py {how}"
    assert rehearsal.breakdown.optimizer_state_bytes == 8 * MIB
    assert rehearsal.breakdown.parameters_bytes == 4 * MIB


ASKS_A_QUEUE = """
import multiprocessing, sys

def train(results):
    import trained
    results.put("trained")

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=train, args=(results,))
    child.start()
    print(results.get())
    child.join()
"""


@pytest.mark.heavy
def test_a_launcher_that_waits_for_the_result_of_what_its_steps_ended_is_ended(script: Script, tmp_path: Path) -> None:
    """By itself it would wait for ever at its queue, and the rehearsal with it."""
    (tmp_path / "trained.py").write_text(TRAINING)

    assert len(seen(script(ASKS_A_QUEUE, steps=2)).steps) == 2


@pytest.mark.heavy
def test_a_launcher_that_waits_for_the_result_of_what_failed_is_ended(script: Script, tmp_path: Path) -> None:
    """Its trainer imports PyTorch when it runs already, and what it dies of is told."""
    (tmp_path / "trained.py").write_text(f"{TRAINING}\nraise ValueError('no file')")

    rehearsal = script(ASKS_A_QUEUE)

    assert (len(rehearsal.steps), rehearsal.exit_code, rehearsal.was_interrupted) == (3, 1, False)
    assert rehearsal.failure is not None
    assert rehearsal.failure.message == "ValueError: no file"


WAITS_FOR_A_RANK = """
import torch, torch.distributed as dist
torch.nn.Linear(8, 8).cuda()
store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
store.wait(["a rank that never comes"])
"""


@pytest.mark.heavy
def test_the_line_at_which_a_script_hangs_is_told(script: Script) -> None:
    """It waits in C, for a rank that does not come."""
    with pytest.raises(UsageError, match=r"did not end within 20 seconds: it is at .*train.py:5"):
        script(WAITS_FOR_A_RANK, timeout_seconds=20)


@pytest.mark.heavy
def test_a_script_that_hangs_is_ended_with_all_that_it_started(script: Script, tmp_path: Path) -> None:
    """Also what its children started, and what does not listen."""
    (tmp_path / "deaf.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid(), file=open('pid', 'w'), flush=True)\n"
        "time.sleep(600)\n"
    )
    starts = "import subprocess, sys\nsubprocess.run([sys.executable, 'deaf.py'], start_new_session=True)"

    with pytest.raises(UsageError, match="did not end within 3 seconds"):
        script(starts, timeout_seconds=3, allow_writes=True)

    gone = Path("/proc") / Path("pid").read_text().strip()
    for _ in range(50):  # it has been killed; who takes its exit code is not ours to say
        if not gone.exists() or "State:\tZ" in (gone / "status").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child still runs")


# rehearsals that begin themselves


GUARDED = """
import sys
import memplan

def build(device):
    import torch
    return lambda: torch.empty(2**20, device=device)

if __name__ == "__main__":
    print(memplan.rehearse(build, gpu="t4", steps=1).peak_allocated_bytes)
"""


@pytest.mark.heavy
def test_a_file_may_rehearse_its_own_function(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Under the guard that every file with multiprocessing has."""
    (tmp_path / "own.py").write_text(GUARDED)

    result = subprocess.run([sys.executable, tmp_path / "own.py"], capture_output=True, text=True, check=False, timeout=100)

    assert (result.stdout, result.stderr) == (f"{4 * MIB}\n", "")


@pytest.mark.heavy
def test_a_rehearsal_does_not_begin_another(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Without the guard, loading the file would, without end."""
    own = tmp_path / "own.py"
    own.write_text(GUARDED.replace('if __name__ == "__main__":', "if True:"))

    with pytest.raises(UsageError, match="that is being rehearsed asked for a rehearsal"):
        rehearse(f"{own}:build", gpu="t4")


# what would be a false "fits"


@pytest.mark.heavy
def test_of_one_step_the_largest_batch_is_the_first(script: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """There is no other."""
    (tmp_path / "train.py").write_text(WORST)

    seen(rehearse_script(["train.py"], gpu=find_gpu("t4"), steps=1, most_walked_batches=100, timeout_seconds=100))

    assert capfd.readouterr().out.splitlines() == ["7000 1"]


LED_WITH_STATE = """
import torch
from torch.utils.data import DataLoader

lengths = [8, 16, 1024, 8, 8, 8, 8, 8]
data = [torch.ones(length, 512) for length in lengths]
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(16)]).cuda()
update = torch.optim.Adam(model.parameters())
for batch in DataLoader(data, batch_size=1):
    model(batch.cuda()).square().mean().backward()
    update.step()
    update.zero_grad()
"""


@pytest.mark.heavy
def test_the_largest_batch_comes_again_when_the_optimizer_has_its_state(script: Script) -> None:
    """16 MiB of weights, 32 of moments, and with them 16 activations of 2 MiB, though the first step had no moments."""
    rehearsal = seen(script(LED_WITH_STATE, steps=4, most_walked_batches=100))

    assert rehearsal.peak_allocated_bytes > (16 + 32 + 16 * 2) * MIB
    assert rehearsal.peak_phase == "backward of step 2"


@pytest.mark.heavy
def test_what_is_cached_of_a_smaller_batch_counts_beside_the_largest(script: Script) -> None:
    """An epoch that begins with a batch of 4000 rows, and has one of 6000 later, reserves what one reserves that has both at once."""
    later = LED_WITH_STATE.replace("[8, 16, 1024, 8, 8, 8, 8, 8]", "[4000, 8, 8, 8, 8, 8, 8, 6000]")
    at_once = later.replace("[4000, 8, 8, 8, 8, 8, 8, 6000]", "[4000, 6000, 6000]")

    led = seen(script(later, steps=3, most_walked_batches=100))
    as_it_comes = seen(script(at_once, steps=3))
    largest_alone = seen(script(at_once.replace("[4000, ", "["), steps=2))

    assert led.peak_reserved_bytes == as_it_comes.peak_reserved_bytes
    # of 15 activations of 4000 x 512 fp32, the blocks that those of 6000 rows do not fit into: a fifth more in all
    assert led.peak_reserved_bytes > 1.2 * largest_alone.peak_reserved_bytes


@pytest.mark.heavy
def test_several_of_the_programs_own_batches_before_the_largest_reserve_what_its_order_does(script: Script) -> None:
    """As a plan runs it: each a little larger than the one before, and then the largest. After the first alone it reserves less."""
    text = LED_WITH_STATE.replace("[8, 16, 1024, 8, 8, 8, 8, 8]", "[2500, 3500, 4500, 6000]")
    in_order = seen(script(text))

    after_one, after_three = (seen(script(text, most_walked_batches=100, own_first=own, steps=5)) for own in (1, 3))

    assert after_one.peak_reserved_bytes < in_order.peak_reserved_bytes <= after_three.peak_reserved_bytes


@pytest.mark.heavy
@pytest.mark.parametrize(("lengths", "is_more"), [("[8000, 4000, 6000]", False), ("[2500, 3500, 4500, 6000]", True)])
def test_where_batches_in_their_own_order_reserve_more_that_is_told(script: Script, lengths: str, is_more: bool) -> None:
    """Each a little larger than the one before: nothing that is cached serves the next one. Those that get smaller are served."""
    (Path.cwd() / "train.py").write_text(LED_WITH_STATE.replace("[8, 16, 1024, 8, 8, 8, 8, 8]", lengths))
    told: list[str] = []
    options: dict[str, Any] = {"gpu": find_gpu("a100-40"), "steps": 4, "timeout_seconds": 100}
    led = seen(rehearse_script(["train.py"], most_walked_batches=100, **options))
    in_order = seen(rehearse_script(["train.py"], **options))

    rehearsal = seen(rehearse_in_both_orders(["train.py"], most_walked_batches=100, on_next_run=told.append, is_heard=False, **options))

    assert (in_order.peak_reserved_bytes > led.peak_reserved_bytes) is is_more
    assert rehearsal.peak_reserved_bytes == max(in_order.peak_reserved_bytes, led.peak_reserved_bytes)
    assert [finding.kind for finding in rehearsal.findings] == ["cached_shapes"]
    assert rehearsal.num_walked_batches
    assert told == ["the batches in their own order"]


LARGER_IN_ITS_SECOND_STEP = """
import torch
weights = torch.nn.Parameter(torch.zeros(1024, 1024, device="cuda"))
update = torch.optim.SGD([weights])
for rows in (1, 2_000_000):
    (torch.ones(rows, 1024, device="cuda") @ weights).sum().backward()
    update.step()
"""


@pytest.mark.heavy
def test_the_peak_of_a_step_that_runs_out_of_memory_is_of_that_step(script: Script) -> None:
    """No optimizer step followed, and yet it is no evaluation: the 7.6 GiB of its input are there, those of its output are not."""
    rehearsal = script(LARGER_IN_ITS_SECOND_STEP)

    assert rehearsal.verdict == "does_not_fit"
    assert rehearsal.peak_allocated_bytes >= 2_000_000 * 1024 * 4
    assert rehearsal.peak_phase == "forward of step 2"


ONE_AFTER_THE_OTHER = """
import subprocess, sys
if len(sys.argv) > 1:
    import torch
    weights = torch.nn.Parameter(torch.empty(int(sys.argv[1]), 1 << 28, device="cuda"))
    update = torch.optim.SGD([weights])
    for _ in range(int(sys.argv[2])):
        weights.sum().backward()
        update.step()
        update.zero_grad()
else:
    for gigabytes, steps in ((1, 5), (12, 2), (2, 5)):
        subprocess.run([sys.executable, "train.py", str(gigabytes), str(steps)])
"""


@pytest.mark.heavy
def test_of_several_processes_one_that_ran_out_of_memory_is_told_of(script: Script) -> None:
    """Whichever made the most steps, and though the program that started it goes on: 12 GiB of weights leave none for their gradient."""
    rehearsal = script(ONE_AFTER_THE_OTHER)

    assert rehearsal.verdict == "does_not_fit"
    assert rehearsal.process is not None
    assert rehearsal.process.endswith("train.py 12 2")


@pytest.mark.heavy
def test_of_several_processes_the_one_that_takes_most_is_told_of(script: Script) -> None:
    """4 GiB of weights and as much of gradients, in two steps of six."""
    rehearsal = seen(script(ONE_AFTER_THE_OTHER.replace("(12, 2)", "(4, 2)")))

    assert 8 * 2**30 <= rehearsal.peak_allocated_bytes < 8 * 2**30 + MIB
    assert rehearsal.verdict == "fits"


AT_ONCE = """
import subprocess, sys, torch
held = torch.empty({held} << 28, device="cuda")
if len(sys.argv) == 1:
    other = subprocess.Popen([sys.executable, "train.py", "other"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"holds\\n"
    weights = torch.nn.Parameter(torch.empty(1 << 28, device="cuda"))
    weights.sum().backward()
    other.communicate()
else:
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.mark.heavy
def test_processes_that_use_the_gpu_at_once_share_it(script: Script) -> None:
    """Two that hold 3 GiB each, and one of them 2 more: 8 of 14.75 GiB, and contexts. With 7 each there is no room for the 2."""
    fits = seen(script(AT_ONCE.format(held=3)))
    does_not = script(AT_ONCE.format(held=7))

    assert fits.breakdown.other_processes_bytes >= 3 * 2**30
    assert fits.device_used_bytes > 8 * 2**30
    assert does_not.verdict == "does_not_fit"


UNFREEZES = """
import torch
backbone = torch.nn.Linear(4096, 4096, bias=False).cuda().requires_grad_(False)
head = torch.nn.Linear(4096, 8, bias=False).cuda()
update = torch.optim.Adam([*backbone.parameters(), *head.parameters()])
for step in range(4):
    loss = head(backbone(torch.randn(8, 4096, device="cuda"))).square().mean()
    loss.backward()
    update.step()
    update.zero_grad()
    if loss.item() < 0.5:
        backbone.requires_grad_(True)
"""


@pytest.mark.heavy
def test_a_number_that_the_program_compares_goes_both_ways(script: Script) -> None:
    """Nobody computes the loss: read as zero, 64 MiB of weights are trained as well, with gradients and moments. That end is told."""
    rehearsal = seen(script(UNFREEZES))

    assert rehearsal.breakdown.optimizer_state_bytes > 128 * MIB
    assert rehearsal.assumed_range is not None
    assert rehearsal.assumed_range.low_bytes < rehearsal.assumed_range.high_bytes - 192 * MIB
    assert any("are compared" in finding.message for finding in rehearsal.findings)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("compared", "with_what"),
    [
        ("loss.item() < 0.5", "value = loss.detach().cpu()\n    if value < 0.5"),
        ("loss.item() < 0.5", "value = loss.cpu().item()\n    if value < 0.5"),
        ("loss.item() < 0.5", "value = loss.detach().cpu().numpy()\n    if value < 0.5"),
        ("loss.item() < 0.5", "losses = torch.stack([loss.detach(), loss.detach()]).cpu().mean()\n    if losses < 0.5"),
        ("loss.item() < 0.5", "loss.to('cpu') < 0.5"),
    ],
)
def test_a_number_that_is_compared_on_the_host_goes_both_ways_too(script: Script, compared: str, with_what: str) -> None:
    """Whichever way it goes there: as a tensor, an array, a mean of several."""
    old = f"if {compared}"
    rehearsal = seen(script(UNFREEZES.replace(old, with_what if "if " in with_what else f"if {with_what}")))

    assert rehearsal.breakdown.optimizer_state_bytes > 128 * MIB
    assert rehearsal.assumed_range is not None
    assert any("are compared" in finding.message for finding in rehearsal.findings)


@pytest.mark.heavy
def test_a_check_that_the_loss_has_fallen_passes(script: Script) -> None:
    """As it does in an ordinary training: numbers that are always one would fail."""
    checks = "losses.append(loss.item())\nassert losses[-1] < losses[0] * 0.9, losses\nprint(losses)"
    program = UNFREEZES.partition("    if loss")[0].replace("for step", "losses = []\nfor step") + f"    {checks}"

    rehearsal = seen(script(program))

    assert (rehearsal.verdict, rehearsal.exit_code, len(rehearsal.steps)) == ("fits", 0, 4)


@pytest.mark.heavy
def test_a_number_by_which_the_best_is_kept_is_no_reason_to_run_again(script: Script) -> None:
    """It is read as one, and nothing is told of it."""
    rehearsal = seen(script(UNFREEZES.replace("backbone.requires_grad_(True)", "best = loss.item()")))

    assert rehearsal.assumed_range is None
    assert rehearsal.findings == ()


EVERY_FOURTH = """
import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)]).cuda()
update = torch.optim.Adam(model.parameters())
for step in range(5):
    loss = model(torch.randn(8, 512, device="cuda")).square().mean()
    if step % 4 == 0:
        penalty = torch.randn(8192, 512, device="cuda", requires_grad=True)
        loss = loss + model(penalty).square().mean()
        del penalty
    loss.backward()
    update.step()
    update.zero_grad()
"""
"""A penalty in the first step, and in the fifth, when Adam's state of 8 MiB is there."""


@pytest.mark.heavy
def test_a_first_step_that_takes_most_may_come_again_beside_the_optimizers_state(script: Script) -> None:
    """The upper bound has it, and what a later step takes is within it; where that step was run, nothing is added."""
    three, five = seen(script(EVERY_FOURTH, steps=3)), seen(script(EVERY_FOURTH, steps=5))

    assert three.peak_phase.endswith("of step 1")
    assert [finding.kind for finding in three.findings] == ["peak_before_state"]
    assert three.device_used.high_bytes == three.peak_reserved_bytes + 630 * MIB + 8 * MIB
    assert five.peak_allocated_bytes > three.peak_allocated_bytes
    assert three.peak_reserved_bytes <= five.peak_reserved_bytes <= three.peak_reserved_bytes + 8 * MIB
    assert five.device_used.high_bytes == five.peak_reserved_bytes + 630 * MIB


@pytest.mark.heavy
def test_what_may_be_too_large_is_tight(script: Script) -> None:
    """The upper bound decides: with a small context it runs, with a large one it does not."""
    reserved_bytes = seen(script(TRAINING)).peak_reserved_bytes
    gpus = [find_gpu("t4").model_copy(update={"total_memory_bytes": reserved_bytes + rest * MIB}) for rest in (630, 629)]

    ample, small = (rehearse_script(["train.py"], gpu=gpu, timeout_seconds=100) for gpu in gpus)

    assert (ample.verdict, small.verdict, small.num_alloc_retries) == ("fits", "tight", 0)
    assert view_rehearsal(small, gpus[1]).headline.startswith("Tight on Tesla T4: ")


DIES = """
import multiprocessing
from common import make, torch

def work(fails):
    update = torch.optim.AdamW(make().parameters())
    if fails:
        raise ValueError("no group of processes")

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    process = multiprocessing.Process(target=work, args=(FAILS,))
    process.start()
    process.join()
"""


@pytest.mark.heavy
def test_a_process_that_dies_without_its_parent_has_no_verdict(script: Script) -> None:
    """The parent ends well; the error is that of the process that trains."""
    found = seen(script(DIES.replace("FAILS", "True")))

    assert (found.verdict, found.steps) == ("unknown", ())
    assert found.failure is not None
    assert found.failure.message == "ValueError: no group of processes"


@pytest.mark.heavy
def test_an_optimizer_that_is_gone_before_it_stepped_leaves_a_lower_bound(script: Script) -> None:
    """A program that prepares a training and ends has not shown what that takes."""
    found = seen(script(DIES.replace("FAILS", "False")))

    assert found.verdict == "unknown"
    assert found.lower_bound_reasons == (
        "an optimizer was made and never stepped, so its state is not counted, nor what leads to its step",
    )


@pytest.mark.heavy
def test_an_optimizer_that_wraps_another_is_not_named_beside_it(script: Script) -> None:
    """As accelerate's does: it has the same parameters."""
    wraps = (
        "class Wrapper(torch.optim.Optimizer):\n    def __init__(self, inner):\n"
        "        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state\n"
    )
    text = TRAINING.replace("for number", f"{wraps}wrapper = Wrapper(update)\nfor number").replace("update.step()", "pass")

    (reason,) = seen(script(text)).lower_bound_reasons

    assert reason.startswith("AdamW with 4 parameters never stepped")


@pytest.mark.heavy
def test_what_a_generator_made_and_a_critic_sees_by_a_view_is_no_parameter(script: Script) -> None:
    """Its `.data` goes into a gradient penalty and has no graph, while the view has one: so looks the flat parameter that FSDP gathers."""
    penalty = (
        "fake = model(batch().repeat(64, 1)).view(64, 64, -1)\n"
        "    rows, values = fake.view(len(fake), -1), fake.data\n"
        "    between = (values * 0.5).requires_grad_()\n"
        "    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)\n"
        "    (rows.square().mean() + slope.norm())"
    )
    found = seen(script(TRAINING.replace("model(batch()).square().mean()", penalty)))

    assert found.breakdown.parameters_bytes == 4 * MIB


@pytest.mark.heavy
def test_gradients_that_are_kept_in_a_list_are_no_parameters(script: Script) -> None:
    """They are there when the next backward begins, and look like an average of the weights then."""
    keeps = "kept = [weight.grad.data for weight in model.parameters()]\n    update.step()"
    found = seen(script(TRAINING.replace("update.step()", keeps)))

    assert found.breakdown.parameters_bytes == 4 * MIB
    assert found.breakdown.gradients_bytes >= 4 * MIB


@pytest.mark.heavy
def test_a_process_that_failed_while_it_trained_is_told_of_beside_one_that_did_not(script: Script) -> None:
    """The program goes on as if nothing had happened; what the other one would have taken is not known."""
    fails = TRAINING + "import subprocess\nif len(sys.argv) < 2:\n    subprocess.run([sys.executable, __file__, 'fails'])\n"
    fails = fails.replace("range(3)", "range(3 if len(sys.argv) < 2 else 1)") + "else:\n    raise ValueError('no more data')\n"

    found = script(fails)

    assert (found.verdict, found.exit_code) == ("unknown", 0)
    assert found.lower_bound_reasons == ("another process of the program failed while it trained: ValueError: no more data",)


@pytest.mark.heavy
def test_an_input_that_requires_a_gradient_is_no_parameter(script: Script) -> None:
    """Points at which a network solves an equation: made anew for each step, and there until the next."""
    points = "points = torch.rand(2**20, 4, device='cuda').requires_grad_()\n    (model(batch()).square().mean() + points.sum())"
    found = seen(script(TRAINING.replace("model(batch()).square().mean()", points)))

    assert found.breakdown.parameters_bytes == 4 * MIB


@pytest.mark.heavy
def test_an_optimizer_that_never_stepped_leaves_a_lower_bound(script: Script) -> None:
    """Its state is not there: 8 MiB of moments would be. That is told once."""
    rehearsal = seen(script(TRAINING.replace("update.step()", "pass")))

    assert rehearsal.verdict == "unknown"
    (reason,) = rehearsal.lower_bound_reasons
    assert reason == "AdamW with 4 parameters never stepped, so its state is not counted, nor what leads to its step"
    assert [warning for warning in view_rehearsal(rehearsal, find_gpu("t4")).warnings if "stepped" in warning] == [
        f"it may take more: {reason}"
    ]


PERIODS = """
import torch
model = torch.nn.Linear(64, 64).cuda()
update = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    x = model(torch.randn(8, 64).cuda())
    periods = torch.topk(x.abs().mean(0), 2)[1].tolist()
    for period in periods:
        x = x.reshape(8, 64 // period, period).sin().reshape(8, 64)
    x.sum().backward()
    update.step()
"""


@pytest.mark.heavy
def test_a_program_that_divides_by_the_places_it_chooses_has_a_verdict(script: Script) -> None:
    """The strongest of a spectrum are periods, and the zeroth of it is none: the first that are assumed are the next two."""
    rehearsal = script(PERIODS)

    assert (rehearsal.verdict, rehearsal.failure, len(rehearsal.steps)) == ("fits", None, 2)
    assert any("the program failed at the other" in finding.message for finding in rehearsal.findings)


@pytest.mark.heavy
def test_a_place_that_decides_a_size_is_told_with_how_to_say_it(script: Script) -> None:
    """Here no place of the assumed ones may be a period. What helps is named with its line, as a number."""
    shifted = PERIODS.replace("64 // period, period", "64 // (period - 2), period - 2")
    failed = script(shifted)
    said = script(shifted, answers={"train.py:7": ("4", None)})

    assert failed.failure is not None
    assert any('`answers={"train.py:7": "1/8"}` (a share of a mask, or a number)' in finding.message for finding in failed.findings)
    assert said.failure is None

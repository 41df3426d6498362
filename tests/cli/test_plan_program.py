"""`memplan … -- train.py` as a user runs it: the user's own program is planned, its file written and put back."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from memplan.hardware.torch_install import TorchBuild
from memplan.programs.plan_file import PLAN_FILE
from tests.conftest import Run, content

TREE = Path(__file__).parents[1] / "trees" / "own_program"
FIELDS = (
    *("--field", "micro_batch_size=config.yaml:data.batch_size"),
    *("--field", "gradient_accumulation_steps=config.yaml:trainer.accumulate"),
)
COMMAND = ("--", "train.py", "config.yaml")


ENDLESS = """
import sys, time, torch
model = torch.nn.Linear(512, 512).cuda()
update = torch.optim.SGD(model.parameters())
model(torch.randn(int(sys.argv[1]), 512, device="cuda")).sum().backward()
update.step()
open(sys.argv[2], "w").close()
time.sleep(600)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of a program with a configuration of its own."""
    return Path(shutil.copytree(TREE, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.heavy
def test_a_programs_file_is_planned_written_and_put_back(run_memplan: Run, torch_build: TorchBuild, project: Path) -> None:
    """Two values of it change and nothing else; what is written fits when it is rehearsed afresh."""
    before = content(project)
    wanted = ("--apply", "--target-effective-batch", "256", "--format", "json")

    planned = run_memplan("--gpu", "t4", *wanted, *FIELDS, *COMMAND, cwd=project)

    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    values = plan["stages"][0]["planned"]
    micro, steps = values["micro_batch_size"], values["gradient_accumulation_steps"]
    assert (micro * steps, plan["stages"][0]["present"]["micro_batch_size"]) == (256, 16)
    assert plan["after"]["kind"] == "command"
    written = before["config.yaml"].replace(b"batch_size: 16 ", f"batch_size: {micro} ".encode())
    assert (project / "config.yaml").read_bytes() == written.replace(b"accumulate: 4", f"accumulate: {steps}".encode())

    rehearsed = run_memplan("rehearse", "--gpu", "t4", "--steps", "2", "--format", "json", *COMMAND, cwd=project)
    assert json.loads(rehearsed.stdout)["verdict"] == "fits"

    assert f"Wrote {PLAN_FILE}: " in planned.stderr
    again = run_memplan("--apply", "--format", "json", cwd=project)
    answer = json.loads(again.stdout)
    assert answer["remembered"] == f"{PLAN_FILE}: command, fields, gpu, target_effective_batch_size"
    assert [answer["stages"][0]["planned"], answer["gpu"], answer["applied"]] == [values, plan["gpu"], False]
    typed = run_memplan("--gpu-memory", "24", "--target-effective-batch", str(micro), cwd=project)
    assert f"remembered  {PLAN_FILE}: command, fields\n" in typed.stdout
    assert "24 GB" in typed.stdout
    said = "steps       4 of the program; what comes after them, as an evaluation, was not run\n"
    assert said in run_memplan("--dry-run", cwd=project).stdout  # of rehearsals that were kept
    assert run_memplan("--auto", cwd=project, CUDA_VISIBLE_DEVICES="").returncode == 3

    assert run_memplan("undo", cwd=project).returncode == 0
    assert content(project)["config.yaml"] == before["config.yaml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "train.py", "7"], "nothing says where the batch size of train.py is written"),
        (["--", "train.py", "commented.json"], "is written; commented.json:1: has a comment: JSON with comments is not edited"),
        (["--", "train.py", "--batch-size", "7"], "`-- train.py --batch-size {micro_batch_size}`, or name the place"),
        (["--", "train.py", "config.yaml", "--batch-size=7"], "which the command sets: `--batch-size=7`"),
        (["--", "train.py", "{micro_batch}"], "did you mean micro_batch_size"),
        (["--", "train.py", "--batch={micro_batch_size"], "has `{micro_batch_size`, a placeholder without its last brace"),
        (["--apply", "--", "train.py", "{micro_batch_size}"], "there is nothing to apply to"),
        (["--method", "analytic", "--", "train.py", "{micro_batch_size}"], "--method analytic knows nothing of it"),
        (["--config-path", ".", "--", "train.py", "{micro_batch_size}"], "--config-path and a program exclude each other"),
        (["--field", "micro_batch_size=config.yaml:data.size", "--", "train.py"], "has no key `data.size`"),
        (["--field", "micro_batch_size=config.yaml:data.batch_size"], "--field is for a program"),
        (["--short", "EPOCHS=1"], "are those of a command"),
        (["--"], "no command follows `--`"),
        (["--pin", "width=8", "train_step.py:build"], "the program has no variable width"),
        (["train_step.py:nothing"], "defines no function nothing"),
        (["--field", "micro_batch_size=bach", "train_step.py:build"], "names no argument of build: did you mean batch?"),
    ],
)
def test_what_makes_no_sense_is_one_clear_error(run_memplan: Run, project: Path, arguments: list[str], said: str) -> None:
    """Before anything is run, with what to do; nothing is left behind."""
    (project / "commented.json").write_text('{"batch_size": 8}  // samples\n')
    before = content(project)

    result = run_memplan("--gpu", "t4", *arguments, cwd=project)

    assert result.returncode == 2
    assert said in result.stderr
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr
    assert content(project) == before


@pytest.mark.heavy
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_a_plan(torch_build: TorchBuild, tmp_path: Path, times: int) -> None:
    """What the program did until then is no answer, and no other size is tried; nor where it was ended at once, by a second one."""
    script = tmp_path / "train.py"
    script.write_text("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" * (times - 1) + ENDLESS)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as passed:  # what is written there is not held back
        seen = Path(passed, "seen")
        command = [sys.executable, "-m", "memplan", "--gpu", "t4", "--", str(script), "{micro_batch_size}", str(seen)]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        while running.poll() is None and not seen.exists():
            time.sleep(0.05)
        for _ in range(times):
            running.send_signal(signal.SIGINT)
            time.sleep(0.2)
        said, errors = running.communicate(timeout=60)

    assert (running.returncode, said) == (130, "")
    assert errors.splitlines()[-1] == "Aborted"


@pytest.mark.heavy
def test_a_function_fills_each_gpu(run_memplan: Run, torch_build: TorchBuild, project: Path) -> None:
    """The larger one takes more."""
    sizes = []
    for gpu in ("t4", "rtx4090"):
        result = run_memplan("--gpu", gpu, "--pin", "length=256", "--format", "json", "train_step.py:build", cwd=project)
        sizes.append(json.loads(result.stdout)["stages"][0]["planned"]["micro_batch_size"])

    assert 1 < sizes[0] < sizes[1]


LARGE_WORKSPACE = """
import sys, torch
from torch import nn
model = nn.Conv2d(304, 256, 3, padding=1, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(int(sys.argv[1]), 304, 129, 129, device="cuda", requires_grad=True)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.heavy
def test_a_workspace_that_gpus_of_its_kind_cannot_have_is_not_planned(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path) -> None:
    """cuDNN 9 ranks a kernel first for this convolution that wants 38 GiB with compute capability 8.6; PyTorch then takes the next."""
    (tmp_path / "train.py").write_text(LARGE_WORKSPACE)
    words = ("--", sys.executable, "train.py", "{micro_batch_size}")

    result = run_memplan("--gpu", "rtx3060", "--target-effective-batch", "16", "--format", "json", *words, cwd=tmp_path)

    (stage,) = json.loads(result.stdout)["stages"]
    assert stage["planned"]["micro_batch_size"] == 16
    assert stage["estimate"]["peak_reserved_bytes"] < 4 * 2**30


CONVOLVES = """
import sys, torch
from torch import nn
torch.backends.cudnn.benchmark = True
model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(int(sys.argv[1]), 3, 224, 224).cuda()).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("asks_cudnn", "said"),
    [
        ("1", "the GPU may show more in use than is told here, where small ones are counted. Which of them is the fastest is not known"),
        ("0", "an allowance is counted (convolution up to"),
    ],
)
def test_a_plan_says_what_of_a_convolving_program_is_not_exact(
    run_memplan: Run, torch_build: TorchBuild, tmp_path: Path, asks_cudnn: str, said: str
) -> None:
    """As its rehearsal does; a size that finds no kernel for want of memory is one that does not fit, and not one that is refused."""
    (tmp_path / "train.py").write_text(CONVOLVES)
    words = ("--", sys.executable, "train.py", "{micro_batch_size}")

    result = run_memplan("--gpu", "t4", *words, cwd=tmp_path, MEMPLAN_ASK_CUDNN=asks_cudnn)

    report = " ".join(result.stdout.split())
    assert "exact except the CUDA context and workspaces that libraries choose" in report
    assert said in report
    assert "`torch.backends.cudnn.benchmark` has cuDNN try kernels" in report
    assert re.search(r"(would be|may be up to) \S+ \S+ over the budget", report)
    assert "the batch size in the command is a placeholder, without a present value" in report


GRAPHS = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader

def collate(sizes):
    graph = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return torch.zeros(len(graph), 256), graph, torch.zeros(len(sizes), dtype=torch.long)

sizes = [100 + 7 * number % 100 for number in range(2000)] + [900] * 400
model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x, graph, labels in DataLoader(sizes, int(sys.argv[1]), collate_fn=collate):
    x, graph, labels = x.cuda(), graph.cuda(), labels.cuda()
    pooled = torch.zeros(int(graph.max()) + 1, 10, device="cuda").index_add(0, graph, model(x))
    nn.functional.cross_entropy(pooled, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.heavy
def test_a_plan_that_begins_with_what_is_kept_is_that_which_begins_with_nothing(
    run_memplan: Run, torch_build: TorchBuild, tmp_path: Path
) -> None:
    """Graphs of many nodes come late: of each size the largest batch decides, whether or not other sizes were run in this plan."""
    (tmp_path / "graphs.py").write_text(GRAPHS)
    command = ("--gpu-memory", "2GiB", "--format", "json", "--", "graphs.py", "{micro_batch_size}")

    def planned(target: int, cache: str) -> int:
        result = run_memplan("--target-effective-batch", str(target), *command, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / cache))
        assert result.returncode == 0, result.stderr
        size: int = json.loads(result.stdout)["stages"][0]["planned"]["micro_batch_size"]
        return size

    assert planned(8, "kept") == 8
    assert planned(1024, "kept") == planned(1024, "fresh")


HYDRA = Path(__file__).parents[1] / "trees" / "hydra"


@pytest.fixture
def hydra_project(tmp_path: Path) -> Path:
    """A copy of a program that Hydra configures."""
    return Path(shutil.copytree(HYDRA, tmp_path / "hydra", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.heavy
def test_a_hydra_program_is_planned_by_its_command_alone(run_memplan: Run, torch_build: TorchBuild, hydra_project: Path) -> None:
    """Nothing says where its batch is: an experiment's file has it, the trainer's the accumulation, and both are written and put back."""
    before = content(hydra_project)
    wanted = ("--gpu", "t4", "--gpu-memory", "2GiB", "--target-effective-batch", "65536", "--apply", "--format", "json")

    planned = run_memplan(*wanted, "--", "train.py", "experiment=large", cwd=hydra_project)

    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    present, values = plan["stages"][0]["present"], plan["stages"][0]["planned"]
    micro, steps = values["micro_batch_size"], values["gradient_accumulation_steps"]
    assert (present["micro_batch_size"], present["gradient_accumulation_steps"], micro * steps) == (512, 4, 65536)
    after = content(hydra_project)
    changed = {name: text for name, text in before.items() if after[name] != text}
    assert changed.keys() == {"configs/experiment/large.yaml", "configs/trainer/default.yaml"}
    assert after["configs/experiment/large.yaml"] == changed["configs/experiment/large.yaml"].replace(b"512", str(micro).encode())
    assert after["configs/trainer/default.yaml"] == changed["configs/trainer/default.yaml"].replace(
        b"batches: 4", f"batches: {steps}".encode()
    )

    assert run_memplan("undo", cwd=hydra_project).returncode == 0
    assert {name: content(hydra_project)[name] for name in before} == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "has a program that Hydra configures"),
        (("--config-path", "configs/experiment/large.yaml"), "is a part of the configuration of train.py, which Hydra composes"),
        (("--config-path", "configs"), "has a program that Hydra configures"),
    ],
)
def test_a_configuration_that_hydra_composes_names_its_program(
    run_memplan: Run, hydra_project: Path, arguments: tuple[str, ...], said: str
) -> None:
    """A file of it says little alone; the command to type composes the rest."""
    result = run_memplan("--gpu", "t4", *arguments, cwd=hydra_project)

    assert result.returncode == 2
    assert said in result.stderr
    chosen = " experiment=large" if "experiment" in " ".join(arguments) else ""
    assert f"`-- python train.py{chosen}`" in result.stderr


SPLITS = """
import json, sys, torch
model = torch.nn.Linear(512, 512).cuda()
update = torch.optim.SGD(model.parameters())
effective, steps = json.load(open("specs.json"))["scenes"], int(sys.argv[1])
for _ in range(4):
    for _ in range(steps):
        model(torch.randn(effective // steps * 2000, 512, device="cuda")).sum().backward()
    update.step()
    update.zero_grad()
"""


@pytest.mark.heavy
def test_what_stands_in_the_command_is_to_be_typed(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path) -> None:
    """The file holds the whole batch already; how it is split is a word of the command, which nobody writes."""
    (tmp_path / "train.py").write_text(SPLITS)
    (tmp_path / "specs.json").write_text('{"scenes": 64}\n')
    field = ("--field", "effective_batch_size=specs.json:scenes")

    planned = run_memplan("--gpu-memory", "1GiB", "--apply", *field, "--", "train.py", "{gradient_accumulation_steps}", cwd=tmp_path)

    assert planned.returncode == 0, planned.stderr
    assert "nothing to write. What changes is in the command: type it as it is planned above." in planned.stderr
    assert "train.py 1\n" not in planned.stdout
    assert (tmp_path / "specs.json").read_text() == '{"scenes": 64}\n'


ACCUMULATED = """
import argparse, torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int)
parser.add_argument("--accum_steps", type=int)
args = parser.parse_args()
torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096).cuda())
update = torch.optim.SGD(model.parameters())
for step in range(4 * args.accum_steps):
    model(torch.randn(args.batch_size, 4096, device="cuda")).relu().sum().backward()
    if (step + 1) % args.accum_steps == 0:
        update.step()
        update.zero_grad()
"""

HARD_CODED = """
import torch
from settings import Train

model = torch.nn.Linear(4096, Train.width).cuda()
update = torch.optim.SGD(model.parameters())
for _ in range(4):
    model(torch.randn(Train.batch_size, 4096, device="cuda")).relu().sum().backward()
    update.step()
    update.zero_grad()
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("settings.py", "class Train:\n    batch_size: int = 64  # samples\n    width = 4 * 1024\n", ""),
        (
            "train.toml",
            "[Train]\nbatch_size = 64  # samples\nwidth = 4096\n",
            "import tomllib, types; Train = types.SimpleNamespace(**tomllib.load(open('train.toml', 'rb'))['Train'])\n",
        ),
    ],
)
def test_a_size_in_python_or_toml_is_planned_written_and_put_back(
    run_memplan: Run, torch_build: TorchBuild, tmp_path: Path, name: str, text: str, read: str
) -> None:
    """The program finds the tried sizes where it imports or opens the file; afterwards the file has the planned one, and nothing else."""
    if read and sys.version_info < (3, 11):
        pytest.skip("the program reads TOML with Python's own parser")
    (tmp_path / "train.py").write_text(HARD_CODED)
    (tmp_path / "settings.py").write_text(read)
    (tmp_path / name).write_text(text)
    field = ("--field", f"micro_batch_size={name}:Train.batch_size")
    options = ("--gpu-memory", "2GiB", "--target-effective-batch", "max", "--format", "json")

    planned = run_memplan(*options, "--apply", *field, "--", "train.py", cwd=tmp_path, PYTHONDONTWRITEBYTECODE="")

    assert planned.returncode == 0, planned.stderr
    size = json.loads(planned.stdout)["stages"][0]["planned"]["micro_batch_size"]
    assert size > 5000
    assert (tmp_path / name).read_text() == text.replace("64", str(size))
    assert run_memplan("undo", cwd=tmp_path).returncode == 0
    assert (tmp_path / name).read_text() == text


@pytest.mark.heavy
def test_a_shell_script_is_planned_written_and_put_back(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path) -> None:
    """Its variable and its option, with as many GPUs as its launcher starts; without the places the error names them."""
    (tmp_path / "train.py").write_text(ACCUMULATED)
    launcher = f"{sys.executable} -m torch.distributed.run --nproc_per_node 2"
    script = f"#!/bin/bash\nSIZE=${{1:-64}}  # each GPU\n{launcher} train.py \\\n  --batch_size $SIZE --accum_steps 4\n"
    (tmp_path / "start.sh").write_text(script)
    options = ("--gpu-memory", "2GiB", "--target-effective-batch", "1024", "--format", "json")

    places = ("micro_batch_size=start.sh:SIZE", "gradient_accumulation_steps=start.sh:accum_steps")
    fields = [word for place in places for word in ("--field", place)]

    refused = run_memplan(*options, "--", "bash", "start.sh", cwd=tmp_path)
    planned = run_memplan(*options, "--apply", *fields, "--", "bash", "start.sh", cwd=tmp_path)

    assert f"name the place: `--field {places[0]} --field {places[1]}`" in refused.stderr
    assert planned.returncode == 0, planned.stderr
    values = json.loads(planned.stdout)["stages"][0]["planned"]
    size, steps = values["micro_batch_size"], values["gradient_accumulation_steps"]
    assert 2 * size * steps == 1024
    assert (tmp_path / "start.sh").read_text() == script.replace("{1:-64", f"{{1:-{size}").replace("accum_steps 4", f"accum_steps {steps}")
    assert run_memplan("undo", cwd=tmp_path).returncode == 0
    assert (tmp_path / "start.sh").read_text() == script

"""`memplan rehearse` as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import memplan
from memplan.errors import UsageError
from memplan.execution.step_source import TypedText
from memplan.hardware.torch_install import TorchBuild
from memplan.units import GIB
from tests.conftest import RehearserOf, Run
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

STEPS = Path(__file__).parents[1] / "child" / "steps.py"


def test_a_step_that_fits(run_memplan: Run, torch_build: TorchBuild) -> None:
    """The report in words; its exit code is 0."""
    result = run_memplan("rehearse", "--gpu", "a100-80", f"{STEPS}:mlp", "--set", "batch=128", "--set", "optimizer=SGD", "--steps", "4")

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Fits on NVIDIA A100-SXM4-80GB: ")
    assert "4 steps" in result.stdout
    assert "optimizer state" not in result.stdout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--gpu", "t4,a100-80", "--num-gpus", "4", "--", "train.py"], "2 GPUs are named, and 4 train together on each machine"),
        (["--gpu", "t4,a100-80", "--", "torchrun", "--nproc-per-node", "8", "train.py"], "2 GPUs are named, and 8 train together"),
        (["--gpu", "t4,a100-80", f"{STEPS}:mlp"], "several GPUs are for a program, not for a function"),
        (["--gpu", "t4,a100-80", "--gpu-memory", "16", "--", "train.py"], "--gpu-memory is for one kind of GPU"),
        (["--gpu", "t4,", "--", "train.py"], "no GPU to simulate is named"),
    ],
)
def test_unlike_gpus_are_those_of_the_machine(run_memplan: Run, words: list[str], problem: str) -> None:
    """As many as train together, each by its name."""
    result = run_memplan("rehearse", *words)

    assert (result.returncode, result.stdout) == (2, "")
    assert problem in " ".join(result.stderr.split()), result.stderr


@pytest.mark.heavy
def test_a_step_that_does_not_fit(run_memplan: Run, torch_build: TorchBuild) -> None:
    """Exit code 1, where it happened, and the same as JSON."""
    arguments = ["rehearse", "--gpu", "t4", "--gpu-memory", "1GiB", f"{STEPS}:mlp", "--set", "batch=1048576"]

    result, answer = run_memplan(*arguments), run_memplan(*arguments, "--format", "json")

    assert (result.returncode, answer.returncode) == (1, 1)
    assert "Does not fit on Tesla T4: out of memory in step 1, forward, at " in result.stdout
    assert "tried to allocate 4.00 GiB" in result.stdout
    assert json.loads(answer.stdout)["out_of_memory"]["phase"] == "forward"
    assert answer.stderr == ""


@pytest.mark.heavy
@pytest.mark.parametrize("odd", ["a b:c;$LIB,d", *(pytest.param(odd, marks=pytest.mark.heavy) for odd in ("a b", "a:b;c", "$LIB,d"))])
def test_any_path_will_do(torch_build: TorchBuild, tmp_path: Path, odd: str) -> None:
    """Cache, home, temporary files, memplan itself, the project and its files, each in a folder whose name splits most lists of paths."""
    folders = {name: tmp_path / odd / name for name in ("cache", "home", "temporary", "checkout", "project")}
    for path in folders.values():
        path.mkdir(parents=True)
    shutil.copytree(Path(memplan.__file__).parent, folders["checkout"] / "memplan")
    script = folders["project"] / f"{odd}.py"
    script.write_text(STEPS.read_text() + "\n\nif __name__ == '__main__':\n    step = mlp('cuda')\n    step(), step()\n")
    environment = {"XDG_CACHE_HOME": folders["cache"], "HOME": folders["home"], "TMPDIR": folders["temporary"]}
    command = f"import sys; sys.path.insert(0, {str(folders['checkout'])!r}); from memplan.cli.app import main; main()"

    def run(*arguments: str) -> str:
        whole = [sys.executable, "-c", command, "rehearse", "--gpu", "t4", "--steps", "2", *arguments]
        done = subprocess.run(
            whole, cwd=folders["project"], env=os.environ | {name: str(path) for name, path in environment.items()},
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(f"{script.name}:mlp").startswith("Fits on Tesla T4: 512.0 MiB")
    assert run("--", script.name).startswith("Fits on Tesla T4: 512.0 MiB")
    assert [path.name for path in folders["cache"].iterdir()] == ["memplan"]
    assert not list(folders["temporary"].glob("memplan-*"))


NAMELESS = """
import pwd

def getpwuid(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")

pwd.getpwuid = getpwuid
"""
"""A sitecustomize.py: every Python finds that its user has no entry in the list of users."""


@pytest.mark.heavy
@pytest.mark.parametrize("home", [None, pytest.param("file/home", marks=pytest.mark.heavy)])
def test_a_user_without_a_home_rehearses_too(torch_build: TorchBuild, tmp_path: Path, home: str | None) -> None:
    """
    No HOME and no entry in the list of users, and a HOME that cannot be made (a file lies in its way).

    The device and Triton's cache are made for this run alone, and nothing of them is left.
    """
    (tmp_path / "file").touch()
    (tmp_path / "sitecustomize.py").write_text(NAMELESS)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR")}
    environment |= {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}
    environment |= {} if home is None else {"HOME": str(tmp_path / home)}

    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "a100-80", "--steps", "1", f"{STEPS}:runs_triton"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Fits on NVIDIA A100-SXM4-80GB")
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu", "t4", "nowhere.py:build"], "nowhere.py does not exist"),
        (["--gpu", "t9000", f"{STEPS}:mlp"], "unknown GPU"),
        (["--gpu", "t4", f"{STEPS}:mlp", "--set", "batch"], "does not say NAME=VALUE"),
        (["--gpu", "t4", f"{STEPS}:mlp", "--steps", "0"], "0 is not in the range"),
        ([f"{STEPS}:mlp"], "no GPU to simulate is named"),
    ],
)
def test_bad_input_gets_one_clear_line(run_memplan: Run, arguments: list[str], problem: str) -> None:
    """Exit code 2, no traceback, nothing on standard output."""
    result = run_memplan("rehearse", *arguments)

    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--", "nowhere.py"], "nowhere.py does not exist"),
        (["-m"], "-m names no module"),
        (["--", "-m"], "-m names no module"),
        (["--"], "nothing to rehearse is named"),
        ([], "nothing to rehearse is named"),
        ([f"{STEPS}:mlp", "--", "train.py"], "nothing to rehearse is named"),
        (["--set", "batch=3", "--", "train.py"], "--set gives values to a function, not to a script"),
        ([f"{STEPS}"], "run the whole script: `memplan rehearse --gpu t4 -- "),
        (["--timeout", "0", "--", "train.py"], "0.0 is not in the range"),
        (["--read", "train.py:3", f"{STEPS}:mlp"], "does not say FILE.py:LINE=ANSWER"),
        (["--read", "train.py:3=perhaps", "--", str(STEPS)], "does not say FILE.py:LINE=ANSWER"),
    ],
)
def test_what_to_rehearse_is_said_once(run_memplan: Run, arguments: list[str], problem: str) -> None:
    """A function, or a script behind `--`; nothing is run before that is clear."""
    result = run_memplan("rehearse", "--gpu", "t4", *arguments)

    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr


ASKS = """
import torch

def build(device):
    flag = torch.ones((), device=device) > 0
    def step():
        torch.empty(2**22 if bool(flag) else 2**20, device=device)
    return step

if __name__ == "__main__":
    build("cuda")()
"""


@pytest.mark.heavy
def test_an_answer_holds_until_its_line_changes(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path) -> None:
    """Given once, used again by a step and by a script, forgotten with the line; one that nobody asked for is told of."""
    program = tmp_path / "train.py"
    program.write_text(ASKS)

    def peak(*arguments: str) -> tuple[int, list[str]]:
        result = run_memplan("rehearse", "--gpu", "t4", "--format", "json", *arguments)
        assert result.returncode == 0, result.stderr
        answer = json.loads(result.stdout)
        return answer["peak_allocated_bytes"] // 2**20, answer["notes"]

    share = peak("--read", "train.py:7=1/8", "train.py:build")
    first = peak("--read", "train.py:7=false", "--read", "train.py:5=true", "train.py:build")
    again, script = peak("train.py:build"), peak("--", "train.py")
    program.write_text(ASKS.replace("2**22", "2**23"))
    changed = peak("train.py:build")

    assert share[1] == ["--read train.py:7: the program reads no mask there, of which 1/8 would be a share: give the value that it reads"]
    assert first == (4, ["--read train.py:5: the program read no value from the device at that line"])
    assert (again, script) == ((4, []), (4, []))
    assert changed == (32, [])
    assert [path.name for path in (tmp_path / ".memplan").iterdir()] == ["reads.json"]


@pytest.mark.heavy
def test_an_answer_with_which_the_program_fails_is_not_remembered(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path) -> None:
    """That of an earlier call stays."""
    (tmp_path / "train.py").write_text("import torch\n\nassert bool(torch.ones((), device='cuda') > 0), 'no flag'\n")
    remembered = tmp_path / ".memplan" / "reads.json"
    remembered.parent.mkdir()
    remembered.write_text(json.dumps({"train.py:9": {"answer": "true", "line": "if flag:"}}))
    before = remembered.read_text()

    result = run_memplan("rehearse", "--gpu", "t4", "--read", "train.py:3=false", "--", "train.py")

    assert (result.returncode, "AssertionError: no flag" in result.stderr) == (1, True), result.stderr
    assert remembered.read_text() == before


@pytest.mark.heavy
def test_what_would_fit_is_told(run_memplan: Run, torch_build: TorchBuild) -> None:
    """The batch by the name that the program gives it, and GPUs."""
    odd = STEPS.with_name("odd_steps.py")

    result = run_memplan("rehearse", "--gpu", "t4", "--gpu-memory", "1GiB", f"{odd}:allocates", "--set", "batch=20000")

    assert result.returncode == 1
    assert "batch=394 on this GPU: the largest that fits" in result.stdout  # and up to 630 MiB of context
    # 20,000 MiB, and the 630.
    assert "a GPU of this kind with 20.15 GiB; GPUs with that much: " in result.stdout


@pytest.mark.heavy
def test_how_much_memory_a_script_needs_that_ran_out_is_told(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path) -> None:
    """It is run again, unheard, with unlimited memory, and not for the thousand steps that it would take; the size told is enough."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "weight = torch.nn.Parameter(torch.zeros(2**28, device='cuda'))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for step in range(1000):\n"
        "    (weight * torch.ones(2**28, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    print('step', step)\n"
    )

    ended = run_memplan("rehearse", "--gpu", "t4", "--gpu-memory", "3GiB", "--format", "json", "--", "train.py")
    needed = json.loads(ended.stdout)["would_fit"]
    enough = run_memplan("rehearse", "--gpu", "t4", "--gpu-memory", f"{needed['device_used_bytes']}B", "--steps", "3", "--", "train.py")

    assert "step" not in ended.stderr.partition("Traceback")[0]
    assert (ended.returncode, needed["num_steps"], enough.returncode) == (1, 3, 0)
    assert 4 * GIB < needed["device_used_bytes"] < 6 * GIB
    assert "\nFits on" in enough.stdout


@pytest.mark.heavy
def test_a_script_that_runs_out_of_memory_keeps_its_exit_code(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path) -> None:
    """Its own traceback, and the report behind it; caught, it goes on and the report says so."""
    text = "import torch\ntry:\n    torch.empty(2**40, device='cuda')\nexcept torch.OutOfMemoryError:\n    {then}\n"
    (tmp_path / "fails.py").write_text(text.format(then="raise"))
    (tmp_path / "goes_on.py").write_text(text.format(then="print('smaller')"))

    failed, went_on = (run_memplan("rehearse", "--gpu", "t4", "--", name) for name in ("fails.py", "goes_on.py"))

    assert (failed.returncode, went_on.returncode) == (1, 0)
    assert "torch.OutOfMemoryError: CUDA out of memory" in failed.stderr
    assert "the figures cover what ran before that" in failed.stdout
    assert went_on.stdout.startswith("smaller\nDoes not fit as it is on Tesla T4: out of memory before the first step, at")
    assert "the program caught the error and went on" in went_on.stdout


SAYS_WHEN = """
import os, socket, time

def build(device):
    def step():
        socket.create_connection(("127.0.0.1", int(os.environ["PORT"]))).send(str(os.getpid()).encode())
        time.sleep(60)

    return step
"""


def test_sigterm_ends_a_step_as_ctrl_c_does(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Nothing of it is left: no process, and no folder for temporary files."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "step.py").write_text(SAYS_WHEN)
    words = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "step.py:build"]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        environment["PORT"] = str(server.getsockname()[1])
        process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        connection, _ = server.accept()
        with connection:
            program = connection.recv(100).decode()

    process.terminate()

    said, _ = process.communicate(timeout=30)
    assert (process.returncode, said.strip()) == (130, "Aborted")
    assert list(temporary.iterdir()) == []
    deadline = time.monotonic() + 10
    while Path(f"/proc/{program}").exists() and time.monotonic() < deadline:  # it is killed, and the system takes it to pieces
        time.sleep(0.05)
    assert not Path(f"/proc/{program}").exists()


@pytest.mark.parametrize("comes_twice", [False, True])
def test_ctrl_c_ends_a_script_and_what_it_did_is_reported(torch_build: TorchBuild, tmp_path: Path, comes_twice: bool) -> None:
    """The script's own process gets the signal too; its exit code is a shell's, 130. `timeout -s INT` sends it, and to all of the group."""
    script = tmp_path / "endless.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(512, 512).cuda()\nupdate = torch.optim.SGD(model.parameters())\n"
        "while True:\n    model(torch.randn(8, 512, device='cuda')).sum().backward()\n    update.step()\n    print('stepped', flush=True)\n"
    )
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--", str(script)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "stepped\n"

    if comes_twice:
        running.send_signal(signal.SIGINT)
    os.killpg(running.pid, signal.SIGINT)
    said, _ = running.communicate(timeout=60)

    assert running.returncode == 130
    assert "Fits on Tesla T4" in said


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([f"{STEPS}:mpl"], "has no function 'mpl'; it has mlp, grows, "),
        ([f"{STEPS}:mlp", "--set", "bacth=8"], "mlp: got an unexpected keyword argument 'bacth'; it takes batch, width, "),
    ],
)
def test_a_mistake_in_a_name_is_told_as_such(run_memplan: Run, torch_build: TorchBuild, arguments: list[str], problem: str) -> None:
    """With the names that there are; no traceback, since nothing of the program's failed."""
    result = run_memplan("rehearse", "--gpu", "t4", *arguments)

    assert (result.returncode, result.stdout) == (2, "")
    assert problem in result.stderr
    assert "Traceback" not in result.stderr


TAKES = """
import json, torch

def build(device, batch=1, mode="fast", norm="none", scale=1.0, flag=True, depth=None, sizes=(), *, free=None, wanted: int):
    print(json.dumps([batch, mode, norm, scale, flag, depth, sizes, free, wanted]))
    return lambda: torch.zeros(batch, device=device)
"""


@pytest.mark.heavy
def test_a_value_takes_the_type_of_its_parameter(torch_build: TorchBuild, tmp_path: Path) -> None:
    """ "none" is a text where the default is one; without a default the annotation decides, or else the text's own look."""
    (tmp_path / "train.py").write_text(TAKES.replace("return lambda", "raise ValueError('seen')\n    return lambda"))
    texts = ["batch=8", "mode=none", "norm=4", "scale=2", "flag=no", "depth=null", "sizes=[1, 2]", "free=1e-3", "wanted=3"]

    result = rehearse_with(tmp_path, texts)

    assert '[8, "none", "4", 2.0, false, null, [1, 2], 0.001, 3]' in result.stderr


@pytest.mark.heavy
def test_a_value_of_another_type_is_a_mistake(torch_build: TorchBuild, tmp_path: Path) -> None:
    """One line, exit code 2."""
    (tmp_path / "train.py").write_text(TAKES)

    result = rehearse_with(tmp_path, ["batch=8.5", "wanted=1"])

    assert (result.returncode, result.stdout) == (2, "")
    assert "batch=8.5 is not a whole number, as its default 1 is" in result.stderr


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("batch", "eight", "batch=eight is not a whole number"),
        ("flag", "maybe", "flag=maybe is not true or false, as its default True is"),
        ("scale", "big", "scale=big is not a number"),
    ],
)
def test_each_type_has_texts_that_are_none_of_its_values(
    rehearser_of: RehearserOf, tmp_path: Path, name: str, text: str, problem: str
) -> None:
    """The mistake names the parameter, the text, and what it should have been."""
    (tmp_path / "train.py").write_text(TAKES)

    with pytest.raises(UsageError, match=problem):
        rehearser_of(f"{tmp_path}/train.py:build").rehearse(gpu="t4", values={name: TypedText(text), "wanted": 1})


def rehearse_with(folder: Path, texts: list[str]) -> subprocess.CompletedProcess[str]:
    """`memplan rehearse` of the file's build with these values."""
    settings = [argument for text in texts for argument in ("--set", text)]
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "train.py:build", *settings]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=100)

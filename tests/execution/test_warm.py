"""A second run without its imports shows what the first did, as Python by itself would run it; where it could not, it runs by itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memplan.execution.command import command_from, program_of, python_program
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_script import rehearse_script
from memplan.execution.warm import Kept, WarmProcess, kept_file, lasting_variables, start_warm
from memplan.execution.warm_connection import ask
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.standin.build import build
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

HEAD = """
import os, sys
with open("runs", "a") as file:
    file.write("warm " if "torch" in sys.modules else "cold ")
import torch
"""

TRAINING = (
    HEAD
    + """
model = torch.nn.Linear(1024, SIZE).cuda()
update = torch.optim.AdamW(model.parameters())
for number in range(3):
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    update.step()
    update.zero_grad()
"""
)

MASKED = (
    HEAD
    + """
x = torch.randn(4096, 256, device="cuda")
kept = (torch.arange(4096) % 4 == 0).cuda()
torch.nn.Linear(256, 256).cuda()(x[kept]).sum().backward()
"""
)


class Project:
    """A folder with a program, and a cache of its own, so that the processes that are kept are its own too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rehearse(self, text: str, *arguments: str, gpu: str = "t4", **options: Any) -> Rehearsal:
        """Rehearse *text* as train.py, which may write."""
        (self.folder / "train.py").write_text(text)
        options = {"allow_writes": True, "keep_warm": True, "timeout_seconds": 100, **options}
        return rehearse_script(["train.py", *arguments], gpu=find_gpu(gpu), **options)

    def memplan(self, text: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Rehearse *text* from the command line."""
        (self.folder / "train.py").write_text(text)
        words = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--allow-writes", "--keep-warm", *options, "--", "train.py"]
        return subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=100)

    def runs(self) -> list[str]:
        """Return how each run so far began."""
        return (self.folder / "runs").read_text().split()

    def kept(self) -> list[WarmProcess]:
        """Return the processes that are kept."""
        files = (Path(os.environ["XDG_CACHE_HOME"]) / "memplan" / "warm").glob("*")
        return [WarmProcess(Path(file.read_text())) for file in files if file.is_file()]


@pytest.fixture
def project(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A project whose kept processes end with the test."""
    cache = tmp_path / "cache"
    (cache / "memplan").mkdir(parents=True)
    simulated = build(torch_build)
    (cache / "memplan" / simulated.name).symlink_to(simulated)  # it is not compiled again
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    made = Project(tmp_path / "project")
    yield made
    for process in made.kept():
        process.end()


@pytest.fixture
def packages(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages that the project's Python finds."""
    folder = project.folder / "site-packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return folder


def test_the_next_rehearsal_has_its_imports_and_the_same_bytes(project: Project) -> None:
    """What the user has edited since is what runs."""
    first = project.rehearse(TRAINING.replace("SIZE", "1024"))
    second = project.rehearse(TRAINING.replace("SIZE", "1024"))
    edited = project.rehearse(TRAINING.replace("SIZE", "2048"))

    assert project.runs() == ["cold", "warm", "warm"]
    assert second == first
    assert edited.peak_allocated_bytes > first.peak_allocated_bytes
    assert edited.breakdown.parameters_bytes == 4 * (1024 * 2048 + 2048)


@pytest.mark.heavy
def test_a_fork_finds_the_gpu_that_its_own_rehearsal_names(project: Project) -> None:
    """The process that is kept has never asked for one."""
    project.rehearse(TRAINING.replace("SIZE", "1024"), gpu="t4")

    other = project.rehearse(TRAINING.replace("SIZE", "1024"), gpu="h100")

    assert project.runs() == ["cold", "warm"]
    assert other.gpu_name == find_gpu("h100").name


@pytest.mark.heavy
def test_the_runs_that_find_values_make_no_imports(project: Project) -> None:
    """The first run shows what they are; nothing is left behind without being asked for."""
    rehearsal = project.rehearse(MASKED, keep_warm=False)

    assert project.runs() == ["cold", "warm", "warm"]
    assert [read.basis for read in rehearsal.reads] == ["data"]
    assert project.kept() == []


ABOUT_ITSELF = """
import atexit, json, os, sys, threading, torch
from neighbour import WORD
torch.ones(1, device="cuda")
print(json.dumps([__name__, __file__, sys.argv, sys.path, os.getcwd(), WORD, sys.stdin.read(), os.environ.get("GIVEN"), __spec__ is None]))
print("to stderr", file=sys.stderr)
atexit.register(print, "at its end")
threading.Timer(0.2, print, ["a thread that is waited for"]).start()
file = open("left_open", "w")
file.write("written at the end")
"""


def _sides(result: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    """Return exit code and outputs, of standard error what the program itself said."""
    return result.returncode, result.stdout.partition("Fits on")[0], result.stderr


@pytest.mark.heavy
@pytest.mark.parametrize(
    "ending",
    [
        "",
        pytest.param("sys.exit(7)", marks=pytest.mark.heavy),
        pytest.param("sys.exit('it ends with words')", marks=pytest.mark.heavy),
        "def fail():\n    raise RuntimeError('on purpose')\nfail()",
        "import signal; os.kill(os.getpid(), signal.SIGINT)",
        pytest.param("os._exit(3)", marks=pytest.mark.heavy),
    ],
)
def test_a_fork_is_what_python_would_have_made(project: Project, ending: str) -> None:
    """Name, path, arguments, input, both outputs, what is left to be done at the end, exit code and traceback."""
    (project.folder / "neighbour.py").write_text("WORD = 'found'\n")
    text = ABOUT_ITSELF.replace("0.2", "30" if "_exit" in ending else "0.2") + ending + "\n"
    cold = _sides(project.memplan(text, GIVEN="yes"))
    written = (project.folder / "left_open").read_text()
    (project.folder / "left_open").unlink()

    warm = _sides(project.memplan(text, GIVEN="yes"))

    assert len(project.kept()) == 1
    assert warm == cold
    assert (project.folder / "left_open").read_text() == written
    assert "found" in cold[1] or "_exit" in ending  # which leaves what is in buffers


@pytest.mark.heavy
def test_a_module_runs_in_a_fork_too(project: Project) -> None:
    """With its package, and the working folder first on its path."""
    (project.folder / "package").mkdir()
    (project.folder / "package" / "__init__.py").touch()
    text = "import sys\nfrom . import __name__ as name\nprint(__spec__.name, name, sys.argv[1:], sys.path[0], 'torch' in sys.modules)\n"
    (project.folder / "package" / "train.py").write_text(text + "import torch\ntorch.ones(1, device='cuda')\n")
    words = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--keep-warm", "-m", "package.train", "x"]

    said = [subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[0] for _ in range(2)]

    assert said == [f"package.train package ['x'] {project.folder} {is_warm}" for is_warm in (False, True)]


PACKAGED = """
import os
os.environ["WIDTH_OF_PACKAGE"] = "SET"
import packaged
import torch
with open("runs", "a") as file:
    file.write(f"{packaged.WIDTH} ")
torch.ones(packaged.WIDTH * 2**20, device="cuda")
"""


@pytest.mark.heavy
def test_a_package_that_was_installed_anew_is_imported_anew(project: Project, packages: Path) -> None:
    """The process that had imported it ends."""
    (packages / "packaged.py").write_text("WIDTH = 1\n")
    project.rehearse(PACKAGED)
    time.sleep(0.01)
    (packages / "packaged.py").write_text("WIDTH = 16\n")

    rehearsal = project.rehearse(PACKAGED)

    assert project.runs() == ["1", "16"]
    assert rehearsal.peak_allocated_bytes == 16 * 2**20 * 4


@pytest.mark.heavy
def test_temporary_files_that_packages_make_at_their_import_go_with_the_process(project: Project, packages: Path) -> None:
    """W&B makes folders then, and the process that has imported it ends without a chance to remove them."""
    (packages / "packaged.py").write_text("import tempfile\nFOLDER = tempfile.mkdtemp()\n")
    told = f"imported-{os.getpid()}-"  # what is new below /tmp is not held back
    try:
        telling = f"import os, packaged, pathlib\npathlib.Path(f'/tmp/{told}{{os.getpid()}}').write_text(packaged.FOLDER)\n"
        project.rehearse(telling + MASKED, allow_writes=False)
        folders = [Path(file.read_text()) for file in Path("/tmp").glob(f"{told}*")]
        for process in (kept := project.kept()):
            process.end()
        _wait_until_gone(*kept)

        assert [folder.exists() for folder in folders] == [False] * 3
        assert len(set(folders)) == 2  # that of the run by itself, and that of the process in whose forks the values were found
    finally:
        for file in Path("/tmp").glob(f"{told}*"):
            file.unlink()


@pytest.mark.heavy
def test_a_variable_that_a_package_reads_at_its_import_is_that_of_the_program(project: Project, packages: Path) -> None:
    """Where a program now sets another, the fork came too late, and what it showed does not count."""
    (packages / "packaged.py").write_text("import os\nWIDTH = int(os.environ['WIDTH_OF_PACKAGE'])\n")
    first = project.rehearse(PACKAGED.replace("SET", "2"))
    same = project.rehearse(PACKAGED.replace("SET", "2"))

    other = project.rehearse(PACKAGED.replace("SET", "32"))

    assert project.runs() == ["2", "2", "2", "32"]  # the third was wrong, and was run again
    assert first.peak_allocated_bytes == same.peak_allocated_bytes == 2 * 2**20 * 4
    assert other.peak_allocated_bytes == 32 * 2**20 * 4


SETS_AT_IMPORT = """
import os
os.environ.setdefault("KMP_OF_PACKAGE", "FALSE")
os.environ["ALLOCATOR_OF_PACKAGE"] = os.environ.get("ALLOCATOR_OF_PACKAGE", "") + "decay;"
"""


@pytest.mark.heavy
@pytest.mark.parametrize("first", ["torch", "packaged"])
def test_a_package_that_sets_variables_at_its_import_is_imported_ahead(project: Project, packages: Path, first: str) -> None:
    """As scikit-learn and polars do, which adds to what is there. The program finds what it would by itself."""
    (packages / "packaged.py").write_text(SETS_AT_IMPORT)
    text = HEAD.replace("import torch\n", f"import {first}\nimport torch, packaged\n") + (
        "print(os.environ['KMP_OF_PACKAGE'], os.environ['ALLOCATOR_OF_PACKAGE'], file=open('seen', 'a'))\ntorch.ones(8, device='cuda')\n"
    )

    rehearsals = [project.rehearse(text) for _ in range(3)]

    assert project.runs() == ["cold", "warm", "warm"]
    assert (project.folder / "seen").read_text().splitlines() == ["FALSE decay;"] * 3
    assert rehearsals[0] == rehearsals[1] == rehearsals[2]


ASKS_AT_IMPORT = """
import torch
number = torch.cuda.device_count()
capability = torch.cuda.get_device_capability(torch.cuda.current_device())
PROPERTIES = torch.cuda.get_device_properties
def now(): return PROPERTIES(0)
"""

ASKED = (
    HEAD
    + """
import packaged
torch.ones(packaged.capability[0] * 2**20, device="cuda")
assert packaged.now().name == torch.cuda.get_device_name() and packaged.now().total_memory > 0
"""
)


@pytest.mark.heavy
def test_a_package_that_asks_for_the_gpu_at_its_import_is_imported_ahead(project: Project, packages: Path) -> None:
    """A fork answers it. What it learned holds for GPUs of that kind: for another one it is imported anew."""
    (packages / "packaged.py").write_text(ASKS_AT_IMPORT)

    first, second, other = (project.rehearse(ASKED, gpu=gpu) for gpu in ("t4", "t4", "h100"))

    assert project.runs() == ["cold", "warm", "cold"]
    assert first == second
    assert [found.peak_allocated_bytes for found in (first, other)] == [7 * 2**22, 9 * 2**22]


LAUNCHER = """
import os, subprocess, sys
with open("launches", "a") as file:
    file.write("launched ")
os.environ["GIVEN"] = sys.argv[1]
sys.exit(subprocess.run([sys.executable, "train.py", *sys.argv[2:]]).returncode)
"""

LAUNCHED = (
    MASKED
    + """
torch.empty(int(os.environ["GIVEN"]) * int(sys.argv[1]) * 2**20, device="cuda").add_(1)
os.kill(os.getpid(), int(sys.argv[2])) if "-" not in sys.argv[2] else sys.exit(-int(sys.argv[2]))
"""
)


@pytest.mark.heavy
@pytest.mark.parametrize(("ending", "exit_code"), [("-0", 0), ("-3", 3), ("15", 241)])
def test_what_a_launcher_starts_runs_in_a_fork(project: Project, ending: str, exit_code: int) -> None:
    """The launcher runs each time, gives the program its arguments and environment, and finds out how it ended."""
    (project.folder / "launch.py").write_text(LAUNCHER)
    (project.folder / "train.py").write_text(LAUNCHED)
    kept = project.folder.parent / "kept"
    gpu = find_gpu("t4")

    first, second = (
        rehearse_script(["launch.py", given, "3", ending], gpu=gpu, allow_writes=True, keep_warm=kept, timeout_seconds=100)
        for given in ("2", "16")
    )

    assert (project.folder / "launches").read_text().split() == ["launched"] * 6
    assert project.runs() == ["cold", *["warm"] * 5]
    assert first.process is not None
    assert first.process.endswith(f"train.py 3 {ending}")
    assert second.peak_allocated_bytes - first.peak_allocated_bytes == (16 - 2) * 3 * 2**22
    assert [first.exit_code, second.exit_code] == [exit_code] * 2
    process = Kept(kept).find()
    assert process is not None
    process.end()


@pytest.mark.heavy
def test_a_launcher_that_uses_the_gpu_itself_loses_none_of_the_programs_values(project: Project) -> None:
    """Both are told to write what they read, and the launcher ends last."""
    (project.folder / "launch.py").write_text(LAUNCHER.replace("import os", "import torch\ntorch.ones(1, device='cuda')\nimport os"))
    (project.folder / "train.py").write_text(LAUNCHED)

    rehearsal = rehearse_script(["launch.py", "1", "1", "-0"], gpu=find_gpu("t4"), timeout_seconds=100)

    assert [read.basis for read in rehearsal.reads] == ["data"]


@pytest.mark.heavy
def test_values_that_are_expected_are_found_in_the_first_run(project: Project) -> None:
    """The report is that of three runs."""
    plain = project.rehearse(MASKED)

    expected = project.rehearse(MASKED, expects_values=True)

    assert project.runs() == ["cold", "warm", "warm", "warm", "warm"]
    assert expected.model_copy(update={"trace": None}) == plain.model_copy(update={"trace": None})


@pytest.mark.heavy
def test_what_a_fork_writes_is_held_back(project: Project) -> None:
    """In the scratch folder of its own rehearsal, where it finds it again, and nobody else does."""
    text = (
        "import os, torch\ntorch.ones(1, device='cuda')\nbefore = os.path.exists('ckpt.pt')\n"
        "torch.save(torch.zeros(1000), 'ckpt.pt')\nassert torch.load('ckpt.pt').shape == (1000,)\nassert not before\n"
    )
    project.rehearse(text, allow_writes=False)

    rehearsal = project.rehearse(text, allow_writes=False)

    assert rehearsal.exit_code == 0
    assert [Path(file.path).name for file in rehearsal.held_back_files] == ["ckpt.pt"]
    assert sorted(path.name for path in project.folder.iterdir()) == ["train.py"]


WAITING = """
import os, time, torch
torch.ones(1, device="cuda")
with open("pid", "w") as file:
    file.write(str(os.getpid()))
os.rename("pid", "ready")
time.sleep(WAIT)
"""


def _begun(project: Project, seconds: float) -> tuple[subprocess.Popen[str], int]:
    """Start a rehearsal from the command line; return it and the number of its program's process, which waits *seconds*."""
    (project.folder / "train.py").write_text(WAITING.replace("WAIT", str(seconds)))
    words = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--allow-writes", "--keep-warm", "--", "train.py"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 60
    while not (project.folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return process, int((project.folder / "ready").read_text())


@pytest.mark.heavy
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.heavy), signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_fork_and_not_the_process_that_is_kept(project: Project, number: signal.Signals) -> None:
    """What was seen is reported; where memplan itself is killed, the fork ends too."""
    project.rehearse(WAITING.replace("WAIT", "0"))
    (project.folder / "ready").unlink()
    process, program = _begun(project, 60)

    process.send_signal(number)
    said, _ = process.communicate(timeout=30)

    deadline = time.monotonic() + 10
    while Path(f"/proc/{program}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{program}").exists()
    assert ("peak allocated" in said) == (number != signal.SIGKILL)
    assert project.rehearse(TRAINING.replace("SIZE", "8")).exit_code == 0
    assert project.runs() == ["warm"]


@pytest.mark.heavy
def test_a_process_that_is_ended_lets_the_programs_of_others_come_to_their_end(project: Project) -> None:
    """Two runs of a plan share one: where the first gives it up, the second is not cut. Nobody finds it any more meanwhile."""
    project.rehearse(WAITING.replace("WAIT", "0"))
    (project.folder / "ready").unlink()
    process, program = _begun(project, 6)
    (warm,) = project.kept()

    warm.end()

    time.sleep(1)
    assert process.poll() is None
    assert ask(str(warm.folder), {"import": []}, ()) is None
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "peak allocated" in said
    assert int((project.folder / "ready").read_text()) == program  # it has not begun again


@pytest.mark.heavy
def test_a_process_that_goes_as_a_run_begins_in_it_is_done_without(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was idle for too long just then, or another run has given it up: its folder goes with the files of the run."""
    first = project.rehearse(TRAINING.replace("SIZE", "8"))
    (warm,) = project.kept()
    make = tempfile.mkdtemp

    def made_and_gone(*arguments: Any, **options: Any) -> str:
        folder = make(*arguments, **options)
        if options.get("dir") == warm.folder:
            warm.end()
            deadline = time.monotonic() + 30
            while warm.folder.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_gone)

    assert project.rehearse(TRAINING.replace("SIZE", "8")) == first
    assert not warm.folder.exists()
    assert project.runs() == ["cold", "cold"]


@pytest.mark.heavy
def test_a_process_that_is_kept_ends_after_it_was_idle(torch_build: TorchBuild, tmp_path: Path) -> None:
    """With everything that it had."""
    folder = tmp_path / "kept"
    folder.mkdir()
    program = python_program(sys.executable, [__file__])
    assert program is not None

    warm = start_warm(program, os.environ, folder, modules=[], variables={}, idle_seconds=2)

    assert warm.process is None
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "-x"], ([], "train.py", "", ["-x"])),
        (["-u", "-W", "ignore", "-Xdev", "train.py"], (["-u", "-W", "ignore", "-Xdev"], "train.py", "", [])),
        (["-m", "package.train", "--lr", "1"], ([], "", "package.train", ["--lr", "1"])),
        (["-I", "train.py"], None),
        (["-i", "train.py"], None),
        (["-c", "pass"], None),
        (["-m"], None),
        ([], None),
        (["folder"], None),
        (["missing.py"], None),
        (["-"], None),
    ],
)
def test_what_python_runs_is_read_from_its_words(words: list[str], expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script or a module; everything else runs by itself only."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").touch()

    found = python_program("/usr/bin/python3", words)

    assert (found and (list(found.options), found.script, found.module, list(found.arguments))) == expected
    assert found is None or found.words == words


def test_only_a_program_of_python_can_be_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell script prepares what nobody knows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "run.sh").write_text("python train.py\n")

    scripts = [program_of(command_from(words)) for words in (["train.py"], [sys.executable, "train.py"], ["-m", "train"])]

    assert [found and (found.script or found.module) for found in scripts] == ["train.py", "train.py", "train"]
    assert program_of(command_from(["bash", "run.sh"])) is None
    assert program_of(command_from(["env", sys.executable, "train.py"])) is None


def test_a_kept_process_is_for_one_environment_and_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shell changes from command to command does not count."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    program = python_program(sys.executable, [__file__])
    assert program is not None

    def kept(writes_are_allowed: bool = False, **environment: str) -> Kept:
        return Kept(kept_file(program, environment, libraries=tmp_path, writes_are_allowed=writes_are_allowed))

    folder = kept(A="1", OLDPWD="/").make_folder()
    (folder / "socket").touch()

    assert kept(A="1", OLDPWD="/home").find() == WarmProcess(folder)
    assert kept(A="2").find() is None
    assert kept(writes_are_allowed=True, A="1").find() is None
    monkeypatch.chdir("/")
    assert kept(A="1").find() is None
    assert kept(A="1").started() == []
    (folder / "socket").unlink()
    folder.rmdir()


def test_processes_that_were_started_beside_each_other_are_all_known(tmp_path: Path) -> None:
    """One is found, and each is ended: two runs that end at once start one each."""
    kept = Kept(tmp_path / "kept")
    folders = [kept.make_folder() for _ in range(3)]
    for folder in folders:
        (folder / "socket").touch()
    (folders[0] / "socket").unlink()

    assert kept.find() == WarmProcess(folders[2])
    assert sorted(kept.started()) == sorted(WarmProcess(folder) for folder in folders[1:])
    for folder in folders:
        shutil.rmtree(folder)
    assert kept.started() == []


@pytest.mark.heavy
def test_the_end_of_a_process_that_is_kept_removes_nothing_but_its_own(torch_build: TorchBuild, tmp_path: Path) -> None:
    """It holds copies of files in the folder for temporary ones: what others have made there since stays."""
    script, config = tmp_path / "train.py", tmp_path / "config.txt"
    config.write_text("8")
    script.write_text(
        "import torch\nn = int(open('" + str(config) + "').read())\n"
        "w = torch.nn.Linear(8, n).cuda()\no = torch.optim.SGD(w.parameters())\n"
        "for _ in range(2):\n    w(torch.ones(n, 8, device='cuda')).sum().backward()\n    o.step()\n"
    )
    kept = tmp_path / "kept"
    rehearse_script([str(script)], gpu=find_gpu("t4"), shown={config: b"16"}, keep_warm=kept, is_heard=False)
    warm = Kept(kept).find()
    assert warm is not None
    rehearse_script([str(script)], gpu=find_gpu("t4"), shown={config: b"32"}, keep_warm=kept, is_heard=False)

    with tempfile.TemporaryDirectory() as another:
        Path(another, "file").touch()
        warm.end()
        _wait_until_gone(warm)

        assert not warm.folder.exists()
        assert Path(another, "file").exists()
    assert config.read_text() == "8"


def _wait_until_gone(*processes: WarmProcess) -> None:
    """Wait for the ends of kept processes, which remove their folders; at most ten seconds each."""
    for process in processes:
        for _ in range(100):
            if not process.folder.exists():
                break
            time.sleep(0.1)


def test_what_differs_between_terminals_changes_nothing_that_is_kept():
    """Else whoever plans once over SSH and once in tmux would have everything run again."""
    terminal = {"SSH_CLIENT": "10.0.0.1 50000 22", "TMUX_PANE": "%3", "VSCODE_IPC_HOOK_CLI": "/run/x", "SHLVL": "2", "MEMPLAN_LOG": "x"}

    assert lasting_variables({"HOME": "/home/me", "CUDA_MODULE_LOADING": "LAZY", **terminal}) == {
        "HOME": "/home/me", "CUDA_MODULE_LOADING": "LAZY",
    }  # fmt: skip

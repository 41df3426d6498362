"""Where a program is that does not end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from memplan.execution.stacks import STACK_SIGNAL, where_it_is

WAITS = """
import faulthandler, queue, signal, sys
faulthandler.register(signal.SIGRTMAX - 1, file=open(sys.argv[1], "w"), all_threads=False)
def train():
    queue.Queue().get()
print("begun", flush=True)
train()
"""


def started(folder: Path, text: str = WAITS, *, wait_seconds: float = 0.2) -> subprocess.Popen[str]:
    """A program that has got to where it waits; its stack goes to PROCESS.stack."""
    (folder / "train.py").write_text(text)
    command = f"exec {sys.executable} train.py $$.stack"
    process = subprocess.Popen(["sh", "-c", command], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(wait_seconds)
    return process


def test_the_line_of_the_program_is_told_and_what_it_calls(tmp_path: Path) -> None:
    """Its own frame, below those of the standard library that wait in C."""
    with started(tmp_path) as process:
        where = where_it_is(tmp_path)
        process.kill()

    assert where is not None
    assert where.startswith(f"{tmp_path}/train.py:5, in `wait` of threading.py:")


def test_a_stack_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """It is written frame by frame: here with a moment between the frame of a library and the program's own."""
    slowly = (
        "import signal, sys, time\n"
        "file = open(sys.argv[1], 'a', buffering=1)\n"
        "def write(*_):\n"
        "    file.write('  File \"/usr/lib/python3.11/queue.py\", line 171 in get\\n')\n"
        "    time.sleep(0.03)\n"
        "    file.write('  File \"train.py\", line 5 in train\\n')\n"
        "signal.signal(signal.SIGRTMAX - 1, write)\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)\n"
    )
    with started(tmp_path, slowly) as process:
        where = where_it_is(tmp_path)
        process.kill()

    assert where == "train.py:5, in `get` of queue.py:171"


def test_the_process_that_was_started_last_is_told(tmp_path: Path) -> None:
    """A launcher waits for what it has started."""
    with started(tmp_path) as launcher:
        with started(tmp_path, WAITS.replace("queue.Queue().get()", "while True: pass")) as trainer:
            where = where_it_is(tmp_path)
            trainer.kill()
        launcher.kill()

    assert where == f"{tmp_path}/train.py:5"


GOES_ON = """
import faulthandler, pathlib, signal, sys
faulthandler.register(signal.SIGRTMAX - 1, file=open(sys.argv[1], "w"), all_threads=False)
print("begun", flush=True)
while not pathlib.Path("go").exists(): pass
pathlib.Path("gone").touch()
while True: pass
"""


def test_a_process_that_waits_in_a_library_alone_is_not_told(tmp_path: Path) -> None:
    """As a worker of a DataLoader does, which was spawned later: its own line is `<string>:3`."""
    worker = (
        "import faulthandler, queue, signal, sys\n"
        "faulthandler.register(signal.SIGRTMAX - 1, file=open(sys.argv[1], 'w'), all_threads=False)\n"
        "print('begun', flush=True); queue.Queue().get()"
    )
    with started(tmp_path) as process:
        later = subprocess.Popen(
            ["sh", "-c", f'exec {sys.executable} -c "{worker}" $$.stack'], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        assert later.stdout is not None
        assert later.stdout.readline() == "begun\n"
        time.sleep(0.2)
        with later:
            where = where_it_is(tmp_path)
            process.kill()
            process.wait()
            alone = where_it_is(tmp_path)
            later.kill()

    assert where is not None
    assert where.startswith(f"{tmp_path}/train.py:5, in `wait` of threading.py:")
    assert alone is not None
    assert alone.startswith("<string>:3")


def test_a_program_that_is_asked_again_tells_where_it_is_then(tmp_path: Path) -> None:
    """What it wrote the first time is in the same file."""
    with started(tmp_path, GOES_ON) as process:
        before = where_it_is(tmp_path)
        (tmp_path / "go").touch()
        while not (tmp_path / "gone").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        after = where_it_is(tmp_path)
        process.kill()

    assert before is not None
    assert before.startswith(f"{tmp_path}/train.py:5")
    assert after == f"{tmp_path}/train.py:7"


def test_what_inductor_has_written_is_not_the_program_s_own(tmp_path: Path) -> None:
    """It is called by the line that is told."""
    made = tmp_path / "inductor" / "bs" / f"c{'ab7' * 17}.py"
    made.parent.mkdir(parents=True)
    made.write_text("def call():\n    while True: pass\n")
    text = f"import sys; sys.path.insert(0, {str(made.parent)!r})\n{WAITS}".replace(
        "queue.Queue().get()", f"__import__({made.stem!r}).call()"
    )
    with started(tmp_path, text) as process:
        where = where_it_is(tmp_path)
        process.kill()

    assert where == f"{tmp_path}/train.py:6, in `call` of {made}:2"


NOTES = """
exec(compile('def note():\\n    while True: pass', '<frozen importlib._memplan>', 'exec'))
"""


def test_frames_of_memplan_are_not_told(tmp_path: Path) -> None:
    """What records an operation stands between the program's line and what it calls."""
    with started(tmp_path, NOTES + WAITS.replace("queue.Queue().get()", "note()")) as process:
        where = where_it_is(tmp_path)
        process.kill()

    assert where == f"{tmp_path}/train.py:7"


def test_of_a_process_that_has_ended_nothing_is_told(tmp_path: Path) -> None:
    """Nor of one that never began to record."""
    (tmp_path / f"{2**22 + 1}.stack").touch()
    os.utime(tmp_path / f"{2**22 + 1}.stack")

    assert where_it_is(tmp_path) is None


def test_a_process_that_would_be_ended_by_it_is_not_asked(tmp_path: Path) -> None:
    """What a launcher has become by `exec` does not know of it, and a number may be another process's by now."""
    with subprocess.Popen(["sleep", "60"]) as process:
        (tmp_path / f"{process.pid}.stack").touch()

        assert where_it_is(tmp_path) is None
        assert process.poll() is None
        process.kill()


ENDS = """
import pathlib, sys
from memplan.child.script import _write_stack_when_asked
_write_stack_when_asked(pathlib.Path(sys.argv[1]))
print("begun", flush=True)
"""


def test_a_process_that_ends_is_not_ended_by_being_asked(tmp_path: Path) -> None:
    """Python takes faulthandler's handler away before its process is over, and what comes then is ignored."""
    with started(tmp_path, ENDS, wait_seconds=0) as process:
        while process.poll() is None:
            os.kill(process.pid, STACK_SIGNAL)

    assert process.returncode == 0

"""What a program writes is held back: it finds it again, and the user's files stay as they are, to the nanosecond of their times."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.errors import MissingError
from memplan.programs import overlay
from memplan.programs.overlay import NOT_TOLD, NOT_TOLD_BELOW, SOURCES, Overlay, build_overlay, tells_reads_of

OPERATIONS = Path(__file__).with_name("file_operations.py")
Before = dict[str, tuple[object, ...]]


@pytest.fixture(scope="session", autouse=True)
def _library() -> None:
    """The library, compiled once."""
    try:
        build_overlay()
    except MissingError as error:
        pytest.skip(f"no rehearsals here: {error.message}")


def everything(root: Path) -> Before:
    """All that can be said of what is below *root*, and of itself."""
    found: Before = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, status.st_ino, status.st_nlink, status.st_mtime_ns, status.st_ctime_ns, content)
    return found


class Held:
    """Runs programs whose writes are held back, in *home*."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home = home
        self.overlay = Overlay(folder)
        self.take_note()

    def take_note(self) -> None:
        """From here on the user's files stay as they are."""
        self._before = everything(self.home)

    def __call__(self, *command: str | Path, check: bool = True, **variables: str) -> str:
        """Run *command*; return what it prints."""
        done = subprocess.run(
            [*map(str, command)], cwd=self.home, env=self.environment(**variables), capture_output=True, text=True, check=False, timeout=60
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def python(self, text: str, *arguments: str) -> Any:
        """Run the lines of a Python program; return what it prints last, which is Python too."""
        return json.loads(self(sys.executable, "-c", f"import json, os, sys\n{text}", *arguments).splitlines()[-1])

    def bash(self, text: str, **variables: str) -> list[str]:
        """Run the lines of a shell script."""
        return self("bash", "-euc", text, **variables).splitlines()

    def environment(self, **variables: str) -> dict[str, str]:
        whole = os.environ | variables
        return whole | self.overlay.environment(whole)

    def written(self) -> dict[str, int]:
        """What the overlay says of files, from the home."""
        return {str(file.path.relative_to(self.home.resolve())): file.size_bytes for file in self.overlay.written()}

    def removed(self) -> list[str]:
        return [str(path.relative_to(self.home.resolve())) for path in self.overlay.removed()]

    def check(self) -> None:
        """The user's files are as they were."""
        assert everything(self.home) == self._before


Hold = Callable[..., Held]


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """Hold back what is written in a folder with these files."""
    made = []
    with tempfile.TemporaryDirectory(prefix="memplan-rehearsal-") as folder:

        def make(**files: str) -> Held:
            home = tmp_path / "home"
            for name, text in files.items():
                path = home / name.replace("__", "/").replace("_", ".")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            home.mkdir(exist_ok=True)
            monkeypatch.chdir(home)
            made.append(Held(home, Path(folder)))
            return made[-1]

        yield make
        for held in made:
            held.check()


# what trainings do


def test_a_checkpoint_is_saved_over_another_and_read_again(hold: Hold) -> None:
    """The program sees its own; the user's stays."""
    held = hold(model_pt="the user's")

    seen = held.python(
        "before = open('model.pt').read()\nopen('model.pt', 'wb').write(bytes(2**16))\n"
        "print(json.dumps([before, len(open('model.pt', 'rb').read()), os.stat('model.pt').st_size]))"
    )

    assert seen == ["the user's", 2**16, 2**16]
    assert held.written() == {"model.pt": 2**16}


def test_a_log_is_appended_to(hold: Hold) -> None:
    """To a copy of what it held."""
    held = hold(train_log="first\n")

    text = "import logging\nlogging.basicConfig(filename='train.log', format='%(message)s')\nlogging.error('second')\n"
    assert held.python(text + "print(json.dumps(open('train.log').read()))") == "first\nsecond\n"


def test_an_output_folder_is_removed_and_made_anew(hold: Hold) -> None:
    """As with --overwrite_output_dir: nothing of the old one shows."""
    held = hold(out__a_pt="old", out__deep__b_pt="old")

    seen = held.python(
        "import shutil\nshutil.rmtree('out')\ngone = os.path.exists('out')\nos.makedirs('out/deep')\nopen('out/deep/c', 'w').write('new')\n"
        "print(json.dumps([gone, [[a, sorted(b), sorted(c)] for a, b, c in os.walk('out')]]))"
    )

    assert seen == [False, [["out", ["deep"], []], ["out/deep", [], ["c"]]]]
    assert held.removed() == ["out/a.pt", "out/deep/b.pt"]


@pytest.mark.parametrize("call", ["os.rename", "os.replace", "shutil.move"])
def test_a_file_takes_the_name_of_another(hold: Hold, call: str) -> None:
    """Written beside it first, as careful programs do."""
    held = hold(state_json="old")

    seen = held.python(
        f"import shutil\nopen('state.tmp', 'w').write('new')\n{call}('state.tmp', 'state.json')\n"
        "print(json.dumps([open('state.json').read(), os.listdir('.')]))"
    )

    assert seen == ["new", ["state.json"]]
    assert held.written() == {"state.json": 3}


def test_the_oldest_checkpoints_are_deleted(hold: Hold) -> None:
    """By what glob finds of the user's and of its own, as with save_total_limit."""
    held = hold(**{f"out__checkpoint-{number}__model_pt": "old" for number in (1, 2)})

    seen = held.python(
        "import glob, shutil\nos.mkdir('out/checkpoint-3')\nopen('out/checkpoint-3/model.pt', 'w').write('new')\n"
        "found = sorted(glob.glob('out/checkpoint-*'))\n[shutil.rmtree(path) for path in found[:-1]]\n"
        "print(json.dumps([found, sorted(glob.glob('out/**', recursive=True))]))"
    )

    assert seen[0] == ["out/checkpoint-1", "out/checkpoint-2", "out/checkpoint-3"]
    assert seen[1] == ["out/", "out/checkpoint-3", "out/checkpoint-3/model.pt"]
    assert held.removed() == ["out/checkpoint-1", "out/checkpoint-2"]


def test_a_folder_takes_the_name_of_another(hold: Hold) -> None:
    """With everything that is in it, the user's and its own."""
    held = hold(out__a="user's", out__deep__b="user's")

    lines = held.bash("echo own > out/c; mv out done; find done -type f | sort; cat done/c; ls")

    assert lines == ["done/a", "done/c", "done/deep/b", "own", "done"]
    assert held.removed() == ["out"]


def test_a_database_is_changed(hold: Hold) -> None:
    """With its journal and its locks, by two processes."""
    held = hold()
    text = "import sqlite3\nbase = sqlite3.connect('runs.db')\n"
    held.python(text + "base.execute('create table run (name)')\nbase.execute('insert into run values (1)')\nbase.commit()\nprint(1)")

    assert held.python(text + "print(json.dumps(base.execute('select * from run').fetchall()))") == [[1]]
    assert list(held.written()) == ["runs.db"]


def test_a_mapped_array_is_written(hold: Hold) -> None:
    """np.memmap in mode r+ changes the copy."""
    held = hold(array_bin="0" * 64)

    seen = held.python(
        "import numpy\narray = numpy.memmap('array.bin', dtype='uint8', mode='r+')\narray[:] = 0x31\narray.flush()\n"
        "print(json.dumps(open('array.bin').read()))"
    )

    assert seen == "1" * 64


def test_workers_write_in_one_folder(hold: Hold) -> None:
    """Forked, and started anew: each sees what the others wrote."""
    held = hold(log="user's\n")
    (held.home / "work.py").write_text(
        "import json, multiprocessing, os\n"
        "def work(number):\n    os.makedirs('shards', exist_ok=True)\n    open(f'shards/{number}', 'w').write('x')\n"
        "    print(number, file=open('log', 'a'), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    for way in ('fork', 'spawn'):\n"
        "        with multiprocessing.get_context(way).Pool(2) as pool:\n            pool.map(work, range(8))\n"
        "    print(json.dumps([len(os.listdir('shards')), len(open('log').readlines())]))\n"
    )
    held.take_note()

    assert json.loads(held(sys.executable, "work.py")) == [8, 17]


# other programs


def test_programs_that_a_program_starts_see_the_same(hold: Hold) -> None:
    """A shell, and what it starts; a program of whom the environment was taken away too."""
    held = hold(file="user's\n")

    seen = held.python(
        "import subprocess\nopen('file', 'a').write('python\\n')\n"
        "subprocess.run('echo bash >> file; cp file copy', shell=True, check=True)\n"
        "subprocess.run(['bash', '-c', 'echo bare >> file'], env={'PATH': os.environ['PATH']}, check=True)\n"
        "os.system('env -i /bin/sh -c \"echo alone >> file\"')\n"
        "print(json.dumps([open('file').read().split(), open('copy').read().split()]))"
    )

    assert seen == [["user's", "python", "bash", "bare", "alone"], ["user's", "python", "bash"]]


def test_a_library_is_compiled_and_loaded(hold: Hold) -> None:
    """As Triton and PyTorch's extensions do; and a program is compiled and run."""
    held = hold(answer_c="int answer(void) { return 42; }\nint main(void) { return answer(); }\n")

    seen = held.python(
        "import ctypes, subprocess\nos.mkdir('build')\n"
        "subprocess.run('cc -shared -fPIC answer.c -o build/answer.so && cc answer.c -o build/answer', shell=True, check=True)\n"
        "print(json.dumps([ctypes.CDLL(os.path.abspath('build/answer.so')).answer(), subprocess.run(['build/answer']).returncode]))"
    )

    assert seen == [42, 42]


def test_git_commits_what_the_program_wrote(hold: Hold) -> None:
    """A repository of the user's has no commit more."""
    held = hold(file="user's\n")
    who = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["bash", "-ec", "git init -q .; git add file; git commit -qm one"], cwd=held.home, env=os.environ | who, check=True)
    held.take_note()

    lines = held.bash("echo more >> file; echo new > other; git add -A; git commit -qm two; git status --short; git log --format=%s", **who)

    assert lines == ["two", "one"]


def test_a_library_that_the_caller_has_a_path_for_is_found(hold: Hold) -> None:
    """dlopen searches where its caller says (DT_RUNPATH), as PyTorch's libraries do for cuDNN."""
    held = hold(
        far_c="int far(void) { return 7; }",
        near_c='#include <dlfcn.h>\nint near(void) { int (*far)(void) = dlsym(dlopen("libfar.so", RTLD_NOW), "far"); return far(); }',
    )
    build = (
        "mkdir far; cc -shared -fPIC far.c -o far/libfar.so; cc -shared -fPIC near.c -o libnear.so -Wl,--enable-new-dtags,-rpath,$PWD/far"
    )
    subprocess.run(["bash", "-ec", build], cwd=held.home, check=True)
    held.take_note()

    assert held.python("import ctypes\nopen('x', 'w')\nprint(ctypes.CDLL('./libnear.so').near())") == 7


# folders, links, names


def test_a_program_goes_into_a_folder_that_it_made(hold: Hold) -> None:
    """And is where it thinks it is."""
    held = hold()

    seen = held.python(
        "os.makedirs('runs/one')\nos.chdir('runs/one')\nopen('log', 'w').write('x')\n"
        "print(json.dumps([os.getcwd(), os.listdir('.'), os.path.realpath('log'), os.path.samefile('.', os.getcwd())]))"
    )

    here = str(held.home.resolve() / "runs" / "one")
    assert seen == [here, ["log"], f"{here}/log", True]
    assert held.bash("cd runs/one; pwd -P; cat log; cd ..; ls") == [here, "xone"]


def test_links_lead_where_they_led(hold: Hold) -> None:
    """Into a folder elsewhere, whose files are held too."""
    held = hold(disk__ckpt="user's")
    (held.home / "out").symlink_to(held.home / "disk")
    held.take_note()

    seen = held.python(
        "open('out/ckpt', 'w').write('new')\nos.symlink('ckpt', 'disk/latest')\nprint(json.dumps([open('disk/ckpt').read(), "
        "open('out/latest').read(), os.readlink('out/latest'), os.path.realpath('out/latest')]))"
    )

    assert seen == ["new", "new", "ckpt", str(held.home.resolve() / "disk" / "ckpt")]


def test_temporary_files_beside_others(hold: Hold) -> None:
    """Of tempfile: with a name, in a folder of their own, and without a name."""
    held = hold(file="user's")

    seen = held.python(
        "import tempfile\nwith tempfile.NamedTemporaryFile('w', dir='.', delete=False) as file: file.write('x')\n"
        "os.replace(file.name, 'file')\nwith tempfile.TemporaryDirectory(dir='.') as folder: open(folder + '/x', 'w').write('y')\n"
        "with tempfile.TemporaryFile(dir='.') as file: file.write(b'z')\nprint(json.dumps([open('file').read(), os.listdir('.')]))"
    )

    assert seen == ["x", ["file"]]


def test_what_is_said_of_files_changes_of_copies(hold: Hold) -> None:
    """Permissions, times and attributes; through a descriptor that is open for reading, too."""
    held = hold(one="1", two="2")

    seen = held.python(
        "os.chmod('one', 0o600)\nos.utime('one', (1, 1))\nfile = os.open('two', os.O_RDONLY)\nos.fchmod(file, 0o640)\n"
        "os.utime(file, (2, 2))\nprint(json.dumps([[oct(os.stat(n).st_mode), os.stat(n).st_mtime] for n in ('one', 'two')]))"
    )

    assert seen == [["0o100600", 1], ["0o100640", 2]]


def test_a_file_that_is_opened_and_not_written_is_not_told(hold: Hold) -> None:
    """Nor what Python compiles for itself; a file that came and went neither."""
    held = hold(data="user's")
    (held.home / "module.py").write_text("")
    held.take_note()

    held.python("open('data', 'r+').read()\nimport module\nopen('gone', 'w')\nos.remove('gone')\nprint(0)")

    assert (held.written(), held.removed()) == ({}, [])


def test_sockets_and_pipes_with_names_work(hold: Hold) -> None:
    """Between processes of the program; a pipe that a program finds is the one that is there."""
    held = hold()

    seen = held.python(
        "import socket\nserver, client = (socket.socket(socket.AF_UNIX) for _ in range(2))\nserver.bind('here')\nserver.listen()\n"
        "client.connect(os.path.abspath('here'))\nclient.send(b'x')\nos.mkfifo('pipe')\n"
        "if os.fork() == 0:\n    open('pipe', 'w').write('through')\n    os._exit(0)\n"
        "print(json.dumps([server.accept()[0].recv(1).decode(), open('pipe').read(), sorted(os.listdir('.'))]))"
    )

    assert seen == ["x", "through", ["here", "pipe"]]


# where nothing is held


def test_new_temporary_files_are_not_held_and_those_that_were_there_are(
    hold: Hold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier run's output in /tmp is the user's."""
    temporary = tmp_path / "temporary"
    (temporary / "earlier").mkdir(parents=True)
    (temporary / "earlier" / "ckpt").write_text("user's")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    held = hold()

    seen = held.python(
        "folder = sys.argv[1]\nopen(folder + '/earlier/ckpt', 'w').write('new')\nopen(folder + '/other', 'w').write('new')\n"
        "os.mkdir(folder + '/more')\nopen(folder + '/more/file', 'w').write('new')\n"
        "print(json.dumps([open(folder + '/earlier/ckpt').read(), sorted(os.listdir(folder)), os.listdir(folder + '/more')]))",
        str(temporary),
    )

    assert seen == ["new", ["earlier", "more", "other"], ["file"]]
    assert (temporary / "earlier" / "ckpt").read_text() == "user's"
    assert (temporary / "other").read_text() == (temporary / "more" / "file").read_text() == "new"


def test_a_program_in_the_temporary_folder_itself_is_held_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes in its working folder is no temporary file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    held = Held(tmp_path, tmp_path / "own")

    assert held.python("open('ckpt', 'w').write('x')\nprint(json.dumps(open('ckpt').read()))") == "x"
    assert not (tmp_path / "ckpt").exists()


def test_outputs_that_are_open_are_the_users(hold: Hold) -> None:
    """A redirection of the shell that started memplan; /dev/null and the terminal are devices."""
    held = hold(out="")
    with (held.home / "out").open("w") as out:
        subprocess.run(
            ["bash", "-c", "echo one; echo two > /dev/stdout; echo no > /dev/null"], stdout=out, env=held.environment(), check=True
        )

    assert "one" in (held.home / "out").read_text() or "two" in (held.home / "out").read_text()
    held.take_note()


def test_a_program_that_calls_the_kernel_itself_cannot_write(hold: Hold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in Go, or linked statically: it is refused, where the kernel can (Landlock), but below a folder for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(overlay, "TEMPORARY", ())
    held = hold(file="user's")
    text = (
        "import ctypes, platform\nnumber = {'x86_64': 257, 'aarch64': 56}[platform.machine()]\nlibc = ctypes.CDLL(None)\n"
        "libc.syscall.restype = ctypes.c_long\nversion = libc.syscall(444, None, 0, 1)\n"
        "opened = [libc.syscall(number, -100, b'file', flags) for flags in (os.O_WRONLY, os.O_RDONLY)]\n"
        "print(json.dumps([version, opened[0], opened[1] > 2]))"
    )
    version, to_write, to_read = held.python(text)
    if version < 3:
        pytest.skip("this kernel has no Landlock")

    assert (to_write, to_read) == (-1, True)


# permissions, disks, ends


def test_what_may_not_be_written_fails_as_ever(hold: Hold) -> None:
    """Read-only files and folders, for a user who is not root."""
    if os.geteuid() == 0:
        pytest.skip("root may write everything")
    held = hold(file="user's", folder__x="")
    (held.home / "file").chmod(0o444)
    (held.home / "folder").chmod(0o555)
    held.take_note()

    assert held.bash("echo > file || echo no; echo > folder/new || echo no; rm -f folder/x || echo no") == ["no", "no", "no"]
    (held.home / "folder").chmod(0o755)


def test_a_program_that_is_killed_leaves_nothing(hold: Hold) -> None:
    """While it writes; and what it had written is there for others."""
    held = hold(ckpt="user's")
    text = (
        "import os, signal\nfile = open('ckpt', 'w')\nfile.write('half')\nfile.flush()\nos.mkdir('more')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )

    done = subprocess.run([sys.executable, "-c", text], cwd=held.home, env=held.environment(), check=False)

    assert done.returncode == -signal.SIGKILL
    assert held.bash("cat ckpt; echo; ls") == ["half", "ckpt", "more"]


def test_after_the_rehearsal_nothing_is_written(hold: Hold, tmp_path: Path) -> None:
    """A process that outlives it fails to write."""
    held = hold(file="user's")
    with tempfile.TemporaryDirectory() as folder:
        own = Held(held.home, Path(folder))
        text = "import sys\nsys.stdin.read()\ntry: open('file', 'w')\nexcept OSError as error: print(error.strerror)"
        with subprocess.Popen(
            [sys.executable, "-c", text], cwd=held.home, env=own.environment(), stdin=-1, stdout=-1, text=True
        ) as process:
            time.sleep(0.3)  # it has begun
            shutil.rmtree(folder)
            Path(folder).mkdir()
            said, _ = process.communicate("go")
    started_later = subprocess.run(
        ["bash", "-c", "echo > file"], cwd=held.home, env=own.environment(), capture_output=True, text=True, check=False
    )

    assert said.strip()
    assert started_later.returncode


def test_holes_stay_holes(hold: Hold) -> None:
    """A copy takes no more room than what it is a copy of."""
    held = hold()
    with (held.home / "sparse").open("wb") as file:
        file.truncate(2**26)
        file.write(b"x")
    held.take_note()

    seen = held.python("file = open('sparse', 'r+b')\nfile.write(b'y')\nprint(json.dumps(os.fstat(file.fileno()).st_blocks))")

    assert seen < 1000
    assert held.written() == {"sparse": 2**26}


@pytest.mark.heavy
def test_a_copy_that_does_not_fit_fails_as_a_full_disk(hold: Hold) -> None:
    """And says which folder is too small."""
    held = hold()
    small = Path("/dev/shm")
    if (
        not small.is_dir()
        or shutil.disk_usage(small).free > 2**36
        or shutil.disk_usage(held.home).free < shutil.disk_usage(small).free + 2**32
    ):
        pytest.skip("no folder here is much smaller than the disk")
    size = shutil.disk_usage(small).free + 2**30
    with (held.home / "large").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    try:
        with tempfile.TemporaryDirectory(dir=small) as folder:
            environment = os.environ | Overlay(Path(folder)).environment(os.environ)
            text = "try: open('large', 'r+')\nexcept OSError as error: print(error.strerror)"
            done = subprocess.run([sys.executable, "-c", text], cwd=held.home, env=environment, capture_output=True, text=True, check=True)
    finally:
        (held.home / "large").unlink()
    held.take_note()

    assert done.stdout == "No space left on device\n"
    assert "memplan: no room in" in done.stderr


def test_errno_is_left_alone(hold: Hold) -> None:
    """What a call that succeeds does inside is nobody's business."""
    held = hold(file="")
    held("bash", "-c", "echo > other")  # from here on reads look for copies

    seen = held.python(
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nctypes.set_errno(5)\n"
        "results = [libc.access(b'file', 0), libc.open(b'new', 0o101, 0o644) > 0, libc.unlink(b'file')]\n"
        "print(json.dumps([results, ctypes.get_errno()]))"
    )

    assert seen == [[0, True, 0], 5]


# any sequence of operations

PATHS = [
    "a",
    "b",
    "c",
    "x",
    "l",
    "a/b",
    "a/x",
    "a/m",
    "a/b/y",
    "c/z",
    "c/x",
    "l/x",
    "l/b",
    "l/b/y",
    "broken",
    "n",
    "n/x",
    "a/n",
    "a/../x",
    "c/",
    "x/y",
]
# A tree is not copied or moved into itself through a link: where that ends is a matter of luck.
GOALS = [path for path in PATHS if not path.startswith("l")]
a_path = st.sampled_from(PATHS)
a_goal = st.sampled_from(GOALS)
a_text = st.sampled_from(["one", "another", ""])
ONE = ["read", "list", "list_descriptor", "stat", "lstat", "exists", "access", "mkdir", "makedirs", "unlink", "rmdir", "rmtree", "readlink"]
MORE = ["realpath", "utime", "tree", "read_through"]
an_operation = st.one_of(
    st.tuples(st.sampled_from(["write", "append", "change", "create"]), a_path, a_text),
    st.tuples(st.sampled_from([*ONE, *MORE]), a_path),
    st.tuples(st.sampled_from(["rename", "replace", "move", "copy", "copytree", "symlink", "link"]), a_path, a_goal),
    st.tuples(st.just("truncate"), a_path, st.integers(0, 20)),
    st.tuples(st.just("chmod"), a_path, st.sampled_from([0o644, 0o600, 0o755, 0o700])),
    st.tuples(st.just("glob"), st.sampled_from(["*", "*/*", "a/*", "l/*"])),
    st.tuples(st.sampled_from(["write_in", "go_and_write"]), a_path, st.sampled_from(["w", "x"])),
)


def make_tree(home: Path) -> None:
    """Files, folders and links of every kind."""
    (home / "a" / "b").mkdir(parents=True)
    (home / "c").mkdir()
    for name in ("x", "a/x", "a/b/y", "c/z"):
        (home / name).write_text(f"the user's {name}")
    (home / "l").symlink_to("a")
    (home / "a" / "m").symlink_to("../x")
    (home / "broken").symlink_to("nowhere")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(an_operation, min_size=1, max_size=25))
def test_any_program_sees_what_it_would_see_and_changes_nothing(operations: list[tuple[Any, ...]]) -> None:
    """The same operations on a plain copy of the folder return the same, fail the same, and leave the same."""
    with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory(prefix="memplan-rehearsal-") as folder:
        home = Path(base) / "home"
        make_tree(home)
        held = Held(home, Path(folder))
        command = [sys.executable, "-I", "-S", str(OPERATIONS), json.dumps(operations)]

        seen = held(*command)
        held.check()
        plain = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True).stdout

        assert seen.splitlines() == plain.splitlines()


# the library


def test_it_is_built_once_and_kept(tmp_path: Path) -> None:
    """The second call finds it."""
    folder = build_overlay(tmp_path)

    assert build_overlay(tmp_path) == folder
    assert [path.name for path in folder.iterdir()] == ["liboverlay.so"]


@pytest.fixture
def shown(hold: Hold) -> Held:
    """A program that finds another configuration than the user has."""
    held = hold(conf__config_yaml="batch: 8\n")
    (held.home / "link").symlink_to("conf/config.yaml")
    folder = held.overlay.folder / "second"
    folder.mkdir()
    held.overlay = Overlay(folder, shown={held.home / "link": b"batch: 1024\n"})
    held.take_note()
    return held


def test_a_file_is_shown_with_other_contents(shown: Held) -> None:
    """By every path, to every program, with its size; what was shown is nothing that was written."""
    read = shown.python(
        "import pathlib\n"
        "texts = [open(path).read() for path in ('conf/config.yaml', 'conf/../link', os.path.abspath('link'))]\n"
        "print(json.dumps([*texts, os.stat('conf/config.yaml').st_size, os.listdir('conf'), pathlib.Path('link').read_text()]))"
    )

    assert read == [*["batch: 1024\n"] * 3, 12, ["config.yaml"], "batch: 1024\n"]
    assert shown.bash("cat conf/config.yaml; wc -c < link") == ["batch: 1024", "12"]
    assert shown.written() == {}


def test_a_file_that_is_shown_can_be_written_over(shown: Held) -> None:
    """As any other: the program finds its own text again."""
    assert shown.bash("echo more >> conf/config.yaml; cat link") == ["batch: 1024", "more"]
    assert shown.written() == {"conf/config.yaml": 17}


def test_a_module_that_is_shown_is_compiled_anew(hold: Hold) -> None:
    """What Python compiled of the user's own, in the same second and of the same length, is not taken; its cache stays as it is."""
    held = hold(settings_py="batch_size = 8\n")
    subprocess.run([sys.executable, "-c", "import settings"], cwd=held.home, env={"PATH": os.environ["PATH"]}, check=True)
    assert (held.home / "__pycache__").is_dir()
    folder = held.overlay.folder / "second"
    folder.mkdir()
    held.overlay = Overlay(folder, shown={held.home / "settings.py": b"batch_size = 9\n"})
    held.take_note()

    assert held.python("import sys; sys.path.insert(0, '.'); import settings; print(settings.batch_size)") == 9
    assert held.written() == {}


def test_what_is_read_is_known(hold: Hold) -> None:
    """Files and folders by the paths that the program gave, each once; what the system has is not told."""
    held = hold(a_txt="a", b_txt="b")

    held.bash("cat a.txt a.txt ./b.txt /etc/hostname > new.txt; cat new.txt; ls .")

    told = {path for path in held.overlay.read() if path.is_relative_to(held.home)}
    assert told == {held.home, *(held.home / name for name in ("a.txt", "b.txt", "new.txt"))}
    assert not any(path.is_relative_to("/etc") for path in held.overlay.read())


def test_files_of_the_system_and_of_packages_are_not_told_of() -> None:
    """Whether a program has read one nobody can say then."""
    assert tells_reads_of(Path("/home/me/project/conf.yaml"))
    assert not tells_reads_of(Path("/usr/src/app/conf.yaml"))
    assert not tells_reads_of(Path("/home/me/venv/lib/python3.11/site-packages/package/conf.yaml"))


def test_the_library_leaves_out_the_same_files() -> None:
    """Both lists, in C and in Python, are one."""
    source = (SOURCES / "reads.c").read_text()
    folders = re.search(r"folders\[\] = \{(.*?), NULL\}", source)
    parts = re.findall(r'strstr\(path, "(.+?)"\)', source)

    assert folders is not None
    assert tuple(re.findall(r'"(.+?)"', folders[1])) == NOT_TOLD
    assert tuple(parts) == NOT_TOLD_BELOW

"""What is rehearsed: files, modules and functions, those that work and those that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memplan.api.rehearsals import rehearse
from memplan.errors import MissingError, UsageError
from memplan.execution.rehearse import Rehearser
from memplan.execution.step_source import StepSource, step_source_from, step_source_of
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from tests.child import odd_steps
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

ODD = Path(odd_steps.__file__)
MIB = 2**20

BUILD = """
def build(device, batch=1):
    import torch
    return lambda: torch.empty(batch, 2**18, device=device)
"""
"""One MiB a sample."""


# what is meant


@pytest.mark.parametrize("text", ["", ":", "train.py", "train.py:", ":build"])
def test_a_target_needs_both_names(text: str) -> None:
    """The file's and the function's."""
    with pytest.raises(UsageError, match=r"does not say FILE\.py:build"):
        step_source_from(text)


def test_names_are_taken_apart_at_the_last_colon(tmp_path: Path) -> None:
    """A path may have others; a module is not looked for yet."""
    (tmp_path / "a:b.py").touch()

    assert step_source_from(f"{tmp_path}/a:b.py:build") == StepSource(f"{tmp_path}/a:b.py", "build")
    assert step_source_from("my.package:build") == StepSource("my.package", "build")


def test_a_function_of_a_module_is_found_by_its_name() -> None:
    """In another process too, with this one's paths."""
    assert step_source_of(odd_steps.allocates) == StepSource("tests.child.odd_steps", "allocates", is_of_this_process=True)


@pytest.mark.parametrize("build", [3, None, "train.py:build", odd_steps])
def test_what_nobody_can_call_is_refused(build: Any) -> None:
    """Before anything is started."""
    with pytest.raises(UsageError, match="is not a function"):
        step_source_of(build)


def closure() -> Callable[..., object]:
    return lambda _: None


class Holder:
    """Has a method."""

    def build(self, _: str) -> Callable[[], object]:
        """Return a step."""
        return lambda: None


@pytest.mark.parametrize(
    "build", [lambda _: None, closure(), Holder().build, odd_steps.instance], ids=["lambda", "closure", "method", "instance"]
)
def test_what_has_no_name_of_its_own_needs_cloudpickle(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is missing, the way out is named; where it is there, the function travels by value."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingError, match="is defined where no other process can import it") as caught:
        step_source_of(build)
    assert "pip install cloudpickle" in (caught.value.hint or "")

    monkeypatch.setitem(sys.modules, "cloudpickle", json)  # anything with a `dumps`
    monkeypatch.setattr(json, "dumps", lambda _: b"pickled")
    target = step_source_of(build)
    assert (target.name, target.pickled, target.is_of_this_process) == ("build.pickle", b"pickled", True)


# what is served


def test_a_function_of_this_process_is_rehearsed(torch_build: TorchBuild) -> None:
    """With its values, and its defaults told."""
    seen = rehearse(odd_steps.allocates, gpu="t4", values={"batch": 3}, steps=1)

    assert seen.peak_allocated_bytes == 3 * MIB
    assert seen.values == {"batch": 3}


@pytest.mark.parametrize(
    ("head", "beside"),
    [
        ("import torch\nweights = torch.zeros(2**18, device='cuda')\n", MIB),
        pytest.param(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n", 0, marks=pytest.mark.heavy
        ),
    ],
    ids=["CUDA", "threads"],
)
def test_a_file_that_cannot_be_forked_is_loaded_for_each_rehearsal(torch_build: TorchBuild, tmp_path: Path, head: str, beside: int) -> None:
    """What it does when it is loaded, begin CUDA or a thread, does not outlive a fork."""
    (tmp_path / "train.py").write_text(head + BUILD)

    with Rehearser(step_source_from(f"{tmp_path}/train.py:build")) as rehearser:
        peaks = [rehearser.rehearse(gpu=find_gpu("t4"), values={"batch": batch}).peak_allocated_bytes for batch in (1, 2)]

    assert peaks == [MIB + beside, 2 * MIB + beside]


def test_a_file_may_ask_for_gpus_when_it_is_loaded(torch_build: TorchBuild, tmp_path: Path) -> None:
    """PyTorch refuses CUDA in a fork of a process that has asked; here it is loaded once, and each request names its GPU."""
    (tmp_path / "train.py").write_text(
        "import os, torch\nassert torch.cuda.is_available() and torch.cuda.device_count() == 1\nLOADED = os.getpid()\n"
        "def build(device, name):\n    assert os.getppid() == LOADED\n    assert torch.cuda.get_device_name() == name\n"
        "    return lambda: torch.zeros(8, device=device)\n"
    )

    with Rehearser(step_source_from(f"{tmp_path}/train.py:build")) as rehearser:
        for gpu in (find_gpu("t4"), find_gpu("h100")):
            assert rehearser.rehearse(gpu=gpu, values={"name": gpu.name}).gpu_name == gpu.name


# what fails. One process serves all of it: a fork that breaks takes nothing with it.


@pytest.fixture(scope="module")
def odd(torch_build: TorchBuild, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearser]:
    """Any of the odd steps, by name."""
    path = tmp_path_factory.mktemp("odd") / "any_of.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(ODD.parents[2])!r})\nfrom tests.child import odd_steps\n"
        "def build(device, name, **values): return getattr(odd_steps, name)(device, **values)\n"
    )
    with Rehearser(step_source_from(f"{path}:build")) as rehearser:
        yield rehearser


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("eats_the_host", {}, r"^the program failed in its step 1 at .*odd_steps.py:[0-9]+: MemoryError"),
        ("aborts", {}, r"^the program was ended by SIGABRT; it said nothing"),
        ("segfaults", {}, r"^the program was ended by SIGSEGV; it said nothing"),
        ("is_killed", {}, r"^the program was ended by SIGKILL \(did the host run out of memory\?\); it said nothing"),
        ("leaves", {}, r"^the program ended with exit code 0; it said nothing"),
        ("leaves", {"status": "the words"}, r"^the program ended with exit code 1; its last output:\nthe words"),
        ("leaves_at_once", {}, r"^the program ended with exit code 0; it said nothing"),
        ("returns_nothing", {}, r"^build returned None, and not a function"),
        ("stays_on_the_host", {}, r"^the program never used the device"),
        ("breaks_on_the_host", {}, r"^the program failed in its step 1 at .*odd_steps.py:[0-9]+: ZeroDivisionError"),
        (
            "allocates",
            {"wrong": 1},
            r"^the program failed in its build.*: TypeError: allocates\(\) got an unexpected keyword argument 'wrong'",
        ),
    ],
)
def test_a_step_that_fails_says_how(odd: Rehearser, name: str, values: dict[str, Any], problem: str) -> None:
    """And the next rehearsal is as good as the first."""
    with pytest.raises(UsageError, match=problem):
        odd.rehearse(gpu=find_gpu("t4"), values={"name": name, **values})

    assert odd.rehearse(gpu=find_gpu("t4"), values={"name": "allocates", "batch": 2}).peak_allocated_bytes == 2 * MIB


@pytest.mark.parametrize("name", ["instance", "closes_its_output"])
def test_a_step_of_an_odd_kind_is_served(odd: Rehearser, name: str) -> None:
    """An object that is called as a function is; a program that has closed its outputs."""
    assert odd.rehearse(gpu=find_gpu("t4"), values={"name": name}).peak_allocated_bytes >= MIB


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["prints_without_end", "hangs_deaf"])
def test_a_step_that_does_not_end_is_ended(odd: Rehearser, name: str) -> None:
    """Whether it says much or nothing; the next rehearsal starts anew."""
    with pytest.raises(UsageError, match="did not end within 8 seconds") as caught:
        odd.rehearse(gpu=find_gpu("t4"), values={"name": name}, timeout_seconds=8)

    assert len(caught.value.message) < 20_000
    assert ("again again" in caught.value.message) == (name == "prints_without_end")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import not_there\n" + BUILD, r"failed in its build at .*train.py:1: ModuleNotFoundError: No module named 'not_there'"),
        ("def build(device:\n", r"failed in its build at .*train.py:1: SyntaxError"),
        ("import sys\nsys.exit('needs a configuration')\n", r"ended with exit code 1; its last output:\nneeds a configuration"),
    ],
    ids=["import", "syntax", "exit"],
)
def test_a_file_that_does_not_load_says_why(torch_build: TorchBuild, tmp_path: Path, text: str, problem: str) -> None:
    """With its own line, where there is one."""
    (tmp_path / "train.py").write_text(text)

    with pytest.raises(UsageError, match=problem):
        rehearse(f"{tmp_path}/train.py:build", gpu="t4")


def test_nothing_is_left_behind(torch_build: TorchBuild, tmp_path: Path) -> None:
    """No file of ours and no process, whatever happened; PyTorch keeps a cache of its own there."""
    (tmp_path / "train.py").write_text("import os\ndef build(device): os.abort()\n")
    code = (
        "import memplan\ntry:\n    memplan.rehearse('train.py:build', gpu='t4')\nexcept Exception as error:\n    print(error.exit_code)\n"
        "import os, subprocess\n"
        "children = subprocess.run(['ps', '--no-headers', '--ppid', str(os.getpid())], capture_output=True, text=True).stdout\n"
        "print(children.count('python'))"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True
    )

    assert result.stdout.split() == ["2", "0"]
    assert list(tmp_path.glob("memplan*")) == []

"""A rehearsal and the user's files: held back and told, or written where that is allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memplan.api.rehearsals import rehearse
from memplan.execution.held_back import Writes
from memplan.hardware.torch_install import TorchBuild
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

SAVES = """
import shutil
import torch

def build(device):
    weight = torch.ones(2**18, device=device)

    def step():
        torch.save(weight, "ckpt.pt")
        assert torch.load("ckpt.pt").shape == weight.shape
        shutil.rmtree("old", ignore_errors=True)

    return step

if __name__ == "__main__":
    build("cuda")()
"""


@pytest.fixture
def project(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that saves over a checkpoint, and removes what an earlier run left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SAVES)
    (tmp_path / "ckpt.pt").write_text("the user's")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "log").write_text("the user's")
    return tmp_path


def is_untouched(project: Path) -> bool:
    texts = [(project / name).read_text() for name in ("ckpt.pt", "old/log")] if (project / "old").exists() else []
    return texts == ["the user's"] * 2


@pytest.mark.heavy
def test_a_checkpoint_of_a_script_is_held_back_and_reported(project: Path) -> None:
    """In words with what to type, and in JSON."""
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", "--format", "json", "--", "train.py"]

    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    words = subprocess.run([*command[:6], *command[8:]], capture_output=True, text=True, check=True).stdout

    assert is_untouched(project)
    size = answer["held_back_files"][0]["size_bytes"]
    assert answer["held_back_files"] == [{"path": str(project / "ckpt.pt"), "size_bytes": size}]
    assert (answer["num_held_back_files"], answer["held_back_bytes"]) == (1, size)
    assert answer["held_back_removals"] == [str(project / "old")]
    assert "files held back     1 (1.0 MiB): ckpt.pt; `--allow-writes` writes them" in words
    assert "removals held back  1: old; `--allow-writes` removes them" in words


@pytest.mark.heavy
def test_a_step_is_held_back_too_unless_it_is_allowed(project: Path) -> None:
    """From Python."""
    held = rehearse("train.py:build", gpu="t4", steps=1)
    assert [file.path for file in held.held_back_files] == [str(project / "ckpt.pt")]
    assert is_untouched(project)

    allowed = rehearse("train.py:build", gpu="t4", steps=1, allow_writes=True)
    assert (allowed.held_back_files, allowed.held_back_removals) == ((), ())
    assert not is_untouched(project)


def test_what_is_allowed_has_the_environment_as_it_is(tmp_path: Path) -> None:
    """No library, no switch."""
    environment = {"LD_PRELOAD": "mine.so"}

    assert Writes(tmp_path, script=None, are_allowed=True).held_in(environment) == environment
    held = Writes(tmp_path, script=None, are_allowed=False).held_in(environment)
    assert held["LD_PRELOAD"].endswith("liboverlay.so:mine.so")
    assert held["WANDB_MODE"] == "offline"

"""Uploads to the Hugging Face Hub and files of safetensors, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

pytest.importorskip("huggingface_hub")

UPLOADS = """
import importlib.util, json
from memplan.child import held_back
spec = importlib.util.spec_from_file_location("memplan_held_back", held_back.__file__)
first = importlib.util.module_from_spec(spec)
spec.loader.exec_module(first)
first.hold_back()  # when Python starts
held_back.hold_back()  # when it has imported PyTorch
import huggingface_hub
from huggingface_hub import HfApi, create_repo
api = HfApi(endpoint="http://127.0.0.1:9")  # nobody listens
"""


def upload(text: str, **variables: str) -> tuple[Any, str]:
    """Run the lines; return what they print, and what is said on standard error."""
    done = subprocess.run([sys.executable, "-c", UPLOADS + text], env=os.environ | variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


def test_uploads_are_answered_as_done_and_it_is_said_once() -> None:
    """By methods and by functions, at once and in the background."""
    seen, said = upload(
        "print(json.dumps([create_repo('me/model').repo_id, create_repo('me/data', repo_type='dataset').repo_id,"
        "len(api.upload_folder(repo_id='me/model', folder_path='.').oid), huggingface_hub.create_branch('me/model', branch='b'),"
        "api.upload_file(path_or_fileobj=b'', path_in_repo='a', repo_id='me/model', run_as_future=True).result().commit_message]))",
        MEMPLAN_OVERLAY="/scratch",
    )

    assert seen == ["me/model", "me/data", 40, None, "held back by memplan"]
    assert said.count("memplan: uploads to the Hugging Face Hub are held back in a rehearsal") == 1


def test_where_writes_are_allowed_uploads_are() -> None:
    """huggingface_hub is as ever."""
    seen, _ = upload("print(json.dumps(HfApi.create_commit.__module__))")

    assert seen == "huggingface_hub.hf_api"


SAVES = """
import pathlib, sys, torch
from safetensors.torch import load_file, save_file
weight = torch.zeros(4, device="cuda")
save_file({"weight": weight}, "model.safetensors")
save_file({"weight": weight}, pathlib.Path("older.safetensors"))
assert load_file("model.safetensors")["weight"].shape == (4,)
"""


def test_a_file_that_safetensors_names_is_held_back(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one and one that was there; the program reads it again."""
    pytest.importorskip("safetensors")
    (tmp_path / "saves.py").write_text(SAVES)
    (tmp_path / "older.safetensors").write_text("older")
    monkeypatch.chdir(tmp_path)

    seen = rehearse_script(["saves.py"], gpu=find_gpu("a100-80"), output_to_stderr=True)

    assert (seen.exit_code, seen.failure) == (0, None)
    assert {Path(file.path).name for file in seen.held_back_files} >= {"model.safetensors", "older.safetensors"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["older.safetensors", "saves.py"]
    assert (tmp_path / "older.safetensors").read_text() == "older"

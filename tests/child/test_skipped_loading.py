"""Weights that a program loads into its own modules: mapped, not looked at, and not needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.memory.estimate import SET_UP
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

pytest.importorskip("torch")

SKIPS = """
import os, torch
from memplan.child.skipped_loading import skip_loading, skipped
skip_loading()
layer = torch.nn.Linear(1024, 1024)
first = layer.weight.detach().clone()
"""


def run(lines: str, folder: Path, *, before: str = "") -> str:
    """What a process prints that runs the lines, after those *before* weights were skipped; an error ends it."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MEMPLAN_OVERLAY": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", before + SKIPS + lines], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_a_file_is_mapped_and_large_weights_are_not_looked_at(tmp_path: Path) -> None:
    """Where it is loaded into a module; small tensors, and what the program keeps, have their values."""
    said = run(
        "torch.save({'model': {'weight': torch.ones(1024, 1024), 'bias': torch.ones(1024)}, 'epoch': 3}, 'a.pt')\n"
        "found = torch.load('a.pt')\n"
        "print(layer.load_state_dict(found['model']), float(layer.weight.abs().sum()), float(layer.bias.sum()))\n"
        "print(found['epoch'], float(found['model']['weight'].sum()) == 1024**2, '/a.pt' in open('/proc/self/maps').read(), skipped)\n",
        tmp_path,
    )

    assert said.splitlines() == ["<All keys matched successfully> 0.0 1024.0", "3 True True []"]


@pytest.mark.heavy
def test_what_does_not_fit_the_module_is_its_own_error(tmp_path: Path) -> None:
    """Names and shapes are compared as ever."""
    said = run(
        "for wrong in ({'weight': torch.ones(1024, 512), 'bias': torch.ones(1024)}, {'weight': torch.ones(1024, 1024)}):\n"
        "    try:\n"
        "        layer.load_state_dict(wrong)\n"
        "    except RuntimeError as error:\n"
        "        print(str(error).splitlines()[1].split(':')[0].strip())\n",
        tmp_path,
    )

    assert said.splitlines() == ["size mismatch for weight", "Missing key(s) in state_dict"]


@pytest.mark.heavy
def test_weights_that_are_to_become_the_modules_own_are_left(tmp_path: Path) -> None:
    """`assign=True` keeps the tensors themselves."""
    said = run(
        "layer.load_state_dict({'weight': first + 1, 'bias': layer.bias.detach()}, assign=True)\n"
        "print(bool((layer.weight == first + 1).all()))\n",
        tmp_path,
    )

    assert said == "True\n"


@pytest.mark.heavy
@pytest.mark.parametrize(
    "loads",
    [
        "layer.load_state_dict(torch.load('gone.pt', map_location='cpu')['model'])",
        "layer.load_state_dict({key.removeprefix('module.'): value for key, value in torch.load('gone.pt').get('state_dict').items()})",
        "torch.optim.Adam(layer.parameters()).load_state_dict(torch.load('gone.pt').pop('optimizer'))",
        "layer.load_state_dict(torch.load('gone.pth.tar')['generator'])",
        "from safetensors.torch import load_file; layer.load_state_dict(load_file('gone.safetensors'))",
        "from safetensors.torch import load_model; load_model(layer, 'gone.safetensors')",
    ],
)
def test_a_file_that_is_not_there_is_taken_to_be_loaded(tmp_path: Path, loads: str) -> None:
    """The module keeps the weights that it was made with; which file it was is told."""
    said = run(f"{loads}\nprint(bool((layer.weight == first).all()), len(skipped), 'gone' in skipped[0])\n", tmp_path)

    assert said == "True 1 True\n"


@pytest.mark.heavy
def test_another_file_that_is_not_there_is_the_programs_own_error(tmp_path: Path) -> None:
    """Only what files of weights end with is taken for one."""
    with pytest.raises(subprocess.CalledProcessError):
        run("torch.load('labels.tensor')\n", tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_loading_and_steps_take_the_same_however_a_program_loads(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Read, mapped, and not there; to the byte. On the GPU weights are there twice for a moment: more than training a layer takes."""
    monkeypatch.chdir(tmp_path)
    model = "torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])"
    subprocess.run(
        [sys.executable, "-c", f"import torch\ntorch.save({model}.state_dict(), 'a.pt')"],
        check=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    (tmp_path / "train.py").write_text(
        f"import torch\nmodel = {model}.to('{place}')\nmodel.load_state_dict(torch.load('a.pt', map_location='{place}'))\n"
        "update = torch.optim.SGD(model.cuda().requires_grad_(False)[-1].requires_grad_(True).parameters())\n"
        "for _ in range(2):\n"
        "    model(torch.randn(64, 1024, device='cuda')).square().mean().backward()\n"
        "    update.step()\n"
        "    update.zero_grad()\n"
    )

    def peaks(**options: Any) -> tuple[object, ...]:
        found: Rehearsal = rehearse_script(["train.py"], gpu=find_gpu("t4"), timeout_seconds=100, **options)
        assert (found.failure, found.peak_phase == SET_UP) == (None, place == "cuda")
        assert not any("files of 5 GB" in finding.message for finding in found.findings)  # a file is read as it is
        return found.peak_allocated_bytes, found.peak_reserved_bytes, found.breakdown, found.steps

    read, mapped = peaks(), peaks(skip_weights=True)
    (tmp_path / "a.pt").unlink()

    assert read == mapped == peaks(skip_weights=True)


def test_weights_that_are_not_downloaded_are_taken_to_be_loaded(tmp_path: Path) -> None:
    """As those of torchvision's models are, which torch.hub fetches; one that lies in its cache is read."""
    said = run(
        "load = torch.hub.load_state_dict_from_url\n"
        "found = load('https://nowhere.invalid/vgg16-397923af.pth', progress=False)\n"
        "print(layer.load_state_dict(found), torch.equal(layer.weight, first), skipped)\n"
        "torch.save({'weight': torch.ones(2)}, 'there.pth')\n"
        "print(load('https://nowhere.invalid/x.pth?raw=1', '.', file_name='there.pth')['weight'].tolist())\n",
        tmp_path,
    )

    assert said.splitlines() == ["<All keys matched successfully> True ['vgg16-397923af.pth']", "[1.0, 1.0]"]


@pytest.mark.parametrize("name", ["load_state_dict_from_url", "load_url"])
def test_a_package_that_was_imported_before_downloads_no_weights_either(tmp_path: Path, name: str) -> None:
    """It has a name of its own for what loads them: torchvision does, and is there already where a warm process becomes the program."""
    (tmp_path / "package.py").write_text(f"from torch.hub import load_state_dict_from_url as {name}\n")

    said = run(f"print(package.{name}('https://nowhere.invalid/a.pth'), skipped)\n", tmp_path, before="import package\n")

    assert said.splitlines() == ["{} ['a.pth']"]

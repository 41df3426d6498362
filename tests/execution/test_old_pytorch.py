"""
Rehearsals under older versions of PyTorch, each in a virtual environment of its own.

The environments take 2 GB each and are kept: in memplan's cache, or in the folder that MEMPLAN_OLD_PYTORCH names. Of CUDA's libraries only
those are installed without which PyTorch is not loaded; for the larger ones, which the simulated GPU stands in for, an empty library of the
name is enough.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from filelock import FileLock

from memplan.hardware.cache_dir import default_cache
from memplan.hardware.torch_install import TorchBuild
from memplan.units import MIB
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

REPOSITORY = Path(__file__).parents[2]
PROGRAM = Path(__file__).parents[1] / "child" / "old_pytorch_steps.py"

VERSIONS = {"2.1.2": ("3.11", "3.10"), "2.3.1": ("3.12", "3.11", "3.10"), "2.5.1": ("3.12", "3.11", "3.10")}
"""Each with the versions of Python that it has packages for, and memplan runs on."""

OTHERS = ("numpy<2", "setuptools<80", "filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec")
"""What PyTorch imports besides. 2.1 was built for numpy 1, and imports pkg_resources."""

LOADED = ("cupti", "nccl", "nvtx", "curand")
"""Libraries of CUDA whose functions PyTorch looks up when it is loaded, not when it calls them."""

UNREACHABLE = "Could not find a version|No matching distribution|Connection|Temporary failure|Max retries|timed out"


def python_for(versions: Iterable[str]) -> str:
    """A Python of one of *versions*; the test is skipped where there is none."""
    for version in versions:
        if sys.version_info[:2] == tuple(map(int, version.split("."))):
            return sys.executable
        found = shutil.which(f"python{version}")
        if found and subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return found
    pytest.skip(f"no Python {' or '.join(versions)} here")


def install(python: Path, *arguments: str) -> None:
    """Install packages beside *python*, which has no pip; the test is skipped where there is no index to have them from."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-cache-dir", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode and re.search(UNREACHABLE, result.stderr):
        pytest.skip(f"cannot be installed here: {arguments[-1]}")
    assert result.returncode == 0, result.stderr


def own_requirements() -> list[str]:
    """What memplan needs, but for PyTorch."""
    return [text for text in metadata.requires("memplan") or [] if "extra ==" not in text and not text.startswith("torch")]


def requirements_of_torch(packages: Path) -> list[str]:
    """The packages with CUDA's libraries that the PyTorch in *packages* asks for, as NAME==VERSION."""
    (about,) = packages.glob("torch-*.dist-info/METADATA")
    return [
        f"{name}=={version}" for name, version in re.findall(r"^Requires-Dist: (nvidia-[\w-]+) ?\(?==([\d.]+)", about.read_text(), re.M)
    ]


def add_empty_libraries(folder: Path) -> None:
    """Put an empty library into *folder*, that of PyTorch's own, for each that they are linked with and nobody has."""
    installed = {path.name for path in folder.parents[1].glob("nvidia/*/lib/*")} | {path.name for path in folder.iterdir()}
    wanted: set[str] = set()
    for path in folder.glob("*.so"):
        with path.open("rb") as file:
            section = ELFFile(file).get_section_by_name(".dynamic")
            wanted |= {tag.needed for tag in section.iter_tags() if tag.entry.d_tag == "DT_NEEDED"} if section else set()
    for name in sorted(wanted - installed - {"libcuda.so.1"}):
        if re.match(r"lib(cu|nv)", name):
            subprocess.run(["cc", "-shared", "-x", "c", os.devnull, f"-Wl,-soname,{name}", "-o", folder / name], check=True)


def environment_with(version: str) -> Path:
    """The Python of a virtual environment with PyTorch *version*, made where it is not there yet."""
    named = os.environ.get("MEMPLAN_OLD_PYTORCH")
    folder = (Path(named) if named else default_cache() / "old-pytorch") / version
    python, is_ready = folder / "bin" / "python", folder / "ready"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{version}.lock")):
        if not is_ready.exists():
            shutil.rmtree(folder, ignore_errors=True)
            base = python_for(VERSIONS[version])
            subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
            install(python, "--no-deps", f"torch==={version}")
            (libraries,) = folder.glob("lib/python*/site-packages/torch/lib")
            loaded = [text for text in requirements_of_torch(libraries.parents[1]) if any(name in text for name in LOADED)]
            install(python, "--no-deps", *loaded)
            install(python, *OTHERS, *own_requirements())
            add_empty_libraries(libraries)
            is_ready.touch()
    return python


def rehearsed(python: Path | str, *arguments: str) -> dict[str, object]:
    """What `memplan rehearse` of this checkout says under *python*: the peaks, and where they come from."""
    command = [str(python), "-m", "memplan", "rehearse", "--gpu", "a100-80", "--format", "json", *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "MEMPLAN_ASK_CUDNN": "0"}  # an older one cannot be asked either
    result = subprocess.run(command, cwd=PROGRAM.parent, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    return {name: answer[name] for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_phase", "breakdown")}


NO_COMPILE = PROGRAM.with_name("no_compile_steps.py")


@pytest.mark.heavy
@pytest.mark.parametrize("version", VERSIONS)
def test_torch_compile_can_be_turned_off_in_an_older_pytorch(version: str, torch_build: TorchBuild) -> None:
    """Which has no public way for that. It is loaded on the simulated GPU alone, since it lacks CUDA's libraries."""
    program = ["--", str(environment_with(version)), str(NO_COMPILE)]
    command = [sys.executable, "-m", "memplan", "rehearse", "--gpu", "t4", *program]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


WIDTH, HEADS, TOKENS = 512, 8, 64 * 256
"""A batch of 64 images of 128 x 128 in patches of 8 x 8: 256 tokens each."""

PARAMETERS = 4 * (WIDTH * 3 * 8 * 8 + 4 * WIDTH + (3 + 1 + 4 + 4) * WIDTH**2)
"""In fp32: the convolution, two norms, and the matrices for queries, keys and values, for the output, up and down."""

LARGEST_GRADIENT = 4 * 4 * WIDTH**2
IMAGES = 4 * 64 * 3 * 128 * 128
WORKSPACES = 2 * (8 * MIB + MIB // 8)
"""cuBLAS's, for the thread of the forward and for autograd's (chooseCublasWorkspaceSize: two of 4 MiB and eight of 16 KiB)."""

KEPT = (
    # Widths of a token: the patch, the first norm, queries, keys and values, what attention gathers, the sum behind it, the second norm,
    # what is up. Then, while GELU is differentiated: the gradient of the sum, and those of GELU's result and of its argument.
    4 * TOKENS * WIDTH * (1 + 1 + 3 + 1 + 1 + 1 + 4 + 1 + 4 + 4)
    + 4 * TOKENS * HEADS  # attention's logarithms of sums
    + 4 * TOKENS * 4  # mean and deviation of two norms
    + 2 * 512  # the loss and its gradient
)
REST = MIB - MIB // 8
"""One workspace lies in a block of 9 MiB, since a rest below 1 MiB is not split off."""


@pytest.mark.heavy
@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_pytorch_rehearses(version: str, torch_build: TorchBuild) -> None:
    """A convolution, a transformer layer and AdamW, as a step and as a script: what shapes dictate, and the newest PyTorch sees."""
    python = environment_with(version)

    step, script = rehearsed(python, f"{PROGRAM}:build"), rehearsed(python, "--steps", "3", "--", str(PROGRAM))

    breakdown = step["breakdown"]
    assert isinstance(breakdown, dict)
    assert breakdown["parameters_bytes"] == PARAMETERS
    assert breakdown["optimizer_state_bytes"] == 2 * PARAMETERS
    assert breakdown["gradients_bytes"] == LARGEST_GRADIENT
    assert step["peak_allocated_bytes"] == 3 * PARAMETERS + LARGEST_GRADIENT + IMAGES + WORKSPACES + KEPT + REST
    assert step["peak_phase"] == "backward of step 2"
    assert script == step == rehearsed(sys.executable, f"{PROGRAM}:build")


SCALED = """
import torch

model = torch.nn.Linear(1024, 1024).cuda()
update, scaler = torch.optim.AdamW(model.parameters()), torch.cuda.amp.GradScaler()
for _ in range(3):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(8, 1024, device="cuda")).square().mean()
    scaler.scale(loss).backward()
    scaler.step(update)
    scaler.update()
    update.zero_grad()
"""


@pytest.mark.heavy
@pytest.mark.parametrize("version", VERSIONS)
def test_a_gradient_scaler_of_an_older_pytorch_finds_no_overflow(version: str, tmp_path: Path, torch_build: TorchBuild) -> None:
    """Its file was another one up to 2.2. Where it finds one, the optimizer does not step, and its state is not counted."""
    program = tmp_path / "scaled.py"
    program.write_text(SCALED)

    breakdown = rehearsed(environment_with(version), "--", str(program))["breakdown"]

    assert isinstance(breakdown, dict)
    assert breakdown["optimizer_state_bytes"] == 2 * 4 * (1024 * 1024 + 1024)

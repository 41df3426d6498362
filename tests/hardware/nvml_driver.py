"""A driver to ask: `nvml_library.c` compiled, and machines for it to answer for. memplan meets it in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from memplan.hardware.gpu import GpuSpec
from tests.warm_python import WarmPython, started

MIB, GIB = 2**20, 2**30

# Totals, names and capabilities as drivers give them (shared/gpu_memory.csv); the reserves are made up in their usual size.
T4 = """
gpu Tesla T4
uuid GPU-7474aaaa-1111-2222-3333-444455556666
memory 16106127360 0 269484032
capability 7 5
"""
A100 = """
gpu NVIDIA A100-SXM4-80GB
uuid GPU-a100bbbb-1111-2222-3333-444455556666
memory 85899345920 0 701497344
capability 8 0
mig_mode 0
"""
MIG_PARENT = A100.replace("mig_mode 0", "mig_mode 1")
MIG = f"""{MIG_PARENT}
mig 1 NVIDIA A100-SXM4-80GB MIG 3g.40gb
uuid MIG-33334040-1111-2222-3333-444455556666
memory 42144366592 {5 * GIB} 39845888
process 77 {5 * GIB}
mig 5 NVIDIA A100-SXM4-80GB MIG 1g.10gb
uuid MIG-11111010-1111-2222-3333-444455556666
memory 10200547328 0 39845888
"""
GB10 = """
gpu NVIDIA GB10
uuid GPU-b10bb10b-1111-2222-3333-444455556666
capability 12 1
"""

_SEE = """
import dataclasses, json, os, sys
from pathlib import Path
from memplan.errors import MissingError
from memplan.hardware.detect import detect_gpus
from memplan.hardware.nvml import read_machine

def see(machine, **options):
    os.environ["NVML_MACHINE"] = machine
    seen = {"machine": None, "gpus": [], "error": None, "hint": None}
    try:
        seen["machine"] = dataclasses.asdict(read_machine())
        seen["gpus"] = [spec.model_dump() for spec in detect_gpus(**options)]
    except MissingError as error:
        seen |= {"error": error.message, "hint": error.hint}
    return seen

options = {"meminfo": Path(sys.argv[1])} if sys.argv[1] else {}
print(json.dumps([see(machine, **options) for machine in sys.argv[2:]]))
"""


@dataclass(frozen=True)
class Seen:
    """What memplan makes of a machine."""

    machine: dict[str, Any] | None
    gpus: list[GpuSpec]
    error: str | None
    hint: str | None

    @property
    def devices(self) -> Sequence[dict[str, Any]]:
        assert self.machine is not None, self.error
        return self.machine["devices"]


@dataclass(frozen=True)
class Driver:
    """A folder with a libnvidia-ml.so.1."""

    folder: Path
    python: WarmPython | None = None
    """What runs Python here; None: each time a new process."""

    def environment(self, machine: str = "") -> dict[str, str]:
        """Return what a process needs to find this driver, and no other, on *machine*."""
        path = self.folder / f"{uuid4().hex}.txt"
        path.write_bytes(machine.encode(errors="surrogateescape"))
        folders = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("LD_LIBRARY_PATH")]))
        return {"LD_LIBRARY_PATH": folders, "NVML_MACHINE": str(path)}

    def see(self, machine: str, *, meminfo: Path | None = None, **environment: str) -> Seen:
        """Return what memplan sees in a process of its own."""
        return self.see_each([machine], meminfo=meminfo, **environment)[0]

    def see_each(self, machines: Sequence[str], *, meminfo: Path | None = None, **environment: str) -> list[Seen]:
        """Return what one process sees that asks of one machine after the other."""
        files = [self.environment(machine)["NVML_MACHINE"] for machine in machines]
        run = self.run("-c", _SEE, str(meminfo or ""), *files, **environment)
        assert run.returncode == 0, run.stderr
        return [Seen(**seen | {"gpus": [GpuSpec(**gpu) for gpu in seen["gpus"]]}) for seen in json.loads(run.stdout)]

    def run(self, *arguments: str, machine: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python where this driver is on *machine*."""
        whole = os.environ | self.environment(machine) | environment
        return (self.python.run if self.python else started)(arguments, environment=whole, cwd=Path.cwd())


def build_driver(folder: Path, *, without: Sequence[str] = (), python: WarmPython | None = None) -> Driver:
    """Compile the driver's library into *folder*, without some of its symbols; skip the test where nothing can compile it."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler (cc) to build a libnvidia-ml.so.1 with")
    left_out = [f"-D{symbol}=absent_{symbol}" for symbol in without]
    source, library = Path(__file__).with_name("nvml_library.c"), folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", *left_out, "-o", str(library), str(source)], check=True, timeout=120)
    return Driver(folder, python)


def no_driver(folder: Path) -> Driver:
    """Return a machine without a driver, wherever the tests run: what is found first is an empty file, which no one can load."""
    (folder / "libnvidia-ml.so.1").touch()
    return Driver(folder)

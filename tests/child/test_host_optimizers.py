"""DeepSpeed's kernels for the host's processors: neither compiled nor run; tests/execution/test_rank_programs.py has DeepSpeed itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BUILDER = """
class OpBuilder:
    def __init__(self, name):
        self.name = name
    def load(self, verbose=True):
        return "compiled " + self.name
"""
"""As `deepspeed/ops/op_builder/builder.py` of DeepSpeed 0.19.8 has it."""

USES = """
from memplan.child.host_optimizers import skip_host_steps
skip_host_steps()
from deepspeed.ops.op_builder.builder import OpBuilder
kernel = OpBuilder("cpu_adam").load()
print(kernel.create_adam(0, 1e-3), kernel.adam_update(0, 1, exp_avg=[]), OpBuilder("fused_adam").load(verbose=False))
"""


def test_a_step_on_the_host_does_nothing(tmp_path: Path) -> None:
    """A kernel for the GPU is loaded as ever."""
    folder = tmp_path / "deepspeed" / "ops" / "op_builder"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    (folder / "builder.py").write_text(BUILDER)

    told = subprocess.run([sys.executable, "-c", USES], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert told.stdout == "None None compiled fused_adam\n", told.stderr

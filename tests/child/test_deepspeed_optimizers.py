"""DeepSpeed's kernels for optimizers: neither compiled nor run; tests/execution/test_rank_programs.py has DeepSpeed itself."""

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
from memplan.child.deepspeed_optimizers import skip_optimizer_kernels
skip_optimizer_kernels()
from deepspeed.ops.op_builder.builder import OpBuilder
on_host, on_gpu = OpBuilder("cpu_adam").load(), OpBuilder("fused_adam").load(verbose=False)
print(on_host.create_adam(0, 1e-3), on_host.adam_update(0, 1, exp_avg=[]), on_gpu.multi_tensor_adam(2048, [0], [[]]))
print(OpBuilder("fused_lamb").load(verbose=False))
"""


def test_the_step_of_an_optimizer_does_nothing(tmp_path: Path) -> None:
    """A kernel that allocates memory of its own is loaded as ever."""
    folder = tmp_path / "deepspeed" / "ops" / "op_builder"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    (folder / "builder.py").write_text(BUILDER)

    told = subprocess.run([sys.executable, "-c", USES], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert told.stdout == "None None None\ncompiled fused_lamb\n", told.stderr

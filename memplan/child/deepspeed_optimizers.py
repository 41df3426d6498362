"""
Optimizers whose steps DeepSpeed computes by kernels that it compiles, on the host's processors or the GPU: not computed, and not compiled.

What the GPU holds does not hang on it: the values of a rehearsal's weights are nobody's, the kernels change tensors in place, and what goes
to the host and comes back has its size. DeepSpeed would compile a kernel in every rehearsal, for two minutes, since what a rehearsal writes
is held back, and those for the GPU only where CUDA's toolkit is installed.
"""

from __future__ import annotations

import functools
from typing import Any

from memplan.child.after_import import change_when_imported

# As its builders call them. Those for the GPU allocate nothing (0.19.8, csrc/adam and csrc/lion); that of LAMB does, and is compiled.
KERNELS = ("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lion")


class _NothingDone:
    """Stands for a kernel's functions: they update tensors in place, and return nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_arguments, **_keywords: None


def skip_optimizer_kernels() -> None:
    """Have DeepSpeed find its kernels for optimizers ready, and doing nothing."""
    change_when_imported({"deepspeed.ops.op_builder.builder": _change_builder})


def _change_builder(module: Any) -> None:
    load = module.OpBuilder.load

    @functools.wraps(load)
    def load_or_skip(builder: Any, *arguments: Any, **keywords: Any) -> Any:
        return _NothingDone() if builder.name in KERNELS else load(builder, *arguments, **keywords)

    module.OpBuilder.load = load_or_skip

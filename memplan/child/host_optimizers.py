"""
Optimizers that DeepSpeed runs on the host's processors (ZeRO-Offload): their steps are not computed, and no kernel is compiled for them.

What the GPU holds does not hang on it: the values of a rehearsal's weights are nobody's, and what goes to the host and comes back has its
size. DeepSpeed would compile the kernel in every rehearsal, for two minutes, since what a rehearsal writes is held back.
"""

from __future__ import annotations

import functools
from typing import Any

from memplan.child.after_import import change_when_imported

HOST_KERNELS = ("cpu_adam", "cpu_adagrad", "cpu_lion")
"""As DeepSpeed's builders call them."""


class _NothingDone:
    """Stands for a kernel's functions: they update tensors of the host in place, and return nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_arguments, **_keywords: None


def skip_host_steps() -> None:
    """Have DeepSpeed find its kernels for the host's processors ready, and doing nothing."""
    change_when_imported({"deepspeed.ops.op_builder.builder": _change_builder})


def _change_builder(module: Any) -> None:
    load = module.OpBuilder.load

    @functools.wraps(load)
    def load_or_skip(builder: Any, *arguments: Any, **keywords: Any) -> Any:
        return _NothingDone() if builder.name in HOST_KERNELS else load(builder, *arguments, **keywords)

    module.OpBuilder.load = load_or_skip

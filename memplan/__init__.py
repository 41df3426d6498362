"""
memplan: does this training step fit on that GPU, and which batch size should it use?

    plan = memplan.plan("conf", gpu="rtx4090", target_effective_batch_size=256)
    print(plan.diff())
    plan.apply()
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DoesNotFitError",
    "EditRefusedError",
    "FittingSteps",
    "FoundBatch",
    "GpuSpec",
    "MemplanError",
    "MissingError",
    "Monitor",
    "NotEstimatedError",
    "NotRehearsedError",
    "NothingSeenError",
    "Plan",
    "Rehearsal",
    "UsageError",
    "Workload",
    "__version__",
    "find_batch",
    "fits_or_smaller",
    "gpus",
    "plan",
    "rehearse",
    "undo",
]

if TYPE_CHECKING:
    from memplan.api.gpus import gpus
    from memplan.api.plans import Plan, plan, undo
    from memplan.api.rehearsals import Rehearsal, rehearse
    from memplan.batch_finder.find_batch import find_batch
    from memplan.batch_finder.trials import FoundBatch
    from memplan.errors import (
        ConfigError,
        DoesNotFitError,
        EditRefusedError,
        MemplanError,
        MissingError,
        NotEstimatedError,
        NothingSeenError,
        NotRehearsedError,
        UsageError,
    )
    from memplan.hardware.gpu import GpuSpec
    from memplan.monitor.background import Monitor
    from memplan.training.oom_retry import FittingSteps, fits_or_smaller
    from memplan.workload.workload import Workload

    from . import data as data
    from . import debug as debug
else:
    _MODULES = {
        "api.gpus": ["gpus"],
        "api.plans": ["Plan", "plan", "undo"],
        "api.rehearsals": ["Rehearsal", "rehearse"],
        "batch_finder.find_batch": ["find_batch"],
        "batch_finder.trials": ["FoundBatch"],
        "errors": [name for name in __all__ if name.endswith("Error")],
        "hardware.gpu": ["GpuSpec"],
        "monitor.background": ["Monitor"],
        "training.oom_retry": ["FittingSteps", "fits_or_smaller"],
        "workload.workload": ["Workload"],
    }

    _PACKAGES = ("data", "debug")

    def __getattr__(name):
        """Load what is asked for: `memplan --help` does without it. A type checker sees the imports above instead."""
        from importlib import import_module  # noqa: PLC0415

        if name in _PACKAGES:
            return import_module(f"memplan.{name}")
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"memplan.{module}"), name)
        raise AttributeError(f"module 'memplan' has no attribute {name!r}")

    def __dir__():
        """List what the package offers."""
        return sorted({*globals(), *__all__})

"""memplan: does this training step fit on that GPU, and which batch size should it use?"""

from typing import Any

__version__ = "0.1.0"

_OFFERED = {
    "rehearse": "memplan.execution.rehearse",
    "find_batch": "memplan.batch_finder.find_batch",
    "fits_or_smaller": "memplan.training.oom_retry",
    "FittingSteps": "memplan.training.oom_retry",
    "Monitor": "memplan.monitor.background",
}
"""By name, where it is defined."""


def __getattr__(name: str) -> Any:
    """Return what `memplan` offers to programs, loaded when it is asked for: `memplan --help` does without."""
    module = _OFFERED.get(name)
    if module is not None:
        from importlib import import_module  # noqa: PLC0415

        return getattr(import_module(module), name)
    raise AttributeError(f"module 'memplan' has no attribute {name!r}")

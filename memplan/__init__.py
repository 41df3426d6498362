"""memplan: does this training step fit on that GPU, and which batch size should it use?"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return `memplan.rehearse`, loaded when it is asked for: `memplan --help` does without."""
    if name == "rehearse":
        from memplan.estimators.rehearsed import rehearse  # noqa: PLC0415

        return rehearse
    raise AttributeError(f"module 'memplan' has no attribute {name!r}")

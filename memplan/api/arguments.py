"""What the functions of the API take: each argument by its name, its type and its range, checked before anything is done.

A type checker sees the signatures; who runs without one gets an error that names the argument, not a traceback from within.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from memplan.errors import UsageError
from memplan.hardware.gpu import GpuSpec
from memplan.workload.workload import Workload

_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Margin = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]

_TYPES: dict[str, tuple[Any, str]] = {
    "source": (
        str | Path | Workload | Sequence[str] | Callable[..., Any] | None,
        "a path, a Workload, a function, or the words of a command",
    ),
    "fields": (Sequence[str], 'texts, as "micro_batch_size=conf/config.yaml:data.batch_size"'),
    "short": (Sequence[str], 'texts, as "conf/config.yaml:trainer.limit_val_batches=0"'),
    "stages": (str | Sequence[str], 'files or patterns of files, as "conf/*_stage.yaml"'),
    "num_gpus": (_Count | None, "a whole number from 1 on"),
    "num_nodes": (_Count | None, "a whole number from 1 on"),
    "launch_config": (str | Path | None, "a path"),
    "path": (str | Path, "a path"),
    "gpu": (str | GpuSpec | None, 'the name of a GPU, as "rtx4090", or a GpuSpec'),
    "gpu_memory": (str | int | float | None, 'a size, as 24 or "23.5GiB"'),
    "target_effective_batch_size": (_Count | Literal["max"] | None, 'a whole number from 1 on, or "max"'),
    "target_tolerance": (_Share | None, "a share from 0 to 1, as 0.05"),
    "margin": (_Margin, "a share from 0 to below 1, as 0.05"),
    "pins": (Mapping[str, str | int | float | bool] | None, 'values by field, as {"micro_batch_size": 8}'),
    "grow_negatives": (bool, "True or False"),
    "with_levers": (bool, "True or False"),
    "program": (str | Callable[..., Any], '"FILE.py:function" or a function'),
    "values": (Mapping[str, Any] | None, 'keyword arguments by name, as {"batch": 8}'),
    "steps": (_Count | None, "a whole number from 1 on"),
    "answers": (Mapping[str, Any] | None, 'answers by line, as {"FILE.py:12": ("true", None)}'),
    "timeout_seconds": (Annotated[float, Field(gt=0)], "a number of seconds above 0"),
    "context_bytes": (Annotated[int, Field(ge=0)] | None, "a number of bytes, or None"),
    "environment": (Mapping[str, str] | None, "variables by name"),
    "allow_writes": (bool, "True or False"),
    "skip_weights": (bool, "True or False"),
}
"""By name: the type, and how the error describes it."""


def check_arguments(**given: object) -> None:
    """Raise UsageError for the first argument that is not of its type, or out of its range."""
    for name, value in given.items():
        kind, described = _TYPES[name]
        try:
            TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True)).validate_python(value)
        except ValidationError as error:
            raise UsageError(f"{name}={value!r} is not valid", hint=f"give {described}") from error

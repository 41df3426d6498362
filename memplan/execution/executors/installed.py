"""The executors by name; what each stands on is an extra of the package, and loaded when it is asked for."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from memplan.errors import MissingError
from memplan.execution.executors.jobs import Executor

ExecutorName: TypeAlias = Literal["ray", "dask", "slurm"]


def executor_by(name: ExecutorName) -> Executor:
    """
    Return the executor *name*, connected.

    Raises MissingError where it is not installed, or does not answer.
    """
    assert name in get_args(ExecutorName)
    try:
        if name == "ray":
            from memplan.execution.executors.on_ray import RayExecutor  # noqa: PLC0415

            return RayExecutor()
        if name == "dask":
            from memplan.execution.executors.on_dask import DaskExecutor  # noqa: PLC0415

            return DaskExecutor()
        from memplan.execution.executors.on_slurm import SlurmExecutor  # noqa: PLC0415

        return SlurmExecutor()
    except ModuleNotFoundError as error:
        raise MissingError(f"{error.name} is not installed", hint=f"`pip install memplan[{name}]`") from error

"""`memplan.rehearse`: a training step from Python, run with the real PyTorch on a simulated GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from memplan.api.arguments import check_arguments
from memplan.errors import UsageError
from memplan.execution.needed_memory import with_needs
from memplan.execution.rehearsal import Rehearsal as PlainRehearsal
from memplan.execution.rehearse import Rehearser
from memplan.execution.runner import DEFAULT_TIMEOUT_SECONDS, REHEARSING
from memplan.execution.step_source import step_source_from, step_source_of
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec


class Rehearsal(PlainRehearsal):
    """A rehearsal that knows its GPU: a notebook shows it as a report."""

    gpu: GpuSpec = Field(exclude=True, repr=False)
    """The GPU that was simulated."""

    def _repr_html_(self) -> str:
        """Return the report, for a notebook."""
        from memplan.reports.html import rehearsal_as_html  # noqa: PLC0415

        return rehearsal_as_html(self, self.gpu)


def rehearse(
    program: str | Callable[..., Callable[[], object]],
    *,
    gpu: GpuSpec | str,
    values: Mapping[str, Any] | None = None,
    steps: int | None = None,
    answers: Mapping[str, Any] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    context_bytes: int | None = None,
    library_workspaces: bool = True,
    checks_tensor_types: bool = True,
    environment: Mapping[str, str] | None = None,
    allow_writes: bool = False,
    skip_weights: bool = False,
) -> Rehearsal:
    """
    Return what *program* does to the memory of *gpu*: a MemoryEstimate, exact except the CUDA context, with its trace.

    Args:
        program: "FILE.py:function", "module:function", or the function itself. It is called as ``program("cuda", **values)`` in a process
            of its own, and returns a function that runs one whole training step (forward, backward, optimizer).
        gpu: A name of the catalogue ("a100-80"), or a GpuSpec.
        values: Keyword arguments for *program*.
        steps: How many steps to run. None: three, and ten where the third still takes more than the second,
            or is of another size.
        answers: What a line that reads values from the device gets, by "FILE.py:LINE": an answer, and the text of the line that it was
            given for (None: any).
        timeout_seconds: After so long the process is ended.
        context_bytes: Device memory that the CUDA context takes, in bytes. None: what it usually takes of that kind of GPU.
        library_workspaces: Count an allowance for workspaces that CUDA's libraries choose at run time; the lower bound is without it.
        checks_tensor_types: Run one step more, which counts for nothing, to find large tensors of wide types.
        environment: Environment variables for the process, as PYTORCH_ALLOC_CONF.
        allow_writes: Let the program change files, and upload. By default what it writes goes to a scratch folder, where it finds it again,
            and which ends with the rehearsal.
        skip_weights: Build pretrained models without reading their weights, which need not be there: the configuration says their sizes.

    Returns:
        The rehearsal; `verdict` is fits, tight, does_not_fit or unknown, and `fits` is true for the first alone.

    Raises:
        UsageError: If the program fails for another reason than memory.
        MissingError: If this machine cannot rehearse: no Linux, no PyTorch built for CUDA, or no C compiler. No GPU is needed.

    >>> import memplan
    >>> rehearsal = memplan.rehearse("train_step.py:build", gpu="rtx4090", values={"batch": 8})
    >>> rehearsal.fits, rehearsal.peak_reserved_bytes >= rehearsal.peak_allocated_bytes
    (True, True)

    """
    check_arguments(
        program=program,
        gpu=gpu,
        values=values,
        steps=steps,
        answers=answers,
        timeout_seconds=timeout_seconds,
        context_bytes=context_bytes,
        environment=environment,
        allow_writes=allow_writes,
        skip_weights=skip_weights,
    )
    if REHEARSING in os.environ:
        raise UsageError(
            "a program that is being rehearsed asked for a rehearsal",
            hint='call memplan.rehearse under `if __name__ == "__main__":`, so that loading the file does not call it',
        )
    spec = gpu if isinstance(gpu, GpuSpec) else find_gpu(gpu or "")
    source = step_source_from(program) if isinstance(program, str) else step_source_of(program)
    with Rehearser(source, skip_weights=skip_weights, allow_writes=allow_writes) as rehearser:

        def run(kind: GpuSpec) -> PlainRehearsal:
            return rehearser.rehearse(
                gpu=kind,
                values=values,
                steps=steps,
                answers=answers,
                timeout_seconds=timeout_seconds,
                context_bytes=context_bytes,
                library_workspaces=library_workspaces,
                checks_tensor_types=checks_tensor_types,
                environment=environment,
            )

        found = run(spec) if allow_writes else with_needs(run, spec)
    return Rehearsal.model_construct(**{name: getattr(found, name) for name in PlainRehearsal.model_fields}, gpu=spec)

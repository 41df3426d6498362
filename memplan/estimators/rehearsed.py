"""
The rehearsal: the real PyTorch and the user's real step, on a card that is not there.

A process of its own (`running.py`) runs the steps with the stand-in device in front of CUDA (`standin/`); this one builds the device where
it is missing, and reads what the device says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memplan.errors import MissingError, UsageError
from memplan.estimators.context import CONTEXT_BYTES, around
from memplan.estimators.running import DEFAULT_TIMEOUT_SECONDS, REHEARSING, Closing, Runner
from memplan.estimators.seen import Seen, rehearsal_of
from memplan.estimators.target import Target, target_from, target_of
from memplan.hardware.catalog import find_card
from memplan.hardware.spec import GpuSpec
from memplan.memory.rehearsal import Rehearsal
from memplan.standin.build import build, find_torch
from memplan.standin.launch import card_description, environment_for


class Rehearser(Closing):
    """Rehearses one program, as often as asked. To be closed, or used in a `with`."""

    def __init__(self, target: Target) -> None:
        self._runner = Runner(target)

    def close(self) -> None:
        """End the process and leave no file."""
        self._runner.close()

    def rehearse(
        self,
        *,
        gpu: GpuSpec,
        values: Mapping[str, Any] | None = None,
        steps: int | None = None,
        answers: Mapping[str, Any] | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        context_bytes: int = CONTEXT_BYTES,
        library_workspaces: bool = True,
        looks: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> Rehearsal:
        """
        Return what the program does to the memory of *gpu*.

        *steps*: how many; None runs three, and ten where the third still takes more than the second. *answers*: what reads of device values
        get, by FILE.py:LINE: an answer, and the line that it was given for (None: any). *library_workspaces*: count an allowance for what
        cuDNN and cuFFT decide at run time; the range's low end is without it. *looks*: run one step more, which counts for nothing, to find
        large tensors of wide types. *environment*: variables for this rehearsal, as PYTORCH_ALLOC_CONF.

        Raises UsageError when the program fails for another reason than memory, MissingError when this machine cannot rehearse it.
        """

        def seen(*, with_workspaces: bool, looks: bool) -> Seen:
            log = self._runner.folder / "log"
            log.unlink(missing_ok=True)
            status = self._runner.run(
                device=lambda: environment_for(gpu, build(find_torch()), context_bytes=context_bytes),
                environment={
                    **(environment or {}),
                    "MEMPLAN_CARD": card_description(gpu, context_bytes),
                    "MEMPLAN_LOG": str(log),
                    "MEMPLAN_WORKSPACES": str(int(with_workspaces)),
                },
                values=values,
                steps=steps,
                answers=answers,
                looks=looks,
                timeout_seconds=timeout_seconds,
            )
            missing = not_served_in(log)
            if missing:
                raise MissingError(f"the stand-in device does not serve {', '.join(missing)}", hint="without it no number would be true")
            return Seen(self._runner.answer(status), workspaces_in(log))

        whole = seen(with_workspaces=library_workspaces, looks=looks)
        without = None
        if library_workspaces and any(line.startswith("workspace ") for line in whole.workspaces):
            without = seen(with_workspaces=False, looks=False)
        return rehearsal_of(whole, without=without, context=around(context_bytes))


def not_served_in(log: Path) -> list[str]:
    """Return the calls that the device's *log* says it does not serve."""
    return sorted({line.removeprefix("not served ") for line in _lines(log) if line.startswith("not served ")})


def workspaces_in(log: Path) -> tuple[str, ...]:
    """Return what the device's *log* says of workspaces that a library would have decided on."""
    return tuple(line for line in _lines(log) if line.startswith(("workspace ", "unknown ")))


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def rehearse(
    program: str | Callable[..., Callable[[], object]],
    *,
    gpu: GpuSpec | str,
    values: Mapping[str, Any] | None = None,
    steps: int | None = None,
    **options: Any,
) -> Rehearsal:
    """
    Return what *program* does to the memory of *gpu*: a MemoryEstimate, exact, with its trace.

    *program* is "FILE.py:function", "module:function", or the function itself; it is called as ``program("cuda", **values)`` in a process
    of its own, and returns a function that runs one whole training step. *gpu* is a GpuSpec or a name of the catalogue ("a100-80").
    *options* are those of `Rehearser.rehearse`, which also says what is raised.
    """
    if REHEARSING in os.environ:
        raise UsageError(
            "a program that is being rehearsed asked for a rehearsal",
            hint='call memplan.rehearse under `if __name__ == "__main__":`, so that loading the file does not call it',
        )
    card = find_card(gpu) if isinstance(gpu, str) else gpu
    with Rehearser(target_from(program) if isinstance(program, str) else target_of(program)) as rehearser:
        return rehearser.rehearse(gpu=card, values=values, steps=steps, **options)

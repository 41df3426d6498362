"""Rehearsing a user's own program as its variables say: a command with changed files, settings and ranks, or a function with arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from memplan.execution.ranks import Ranks
from memplan.execution.read_answers import read_answers
from memplan.execution.rehearsal import LONGEST_LINE, Rehearsal
from memplan.execution.rehearse import Rehearser
from memplan.execution.rehearse_ranks import rehearse_ranks
from memplan.execution.rehearse_script import rehearse_script
from memplan.execution.step_source import TypedText
from memplan.hardware.gpu import GpuSpec
from memplan.programs.command_program import CommandProgram
from memplan.programs.function_program import FunctionProgram

_LAST_LINES = 12

# torchrun's, and that of `accelerate launch` and others that start Python by subprocess.
_LAUNCHER_ERROR = re.compile(r"torch\.distributed\.elastic\..*ChildFailedError|subprocess\.CalledProcessError: Command .* exit status")
_LAUNCHER_LINE = re.compile(r"[EWI]\d{4} .* torch/distributed/(elastic|run)\b")


def rehearse_command(
    program: CommandProgram,
    *,
    gpu: GpuSpec,
    shown: Mapping[Path, bytes],
    said: Path,
    of_one_rank: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Rehearsal:
    """
    Return what *program* does with its present values on *gpu*, its files as *shown*; what it says goes to the file *said*.

    *options* are those of `rehearse_script`, which also says what is raised; *of_one_rank* those that count where it trains alone. Of
    several ranks each kind is run.
    """
    ranks = Ranks(program.parallelism.devices, program.parallelism.nodes)
    words = words_of(program)
    folder = next((Path(word).parent for word in program.command if word.endswith(".py")), Path())
    options |= {
        "gpu": gpu,
        "said": said,
        "answers": read_answers((), folder).request(),
        "shown": shown,
        "skip_weights": program.skips_weights,
    }
    if ranks.size > 1:
        return rehearse_ranks(words, ranks=ranks, which="kinds", **options)
    return rehearse_script(words, **options, **of_one_rank)


def words_of(program: CommandProgram) -> list[str]:
    """Return the command of *program* as a short run of it is typed, under its allocator settings."""
    settings = program.training.allocator_settings
    return [*([f"PYTORCH_ALLOC_CONF={settings}"] if settings else []), *program.words_of_rehearsal]


def rehearse_function(rehearser: Rehearser, program: FunctionProgram, *, gpu: GpuSpec, steps: int | None = None) -> Rehearsal:
    """Return what the function of *program*, which *rehearser* runs, does with its present arguments on *gpu*. Raises as `rehearse`."""
    settings = program.training.allocator_settings
    return rehearser.rehearse(
        gpu=gpu,
        values={name: TypedText(value) for name, value in program.arguments_with_values.items()},
        steps=steps,
        answers=read_answers((), Path(program.source.rpartition(":")[0]).parent).request(),
        environment={"PYTORCH_ALLOC_CONF": settings} if settings else {},
    )


def last_lines(said: Path) -> str:
    """Return the last lines of what a program said, each in a line of its own; empty where it said nothing."""
    return "".join(f"\n  {line[:LONGEST_LINE]}" for line in _lines_of(said)[-_LAST_LINES:])


def error_in(said: Path) -> str:
    """Return the line that names the error with which a program ended, by its last traceback; without one, its last line."""
    told = [line for line in _lines_of(said) if line.strip()]
    begin = max((at for at, line in enumerate(told) if line.startswith("Traceback (most recent")), default=None)
    named = None if begin is None else next((line for line in told[begin + 1 :] if not line.startswith(" ")), None)
    return (named or (told or [""])[-1]).strip()


def _lines_of(said: Path) -> list[str]:
    """
    Return the lines of what a program said.

    What a launcher says of a rank that has failed, at more length than the rank itself, is left out where anything stands before it.
    """
    lines = said.read_text(encoding="utf-8", errors="replace").splitlines() if said.exists() else []
    error = next((at for at, line in enumerate(lines) if _LAUNCHER_ERROR.match(line)), None)
    if error is None:
        return lines
    begin = max((at for at, line in enumerate(lines[:error]) if line.startswith("Traceback (most recent")), default=error)
    own = [line for line in lines[:begin] if not _LAUNCHER_LINE.match(line)]
    return own if any(line.strip() for line in own) else lines

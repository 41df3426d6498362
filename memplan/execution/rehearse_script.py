"""Rehearsing a whole program, unmodified: it is started as ever, on the simulated GPU, with a recorder that waits for PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from memplan.errors import MissingError, NothingSeenError
from memplan.execution.command import Command, command_from
from memplan.execution.program_runs import Asked, OnNextRun, OnProgress, ProgramRuns
from memplan.execution.ranks import ONE_RANK, Ranks
from memplan.execution.recorded_run import WalkedBatches
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.summary import rehearsal_of
from memplan.execution.values_pass import settle
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild, find_torch
from memplan.memory.cuda_context import usual_context
from memplan.memory.estimate import MemoryRange
from memplan.memory.nccl_buffers import Communicator, nccl_buffers
from memplan.programs.prepared_data import PreparedData
from memplan.standin.build import build

NOTHING_SHOWN: Mapping[Path, bytes] = MappingProxyType({})


def rehearse_script(
    words: Sequence[str],
    *,
    gpu: GpuSpec,
    steps: int | None = None,
    answers: Mapping[str, Any] | None = None,
    timeout_seconds: float | None = None,
    output_to_stderr: bool = False,
    context_bytes: int | None = None,
    allow_writes: bool = False,
    skip_weights: bool = False,
    late_steps: int = 0,
    most_walked_batches: int = 0,
    own_first: int = 1,
    most_walk_seconds: float = 0.0,
    walks_where_they_differ: WalkedBatches | None = None,
    keep_warm: bool | Path = False,
    on_progress: OnProgress | None = None,
    on_next_run: OnNextRun | None = None,
    ranks: Ranks = ONE_RANK,
    sent: Path | None = None,
    is_heard: bool = True,
    shown: Mapping[Path, bytes] = NOTHING_SHOWN,
    said: Path | None = None,
    expects_values: bool = False,
    harmless: Collection[str] = (),
    prepared: PreparedData | None = None,
    habits: str | None = None,
) -> Rehearsal:
    """
    Run the program that *words* say on *gpu*; return what its memory did. Its exit code is minus the signal's number where one ended it.

    *words* begin with a script, ``-m`` or a program. The program's output goes where this process's does (*output_to_stderr*: all of it
    to standard error). *steps* ends it after that many steps. What it writes is held back, unless *allow_writes*. *skip_weights*:
    pretrained models are built without reading their weights, which need not be there. Of several processes, the one that trains is
    reported. *late_steps*: end it after that many where the last of *steps* reserves more than the one before.
    *most_walked_batches*: look at so many batches of each DataLoader, and take the largest after the *own_first* that the program takes
    itself; 0: as they come. *most_walk_seconds*: look at no more of a DataLoader after that; 0: however long it takes.
    *walks_where_they_differ*: look at those where the first run shows batches of several shapes.
    *keep_warm*: leave a process behind that spares the next rehearsal in this folder the imports; a file: for who names that file
    alone. *on_progress* is called from time to time with how far the program is, *on_next_run* with what it runs again, unheard.
    *ranks*: how many GPUs train together, and which rank is run; the others need not be there. *sent*: a folder for the objects that
    one rank sends another, in rehearsals of their own. *is_heard*: the program's output goes anywhere. *shown*: other contents of
    files, which the program finds in their place. *said*: a file for what it says. *expects_values*: data decided its memory before.
    *harmless*: lines that read values which decided nothing with another batch.
    *prepared*: where data that it prepares are kept for the next rehearsal. *habits*: what is asked for of the program's
    (`program_habits.py`).

    Raises NothingSeenError for a program that did not use the GPU, or ended before it could report; UsageError for one that is not there or
    takes longer; MissingError when this machine cannot rehearse it, NoKernelsError for a *gpu* on which its PyTorch does not run.
    """
    ranks.checked()
    command = command_from(words)
    torch = torch_of(command)
    torch.check_kernels(gpu)
    context = usual_context(gpu, context_bytes)
    asked = Asked(
        command=command,
        torch=torch,
        libraries=build(torch),
        gpu=gpu,
        context_bytes=context.expected_bytes,
        answers=dict(answers or {}),
        walked=WalkedBatches(most_walked_batches, own_first, steps or 0, late_steps, most_walk_seconds),
        timeout_seconds=timeout_seconds,
        output_to_stderr=output_to_stderr,
        allow_writes=allow_writes,
        skip_weights=skip_weights,
        keep_warm=keep_warm,
        on_progress=on_progress,
        on_next_run=on_next_run,
        ranks=ranks,
        sent=sent,
        is_heard=is_heard,
        shown=shown,
        said=said,
        prepared=prepared,
        habits=habits,
    )
    asked = asked._replace(nccl_bytes=_nccl_buffers([Communicator(ranks.size)] if ranks.size > 1 else [], asked).expected_bytes)
    with ProgramRuns(asked) as runs:
        run = partial(runs.run_walking, batches=walks_where_they_differ) if walks_where_they_differ else runs.run
        found = settle(run, folder=runs.folder, answers=answers, expects_values=expects_values, harmless=harmless)
        how = runs.ended(found.run)
        rehearsal = rehearsal_of(
            found.run,
            others=found.others,
            context=context,
            nccl=_nccl_buffers(found.run.log.communicators, asked),
            exit_code=how.exit_code,
            process=None if how.is_first else " ".join(found.run.record.command),
            values_failure=found.failure,
            ranks=asked.ranks,
        )
        more = {
            "was_interrupted": runs.was_interrupted,
            "num_walked_batches": found.run.record.num_walked_batches or 0,
            "values_effect": found.effect,
            "deciding_reads": found.deciding,
        }
        return how.writes.told_in(rehearsal).model_copy(update=more)


def rehearse_in_both_orders(
    words: Sequence[str], *, most_walked_batches: int, on_next_run: OnNextRun | None = None, **options: Any
) -> Rehearsal:
    """
    Return the rehearsal that takes more: with the largest batches after the first one, or with all in the program's own order.

    What PyTorch has cached for one shape may serve another or not, so that smaller batches before a large one can reserve more than that
    alone. *options* are those of `rehearse_script`; the program is heard in the first of both. Raises as that.
    """
    walked = rehearse_script(words, most_walked_batches=most_walked_batches, on_next_run=on_next_run, **options)
    shapes = [finding for finding in walked.findings if finding.kind == "cached_shapes"]
    if not shapes or walked.verdict != "fits" or walked.was_interrupted:
        return walked
    if on_next_run is not None:
        on_next_run("the batches in their own order")
    try:
        in_order = rehearse_script(words, on_next_run=on_next_run, **options | {"is_heard": False})
    except NothingSeenError:  # it asks for what nobody types again
        return walked
    if in_order.failure is not None or (in_order.verdict == "fits" and in_order.device_used_bytes <= walked.device_used_bytes):
        return walked
    findings = (*(finding for finding in in_order.findings if finding.kind != "batch_shapes"), *shapes)
    return in_order.model_copy(update={"findings": findings, "num_walked_batches": walked.num_walked_batches})


def _nccl_buffers(communicators: Iterable[Communicator], asked: Asked) -> MemoryRange:
    return nccl_buffers(
        communicators, gpu=asked.gpu, num_gpus=asked.ranks.num_gpus, version=asked.torch.nccl_version, settings=asked.inherited
    )


def torch_of(command: Command) -> TorchBuild:
    """Return the PyTorch that *command* will run; where it does not say its Python and that has none, this one's."""
    if command.is_of_this_python:
        return find_torch()
    try:
        return find_torch(command.python)
    except MissingError:
        if command.is_guess:
            return find_torch()
        raise

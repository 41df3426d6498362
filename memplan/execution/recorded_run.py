"""
One run of a user's program with the recorder in it: what its process is given, and what it leaves.

It may run on the simulated GPU (`program_runs.py`) or on a real one (`measure_script.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from memplan.errors import NothingSeenError, UsageError
from memplan.execution.findings import MISSING_WEIGHTS
from memplan.execution.program_process import USERS_SIGNALS
from memplan.execution.run_record import RunRecord, read_record
from memplan.execution.runner import REHEARSING, ended
from memplan.execution.standard_input import StandardInput
from memplan.execution.values_pass import NO_VALUES, ValuesFile
from memplan.hardware.torch_install import TorchBuild
from memplan.standin.compiled_libraries import path_for_variables

HOOK = Path(__file__).parents[1] / "child" / "hook"


class WalkedBatches(NamedTuple):
    """How the batches of a program's DataLoaders are looked at before it trains, and for how long it does."""

    most: int
    """Of each DataLoader; 0: none, they come as they come."""
    own_first: int
    """How many of the program's own come before the largest."""
    steps: int
    """After which the program is ended; 0: it ends itself."""
    late_steps: int = 0
    """After which it is ended instead, where the last of *steps* reserves more than the one before; 0: after *steps* all the same."""
    seconds: float = 0.0
    """After which no more batches of a DataLoader are looked at; 0: however long it takes."""


def recorder_variables(
    folder: Path,
    torch: TorchBuild,
    *,
    walked: WalkedBatches,
    answers: Mapping[str, Any] = MappingProxyType({}),
    file: ValuesFile = NO_VALUES,
    walks: Path | None = None,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """
    Return what child/script.py reads of a process whose results go to *folder*, and where its Python finds the hook.

    *walks*: the folder in which the runs of a program keep what they find as they look at batches.
    """
    return {
        "MEMPLAN_RESULTS": str(folder),
        "MEMPLAN_STEPS": str(walked.steps),
        "MEMPLAN_LATE_STEPS": str(0 if file.is_told else walked.late_steps),  # there are values for no more steps than they were sought in
        "MEMPLAN_ANSWERS": json.dumps(dict(answers)),
        "MEMPLAN_WORST_BATCH": str(walked.most),
        "MEMPLAN_WALK_SECONDS": str(walked.seconds or ""),
        "MEMPLAN_WALKS": str(walks or ""),
        "MEMPLAN_OWN_FIRST": str(walked.own_first),
        "MEMPLAN_TORCH": torch.version,
        **{f"MEMPLAN_{key.upper()}": value for key, value in file.request().items()},
        "PYTHONPATH": os.pathsep.join(filter(None, [str(path_for_variables(HOOK)), inherited.get("PYTHONPATH", "")])),
        REHEARSING: "1",
    }


@contextmanager
def streams(
    *, is_heard: bool, output_to_stderr: bool, said: Path | None, found: StandardInput | None = None
) -> Iterator[tuple[int, int, int]]:
    """
    Give the descriptors that a program gets as its standard input, output and error; one that is not heard has nothing to say.

    *found*: what its first run has found on standard input.
    """
    if is_heard and said is not None:
        with said.open("ab") as file, Path(os.devnull).open("rb") as unheard:
            yield unheard.fileno(), file.fileno(), file.fileno()
        return
    if is_heard:
        yield 0, (2 if output_to_stderr else 1), 2
        return
    with Path(os.devnull).open("r+b", buffering=0) as nowhere, found.again() if found else nullcontext(nowhere.fileno()) as standard_input:
        yield standard_input, nowhere.fileno(), nowhere.fileno()


def deciding_record(folder: Path) -> RunRecord | None:
    """
    Return what the process wrote that decides: one that ran out of memory, else the one that took most of it.

    It tells of another that failed while it trained, whatever the program made of that.
    """
    records = [read_record(path) for path in sorted(folder.glob("*.json"))]
    found = max(records, key=lambda record: (_is_out_of_memory(record), record.peak_reserved_bytes, len(record.steps)), default=None)
    failed = next((record for record in records if record.failure is not None and record.num_backwards), None)
    if found is None or failed is None or failed.failure is None or found.failure is not None:
        return found
    return found.model_copy(update={"failed_beside": failed.failure.message.strip().splitlines()[0]})


def _is_out_of_memory(record: RunRecord) -> bool:
    return record.failure is not None and record.failure.kind == "out_of_memory"


def checked(record: RunRecord | None, exit_code: int, *, lacks_weights: bool = False) -> RunRecord:
    """
    Return *record*, which a program left that ended with *exit_code*.

    Raises NothingSeenError where it is none, or one of a program that did not use the GPU; UsageError where another Python ran it than was
    taken for its own. *lacks_weights*: it failed for weights that are not there.
    """
    if record is None or _used_no_memory(record):
        raise nothing_seen(exit_code, lacks_weights=lacks_weights)
    if record.failure is not None and record.failure.kind == "mistake":
        raise UsageError(record.failure.message, hint="name the Python that runs it: `-- /path/to/python train.py`")
    return record


def _used_no_memory(record: RunRecord) -> bool:
    """Say whether the program only began to use the GPU, as by a seed, and ran on the host."""
    return not record.peak_reserved_bytes and record.failure is None and record.out_of_memory is None


def nothing_seen(exit_code: int, *, lacks_weights: bool = False) -> NothingSeenError:
    """Return why a program left no report: it never used the GPU, or a signal ended it before it could write one."""
    if exit_code < 0:
        message = f"the program {ended(exit_code)} before it reported its memory"
        hint = None if -exit_code in USERS_SIGNALS else "end it before whatever ended it: `steps=3`"
        return NothingSeenError(message, program_exit_code=exit_code, hint=hint)
    message = f"the program {ended(exit_code)} and never used the GPU: there is nothing to report"
    hint = (
        MISSING_WEIGHTS
        if lacks_weights
        else "it failed before that: see what it said"
        if exit_code
        else 'its model and its batches have to be on the device "cuda"'
    )
    return NothingSeenError(message, program_exit_code=exit_code, hint=hint)

"""
Measuring a whole program, unmodified: it is started as ever, on a GPU of this machine, and ended after some steps.

The recorder is that of a rehearsal. What the program writes is held back as there, and it may be shown other contents of its files.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from memplan.execution.command import Command, command_from
from memplan.execution.findings import batches_differ
from memplan.execution.held_back import Writes
from memplan.execution.measure import held_bytes, measurement_of, seen_at_the_end
from memplan.execution.measurement import Measurement
from memplan.execution.program_process import ended_after, wait_for
from memplan.execution.recorded_run import WalkedBatches, checked, deciding_record, recorder_variables, streams
from memplan.execution.rehearse_script import NOTHING_SHOWN, torch_of
from memplan.execution.run_record import RunRecord
from memplan.execution.runner import SKIP_WEIGHTS
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.nvml import watched_gpu
from memplan.standin.launch import command_for


def measure_script(
    words: Sequence[str],
    *,
    gpu: GpuSpec,
    steps: int,
    shown: Mapping[Path, bytes] = NOTHING_SHOWN,
    said: Path | None = None,
    walks_where_they_differ: WalkedBatches | None = None,
    skip_weights: bool = False,
) -> Measurement:
    """
    Run the program that *words* say on *gpu*, of this machine, which it sees alone; return what it took. It is ended after *steps* steps.

    *shown*: other contents of files, which the program finds in their place. *said*: a file for what it says. Where its batches differ in
    shape, those that *walks_where_they_differ* says are looked at, and it is run again with the largest early. *skip_weights*: pretrained
    models are built without reading their weights.

    Raises NothingSeenError for a program that did not use the GPU, KeyboardInterrupt where a signal was to end it.
    """
    command = command_from(words)
    with tempfile.TemporaryDirectory(prefix="memplan-measurement-") as name:
        folder = Path(name).resolve()

        def measured(number: int, walked: WalkedBatches) -> tuple[RunRecord, int | None]:
            own = folder / str(number)
            own.mkdir()
            return _run(command, gpu, own, shown=shown, said=said, walked=walked, skips_weights=skip_weights)

        record, held = measured(1, WalkedBatches(most=0, own_first=0, steps=steps))
        if walks_where_they_differ is not None and batches_differ(record):
            record, held = measured(2, walks_where_they_differ)
    return measurement_of(record, gpu, held)


def _run(
    command: Command,
    gpu: GpuSpec,
    folder: Path,
    *,
    shown: Mapping[Path, bytes],
    said: Path | None,
    walked: WalkedBatches,
    skips_weights: bool,
) -> tuple[RunRecord, int | None]:
    """Return what one run of *command* showed, and what it held of the GPU at its end."""
    inherited = os.environ | dict(command.environment)
    results, until = folder / "results", folder / "until"
    results.mkdir()
    environment = inherited | recorder_variables(results, torch_of(command), walked=walked, inherited=inherited)
    environment |= {"MEMPLAN_UNTIL": str(until), **({"CUDA_VISIBLE_DEVICES": gpu.uuid} if gpu.uuid else {})}
    environment |= {SKIP_WEIGHTS: str(results)} if skips_weights else {}
    environment = Writes(folder, script=command.script, are_allowed=False, shown=shown).held_in(environment)
    with watched_gpu(gpu.uuid) as use, seen_at_the_end(use, lambda: any(results.glob("*.json")), until) as seen:
        before = use()
        with streams(is_heard=said is not None, output_to_stderr=True, said=said) as (standard_input, output, errors):
            process = subprocess.Popen(command_for(command.words), env=environment, stdin=standard_input, stdout=output, stderr=errors)
        with ended_after(process, str(results)):
            if wait_for(process, None) is not None:
                raise KeyboardInterrupt
    record = checked(deciding_record(results), process.wait())
    return record, held_bytes(record.pid, before, seen)

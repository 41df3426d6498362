"""
The rehearsal: the real PyTorch and the user's real step, on a simulated GPU.

A process of its own (`runner.py`) runs the steps with the simulated GPU in place of CUDA (`standin/`); this one builds that where it is
missing, and reads its log.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memplan.execution.device_log import read_device_log
from memplan.execution.held_back import Writes
from memplan.execution.program_habits import HABITS
from memplan.execution.program_process import NotEndedError
from memplan.execution.ranks import ONE_RANK, Ranks
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.runner import DEFAULT_TIMEOUT_SECONDS, SKIP_WEIGHTS, Closing, Runner
from memplan.execution.step_source import StepSource
from memplan.execution.summary import Run, rehearsal_of
from memplan.execution.values_pass import NO_VALUES, EndlessError, ValuesFile, settle, with_ample_memory
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import find_torch
from memplan.memory.cuda_context import usual_context
from memplan.memory.estimate import MemoryRange
from memplan.memory.nccl_buffers import Communicator, nccl_buffers
from memplan.standin.build import build
from memplan.standin.launch import environment_for, on_gpus, own_caches


class Rehearser(Closing):
    """
    Rehearses one program, as often as asked. To be closed, or used in a `with`.

    What the program writes is held back, and found again by its next rehearsal, unless *allow_writes*. *skip_weights*: pretrained
    models are built without reading their weights, which need not be there. *habits*: what is asked for (`program_habits.py`).
    """

    def __init__(self, source: StepSource, *, allow_writes: bool = False, skip_weights: bool = False, habits: str | None = None) -> None:
        self._runner = Runner(source)
        script = Path(source.name) if source.name.endswith(".py") else None
        self._more = {SKIP_WEIGHTS: str(self._runner.folder)} if skip_weights else {}
        if habits is not None:
            self._more[HABITS] = habits
        self._writes = Writes(self._runner.folder, script=script, are_allowed=allow_writes)

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
        context_bytes: int | None = None,
        library_workspaces: bool = True,
        checks_tensor_types: bool = False,
        environment: Mapping[str, str] | None = None,
        has_padding: bool = False,
        ranks: Ranks = ONE_RANK,
    ) -> Rehearsal:
        """
        Return what the program does to the memory of *gpu*.

        *steps*: how many; None runs three, and ten where the third still takes more than the second or is of another
        size. *answers*: what reads of device values get, by FILE.py:LINE: an answer, and the line that it was given for
        (None: any). *library_workspaces*: count an allowance for what CUDA's libraries decide at run time; the lower bound is without it.
        *checks_tensor_types*: run one step more, which counts for nothing, to find large tensors of wide types. *environment*: variables
        for this rehearsal, as PYTORCH_ALLOC_CONF. *has_padding*: the program's batch has padding: what it reads of a mask is known.
        *ranks*: how many GPUs train together, and which rank this is; the others need not be there.

        Raises UsageError when the program fails for another reason than memory, MissingError when this machine cannot rehearse it,
        NoKernelsError for a *gpu* on which its PyTorch does not run.
        """
        ranks.checked()
        torch = find_torch()
        torch.check_kernels(gpu)
        inherited = os.environ | dict(environment or {})

        def nccl(communicators: Iterable[Communicator]) -> MemoryRange:
            return nccl_buffers(communicators, gpu=gpu, num_gpus=ranks.num_gpus, version=torch.nccl_version, settings=inherited)

        context = usual_context(gpu, context_bytes)
        beside_bytes = context.expected_bytes + nccl([Communicator(ranks.size)] if ranks.size > 1 else []).expected_bytes

        def run(values_file: ValuesFile | None, *, with_workspaces: bool, checks_tensor_types: bool) -> Run:
            log = self._runner.folder / "log"
            log.unlink(missing_ok=True)
            card = gpu if values_file is None or values_file.variant is None or has_run_out else with_ample_memory(gpu)
            status = self._runner.run(
                device=lambda: self._writes.held_in(
                    environment_for([gpu], build(torch), context_bytes=context.expected_bytes)
                    | own_caches(self._runner.folder)
                    | self._more
                ),
                environment={
                    **(environment or {}),
                    **on_gpus(ranks.gpus_with(card), context_bytes=beside_bytes),
                    "MEMPLAN_WORLD": "",  # the process may have begun as one of several
                    **ranks.variables(),
                    "MEMPLAN_NCCL": torch.nccl_number,
                    "MEMPLAN_RESULTS": str(self._runner.folder),
                    "MEMPLAN_LOG": str(log),
                    "MEMPLAN_WORKSPACES": str(int(with_workspaces)),
                },
                values=values,
                steps=steps,
                answers=answers,
                checks_tensor_types=checks_tensor_types,
                timeout_seconds=timeout_seconds,
                values_file=(values_file or NO_VALUES).request(),
            )
            return Run(self._runner.record(status), read_device_log(log))

        has_run_out = False

        def run_whole(values_file: ValuesFile | None) -> Run:
            nonlocal has_run_out
            is_told = values_file is None or values_file.variant is None
            try:
                found = run(values_file, with_workspaces=library_workspaces, checks_tensor_types=checks_tensor_types and is_told)
            except NotEndedError as error:
                if values_file is None:
                    raise
                raise EndlessError(f"it took more than {timeout_seconds:g} seconds") from error
            has_run_out = has_run_out or found.record.out_of_memory is not None
            return found

        found = settle(run_whole, folder=self._runner.folder, answers=answers, has_padding=has_padding)
        whole = found.run
        self._check(whole)
        without = None
        if library_workspaces and whole.log.workspaces:
            without = run(found.values, with_workspaces=False, checks_tensor_types=False).record
        told = rehearsal_of(
            whole,
            without=without,
            others=found.others,
            context=context,
            nccl=nccl(whole.log.communicators),
            values_failure=found.failure,
            ranks=ranks,
        )
        return self._writes.told_in(told).model_copy(update={"values_effect": found.effect, "deciding_reads": found.deciding})

    def _check(self, run: Run) -> None:
        """Raise what is to be said of a program that failed: by a call that the device does not serve, or otherwise than for memory."""
        if run.record.failure is not None:
            run.log.check()
        self._runner.check(run.record)

"""
Jobs on Slurm, by submitit: each is a batch job with one processor.

Partition, account, memory and time are said as for `sbatch`, by SBATCH_PARTITION, SBATCH_ACCOUNT and the others of its variables.
"""

from __future__ import annotations

import shutil
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, UncompletedJobError

from memplan.errors import MissingError
from memplan.execution.executors.jobs import BYTES_OF_A_JOB, Executor, Job, JobAnswer, LostJobError, RunningJob, run_job
from memplan.hardware.cache_dir import default_cache, temporary_folder

MINUTES = 120
"""That a job may take."""


class SlurmExecutor(Executor):
    """Each job is one of Slurm's; with *cluster* "local", submitit runs it on this machine."""

    def __init__(self, cluster: str = "slurm") -> None:
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise MissingError("there is no Slurm on this machine: `sbatch` is not found", hint="start it where jobs are submitted")
        parent = default_cache()
        parent.mkdir(parents=True, exist_ok=True)
        # In the user's cache, which workers see as this machine does where homes are shared.
        self._executor = submitit.AutoExecutor(folder=temporary_folder("slurm-", str(parent)), cluster=cluster)
        self._executor.update_parameters(name="memplan", cpus_per_task=1, mem_gb=BYTES_OF_A_JOB >> 30, timeout_min=MINUTES)
        self._started: list[submitit.Job[Any]] = []

    def start(self, job: Job) -> RunningJob:
        """Hand *job* over."""
        self._started.append(self._executor.submit(run_job, job))
        return _SlurmJob(self._started[-1])

    def close(self) -> None:
        """Cancel what has not ended."""
        for started in self._started:
            if not started.done():
                started.cancel(check=False)


class _SlurmJob(RunningJob):
    def __init__(self, job: submitit.Job[Any]) -> None:
        self._job = job

    def answer(self) -> JobAnswer | None:
        if not self._job.done():
            return None
        try:
            found = self._job.result()
        except FailedJobError as error:
            raise MissingError(f"a job of Slurm's cannot run memplan: {error}", hint="install memplan for its nodes") from error
        except UncompletedJobError as error:  # ended from outside, or with its node
            raise LostJobError(str(error).splitlines()[0]) from error
        assert isinstance(found, JobAnswer)
        return found

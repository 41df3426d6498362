"""Jobs on Ray: on the cluster that RAY_ADDRESS names, or that runs on this machine; else on this machine's processors."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from memplan.errors import MissingError
from memplan.execution.executors.jobs import BYTES_OF_A_JOB, Executor, Job, JobAnswer, LostJobError, RunningJob, run_job


class RayExecutor(Executor):
    """Each job is a task of Ray's, with one processor and the memory that it may need."""

    def __init__(self) -> None:
        self._is_own = not ray.is_initialized()
        if self._is_own:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a Ray that is started here
            ray.init(log_to_driver=False, configure_logging=False)
        self._run = ray.remote(run_job).options(num_cpus=1, memory=BYTES_OF_A_JOB, max_retries=0)
        self._started: list[Any] = []

    def start(self, job: Job) -> RunningJob:
        """Hand *job* over."""
        self._started.append(self._run.remote(job))
        return _RayJob(self._started[-1])

    def close(self) -> None:
        """Take back what has not ended, and leave Ray."""
        for started in self._started:
            ray.cancel(started, force=True)
        if self._is_own:
            ray.shutdown()


class _RayJob(RunningJob):
    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def answer(self) -> JobAnswer | None:
        try:
            found = ray.get(self._reference, timeout=0)
        except GetTimeoutError:
            return None
        except RayTaskError as error:
            raise MissingError(f"a worker of Ray cannot run memplan: {error.cause}", hint="install memplan for its workers") from error
        except RayError as error:  # the worker, its machine or what it had found
            raise LostJobError(str(error).splitlines()[0]) from error
        assert isinstance(found, JobAnswer)
        return found

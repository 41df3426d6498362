"""Jobs on Dask: on the scheduler that DASK_SCHEDULER_ADDRESS, or Dask's own configuration, names; else in processes of this machine."""

from __future__ import annotations

import dask
from distributed import Client, Future, KilledWorker
from distributed.client import FutureCancelledError

from memplan.errors import MissingError
from memplan.execution.executors.jobs import BYTES_OF_A_JOB, Executor, Job, JobAnswer, LostJobError, RunningJob, run_job
from memplan.hardware.host import most_processes_of

WAIT_FOR_SCHEDULER = "30s"


class DaskExecutor(Executor):
    """Each job is a task of Dask's."""

    def __init__(self) -> None:
        address = dask.config.get("scheduler-address", None)
        try:
            if address is not None:
                self._client = Client(address, timeout=WAIT_FOR_SCHEDULER)
            else:  # a task waits for a process, and takes a processor so
                workers = most_processes_of(BYTES_OF_A_JOB)
                self._client = Client(n_workers=workers, threads_per_worker=1, dashboard_address=None, set_as_default=False)
        except OSError as error:
            raise MissingError(f"no Dask scheduler answers at {address}: {error}", hint="see DASK_SCHEDULER_ADDRESS") from error

    def start(self, job: Job) -> RunningJob:
        """Hand *job* over."""
        return _DaskJob(self._client.submit(run_job, job, pure=False))

    def close(self) -> None:
        """Leave the scheduler, which drops what has not ended; one that was started here ends."""
        self._client.close()


class _DaskJob(RunningJob):
    def __init__(self, future: Future) -> None:
        self._future = future

    def answer(self) -> JobAnswer | None:
        if not self._future.done():
            return None
        try:
            found = self._future.result()
        except (KilledWorker, FutureCancelledError) as error:  # workers ended under it more often than Dask allows, or the scheduler did
            raise LostJobError(str(error)) from error
        except Exception as error:
            raise MissingError(f"a worker of Dask cannot run memplan: {error}", hint="install memplan for its workers") from error
        assert isinstance(found, JobAnswer)
        return found

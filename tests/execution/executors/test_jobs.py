"""Jobs that are handed to others: how they end, and what becomes of those whose worker is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from memplan.errors import MissingError
from memplan.execution.executors.installed import executor_by
from memplan.execution.executors.jobs import Executor, Job, JobAnswer, RunningJob, run_job, run_jobs


def job(function: str, request: str, folder: Path, **others: object) -> Job:
    """A job of the tests' own."""
    place = f"tests.execution.executors.job_functions:{function}"
    return Job.model_validate({"name": function, "function": place, "request": request, "folder": str(folder), "environment": {}, **others})


class RunningInThread(RunningJob):
    def __init__(self, future: Future[JobAnswer]) -> None:
        self._future = future

    def answer(self) -> JobAnswer | None:
        return self._future.result() if self._future.done() else None


class InThreads(Executor):
    """Workers of this process."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)

    def start(self, job: Job) -> RunningJob:
        return RunningInThread(self._pool.submit(run_job, job))

    def close(self) -> None:
        self._pool.shutdown()


def test_answers_come_in_the_order_of_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs in the folder and with the variables that are sent along; what the worker itself has of them does not count."""
    monkeypatch.setenv("TORCH_TOLD", "the worker's own")
    told: list[tuple[int, int]] = []
    jobs = [
        job("tell", "a", tmp_path, environment={"TORCH_TOLD": "the asker's"}),
        job("tell", "b", tmp_path, without=("TORCH",)),
    ]

    with InThreads() as executor:
        answers = run_jobs(executor, jobs, on_job=lambda ended, count: told.append((ended, count)))

    assert answers == [f"a in {tmp_path.name} with the asker's", f"b in {tmp_path.name} with None"]
    assert told[0] == (0, 2)


def test_what_a_job_raises_is_raised_where_it_is_asked_for(tmp_path: Path) -> None:
    with InThreads() as executor, pytest.raises(MissingError, match="there is no thing") as raised:
        run_jobs(executor, [job("miss", "thing", tmp_path)])

    assert raised.value.hint == "get one"


def test_a_job_that_ended_early_is_run_again(tmp_path: Path) -> None:
    """The third time is the last, and its last words are told."""
    with InThreads() as executor:
        assert run_jobs(executor, [job("end_early", f"{tmp_path / 'once'}:1", tmp_path)]) == ["run 2 times"]
        with pytest.raises(MissingError, match="its worker was lost 3 times") as raised:
            run_jobs(executor, [job("end_early", f"{tmp_path / 'always'}:9", tmp_path)])

    assert "ended with status -9" in raised.value.message
    assert "about to end" in raised.value.message


def test_a_worker_without_the_folder_says_so(tmp_path: Path) -> None:
    """Where the job reads files there; else any folder will do."""
    missing = tmp_path / "missing"

    with InThreads() as executor:
        assert run_jobs(executor, [job("tell", "a", missing)])[0].startswith("a in memplan-job-")
        with pytest.raises(MissingError, match=f"has no folder {missing}"):
            run_jobs(executor, [job("tell", "a", missing, needs_folder=True)])


def test_a_job_ends_with_its_worker(tmp_path: Path) -> None:
    """A worker that is ended leaves nothing running."""
    file = tmp_path / "number"
    asked = job("wait", str(file), tmp_path).model_dump_json()
    code = "import sys; from memplan.execution.executors.jobs import Job, run_job; run_job(Job.model_validate_json(sys.argv[1]))"
    worker = subprocess.Popen([sys.executable, "-c", code, asked])
    try:
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        number = int(file.read_text())
    finally:
        worker.kill()
        worker.wait()

    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def connected(name: str) -> Executor:
    """The real thing, on this machine."""
    pytest.importorskip({"slurm": "submitit", "dask": "distributed"}.get(name, name), reason=f"the extra {name} is not installed")
    if name != "slurm":
        return executor_by(name)  # type: ignore[arg-type]
    from memplan.execution.executors.on_slurm import SlurmExecutor

    return SlurmExecutor("local")


@pytest.mark.heavy
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["ray", "dask", "slurm"])
def test_the_task_of_a_lost_worker_is_done_by_another(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others answered meanwhile stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    jobs = [job("end_worker_once", str(tmp_path / "once"), tmp_path), job("tell", "b", tmp_path)]
    before = set(psutil.Process(os.getpid()).children())  # processes that serve other tests

    with connected(name) as executor:
        answers = run_jobs(executor, jobs)

    assert answers == ["done by another", f"b in {tmp_path.name} with None"]
    left = [each for each in psutil.Process(os.getpid()).children() if each not in before and each.status() != psutil.STATUS_ZOMBIE]
    assert [each.cmdline() for each in left if "resource_tracker" not in " ".join(each.cmdline())] == []


def test_an_executor_that_is_not_installed_says_which_extra_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And Slurm says where it is not there."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "memplan.execution.executors.on_ray", raising=False)

    with pytest.raises(MissingError, match="ray is not installed") as raised:
        executor_by("ray")

    assert raised.value.hint == "`pip install memplan[ray]`"


def test_slurm_is_asked_for_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit", reason="the extra slurm is not installed")
    monkeypatch.setenv("PATH", "")

    with pytest.raises(MissingError, match="no Slurm on this machine"):
        executor_by("slurm")

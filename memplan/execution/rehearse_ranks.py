"""
Several ranks of one program: each is a rehearsal of its own, and the one that takes most is told.

Data-parallel ranks are alike. Stages of a pipeline are not: which ranks a rank sends to, its rehearsal shows, and each of them is
rehearsed too. Where a rank waits for an object that only another one sends, the other is run first, and leaves it in a folder.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from memplan.errors import MemplanError
from memplan.execution.ranks import Ranks
from memplan.execution.rehearsal import RankPeaks, Rehearsal
from memplan.execution.rehearse_script import rehearse_script

Which = Literal["one", "kinds", "node"]
"""Which ranks: that one alone, one of each kind, or all of its machine."""

MOST_RANKS = 64
"""That are rehearsed for one report."""

_SERVE = "from memplan.execution.rehearse_ranks import serve; serve()"


class _Request(NamedTuple):
    words: tuple[str, ...]
    options: Mapping[str, Any]
    result: Path


class _Wait(NamedTuple):
    """What a rank waits for."""

    needed: int
    """The rank that is to send something."""
    num_sent: int
    """How much that rank had sent when this one was run."""


def rehearse_ranks(words: Sequence[str], *, ranks: Ranks, which: Which, **options: Any) -> Rehearsal:
    """
    Return the rehearsal of the rank that takes most, with the peaks of the others, of the program that *words* say.

    That of *ranks* is run here, and its output is the user's; the others run in processes of their own, as many at once as there are cores.
    *options* are those of `rehearse_script`, which also says what is raised.
    """
    with tempfile.TemporaryDirectory(prefix="memplan-ranks-") as folder:
        sent = Path(folder, "sent")
        sent.mkdir()
        of_one = ("on_progress", "on_next_run", "output_to_stderr", "keep_warm")
        own = {name: value for name, value in options.items() if name not in of_one}

        def run(rank: int) -> Rehearsal:
            asked = {**own, "ranks": ranks._replace(rank=rank), "sent": sent, "is_heard": False}
            asked["gpu"] = ranks.gpu_of(rank, options["gpu"])
            return _in_process(_Request(tuple(words), asked, Path(folder, str(rank))))

        found = _all_found(
            lambda: rehearse_script(words, ranks=ranks, sent=sent, **options),
            run,
            ranks,
            which,
            lambda rank: len(list(sent.glob(f"{rank} *"))),
        )
    told = max(found, key=_severity)
    return told.model_copy(update={"rank_peaks": tuple(map(_peaks, found)) if len(found) > 1 else ()})


def _all_found(
    run_here: Callable[[], Rehearsal], run: Callable[[int], Rehearsal], ranks: Ranks, which: Which, num_sent: Callable[[int], int]
) -> list[Rehearsal]:
    """
    Return the rehearsals of the ranks that are wanted, in their order; one that waits for another's objects is run again behind it.

    *num_sent* says how many objects a rank has left so far: two ranks may wait for each other in turn, and each time get further.
    """
    node = range(ranks.rank // ranks.num_gpus * ranks.num_gpus, (ranks.rank // ranks.num_gpus + 1) * ranks.num_gpus)
    wanted = {ranks.rank, *(node if which == "node" else _first_of_each_kind(ranks) if which == "kinds" else ())}
    waiting = sorted(wanted, key=lambda rank: (rank != ranks.rank, rank))
    waits: dict[int, _Wait] = {}
    found: dict[int, Rehearsal] = {}
    latest: dict[int, Rehearsal] = {}
    with ThreadPoolExecutor(_num_workers()) as workers:
        while wanted - found.keys():  # who else waits was to send something to these
            ready = [rank for rank in waiting if rank not in waits or num_sent(waits[rank].needed) > waits[rank].num_sent]
            if not ready:  # they wait for each other
                found |= {rank: latest[rank] for rank in waiting}
                break
            others = [rank for rank in ready if rank != ranks.rank]
            batch = [ranks.rank] if ready[0] == ranks.rank else others[: _num_workers()]
            before = {rank: num_sent(rank) for rank in range(ranks.size)}
            results = [run_here()] if batch == [ranks.rank] else list(workers.map(run, batch))
            for rank, result in zip(batch, results, strict=True):
                latest[rank], needed = result, result.needed_rank
                if needed is not None and len(found) < MOST_RANKS:
                    waits[rank] = _Wait(needed, before[needed])
                    waiting += [] if needed in waiting or needed in latest else [needed]
                    continue
                waiting.remove(rank)
                found[rank] = result
                wanted |= set(result.peers) if which == "kinds" else set()
                waiting += sorted(wanted - {*found, *waiting})[: MOST_RANKS - len(found)]
    return [found[rank] for rank in sorted(wanted & set(found))]


def _first_of_each_kind(ranks: Ranks) -> Iterator[int]:
    """Yield the first rank on each kind of GPU, but for that of the rank that is asked for."""
    seen = {ranks.kinds[ranks.local_rank]} if ranks.kinds else set()
    for number, kind in enumerate(ranks.kinds):
        if kind not in seen:
            seen.add(kind)
            yield number


def _severity(rehearsal: Rehearsal) -> tuple[int, float, int]:
    """Order what is to be told: out of memory before no verdict, before what is tight; then by the share of the GPU, and the first one."""
    order = ("fits", "tight", "unknown", "does_not_fit")
    return order.index(rehearsal.verdict), rehearsal.peak_reserved_bytes / (rehearsal.gpu_memory_bytes or 1), -rehearsal.rank


def _peaks(rehearsal: Rehearsal) -> RankPeaks:
    return RankPeaks(
        rank=rehearsal.rank,
        gpu_name=rehearsal.gpu_name,
        verdict=rehearsal.verdict,
        peak_allocated_bytes=rehearsal.peak_allocated_bytes,
        peak_reserved_bytes=rehearsal.peak_reserved_bytes,
    )


def _num_workers() -> int:
    return max(1, os.cpu_count() or 1)


def _in_process(request: _Request) -> Rehearsal:
    """Return what a process of its own finds. Raises the MemplanError that it raised."""
    process = subprocess.Popen([sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, errors = process.communicate(pickle.dumps(request))
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    if not request.result.exists():
        raise RuntimeError(f"the rehearsal of rank {request.options['ranks'].rank} ended early: {errors.decode(errors='replace')}")
    found = pickle.loads(request.result.read_bytes())
    request.result.unlink()
    if isinstance(found, MemplanError):
        raise found
    assert isinstance(found, Rehearsal)
    return found


def serve() -> None:
    """Rehearse the rank that standard input asks for, and leave what was found in the file that it names."""
    request: _Request = pickle.load(sys.stdin.buffer)
    found: Rehearsal | MemplanError
    try:
        found = rehearse_script(request.words, **request.options).without_trace()
    except MemplanError as error:
        found = error
    partial = request.result.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(found))
    partial.replace(request.result)

"""`memplan.Monitor`: watches a training from inside its own process."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

from memplan.errors import MissingError
from memplan.monitor.sampler import Sample, Sampler

MOST_KEPT = 3600
"""Samples that are kept in memory; the log has all of them."""


class Monitor:
    """
    Takes a sample every *interval* seconds while its `with` block runs, in a thread of this process.

        with memplan.Monitor(log="run.jsonl") as monitor:
            train()
        print(monitor.peaks)

    PyTorch's own peak counts, so that what happens between samples is not missed. Where there is no GPU it does nothing.
    """

    def __init__(self, *, interval: float = 1.0, log: str | Path | None = None) -> None:
        self._interval = interval
        self._log = Path(log) if log is not None else None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="memplan-monitor")
        self._sampler = Sampler(watches_itself=True)
        self.samples: deque[Sample] = deque(maxlen=MOST_KEPT)
        """The last of them, oldest first."""

    @property
    def peaks(self) -> dict[str, int]:
        """Return the most bytes that were used of each GPU, by UUID."""
        return dict(self._sampler.peaks)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ends.set()
        self._thread.join()
        self._take()

    def _watch(self) -> None:
        while not self._ends.is_set():
            self._take()
            self._ends.wait(self._interval)

    def _take(self) -> None:
        with contextlib.suppress(MissingError):  # no GPU: there is nothing to watch
            sample = self._sampler.sample()
            self.samples.append(sample)
            if self._log is not None:
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(sample.model_dump_json() + "\n")

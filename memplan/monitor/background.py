"""`memplan.Monitor`: watches a training from inside its own process."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

from memplan.errors import MissingError, UsageError, reason_of
from memplan.monitor.sampler import Sample, Sampler

MOST_KEPT = 3600
"""Samples that are kept in memory; the log has all of them."""

LEAST_SECONDS = 0.05

logger = logging.getLogger("memplan")


class Monitor:
    """
    Takes a sample every *interval* seconds while its `with` block runs, in a thread of this process.

    >>> import memplan
    >>> with memplan.Monitor(interval=0.5) as monitor:
    ...     weights = [0.0] * 1000  # the training
    >>> all(peak_bytes >= 0 for peak_bytes in monitor.peaks.values())
    True

    PyTorch's own peak counts, so that what happens between samples is not missed. Where there is no GPU it does nothing, and nothing that
    happens to it disturbs the training: a log that cannot be written any more is warned of once. Raises UsageError for an interval below
    0.05 seconds, and, when the block begins, for a log that cannot be written.
    """

    def __init__(self, *, interval: float = 1.0, log: str | Path | None = None) -> None:
        if not (isinstance(interval, (int, float)) and LEAST_SECONDS <= interval < math.inf):
            raise UsageError(f"interval={interval!r} is not a time between two samples", hint=f"use {LEAST_SECONDS} seconds or more")
        self._interval = interval
        self._log = Path(log) if log is not None else None
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._sampler = Sampler(watches_itself=True)
        self.samples: deque[Sample] = deque(maxlen=MOST_KEPT)
        """The last of them, oldest first."""

    @property
    def peaks(self) -> dict[str, int]:
        """Return the most bytes that were used of each GPU, by UUID."""
        return dict(self._sampler.peaks)

    def __enter__(self) -> Monitor:
        if self._log is not None:
            try:
                self._log.open("a", encoding="utf-8").close()
            except OSError as error:
                raise UsageError(f"{self._log}: {reason_of(error)}", hint="name a file that can be written") from error
        self._ends.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="memplan-monitor")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ends.set()
        if self._thread is not None:
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
            self._write(sample)

    def _write(self, sample: Sample) -> None:
        if self._log is None:
            return
        try:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(sample.model_dump_json() + "\n")
        except OSError as error:
            logger.warning("%s: %s; nothing more is written there", self._log, reason_of(error))
            self._log = None

"""What the report of `memplan loader` shows, as plain text in plain structures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memplan.analysis.loader_settings import Host, LoaderAdvice
from memplan.units import format_bytes


class LoaderView(NamedTuple):
    """A headline, facts, a row for each setting, and one for each number of workers that was measured."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str, str], ...]
    rates: tuple[tuple[str, ...], ...]


RATE_COLUMNS = ("workers", "samples/s", "longest wait", "workers' memory")


def view_loader(advice: LoaderAdvice, host: Host) -> LoaderView:
    """Return the report of *advice* for *host*."""
    workers = advice.value_of("num_workers")
    how = "measured" if advice.is_measured else "by rule"
    headline = f"{workers} worker{'' if workers == 1 else 's'} for each DataLoader, {how}"
    settings = tuple((one.name, "" if one.value is None else str(one.value), one.reason) for one in advice.settings)
    rates = tuple(
        (
            str(rate.num_workers),
            f"{rate.samples_per_second:,.0f}",
            f"{rate.longest_wait_seconds:.3f} s",
            format_bytes(rate.worker_bytes) if rate.num_workers else "",
        )
        for rate in advice.rates
    )
    return LoaderView(headline, tuple(_facts(advice, host)), settings, rates)


def _facts(advice: LoaderAdvice, host: Host) -> Iterator[tuple[str, str]]:
    gpus = f"{host.num_gpus} GPU{'' if host.num_gpus == 1 else 's'}" if host.num_gpus else "no GPU found"
    yield "machine", f"{host.num_processors} processors, {gpus}, {format_bytes(host.available_bytes)} of memory free"
    if advice.host_bytes:
        yield "memory", f"{format_bytes(advice.host_bytes)} for workers and pinned batches of each DataLoader"
    if advice.shared_bytes and host.shared_bytes is not None:
        yield "/dev/shm", f"{format_bytes(advice.shared_bytes)} of {format_bytes(host.shared_bytes)} that are free"


def typed(advice: LoaderAdvice) -> str:
    """Return the settings as arguments of Python's DataLoader."""
    words = [f"{one.name}={one.value}" for one in advice.settings if one.value is not None and one.name != "non_blocking"]
    return f"DataLoader(…, {', '.join(words)})"

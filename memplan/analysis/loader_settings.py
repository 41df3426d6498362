"""
How a DataLoader is best set up on this machine: rates that were measured, or a rule; memory counted; a reason for each value.

What loading takes of the host, with W workers that each hold P batches:

    /dev/shm       W x P batches, where workers hand them over
    workers        their own memory, as measured
    pinned memory  W x P + 1 batches, each tensor rounded up to a power of two (PyTorch's CachingHostAllocator.h)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from memplan.description import Description
from memplan.units import format_bytes

DEFAULT_PREFETCH = 2
"""PyTorch's."""

ENOUGH = 0.95
"""Of the best rate: more workers that bring less are not worth their memory."""

RESERVE = 1.1
"""So many times what the step eats: rates vary."""

BESIDE_STEP = 10
"""So many times what the step eats, loading can bring in the training process itself: there the step waits for it."""

BETTER_ALONE = 2
"""So many times what workers bring, the training process has to load by itself to be better off without them: they work beside the step."""

UNEVEN = 4.0
"""The longest wait for a batch, in medians, from which more are to be held ready."""

LEAST_WAIT = 0.1
"""Seconds; shorter waits are those of any machine with other programs."""

MOST_BY_RULE = 8
"""Workers for each GPU that a rule gives: whether more help, only a measurement shows."""

FREE_SHARE = 0.8
"""Of what is free, at most: other programs grow too."""


class LoaderRate(Description):
    """What one number of workers brought."""

    num_workers: NonNegativeInt
    """0: the training process loads."""

    samples_per_second: NonNegativeFloat
    """In random order."""

    longest_wait_seconds: NonNegativeFloat = 0.0
    """For a batch."""

    median_wait_seconds: NonNegativeFloat = 0.0
    """For a batch."""

    worker_bytes: NonNegativeInt = 0
    """The workers' own memory, what they share with the training process not counted."""


class Measured(Description):
    """What was measured of a dataset."""

    num_samples: PositiveInt
    """Its length."""

    tensor_bytes: tuple[NonNegativeInt, ...]
    """The tensors of one batch."""

    rates: tuple[LoaderRate, ...]
    """By number of workers, from few to many."""


class Host(Description):
    """What this machine has for loading."""

    num_processors: PositiveInt
    """That this process may use."""

    num_gpus: NonNegativeInt
    """That train here, each with a DataLoader of its own; 0: none was found."""

    available_bytes: NonNegativeInt
    """Memory that programs can still have."""

    shared_bytes: NonNegativeInt | None
    """What is free in /dev/shm; None: there is none on this system."""


class LoaderSetting(Description):
    """One argument of the DataLoader."""

    name: str
    """By PyTorch's name."""

    value: bool | int | None
    """None: it is left out, since it has no meaning."""

    reason: str
    """Why."""


class LoaderAdvice(Description):
    """How to set up the DataLoader."""

    is_measured: bool
    """Else by rule."""

    settings: tuple[LoaderSetting, ...]
    """In the order of DataLoader's arguments; non_blocking is one of `.to()`."""

    rates: tuple[LoaderRate, ...] = ()
    """What was measured."""

    shared_bytes: NonNegativeInt | None = None
    """What batches take of /dev/shm; None: their size is not known."""

    host_bytes: NonNegativeInt | None = None
    """What workers and pinned batches take of the host's memory; None: not known."""

    warnings: tuple[str, ...] = ()
    """What is short."""

    def value_of(self, name: str) -> bool | int | None:
        """Return the value of the setting *name*."""
        return next(setting.value for setting in self.settings if setting.name == name)


class _Workers(NamedTuple):
    """How many workers, and why."""

    number: int
    reason: str
    warnings: tuple[str, ...] = ()


def advise_loading(
    host: Host, measured: Measured | None, *, batch_size: int | None, num_samples: int | None = None, needed: float | None = None
) -> LoaderAdvice:
    """
    Return the settings for *host*.

    *measured*: what a dataset's loading was seen to bring; None: by rule. *needed*: the samples a second that the step of one GPU eats.
    *num_samples*: of the dataset, where it is known otherwise.
    """
    prefetch, why_prefetch = _prefetch(measured)
    workers = _by_rule(host) if measured is None else _within_memory(_by_rate(measured, needed), measured, host, prefetch)
    rate = None if measured is None else _rate_of(measured, workers.number)
    settings = (
        LoaderSetting(name="num_workers", value=workers.number, reason=workers.reason),
        *_of_workers(workers.number, prefetch, why_prefetch),
        *_of_copies(host),
        _drop_last(measured.num_samples if measured is not None else num_samples, batch_size),
    )
    if measured is None or rate is None:
        return LoaderAdvice(is_measured=False, settings=settings)
    return LoaderAdvice(
        is_measured=True,
        settings=settings,
        rates=measured.rates,
        shared_bytes=_shared(measured, workers.number, prefetch),
        host_bytes=_of_host(rate, measured, host, prefetch),
        warnings=(*workers.warnings, *_too_slow(rate, needed)),
    )


def _too_slow(rate: LoaderRate, needed: float | None) -> Iterator[str]:
    if needed is not None and rate.samples_per_second < needed:
        yield (
            f"the step eats {needed:,.0f} samples a second, and loading brings {rate.samples_per_second:,.0f}: make samples cheaper "
            "(decode or resize them once), or keep them on the GPU (`memplan dataset`)"
        )


def _within_memory(wanted: _Workers, measured: Measured, host: Host, prefetch: int) -> _Workers:
    """Return *wanted*, or the most workers below it for which there is memory."""
    short = _short(_rate_of(measured, wanted.number), measured, host, prefetch)
    if not short:
        return wanted
    fewer = [rate.num_workers for rate in measured.rates if rate.num_workers < wanted.number]
    fitting = max((count for count in fewer if not _short(_rate_of(measured, count), measured, host, prefetch)), default=0)
    rate = _rate_of(measured, fitting).samples_per_second
    told = f"{wanted.number} workers load faster, but {short}"
    return _Workers(fitting, f"the most that there is memory for: {rate:,.0f} samples a second", (told,))


def _of_workers(count: int, prefetch: int, why: str) -> Iterator[LoaderSetting]:
    if count:
        yield LoaderSetting(name="prefetch_factor", value=prefetch, reason=why)
        yield LoaderSetting(name="persistent_workers", value=True, reason="workers are not started anew for each epoch")
    else:
        yield LoaderSetting(name="prefetch_factor", value=None, reason="without workers nothing is loaded ahead")
        yield LoaderSetting(name="persistent_workers", value=False, reason="there are no workers")


def _of_copies(host: Host) -> Iterator[LoaderSetting]:
    if host.num_gpus:
        yield LoaderSetting(name="pin_memory", value=True, reason="batches go to a GPU: from pinned memory they are copied while it works")
        yield LoaderSetting(name="non_blocking", value=True, reason="in `batch.to(device, non_blocking=True)`; it needs pin_memory")
    else:
        yield LoaderSetting(name="pin_memory", value=False, reason="no GPU was found here; true where there is one")
        yield LoaderSetting(name="non_blocking", value=False, reason="it needs pin_memory")


def _by_rule(host: Host) -> _Workers:
    gpus = max(1, host.num_gpus)
    count = max(0, min(MOST_BY_RULE, host.num_processors // gpus - 1))
    each = f"{host.num_processors} processors for {gpus} GPU{'s' if gpus > 1 else ''}, one of them left to each training process"
    return _Workers(count, f"by rule: {each}, at most {MOST_BY_RULE}; name the dataset to have it measured")


def _by_rate(measured: Measured, needed: float | None) -> _Workers:
    """Return the fewest workers that bring what is needed, or nearly as much as any number does."""
    alone = next((rate.samples_per_second for rate in measured.rates if not rate.num_workers), 0.0)
    with_workers = [rate for rate in measured.rates if rate.num_workers]
    best = max((rate.samples_per_second for rate in with_workers), default=0.0)
    if needed is not None and alone >= needed * BESIDE_STEP:
        return _Workers(
            0, f"measured: {alone:,.0f} samples a second without any, and the step eats {needed:,.0f}: loading takes next to nothing"
        )
    if alone >= best * BETTER_ALONE:
        return _Workers(
            0, f"measured: {alone:,.0f} samples a second without any, {best:,.0f} with: samples are cheap, and handing them over is not"
        )
    is_enough = needed is not None and best >= needed * RESERVE
    least = needed * RESERVE if needed is not None and is_enough else best * ENOUGH
    found = next(rate for rate in with_workers if rate.samples_per_second >= least)
    brings = f"{found.samples_per_second:,.0f} samples a second"
    if is_enough:
        return _Workers(found.num_workers, f"measured: the fewest that bring more than the step eats ({brings}, and {needed:,.0f})")
    return _Workers(found.num_workers, f"measured: {brings}; the most with any number is {best:,.0f}")


def _prefetch(measured: Measured | None) -> tuple[int, str]:
    """Return twice PyTorch's default where batches come unevenly, whatever the number of workers."""
    with_workers = [rate for rate in measured.rates if rate.num_workers] if measured is not None else []
    if with_workers and all(rate.longest_wait_seconds > max(LEAST_WAIT, UNEVEN * rate.median_wait_seconds) for rate in with_workers):
        longest = max(rate.longest_wait_seconds for rate in with_workers)
        return 2 * DEFAULT_PREFETCH, f"batches come unevenly: the longest wait for one was {longest:.2f} s"
    return DEFAULT_PREFETCH, f"PyTorch's default{'; batches come evenly' if with_workers else ''}"


def _drop_last(num_samples: int | None, batch_size: int | None) -> LoaderSetting:
    if num_samples is None or batch_size is None:
        return LoaderSetting(name="drop_last", value=True, reason="every batch of a training then has one shape; not for an evaluation")
    left = num_samples % batch_size
    if num_samples < batch_size:
        return LoaderSetting(name="drop_last", value=False, reason=f"{num_samples} samples make no whole batch of {batch_size}")
    if left == 0:
        return LoaderSetting(name="drop_last", value=False, reason=f"{num_samples:,} samples are whole batches of {batch_size}")
    reason = f"{left} of {num_samples:,} samples are left over: a batch of another shape, or left out of an epoch; not for an evaluation"
    return LoaderSetting(name="drop_last", value=True, reason=reason)


def _rate_of(measured: Measured, num_workers: int) -> LoaderRate:
    """Return what was measured with *num_workers*; without any, where that was not measured, the first."""
    return next((rate for rate in measured.rates if rate.num_workers == num_workers), measured.rates[0])


def _shared(measured: Measured, workers: int, prefetch: int) -> int:
    return workers * prefetch * sum(measured.tensor_bytes)


def _of_host(rate: LoaderRate, measured: Measured, host: Host, prefetch: int) -> int:
    """Return what workers and pinned batches take of the host."""
    return rate.worker_bytes + (_pinned(measured.tensor_bytes) * (rate.num_workers * prefetch + 1) if host.num_gpus else 0)


def _pinned(tensor_bytes: Sequence[int]) -> int:
    return sum(1 << max(0, size - 1).bit_length() for size in tensor_bytes if size)


def _short(rate: LoaderRate, measured: Measured, host: Host, prefetch: int) -> str:
    """Return what is short with so many workers for each GPU, as the end of a sentence; empty where nothing is."""
    gpus = max(1, host.num_gpus)
    shared = gpus * _shared(measured, rate.num_workers, prefetch)
    if host.shared_bytes is not None and shared > FREE_SHARE * host.shared_bytes:
        return f"their batches take {format_bytes(shared)} of /dev/shm, which has {format_bytes(host.shared_bytes)} free"
    taken = gpus * _of_host(rate, measured, host, prefetch) + shared
    if taken > FREE_SHARE * host.available_bytes:
        return f"they take {format_bytes(taken)} of the host's memory, of which {format_bytes(host.available_bytes)} are free"
    return ""

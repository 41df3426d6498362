"""
`DeviceCachedDataset`: a dataset whose samples are all on the device, one tensor for each of their values.

    cached = DeviceCachedDataset(dataset, device="cuda", dtype=torch.bfloat16, cache_file="train.safetensors")
    for images, labels in DeviceLoader(cached, batch_size=256, shuffle=True):
        ...

Whether they fit is asked as soon as the first sample has been read, and their memory is allocated before they are. Samples are collected on
the host, a chunk at a time, and copied together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from memplan.analysis.dataset_memory import samples_in_chunk
from memplan.data.disk_cache import (
    CacheDetails,
    CacheKey,
    CacheReader,
    CacheWriter,
    StaleCacheError,
    check_can_be_cached,
    only_one_writer,
    writing,
)
from memplan.data.fingerprint import fingerprint_of
from memplan.data.room import Room, check_fits, device_room
from memplan.data.samples import HostValue, SampleStructure, SampleValues, TensorPart
from memplan.errors import DoesNotFitError, SampleError, UsageError, is_out_of_memory
from memplan.memory.budget import DEFAULT_MARGIN
from memplan.planner.plan import Plan
from memplan.units import format_bytes

logger = logging.getLogger("memplan")

OnError = Literal["raise", "skip"]

MOST_NAMED = 5
"""Skipped samples that a warning names."""


class SizedDataset(Protocol):
    """What can be cached: anything with a length whose samples are read by index, as a map-style Dataset or a list."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return the sample at *index*."""
        ...


class DeviceCachedDataset(Dataset[Any]):
    """
    A dataset that keeps the samples of another on a device, and takes its place.

    A sample is a tensor, a NumPy array or a number, or dicts, tuples, named tuples and lists of them, as `default_collate` takes them.
    All samples need the same values, shapes and types. Every value keeps its type: numbers of Python become int64, float64 or bool, as in a
    batch of a DataLoader; texts, bytes and None stay on the host. Random transforms would be frozen: give them to the
    :class:`DeviceLoader`, which applies them to batches.

    Args:
        dataset: A map-style dataset, or anything else with ``len(dataset)`` and ``dataset[index]``. Every sample is read once, in order.
        device: A CUDA device or the CPU. Default: the current CUDA device if there is one, else the CPU.
        dtype: The type in which floating-point values are kept, as ``torch.bfloat16``. Other values keep theirs. Default: that of each.
        transform: Is called with each sample before it is kept.
        others: What the training itself takes of a GPU at its peak, in bytes of PyTorch's allocator (``torch.cuda.max_memory_reserved()``),
            or the :class:`memplan.Plan` of the training. Default: the peak that this process has had; so either make the dataset after a
            training step, or say it.
        margin: Share of the free memory that stays free.
        on_error: ``"raise"``: a sample that cannot be read or kept is an error. ``"skip"``: it is left out; `skipped` names it, and a
            warning is logged.
        cache_file: Where the filled dataset is kept on disk (safetensors). If the file is there and was made of the same, it is read
            instead of the dataset; of the dataset then only the first sample is. Of several processes one fills, the others wait for it.
        fingerprint: What the dataset and its transform are made of, in words of yours. Default: derived from their classes, code and
            attributes. This does not see that files have changed whose paths stayed.
        rebuild: Fill again, and replace `cache_file`, if it is damaged or was made of something else. Default: that is an error.
        num_workers: Processes that read samples, as of a DataLoader; 0 reads in this one.
        progress: Show a progress bar on standard error if that is a terminal.

    Raises:
        DoesNotFitError: If the samples do not fit beside the training; before the first chunk is read.
        SampleError: If a sample cannot be read, or has other values, shapes or types than the first; with its `index`.
        ConfigError: If `cache_file` is damaged, was made of something else, or cannot be written. It is never left half-written.
        UsageError: If the dataset is empty or has no length, or an argument makes no sense.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from memplan.data import DeviceCachedDataset
    >>> dataset = TensorDataset(torch.zeros(100, 3, 8, 8), torch.arange(100))
    >>> cached = DeviceCachedDataset(dataset, device="cpu", dtype=torch.bfloat16)
    >>> len(cached), cached.sample_bytes
    (100, 392)
    >>> image, label = cached[7]
    >>> image.dtype, label
    (torch.bfloat16, tensor(7))

    """

    def __init__(
        self,
        dataset: SizedDataset | Dataset[Any],
        device: torch.device | str | int | None = None,
        *,
        dtype: torch.dtype | None = None,
        transform: Callable[[Any], Any] | None = None,
        others: int | Plan | None = None,
        margin: float = DEFAULT_MARGIN,
        on_error: OnError = "raise",
        cache_file: str | Path | None = None,
        fingerprint: str | None = None,
        rebuild: bool = False,
        num_workers: int = 0,
        progress: bool = True,
    ) -> None:
        _check_arguments(dtype, others, margin, on_error)
        source = _Source(cast("SizedDataset", dataset), transform, on_error)
        first = source.first(dtype)
        self.device = _device(device)
        self._structure = first.structure
        room = device_room(self.device, others, margin)
        check_fits(room, [part.sample_bytes for part in self.parts], source.num_samples, self.device)
        before = _allocated_bytes(self.device)
        storages = _allocate(self.parts, source.num_samples, self.device, room)
        self.device_bytes: int = _allocated_bytes(self.device) - before or sum(storage.nbytes for storage in storages)
        """What the samples take of the device: `torch.cuda.memory_allocated()` has grown by it; with room for samples that were skipped."""
        filling = _Filling(source, first, storages, num_workers=num_workers, shows_progress=progress)
        if cache_file is None:
            details = filling.fill()
        else:
            check_can_be_cached(self.parts)
            key = CacheKey(fingerprint or fingerprint_of(source.dataset, transform), source.num_samples, first.structure)
            details = _from_disk_or_filled(Path(cache_file), key, filling, on_error, rebuild=rebuild)
        self.skipped: dict[int, str] = details.skipped
        """The samples that were left out, by their index in the dataset, each with the reason."""
        self._storages = [storage[: source.num_samples - len(self.skipped)] for storage in storages]
        self._host = details.host

    @property
    def parts(self) -> tuple[TensorPart, ...]:
        """Return what of a sample is on the device: name, shape (without a dimension for the samples) and type of each value."""
        return self._structure.parts

    @property
    def sample_bytes(self) -> int:
        """Return the bytes of one sample on the device."""
        return self._structure.sample_bytes

    @property
    def has_host_values(self) -> bool:
        """Say whether samples have values that stay on the host."""
        return bool(self._host)

    def __len__(self) -> int:
        """Return the number of samples, without those that were skipped."""
        return len(self._storages[0])

    def __getitem__(self, index: int) -> Any:
        """
        Return sample *index*, in the containers that the dataset returns.

        Its tensors are views of what is kept: changed in place, the sample is changed. Raises IndexError if there is none.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._structure.sample_from([storage[index] for storage in self._storages], [values[index] for values in self._host])

    def batch(self, indices: Tensor | Sequence[int], host_indices: Sequence[int] | None = None) -> Any:
        """
        Return the samples at *indices* as one batch, as `default_collate` would; what stays on the host is in lists.

        Args:
            indices: Integers from 0 on, of one dimension. On the device, they cause no transfer.
            host_indices: The same, if they are on the host already and samples have values there.

        """
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.device)
        numbers = (chosen.tolist() if host_indices is None else host_indices) if self._host else []
        tensors = [torch.index_select(storage, 0, chosen) for storage in self._storages]
        return self._structure.batch_from(tensors, [[values[number] for number in numbers] for values in self._host])


def _check_arguments(dtype: torch.dtype | None, others: Any, margin: float, on_error: str) -> None:
    """Raise UsageError for what a type checker would have found, and what it would not."""
    if on_error not in ("raise", "skip"):
        raise UsageError(f"on_error={on_error!r} is not valid", hint='give "raise" or "skip"')
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"dtype={dtype} is no floating-point type", hint="integers and booleans keep the type that they have")
    if not 0 <= margin < 1:
        raise UsageError(f"margin={margin!r} is not valid", hint="give a share from 0 to below 1, as 0.05")
    if others is not None and not isinstance(others, Plan) and (type(others) is not int or others < 0):
        raise UsageError(f"others={others!r} is not valid", hint="give bytes, or a plan: `memplan.plan(...)`")


def _device(device: torch.device | str | int | None) -> torch.device:
    """Return *device* with its number: a bare "cuda" is the current one."""
    chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={str(chosen)!r}, and PyTorch sees no GPU here", hint='`device="cpu"` works the same')
    return torch.device("cuda", torch.cuda.current_device()) if chosen.type == "cuda" and chosen.index is None else chosen


def _allocated_bytes(device: torch.device) -> int:
    """Return what PyTorch's allocator has given out of *device*, which is more than was asked for; 0 for the CPU, which has none."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _allocate(parts: Sequence[TensorPart], num_samples: int, device: torch.device, room: Room) -> list[Tensor]:
    """Return a tensor for each of *parts*. Raises DoesNotFitError where memory runs out after all."""
    try:
        return [torch.empty((num_samples, *part.shape), dtype=part.dtype, device=device) for part in parts]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        told = str(error).partition(". ")[0]
        raise DoesNotFitError(
            f"memory of {device} ran out for {num_samples:,} samples, though {format_bytes(room.left_bytes)} were left: {told}",
            hint="another program has taken memory, or it is fragmented: make the dataset before the model",
        ) from error


class _Failed(NamedTuple):
    """A sample that could not be read; it can travel between processes."""

    reason: str
    error: Exception | None
    """None where another process read it."""


class _First(NamedTuple):
    """The first sample that can be kept."""

    position: int
    structure: SampleStructure
    values: SampleValues


class _Source(Dataset[Any]):
    """A dataset with its transform, whose samples are values or say why they are none."""

    def __init__(self, dataset: SizedDataset, transform: Callable[[Any], Any] | None, on_error: OnError) -> None:
        self.dataset, self._transform, self.on_error = dataset, transform, on_error
        try:
            self.num_samples = len(dataset)
        except TypeError as error:
            raise UsageError(
                f"the dataset has no length: {type(dataset).__name__}", hint="give a map-style dataset, or a list of the samples"
            ) from error
        if self.num_samples == 0:
            raise UsageError("the dataset is empty: it has 0 samples", hint="check its path, its split, and its filters")

    def __getitem__(self, index: int) -> Any:
        try:
            sample = self.dataset[index]
            return sample if self._transform is None else self._transform(sample)
        except Exception as error:  # whatever the user's code raises
            if isinstance(error, MemoryError) or is_out_of_memory(error):  # not for this sample's sake
                raise
            is_here = torch.utils.data.get_worker_info() is None
            return _Failed(f"{type(error).__name__}: {error}", error if is_here else None)

    def first(self, dtype: torch.dtype | None) -> _First:
        """Return the first sample that can be kept. Raises SampleError where there is none, or where one that fails is an error."""
        reason = ""
        for index in range(self.num_samples):
            sample = self[index]
            try:
                if not isinstance(sample, _Failed):
                    structure = SampleStructure(sample, dtype)
                    return _First(index, structure, structure.values_of(sample))
                failure: Exception = self._not_read(index, sample)
            except UsageError as error:
                failure = _not_kept(index, error)
            if self.on_error == "raise":
                raise failure
            reason = reason or str(failure)
        raise self.nothing_kept(reason)

    def nothing_kept(self, reason: str) -> SampleError:
        """Return the error for a dataset whose samples all fail, the first for *reason*."""
        return SampleError(f"none of {self.num_samples:,} samples could be kept; the first: {reason}", index=0)

    def values(self, structure: SampleStructure, *, num_workers: int) -> Iterator[tuple[int, SampleValues | str]]:
        """Yield every index with its values; with the reason where it is to be skipped."""
        for index, sample in enumerate(self._samples(num_workers)):
            try:
                if isinstance(sample, _Failed):
                    raise self._not_read(index, sample)
                yield index, structure.values_of(sample)
            except UsageError as error:
                failure = error if isinstance(error, SampleError) else _not_kept(index, error)
                if self.on_error == "raise":
                    raise failure from (sample.error if isinstance(sample, _Failed) else error)
                yield index, failure.message.partition(": ")[2]

    def _samples(self, num_workers: int) -> Iterator[Any]:
        if num_workers == 0:
            return map(self.__getitem__, range(self.num_samples))
        order = range(self.num_samples)
        # A generator of its own: the program's draws the same numbers as without a cache.
        return iter(
            DataLoader(self, batch_size=None, sampler=order, num_workers=num_workers, collate_fn=_as_it_is, generator=torch.Generator())
        )

    def _not_read(self, index: int, failed: _Failed) -> SampleError:
        error = SampleError(
            f"sample {index}: {failed.reason}", index=index, hint='`on_error="skip"` leaves such samples out and names them'
        )
        error.__cause__ = failed.error
        return error


def _as_it_is(sample: Any) -> Any:
    return sample


def _not_kept(index: int, error: UsageError) -> SampleError:
    return SampleError(f"sample {index}: {error.message}", index=index, hint=error.hint)


class _Filling:
    """What fills the tensors on the device: from the dataset, or from a file."""

    def __init__(self, source: _Source, first: _First, storages: Sequence[Tensor], *, num_workers: int, shows_progress: bool) -> None:
        self._source, self._first, self._storages, self._num_workers = source, first, storages, num_workers
        self._parts = first.structure.parts
        self._chunk = samples_in_chunk(first.structure.sample_bytes, source.num_samples)
        self._shows_progress = shows_progress

    def fill(self, writer: CacheWriter | None = None) -> CacheDetails:
        """Read every sample, keep it, and write it with *writer*. Raises SampleError for one that fails and is not to be skipped."""
        staging = [torch.empty((self._chunk, *part.shape), dtype=part.dtype) for part in self._parts]
        host: list[list[HostValue]] = [[] for _ in self._first.structure.host_names]
        skipped: dict[int, str] = {}
        num_staged = num_kept = 0
        is_random = False
        for index, found in self._progress(self._source.values(self._first.structure, num_workers=self._num_workers), "filling"):
            if isinstance(found, str):
                skipped[index] = found
                is_random |= index == self._first.position  # it could be read before
                continue
            for stage, tensor in zip(staging, found.tensors, strict=True):
                stage[num_staged].copy_(tensor)
            for values, value in zip(host, found.host, strict=True):
                values.append(value)
            if index == self._first.position:
                is_random = not self._is_first([stage[num_staged] for stage in staging])
            num_staged += 1
            if num_staged == self._chunk:
                self._keep(staging, num_kept, num_staged, writer)
                num_kept, num_staged = num_kept + num_staged, 0
        self._keep(staging, num_kept, num_staged, writer)
        if len(skipped) == self._source.num_samples:  # though one could be read before
            raise self._source.nothing_kept(f"sample 0: {skipped[0]}")
        details = CacheDetails(host, skipped, is_random)
        _warn_of(details, self._first.position)
        return details

    def read(self, reader: CacheReader) -> CacheDetails:
        """Copy every sample from a file. Raises StaleCacheError where its bytes are not those that were written."""
        details = reader.details
        num_kept = self._source.num_samples - len(details.skipped)
        copied = reader.read_into(self._storages, num_kept, self._chunk)
        with self._bar("reading the cache", num_kept * len(self._parts)) as bar:
            for count in copied:
                bar.update(count)
        _warn_of(details, self._first.position)
        return details

    def is_unchanged(self, reader: CacheReader) -> bool:
        """Say whether the dataset's first sample is that of the file, as far as a sample is the same each time it is read."""
        return reader.details.is_random or self._is_first([stored.cpu() for stored in reader.first_sample()])

    def _keep(self, staging: Sequence[Tensor], first: int, count: int, writer: CacheWriter | None) -> None:
        for part, (storage, stage) in enumerate(zip(self._storages, staging, strict=True)):
            storage[first : first + count].copy_(stage[:count])
            if writer is not None:
                writer.write(part, first, stage[:count])

    def _is_first(self, stored: Sequence[Tensor]) -> bool:
        """Say whether *stored* are the values of the first sample, bit for bit."""
        read = [tensor.cpu().to(part.dtype) for tensor, part in zip(self._first.values.tensors, self._parts, strict=True)]
        return all(map(_is_same, read, stored))

    def _bar(self, what: str, total: int) -> tqdm[Any]:
        return tqdm(total=total, desc=what, unit=" samples", disable=None if self._shows_progress else True)

    def _progress(self, samples: Iterator[tuple[int, SampleValues | str]], what: str) -> Iterator[tuple[int, SampleValues | str]]:
        with self._bar(what, self._source.num_samples) as bar:
            for each in samples:
                yield each
                bar.update()


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _warn_of(details: CacheDetails, first: int) -> None:
    if details.skipped:
        named = "; ".join(f"sample {index}: {reason}" for index, reason in list(details.skipped.items())[:MOST_NAMED])
        logger.warning(
            "%s skipped: %s%s",
            "1 sample was" if len(details.skipped) == 1 else f"{len(details.skipped):,} samples were",
            named,
            "; …" if len(details.skipped) > MOST_NAMED else "",
        )
    if details.is_random:
        logger.warning("sample %s differs each time it is read: one version of it is kept; random transforms go to the DeviceLoader", first)


def _from_disk_or_filled(path: Path, key: CacheKey, filling: _Filling, on_error: OnError, *, rebuild: bool) -> CacheDetails:
    """Read the file at *path*; fill and write it where there is none, or where one that is stale may be replaced."""
    found, _ = _from_disk(path, key, filling, on_error, rebuild=rebuild)
    if found is not None:
        return found
    with only_one_writer(path):
        found, problem = _from_disk(path, key, filling, on_error, rebuild=rebuild)  # by the process that this one waited for
        if found is not None:
            return found
        if problem:
            logger.warning("%s; it is filled again", problem)
        with writing(path, key) as writer:
            details = filling.fill(writer)
            writer.finish(details)
        return details


def _from_disk(path: Path, key: CacheKey, filling: _Filling, on_error: OnError, *, rebuild: bool) -> tuple[CacheDetails | None, str]:
    """
    Read the file at *path*; None where there is none, or it is stale and may be replaced, with the reason.

    Raises StaleCacheError where it may not.
    """
    if not path.exists():
        return None, ""
    try:
        reader = CacheReader(path, key)
        if reader.details.skipped and on_error == "raise":
            index, reason = next(iter(reader.details.skipped.items()))
            raise reader.stale(f"the cache of the dataset lacks samples that were skipped: sample {index}: {reason}")
        if not filling.is_unchanged(reader):
            raise reader.stale("the first sample of the dataset is not the one in its cache")
        return filling.read(reader), ""
    except StaleCacheError as error:
        if not rebuild:
            raise
        return None, error.message

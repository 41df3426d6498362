"""
A filled dataset as a file: safetensors, with what it was made of in its header.

The file appears whole or not at all. It is written without a name where the file system can (a fill that is killed leaves nothing), its
space is taken before the first sample is written (a full disk is told at once), and it gets its name after everything is on the disk. The
tensors stand in it as on the device, all samples of a value together; a last one, `details`, holds what stays on the host, as JSON. It is
read through a memory map, and every byte is checked against checksums.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch import Tensor

from memplan.data.fingerprint import buffer_of
from memplan.data.samples import HostValue, SampleStructure, TensorPart
from memplan.errors import ConfigError, UsageError, reason_of
from memplan.units import format_bytes

logger = logging.getLogger("memplan")

FORMAT_VERSION = 1
"""Of what the file holds; another is not read."""

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
    **{getattr(torch, name): short for name, short in (("uint16", "U16"), ("uint32", "U32"), ("uint64", "U64")) if hasattr(torch, name)},
}  # fmt: skip
"""The types of the format, by its names."""

_KEY, _CHECKSUMS, _DETAILS = "memplan_dataset", "memplan_checksums", "details"
_BEGINNING = f'{{"__metadata__": {{"{_KEY}": '.encode()
"""Of the header of each cache, behind its length."""
_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


class CacheKey(NamedTuple):
    """Everything that shapes a filled dataset."""

    fingerprint: str
    """Of the dataset and its transform."""
    num_samples: int
    """Of the dataset, those that were skipped included."""
    structure: SampleStructure
    """Of a sample."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as the header of a file has it."""
        parts = [[part.name, list(part.shape), str(part.dtype), str(part.read_dtype)] for part in self.structure.parts]
        return {
            "format": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "num_samples": self.num_samples,
            "values": parts,
            "host_values": list(self.structure.host_names),
        }


class CacheDetails(NamedTuple):
    """What of a filled dataset is not on the device."""

    host: list[list[HostValue]]
    """For each value that stays on the host, that of each sample."""
    skipped: dict[int, str]
    """The samples that were skipped, and why."""
    is_random: bool
    """A sample was not the same when it was read again."""


class StaleCacheError(ConfigError):
    """A file that is damaged, or was made of something else."""


_WHAT_DIFFERS = {
    "format": "another version of memplan's format",
    "fingerprint": "another dataset or transform, or from other code of theirs",
    "num_samples": "another number of samples",
    "values": "values of other names, shapes or types",
    "host_values": "other texts",
}


def _stale(path: Path, problem: str) -> StaleCacheError:
    return StaleCacheError(problem, file=path, hint="remove the file, name another, or let it be replaced: `rebuild=True`")


def _not_a_cache(path: Path) -> ConfigError:
    return ConfigError("this file is not a cache of a dataset", file=path, hint="name another file")


def _begins_as_a_cache(path: Path) -> bool:
    """Say whether a file that cannot be read was a cache once, or is empty: any other is somebody's own, and never replaced."""
    with path.open("rb") as file:
        begins = file.read(8 + len(_BEGINNING))
    return begins[8:] == _BEGINNING or not begins


class CacheReader:
    """
    A file that was made of what *key* says, memory-mapped.

    Raises StaleCacheError where it is damaged, or was made of something else; ConfigError for a file of somebody else's.
    """

    def __init__(self, path: Path, key: CacheKey) -> None:
        self._path, self._parts = path, key.structure.parts
        try:
            self._file = safe_open(path, framework="pt")
            metadata = self._file.metadata() or {}
        except (SafetensorError, OSError) as error:
            if not _begins_as_a_cache(path):
                raise _not_a_cache(path) from error
            raise _stale(path, f"the cache of the dataset is damaged ({error})") from error
        if _KEY not in metadata:
            raise _not_a_cache(path)
        self._check_key(json.loads(metadata[_KEY]), key.as_dict())
        self._checksums: list[int] = json.loads(metadata[_CHECKSUMS])
        self.details = self._read_details()

    def _check_key(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        for name, words in _WHAT_DIFFERS.items():
            if found.get(name) != wanted[name]:
                told = f" ({found.get(name)}, and not {wanted[name]})" if name in ("format", "num_samples", "values") else ""
                raise _stale(self._path, f"the cache of the dataset was made with {words}{told}")

    def _read_details(self) -> CacheDetails:
        tensor = self._file.get_tensor(_DETAILS)
        if zlib.crc32(buffer_of(tensor)) != self._checksums[-1]:
            raise _stale(self._path, "the cache of the dataset is damaged (checksum of its details)")
        return _details_from(bytes(buffer_of(tensor)))

    def stale(self, problem: str) -> StaleCacheError:
        """Return the error for a file that is of no use for *problem*."""
        return _stale(self._path, problem)

    def first_sample(self) -> list[Tensor]:
        """Return the values of the first sample that was kept."""
        return [self._file.get_tensor(f"sample{part.name}")[0] for part in self._parts]

    def read_into(self, storages: Sequence[Tensor], num_samples: int, chunk: int) -> Iterator[int]:
        """
        Copy the first *num_samples* samples into *storages*, *chunk* at a time; yield how many values were copied each time.

        Raises StaleCacheError at the end of a value whose bytes are not those that were written.
        """
        for part, storage, checksum in zip(self._parts, storages, self._checksums, strict=False):
            whole, found = self._file.get_tensor(f"sample{part.name}"), 0
            for begin in range(0, num_samples, chunk):
                some = whole[begin : min(begin + chunk, num_samples)]
                found = zlib.crc32(buffer_of(some), found)
                storage[begin : begin + len(some)].copy_(some)
                yield len(some)
            if found != checksum:
                raise _stale(self._path, f"the cache of the dataset is damaged (checksum of sample{part.name})")


class CacheWriter:
    """Writes a file of samples that come in their order; made by `writing`."""

    def __init__(self, path: Path, descriptor: int, key: CacheKey) -> None:
        self._path, self._descriptor, self._key = path, descriptor, key
        self._checksums = [0] * len(key.structure.parts)
        self._offsets, end = {}, 0
        # Wide types first, so that each begins where its type may.
        for index, part in sorted(enumerate(key.structure.parts), key=lambda each: -each[1].dtype.itemsize):
            self._offsets[index] = (end, end + part.sample_bytes * key.num_samples)
            end = self._offsets[index][1]
        self._end = end
        self._begin = len(self._header(details_bytes=10**15, checksums=[2**32] * (len(self._checksums) + 1)))
        self._take_space(self._begin + end)

    def write(self, part: int, first: int, samples: Tensor) -> None:
        """Write *samples*, on the host and contiguous, of value *part* from sample *first* on."""
        content = buffer_of(samples)
        self._checksums[part] = zlib.crc32(content, self._checksums[part])
        self._write_at(self._begin + self._offsets[part][0] + first * self._key.structure.parts[part].sample_bytes, content)

    def finish(self, details: CacheDetails) -> None:
        """Write what is left, and wait until all of it is on the disk."""
        content = _details_as_bytes(details)
        self._write_at(self._begin + self._end, memoryview(content))
        header = self._header(details_bytes=len(content), checksums=[*self._checksums, zlib.crc32(content)], size=self._begin)
        self._write_at(0, memoryview(header))
        with self._told():
            os.fsync(self._descriptor)

    def _header(self, *, details_bytes: int, checksums: list[int], size: int = 0) -> bytes:
        """Return the beginning of the file, of *size* bytes at least: the length of the rest in 8 bytes, JSON, and blanks."""
        tensors = {
            f"sample{part.name}": {
                "dtype": _DTYPES[part.dtype],
                "shape": [self._key.num_samples, *part.shape],
                "data_offsets": list(self._offsets[index]),
            }
            for index, part in enumerate(self._key.structure.parts)
        }
        tensors[_DETAILS] = {"dtype": "U8", "shape": [details_bytes], "data_offsets": [self._end, self._end + details_bytes]}
        metadata = {_KEY: json.dumps(self._key.as_dict()), _CHECKSUMS: json.dumps(checksums)}
        text = json.dumps({"__metadata__": metadata, **tensors}).encode()
        assert text.startswith(_BEGINNING)
        text = text.ljust(max(size - 8, -(-len(text) // 8) * 8))
        return len(text).to_bytes(8, "little") + text

    def _take_space(self, size: int) -> None:
        with self._told(size):
            try:
                os.posix_fallocate(self._descriptor, 0, size)
            except AttributeError:  # not on this system
                os.truncate(self._descriptor, size)
            except OSError as error:
                if error.errno in _FULL:
                    raise
                os.truncate(self._descriptor, size)  # a file system that cannot

    def _write_at(self, offset: int, content: memoryview) -> None:
        with self._told():
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            while content:
                content = content[os.write(self._descriptor, content) :]

    @contextlib.contextmanager
    def _told(self, size: int | None = None) -> Iterator[None]:
        """Tell what the system refuses as an error of the file."""
        try:
            yield
        except OSError as error:
            needs = "" if size is None else f": it takes {format_bytes(size)}, and {_free(self._path)} are free"
            raise ConfigError(
                f"the cache of the dataset could not be written ({reason_of(error)}){needs}",
                file=self._path,
                hint="free some space, name a file on another disk, or leave `cache_file` out",
            ) from error


def _free(path: Path) -> str:
    return format_bytes(shutil.disk_usage(path.parent).free)


def check_can_be_cached(parts: Sequence[TensorPart]) -> None:
    """Raise UsageError for a value whose type the format does not have."""
    for part in parts:
        if part.dtype not in _DTYPES:
            raise UsageError(f"sample{part.name} is {part.dtype}, which safetensors does not have", hint="leave `cache_file` out")


@contextlib.contextmanager
def only_one_writer(path: Path) -> Iterator[None]:
    """Wait until no other process fills this file. Raises ConfigError where its folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("%s: waiting for the process that fills it", path)
            lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"the cache of the dataset cannot be written ({reason_of(error)})", file=path, hint="name a file that can be"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def writing(path: Path, key: CacheKey) -> Iterator[CacheWriter]:
    """Give what writes the file at *path*, which has its name, or takes the place of another, when the block ends; not where it fails."""
    for left in path.parent.glob(f".{path.name}.*.partial"):  # of one that was killed where files need a name
        left.unlink()
    descriptor, name = _open_new(path)
    try:
        try:
            yield CacheWriter(path, descriptor, key)
            name = name or _name_it(descriptor, path)
        finally:
            os.close(descriptor)
        Path(name).replace(path)
        _sync_folder(path.parent)
    except BaseException:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise


def _open_new(path: Path) -> tuple[int, str | None]:
    """Open a new file on the disk of *path*; return its name too where it needs one."""
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # a file system that cannot
            return os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666), None
    return tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)


def _name_it(descriptor: int, path: Path) -> str:
    """Give a file without a name one, which no other has."""
    name = str(path.with_name(f".{path.name}.{os.getpid()}.partial"))
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # With a folder given Python calls linkat, which follows the link; link alone would not.
        os.link(f"/proc/self/fd/{descriptor}", name, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
    return name


def _sync_folder(folder: Path) -> None:
    """Wait until the names of *folder* are on the disk; where that cannot be asked for, they come to be so by themselves."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _details_as_bytes(details: CacheDetails) -> bytes:
    host = [
        [{"base64": base64.b64encode(each).decode()} if isinstance(each, bytes) else each for each in values] for values in details.host
    ]
    skipped = {str(index): reason for index, reason in details.skipped.items()}
    return json.dumps({"host": host, "skipped": skipped, "is_random": details.is_random}).encode()


def _details_from(content: bytes) -> CacheDetails:
    read = json.loads(content)
    host = [[base64.b64decode(each["base64"]) if isinstance(each, dict) else each for each in values] for values in read["host"]]
    return CacheDetails(host, {int(index): reason for index, reason in read["skipped"].items()}, read["is_random"])

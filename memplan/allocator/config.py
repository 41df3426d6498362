"""
The caching allocator's settings, read from the text that PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) holds.

Read as PyTorch 2.13 reads it: c10/core/AllocatorConfig.cpp, then c10/cuda/CUDAAllocatorConfig.cpp for what is CUDA's own. That reader is
lenient where one would not think so (whatever stands where a colon should is taken for one, and "64MB" is 64), and this one is too: what
PyTorch accepts is accepted, with the same meaning, and what it refuses is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from memplan.errors import UsageError
from memplan.traces.block_sizes import LARGE_SEGMENT_BYTES, MIN_LARGE_BYTES
from memplan.units import MIB

NUM_INTERVALS = 16
"""Sizes from 1 MiB up to 64 GiB, one interval for each power of two, have their own roundup_power2_divisions."""

_MOST = 2**64 - 1
"""A size_t without a limit."""

_CUDA_FLAGS = (
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "graph_capture_record_stream_reuse", "pinned_free_catch_all", "throw_on_cudamalloc_oom",
)  # fmt: skip
"""Settings that are True or False and decide nothing that is simulated here."""

_WHOLE = re.compile(r"[+-]?\d+")
_REAL = re.compile(r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)")


@dataclass(frozen=True)
class AllocatorSettings:
    """What decides how the allocator rounds, splits and gives back."""

    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    """A segment for requests between 1 and 10 MiB."""

    max_split_bytes: int | None = None
    """Blocks of this size or more are never split; None: every block may be."""

    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """How much larger than asked for a block may be that is not split."""

    roundup_power2_divisions: tuple[int, ...] = field(default=(0,) * NUM_INTERVALS)
    """Into how many steps each power of two is divided for rounding, from 1 MiB on; 0: multiples of 512 bytes."""

    garbage_collection_threshold: float = 0.0
    """The share of what the process may have above which old cached segments are given back first; 0: never."""

    expandable_segments: bool = False
    """One segment a stream, which grows by mapping pages."""

    memory_fraction: float | None = None
    """The share of the GPU that the process may have (per_process_memory_fraction); None: none was set."""

    backend: str = "native"
    """native is the caching allocator; cudaMallocAsync is CUDA's own, which is not simulated."""


def read_settings(text: str) -> AllocatorSettings:
    """
    Return the settings that *text* ("max_split_size_mb:128,expandable_segments:True") says; all defaults where it is empty.

    Raises UsageError where PyTorch would refuse to start.
    """
    return _Reader(text).read()


class _Reader:
    """Walks over the words of the text, as PyTorch's tokenizer makes them: commas, colons, brackets, and what is between."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words: list[str] = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text))
        self._at = 0
        self._found: dict[str, object] = {}
        self._large_segment_bytes = AllocatorSettings.large_segment_bytes
        self._divisions = [0] * NUM_INTERVALS

    def read(self) -> AllocatorSettings:
        # Whatever its place in the text: the two sizes of splitting are compared with it.
        for index, word in enumerate(self._words):
            if word == "large_segment_size_mb":
                self._at = index
                self._read_large_segment()
        self._found["max_non_split_rounding_bytes"] = self._large_segment_bytes
        self._at = 0
        while self._at < len(self._words):
            self._read_setting()
            self._at += 2  # the comma, whatever stands there, and on to the next
        return AllocatorSettings(
            large_segment_bytes=self._large_segment_bytes,
            roundup_power2_divisions=tuple(self._divisions),
            **self._found,  # type: ignore[arg-type]  # each by its own reader
        )

    def _read_setting(self) -> None:
        name = self._words[self._at]
        readers: dict[str, Callable[[], None]] = {
            "large_segment_size_mb": self._skip,
            "max_split_size_mb": lambda: self._keep("max_split_bytes", self._split_size()),
            "max_non_split_rounding_mb": lambda: self._keep("max_non_split_rounding_bytes", self._split_size()),
            "garbage_collection_threshold": lambda: self._keep(
                "garbage_collection_threshold", self._share("in (0.0, 1.0)", lambda share: 0 < share < 1)
            ),
            "roundup_power2_divisions": self._read_divisions,
            "expandable_segments": lambda: self._keep("expandable_segments", self._flag()),
            "pinned_use_background_threads": lambda: self._drop(self._flag()),
            "per_process_memory_fraction": lambda: self._keep(
                "memory_fraction", _below_one(self._share("in [0.0, 1.0]", lambda share: 0 <= share <= 1))
            ),
            "backend": self._read_backend,
            "pinned_num_register_threads": self._read_threads,
            "pinned_reserve_segment_size_mb": lambda: self._drop(self._whole() or self._refuse("the segment has to be larger than 0")),
            "pinned_max_round_threshold_mb": lambda: self._drop(self._whole()),
            "pinned_max_cached_size_mb": lambda: self._drop(self._whole()),
        } | {flag: lambda: self._drop(self._flag()) for flag in _CUDA_FLAGS}
        if name not in readers:
            self._refuse(f"unknown setting {name!r}")
        readers[name]()

    def _keep(self, field_name: str, value: object) -> None:
        self._found[field_name] = value

    def _drop(self, value: object) -> None:
        """Take a value that only had to be right."""

    def _value(self) -> str:
        """Return the word behind the colon."""
        self._at += 2
        return self._word(self._at)

    def _word(self, index: int) -> str:
        if index >= len(self._words):
            self._refuse("it ends where a value should be")
        return self._words[index]

    def _whole(self) -> int:
        return self._as_whole(self._value())

    def _as_whole(self, word: str) -> int:
        """Return the number that *word* begins with, as std::stoull does: a minus wraps around."""
        found = _WHOLE.match(word)
        if found is None or abs(int(found[0])) > _MOST:
            self._refuse(f"{word!r} is not a number")
        return int(found[0]) % 2**64

    def _share(self, bounds: str, is_right: Callable[[float], bool]) -> float:
        word = self._value()
        found = _REAL.match(word)
        if found is None or not is_right(float(found[0])):
            self._refuse(f"{word!r} is not {bounds}")
        return float(found[0])

    def _flag(self) -> bool:
        word = self._value()
        if word not in ("True", "False"):
            self._refuse(f"{word!r} is neither True nor False")
        return word == "True"

    def _read_large_segment(self) -> None:
        size_mib = self._whole()
        if size_mib * MIB <= MIN_LARGE_BYTES:
            self._refuse(f"large_segment_size_mb must be more than {MIN_LARGE_BYTES // MIB}")
        self._large_segment_bytes = min(size_mib, _MOST // MIB) * MIB

    def _split_size(self) -> int:
        size_mib = self._whole()
        if size_mib < self._large_segment_bytes // MIB:
            self._refuse(f"the size must be at least that of a large segment, {self._large_segment_bytes // MIB}")
        return min(size_mib, _MOST // MIB) * MIB

    def _skip(self) -> None:
        """Step over a value, which may be a list."""
        if self._value() == "[":
            while self._word(self._at) != "]":
                self._at += 1

    def _read_backend(self) -> None:
        word = self._value()
        if word not in ("native", "cudaMallocAsync"):
            self._refuse(f"backend is native or cudaMallocAsync, not {word!r}")
        self._keep("backend", word)

    def _read_threads(self) -> None:
        count = self._whole()
        if not _is_power_of_two(count) or count > 128:
            self._refuse("pinned_num_register_threads is a power of two, up to 128")

    def _read_divisions(self) -> None:
        """Read one number for all sizes, or a list [256:1,512:2,>:4] of sizes in MiB with their own."""
        if self._value() != "[":
            divisions = self._as_whole(self._words[self._at])
            if not _is_power_of_two(divisions):
                self._refuse("roundup_power2_divisions is a power of two")
            self._divisions = [divisions] * NUM_INTERVALS
            return
        is_first, last = True, 0
        self._at += 1
        while self._word(self._at) != "]":
            boundary = self._words[self._at]
            divisions = self._whole()
            if divisions and not _is_power_of_two(divisions):
                self._refuse("the divisions are powers of two, or 0")
            if boundary == ">":
                self._divisions[last + 1 :] = [divisions] * (NUM_INTERVALS - last - 1)
            else:
                size_mib = self._as_whole(boundary)
                if not _is_power_of_two(size_mib):
                    self._refuse("the sizes are powers of two")
                last = min(size_mib.bit_length() - 1, NUM_INTERVALS - 1)
                if is_first:
                    self._divisions[:last] = [divisions] * last
                    is_first = False
                self._divisions[last] = divisions
            self._at += 1 if self._word(self._at + 1) == "]" else 2

    def _refuse(self, problem: str) -> NoReturn:
        raise UsageError(
            f"PYTORCH_ALLOC_CONF={self._text}: {problem}", hint="it is written as max_split_size_mb:128,expandable_segments:True"
        )


def _below_one(share: float) -> float | None:
    """Return *share*; all of the GPU is what a process without a share has."""
    return share if share < 1 else None


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0

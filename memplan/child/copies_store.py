"""The store by which ranks tell each other of their start, where the other ranks are not there."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from memplan.child.one_rank import NeedsOtherRankError

_NUMBER = re.compile(r"\d+")
_COMMUNICATOR = re.compile(r"cuda(:\d+)?//?\d+(:\d+)?$")
"""Under such a key the first rank of an NCCL communicator leaves its identifier (`ProcessGroupNCCL::broadcastUniqueNCCLID` of 2.13)."""
_IDENTIFIER_BYTES = 128


_kept: list[Any] = []
"""Every store: PyTorch's threads use one for as long as the process lives, and hold no reference to its Python half."""


class CopiesStore(Store):
    """
    A store in which every other rank has written what this one has, under the key with its own number, and counted as often.

    Whoever waits for another rank does not have to: it has been here.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        _kept.append(self)
        self._num_ranks = num_ranks
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._timeout = timedelta(minutes=30)

    def set(self, key: str, value: Any) -> None:
        """Keep *value*."""
        with self._lock:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """
        Return what is kept, or what the rank in *key* would have kept.

        Raises NeedsOtherRankError where this rank kept nothing like it.
        """
        with self._lock:
            found = self._found(key)
        if found is not None:
            return found
        if _COMMUNICATOR.search(key):
            return bytes(_IDENTIFIER_BYTES)
        raise NeedsOtherRankError(f"the program waits for what another rank stores as {key!r}")

    def _found(self, key: str) -> bytes | None:
        if key in self._values:
            return self._values[key]
        return next((value for own, value in self._values.items() if _differ_by_a_number(own, key)), None)

    def add(self, key: str, amount: int) -> int:
        """Add *amount* for each rank."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount * self._num_ranks
            self._values[key] = str(total).encode()
            return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set *desired* where *expected* is kept, or nothing and nothing is expected; return what is kept then."""
        expected, desired = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired))
        with self._lock:
            if self._values.get(key, b"") == expected:
                self._values[key] = desired
            return self._values.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        """Say whether all of *keys* are kept."""
        with self._lock:
            return all(self._found(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return: the others have set them."""

    def delete_key(self, key: str) -> bool:
        """Forget a key; say whether it was there."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return len(self._values)

    def append(self, key: str, value: Any) -> None:
        """Put *value* behind what is kept."""
        with self._lock:
            self._values[key] = self._values.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return what is kept of each key."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Keep each value."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Say that the three above are there."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Keep the time, for whoever asks: nothing here waits."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """Return that time."""
        return self._timeout

    def clone(self) -> CopiesStore:
        """Return the same."""
        return self


def _differ_by_a_number(own: str, other: str) -> bool:
    """Say whether the keys are those of two ranks: alike, but for one of the numbers in them."""
    if _NUMBER.sub("#", own) != _NUMBER.sub("#", other):
        return False
    return sum(mine != theirs for mine, theirs in zip(_NUMBER.findall(own), _NUMBER.findall(other), strict=True)) == 1

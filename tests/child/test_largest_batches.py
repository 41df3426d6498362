"""Walking through a DataLoader: how far, what other runs of the program make of it, and what the program's own batches are then."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from memplan.child import largest_batches
from memplan.child.largest_batches import Walk, Walker, WalkLimits


class Texts(Dataset[torch.Tensor]):
    """Texts of some lengths, each of which draws numbers as it is made, and takes time."""

    def __init__(self, *lengths: int, seconds: float = 0.0) -> None:
        self.lengths, self.seconds = lengths, seconds
        self.num_made = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        self.num_made += 1
        random.random()
        np.random.random()
        return torch.full((self.lengths[index],), torch.rand(()).item())


class Endless(DataLoader[Any]):
    """A DataLoader that begins anew where its data end, and says how long an epoch is."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        while True:
            yield from super().__iter__()


class Unkept(list[torch.Tensor]):
    """A batch that cannot be written to a file."""

    def __reduce__(self) -> Any:
        raise TypeError("no file can hold it")


def walk(loader: DataLoader[Any], **limits: Any) -> Walk:
    """Walk through it as far as *limits* say, 100 batches unless they do."""
    return Walker(WalkLimits(**{"most": 100, **limits}), samples_of=lambda _: None).walk(loader, lambda: iter(loader))


def lengths_of(found: Walk) -> list[int]:
    """The lengths of the batches that were found."""
    return [len(given.batch) for given in found.largest]


def test_the_largest_of_an_epoch_is_found() -> None:
    """All of it was looked at."""
    found = walk(DataLoader(Texts(10, 70, 20), batch_size=None))

    assert (found.num_batches, found.was_cut, lengths_of(found)) == (3, False, [70])


def test_a_walk_ends_where_it_is_to() -> None:
    """A later batch may be larger then."""
    found = walk(DataLoader(Texts(10, 20, 70), batch_size=None), most=2)

    assert (found.num_batches, found.was_cut, lengths_of(found)) == (2, True, [20])


def test_an_endless_dataloader_is_looked_at_for_one_epoch() -> None:
    """As a program has it that keeps its workers; that is not cut."""
    found = walk(Endless(Texts(10, 70, 20), batch_size=None))

    assert (found.num_batches, found.was_cut, lengths_of(found)) == (3, False, [70])


def test_slow_data_are_looked_at_for_some_time(tmp_path: Path) -> None:
    """One batch at least; as many in each run of the program, however fast that is."""
    slow, fast = (DataLoader(Texts(10, 20, 70, seconds=seconds), batch_size=None) for seconds in (0.2, 0.0))

    first = walk(slow, seconds=0.3, folder=tmp_path)

    assert (first.num_batches, first.was_cut, lengths_of(first)) == (2, True, [20])
    assert walk(fast, seconds=0.3, folder=tmp_path)[:2] == first[:2]


def test_what_one_run_has_found_serves_the_next(tmp_path: Path) -> None:
    """With the same numbers in it, and without making a batch; another DataLoader is walked through by itself."""
    first, again, other = Texts(10, 70, 20), Texts(10, 70, 20), Texts(10, 30)

    found = walk(DataLoader(first, batch_size=None), folder=tmp_path)
    kept = walk(DataLoader(again, batch_size=None), folder=tmp_path)
    of_other = walk(DataLoader(other, batch_size=None), folder=tmp_path)

    assert torch.equal(found.largest[0].batch, kept.largest[0].batch)
    assert (again.num_made, lengths_of(of_other)) == (0, [30])


@pytest.mark.parametrize("reason", ["it has no file", "it is too large"])
def test_batches_that_cannot_be_kept_are_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """As many of them as before."""
    if reason == "it is too large":
        monkeypatch.setattr(largest_batches, "MOST_KEPT_BYTES", 100)
    samples = Texts(10, 20, 70, 30)
    loader = DataLoader(samples, batch_size=1, collate_fn=Unkept if reason == "it has no file" else lambda made: made[0])

    found = walk(loader, folder=tmp_path, most=3)
    again = walk(loader, folder=tmp_path)

    assert (found[:2], again[:2], samples.num_made) == ((3, True), (3, True), 6)
    assert not list(tmp_path.glob("*.*"))


def test_a_file_that_cannot_be_read_is_no_walk(tmp_path: Path) -> None:
    """Its batches are looked at as ever."""
    samples = Texts(10, 70)
    walk(DataLoader(samples, batch_size=None), folder=tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(b"no walk")

    assert lengths_of(walk(DataLoader(samples, batch_size=None), folder=tmp_path)) == [70]


@pytest.mark.parametrize("is_own", [False, True])
def test_a_programs_own_batches_are_those_that_it_has_without_a_walk(is_own: bool) -> None:
    """What a walk draws, of PyTorch's numbers, NumPy's, Python's or a generator of the program's, is drawn again."""

    def order(is_walked: bool) -> list[float]:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        samples = Texts(*range(1, 9))
        generator = torch.Generator().manual_seed(2) if is_own else None
        loader = DataLoader(samples, batch_size=None, sampler=RandomSampler(samples, generator=generator))
        if is_walked:
            walk(loader)
        drawn = [random.random(), float(np.random.random())]
        return [*drawn, *(float(batch.sum()) for batch in loader)]

    assert order(is_walked=True) == order(is_walked=False)

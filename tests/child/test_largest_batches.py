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
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

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
    slow, fast = (DataLoader(Texts(*range(10, 60), seconds=seconds), batch_size=None) for seconds in (0.1, 0.0))

    first = walk(slow, seconds=0.3, folder=tmp_path)
    again = walk(fast, seconds=0.3, folder=tmp_path)

    assert 1 <= first.num_batches < 50
    assert first.was_cut
    assert (again.num_batches, again.was_cut, lengths_of(again)) == (first.num_batches, True, lengths_of(first))


def test_each_run_looks_at_as_many_batches_of_a_dataloader(tmp_path: Path) -> None:
    """Of each by itself; whether it has more was seen by the first."""
    whole = walk(DataLoader(Texts(10, 70, 20), batch_size=None), folder=tmp_path)
    other = walk(DataLoader(Texts(10, 20, 70, 30), batch_size=None), most=2, folder=tmp_path)

    assert walk(DataLoader(Texts(10, 70, 20), batch_size=None), most=1, folder=tmp_path)[:2] == whole[:2] == (3, False)
    assert walk(DataLoader(Texts(10, 20, 70, 30), batch_size=None), folder=tmp_path)[:2] == other[:2] == (2, True)
    assert not list(tmp_path.glob("*.*"))


@pytest.mark.parametrize("content", [b"no walk", b"[3]", b"{}", b"\xff"])
def test_a_file_that_says_nothing_is_no_walk(tmp_path: Path, content: bytes) -> None:
    """The batches are looked at as ever; and where nothing can be written, too."""
    samples = Texts(10, 70)
    walk(DataLoader(samples, batch_size=None), folder=tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(content)

    assert lengths_of(walk(DataLoader(samples, batch_size=None), folder=tmp_path)) == [70]
    assert lengths_of(walk(DataLoader(samples, batch_size=None), folder=tmp_path / "none")) == [70]


def test_batches_of_sparse_tensors_are_looked_at(tmp_path: Path) -> None:
    """As graph networks have them."""
    loader = DataLoader(Texts(10, 70, 20), batch_size=1, collate_fn=lambda made: made[0].to_sparse())

    assert walk(loader, folder=tmp_path)[:2] == (3, False)


@pytest.mark.parametrize("generator_of", ["none", "sampler", "batches"])
def test_a_programs_own_batches_are_those_that_it_has_without_a_walk(generator_of: str) -> None:
    """What a walk draws, of PyTorch's numbers, NumPy's, Python's or a generator of the program's, is drawn again."""

    def order(is_walked: bool) -> list[float]:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        samples = Texts(*range(1, 9))
        sampler = RandomSampler(samples, generator=None if generator_of == "none" else torch.Generator().manual_seed(2))
        is_of_batches = generator_of == "batches"
        how = {"batch_sampler": BatchSampler(sampler, 1, drop_last=False)} if is_of_batches else {"batch_size": None, "sampler": sampler}
        loader: DataLoader[Any] = DataLoader(samples, **how)
        if is_walked:
            walk(loader)
        drawn = [random.random(), float(np.random.random())]
        return [*drawn, *(float(batch.sum()) for batch in loader)]

    assert order(is_walked=True) == order(is_walked=False)

"""DataLoaders with fewer workers: what they give, and what the program sees of them."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from memplan.child.fewer_workers import use_fewer_workers

NUM_SAMPLES = 64

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # PyTorch's own, of more workers than processors


class Samples(Dataset[tuple[int, int]]):
    """Numbers, with who loaded each; how many were loaded is counted."""

    def __init__(self) -> None:
        self.num_loaded: Any = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        """Return how many there are."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return the sample at *index*, and the number of its worker."""
        with self.num_loaded.get_lock():
            self.num_loaded.value += 1
        worker = get_worker_info()
        return index, -1 if worker is None else worker.id


@pytest.fixture(autouse=True)
def at_most_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, as on a machine with two processors, while the test lasts."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "__init__", _MultiProcessingDataLoaderIter.__init__)  # and back
    use_fewer_workers(2)


@pytest.mark.parametrize(("asked", "begun"), [(5, {0, 1}), (1, {0}), (0, {-1})])
def test_no_more_workers_begin_than_there_are_processors(asked: int, begun: set[int]) -> None:
    """Their batches are those of the program, in its order, and it reads the number that it gave."""
    loader = DataLoader(Samples(), batch_size=4, num_workers=asked)

    batches = list(loader)

    assert [number for numbers, _ in batches for number in numbers.tolist()] == list(range(NUM_SAMPLES))
    assert {worker for _, workers in batches for worker in workers.tolist()} == begun
    assert loader.num_workers == asked


def test_each_worker_is_one_batch_ahead() -> None:
    """Of a program that takes one batch two more are begun, where it would be twenty."""
    samples = Samples()
    batches = iter(DataLoader(samples, batch_size=4, num_workers=5, prefetch_factor=4))

    next(batches)
    del batches  # its workers end what they have begun

    assert samples.num_loaded.value <= 3 * 4


def test_workers_that_stay_begin_each_epoch_anew() -> None:
    """As a DataLoader with persistent workers has them."""
    loader = DataLoader(Samples(), batch_size=16, num_workers=3, persistent_workers=True)

    assert [len(list(loader)) for _ in range(3)] == [4, 4, 4]

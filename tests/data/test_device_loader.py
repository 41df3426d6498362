"""The order of batches: that of PyTorch's own samplers, and the rest of it after a state was loaded."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from memplan.data import DeviceCachedDataset, DeviceLoader
from memplan.errors import UsageError


def cached(num_samples: int) -> DeviceCachedDataset:
    """A dataset whose samples are their indices."""
    return DeviceCachedDataset(list(range(num_samples)), "cpu", progress=False)


def indices(loader: DeviceLoader) -> list[list[int]]:
    """The samples of each batch of an epoch."""
    return [batch.tolist() for batch in loader]


sizes = {"num_samples": st.integers(1, 40), "batch_size": st.integers(1, 9), "drop_last": st.booleans()}


@settings(max_examples=60, deadline=None)
@given(**sizes, seed=st.integers(0, 2**32))
def test_with_a_generator_the_order_is_that_of_a_random_sampler(num_samples: int, batch_size: int, drop_last: bool, seed: int) -> None:
    """Of each epoch. (A RandomSampler draws twice for an epoch, and does not use the second.)"""
    ours, theirs = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    loader = DeviceLoader(cached(num_samples), batch_size, shuffle=True, drop_last=drop_last, generator=ours)
    sampler = BatchSampler(RandomSampler(range(num_samples), generator=theirs), batch_size, drop_last)

    for _ in range(3):
        theirs.set_state(ours.get_state())
        expected = list(sampler)
        assert indices(loader) == expected
        assert len(loader) == len(expected)


@settings(max_examples=100, deadline=None)
@given(**sizes, shuffle=st.booleans(), num_replicas=st.integers(1, 5), seed=st.integers(0, 1000), epoch=st.integers(0, 5))
def test_the_shards_are_those_of_a_distributed_sampler(
    num_samples: int, batch_size: int, drop_last: bool, shuffle: bool, num_replicas: int, seed: int, epoch: int
) -> None:
    """Of every rank, in every epoch."""
    if drop_last and num_samples < num_replicas:  # DistributedSampler of an empty shard computes less than none
        return
    dataset = cached(num_samples)
    for rank in range(num_replicas):
        sampler = DistributedSampler(range(num_samples), num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        loader = DeviceLoader(dataset, batch_size, shuffle, drop_last=drop_last, seed=seed, num_replicas=num_replicas, rank=rank)
        sampler.set_epoch(epoch)
        loader.set_epoch(epoch)

        assert indices(loader) == list(BatchSampler(sampler, batch_size, drop_last))


@settings(max_examples=60, deadline=None)
@given(**sizes, stop=st.integers(0, 12), with_generator=st.booleans(), epochs=st.integers(0, 2))
def test_a_loaded_state_goes_on_in_the_middle_of_an_epoch(
    num_samples: int, batch_size: int, drop_last: bool, stop: int, with_generator: bool, epochs: int
) -> None:
    """With the batches that were left, and then with the next epochs."""

    def loader() -> DeviceLoader:
        options: dict[str, Any] = {"generator": torch.Generator().manual_seed(3)} if with_generator else {"seed": 3}
        return DeviceLoader(cached(num_samples), batch_size, shuffle=True, drop_last=drop_last, **options)

    first = loader()
    for _ in range(epochs):
        indices(first)
    under_way = iter(first)
    list(itertools.islice(under_way, min(stop, len(first))))
    state = first.state_dict()
    left = [[batch.tolist() for batch in under_way], indices(first), indices(first)]

    again = loader()
    again.load_state_dict(state)

    assert [indices(again), indices(again), indices(again)] == left


def test_a_state_is_numbers() -> None:
    """JSON keeps it."""
    loader = DeviceLoader(cached(10), 3, shuffle=True, seed=5)
    next(iter(loader))

    assert json.loads(json.dumps(loader.state_dict()))["num_batches"] == 1


def test_set_epoch_after_a_state_keeps_the_place() -> None:
    """The usual loop calls it before each epoch; an epoch that was left is begun again."""
    loader = DeviceLoader(cached(10), 4, shuffle=True, seed=5)
    whole = indices(loader)
    loader.set_epoch(0)
    next(iter(loader))
    state = loader.state_dict()
    loader.set_epoch(0)
    assert indices(loader) == whole

    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert indices(loader) == whole[1:]


def test_every_iteration_has_another_order() -> None:
    """As a DataLoader's; also of one that was left before its end."""
    loader = DeviceLoader(cached(100), 100, shuffle=True)
    first, second = indices(loader), indices(loader)
    next(iter(loader))
    third = indices(loader)

    assert sorted(first[0]) == sorted(second[0]) == list(range(100))
    assert first != second != third != first


def test_the_default_seed_is_that_of_the_program() -> None:
    """`torch.manual_seed` decides, as for a DataLoader."""
    orders = []
    for _ in range(2):
        torch.manual_seed(1)
        orders.append(indices(DeviceLoader(cached(50), 50, shuffle=True)))

    assert orders[0] == orders[1]


def test_the_ranks_of_torch_distributed_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is initialized; all ranks have the same seed then."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        loader = DeviceLoader(cached(10), 2)
        assert (loader.num_replicas, loader.rank, loader.seed) == (4, 2, 0)
        assert indices(loader) == [[2, 6], [0]]
    finally:
        torch.distributed.destroy_process_group()


def test_a_transform_gets_whole_batches() -> None:
    """And what it returns is the batch."""
    loader = DeviceLoader(cached(5), 2, transform=lambda batch: batch * 10)

    assert indices(loader) == [[0, 10], [20, 30], [40]]


def test_batches_are_those_of_a_dataloader() -> None:
    """Of nested samples with texts, the containers included."""
    samples = [{"image": torch.full((2, 2), number), "meta": (number, f"text {number}")} for number in range(7)]
    ours = list(DeviceLoader(DeviceCachedDataset(samples, "cpu"), 3))
    theirs = list(DataLoader(samples, 3))  # type: ignore[arg-type]

    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine["image"], other["image"])
        assert torch.equal(mine["meta"][0], other["meta"][0])
        assert list(mine["meta"][1]) == list(other["meta"][1])
        assert type(mine["meta"]) is type(other["meta"]) is list


def test_a_dataloader_takes_the_cached_dataset() -> None:
    """It is a Dataset."""
    batches = [batch.tolist() for batch in DataLoader(cached(5), 2)]

    assert batches == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, "batch_size=0 is not valid"),
        ({"batch_size": None}, "batch_size=None is not valid"),
        ({"num_replicas": 2, "rank": 2}, "rank=2 of num_replicas=2 is not valid"),
        ({"generator": torch.Generator()}, "a generator goes with shuffle=True"),
        ({"generator": torch.Generator(), "shuffle": True, "num_replicas": 2}, "a generator goes with"),
        ({"generator": torch.Generator(), "shuffle": True, "seed": 1}, "a generator goes with"),
    ],
)
def test_what_makes_no_sense_is_an_error(options: dict[str, Any], error: str) -> None:
    """In one line."""
    with pytest.raises(UsageError, match=error):
        DeviceLoader(cached(3), **options)


def test_a_dataset_that_is_not_cached_is_an_error() -> None:
    """It says what to do."""
    with pytest.raises(UsageError, match="the dataset is a list"):
        DeviceLoader([1, 2, 3])  # type: ignore[arg-type]


def test_a_state_of_another_loader_is_refused() -> None:
    """It names what differs: the order would be another."""
    state = DeviceLoader(cached(10), 2, shuffle=True, seed=1).state_dict()

    with pytest.raises(UsageError, match="the state was taken with num_samples 10, and not 11, batch_size 2, and not 3"):
        DeviceLoader(cached(11), 3, shuffle=True, seed=1).load_state_dict(state)
    with pytest.raises(UsageError, match="not the state of a DeviceLoader"):
        DeviceLoader(cached(11), 3).load_state_dict({})  # type: ignore[typeddict-item]

"""
`DeviceLoader`: batches of a DeviceCachedDataset, in the place of a DataLoader.

The order of an epoch is drawn on the device, and a batch is one `index_select` for each value of a sample: no Python loop over samples, no
worker, no transfer. The order is a function of a seed and the number of the epoch, as that of PyTorch's DistributedSampler, or is drawn
from a generator, as that of its RandomSampler. So a state of a few numbers is enough to go on in the middle of an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch import distributed as dist

from memplan.data.device_cache import DeviceCachedDataset
from memplan.errors import UsageError

STATE_VERSION = 1


class LoaderState(TypedDict):
    """Where a loader is; `torch.save` and JSON can keep it, where no generator was given."""

    version: int
    """Of this format."""
    epoch: int
    """The epoch that is under way, or comes next."""
    num_batches: int
    """Batches of it that were returned."""
    seed: int
    """What the order is drawn from."""
    generator_state: Tensor | None
    """That of the given generator before it drew the order of the epoch; None without one, or between two epochs."""
    made_with: dict[str, Any]
    """What the order depends on besides."""


class DeviceLoader:
    """
    Batches of a :class:`DeviceCachedDataset`, with the arguments of PyTorch's DataLoader and DistributedSampler.

    Each iteration is an epoch. With `shuffle` each has another order; :meth:`set_epoch` chooses it. The batches are those of
    `default_collate` of the samples, on the device of the dataset.

    Args:
        dataset: The samples.
        batch_size: Samples of a batch, on each rank.
        shuffle: Draw a new order for each epoch.
        drop_last: Leave out a last batch that is smaller. Of several ranks: also leave out samples, fewer than ranks, rather than
            give some of them twice, which is what is done without it so that all ranks have as many.
        generator: Where the order is drawn from, instead of `seed`: on the CPU, or on the dataset's device. Only for one rank.
        seed: What the order is drawn from, together with the epoch; the same on all ranks. Default: drawn from PyTorch's default
            generator for one rank, 0 for several.
        num_replicas: Ranks that share the samples. Default: the world size of `torch.distributed` if it is initialized, else 1.
        rank: Which of them this is. Default: that of `torch.distributed`, else 0.
        transform: Is called with each batch; what it returns takes its place. Random transforms go here.

    Raises:
        UsageError: If an argument makes no sense, or contradicts another.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from memplan.data import DeviceCachedDataset, DeviceLoader
    >>> cached = DeviceCachedDataset(TensorDataset(torch.arange(10)), device="cpu")
    >>> loader = DeviceLoader(cached, batch_size=4, shuffle=True, seed=0, drop_last=True)
    >>> len(loader), [len(numbers) for [numbers] in loader]
    (2, [4, 4])

    """

    def __init__(
        self,
        dataset: DeviceCachedDataset,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.generator = generator
        self.num_replicas = num_replicas if num_replicas is not None else dist.get_world_size() if is_distributed else 1
        self.rank = rank if rank is not None else dist.get_rank() if is_distributed else 0
        self.transform = transform
        self._check(seed)
        self.seed = seed if seed is not None else 0 if self.num_replicas > 1 else int(torch.empty((), dtype=torch.int64).random_())
        """What the order is drawn from, together with the epoch."""
        self.epoch = 0
        """The epoch that is under way, or comes next."""
        self._num_batches = 0
        self._generator_state: Tensor | None = None
        self._is_under_way = False

    def _check(self, seed: int | None) -> None:
        if not isinstance(self.dataset, DeviceCachedDataset):
            raise UsageError(
                f"the dataset is a {type(self.dataset).__name__}", hint="make it one on the device: `DeviceCachedDataset(dataset)`"
            )
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise UsageError(f"batch_size={self.batch_size!r} is not valid", hint="give a whole number from 1 on")
        if self.num_replicas < 1 or not 0 <= self.rank < self.num_replicas:
            raise UsageError(f"rank={self.rank} of num_replicas={self.num_replicas} is not valid", hint="ranks count from 0")
        if self.generator is not None and (not self.shuffle or seed is not None or self.num_replicas > 1):
            raise UsageError(
                "a generator goes with shuffle=True, one rank and no seed", hint="with several ranks give the same `seed` to all"
            )

    @property
    def num_samples(self) -> int:
        """Return the samples of an epoch on this rank."""
        whole, rest = divmod(len(self.dataset), self.num_replicas)
        return whole + (rest > 0 and not self.drop_last)

    def __len__(self) -> int:
        """Return the batches of an epoch on this rank."""
        return self.num_samples // self.batch_size if self.drop_last else math.ceil(self.num_samples / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """
        Choose the epoch of the next iteration, as of a DistributedSampler. Not needed: each iteration is the next epoch.

        After :meth:`load_state_dict`, the epoch that the state is in goes on where it was.
        """
        if epoch != self.epoch or self._is_under_way:
            self.epoch, self._num_batches, self._generator_state, self._is_under_way = epoch, 0, None, False

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of the next epoch; after :meth:`load_state_dict`, those that are left of the epoch that it is in."""
        if self._is_under_way:  # left before its end
            self._next_epoch()
        self._is_under_way = True
        return self._batches(self._order())

    def _batches(self, order: Tensor) -> Iterator[Any]:
        numbers = order.tolist() if self.dataset.has_host_values else None
        order = order.to(self.dataset.device)
        epoch = self.epoch
        for number in range(self._num_batches, len(self)):
            chosen = slice(number * self.batch_size, (number + 1) * self.batch_size)
            batch = self.dataset.batch(order[chosen], None if numbers is None else numbers[chosen])
            batch = batch if self.transform is None else self.transform(batch)
            self._num_batches = number + 1
            yield batch
        if self.epoch == epoch:
            self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch, self._num_batches, self._generator_state, self._is_under_way = self.epoch + 1, 0, None, False

    def _order(self) -> Tensor:
        """Return the indices of this rank's samples in this epoch."""
        order = self._whole_order()
        total = self.num_samples * self.num_replicas
        if total > len(order):
            order = order.repeat(math.ceil(total / len(order)))
        return order[self.rank : total : self.num_replicas]

    def _whole_order(self) -> Tensor:
        # What stays on the host is chosen by numbers of the host: drawn there, they need not be waited for.
        device = torch.device("cpu") if self.dataset.has_host_values else self.dataset.device
        if not self.shuffle:
            return torch.arange(len(self.dataset), device=device)
        generator = self.generator
        if generator is None:
            generator = torch.Generator(device).manual_seed(self.seed + self.epoch)
        elif self._generator_state is None:
            self._generator_state = generator.get_state()
        else:  # goes on where a state was saved
            generator.set_state(self._generator_state)
        return torch.randperm(len(self.dataset), generator=generator, device=generator.device)

    def state_dict(self) -> LoaderState:
        """Return where the loader is: the epoch, and the batches of it that were returned."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "num_batches": self._num_batches,
            "seed": self.seed,
            "generator_state": self._generator_state,
            "made_with": self._made_with(),
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """
        Go on where *state* was taken: the next iteration returns the batches that were left of its epoch, in its order.

        Raises UsageError if it was taken with another batch size, dataset, sharding or order, or is none.
        """
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise UsageError("this is not the state of a DeviceLoader of this version", hint="give what `state_dict()` returned")
        differing = [name for name, value in self._made_with().items() if state["made_with"].get(name) != value]
        if differing:
            told = ", ".join(f"{name} {state['made_with'].get(name)}, and not {self._made_with()[name]}" for name in differing)
            raise UsageError(f"the state was taken with {told}", hint="make the loader as it was, or begin an epoch: `set_epoch()`")
        self.epoch, self._num_batches, self.seed = state["epoch"], state["num_batches"], state["seed"]
        self._generator_state, self._is_under_way = state["generator_state"], False

    def _made_with(self) -> dict[str, Any]:
        return {
            "num_samples": len(self.dataset),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "num_replicas": self.num_replicas,
            "rank": self.rank,
            "generator": None if self.generator is None else str(self.generator.device),
        }

"""Random requests to the real caching allocator, for the simulator to be compared with."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import torch

MIB = 2**20


def size_of(chance: random.Random, most_mib: int) -> int:
    """A size of any magnitude: as many small ones as large ones, some of them round."""
    largest = most_mib * MIB
    size = int(2 ** chance.uniform(0, largest.bit_length() - 1))
    return chance.choice([size, size, -(-size // 4096) * 4096, 1 << (size.bit_length() - 1)])


def churn(
    device: str, seed: int = 0, requests: int = 2000, most_mib: int = 64, streams: int = 1, empties: bool = True
) -> Callable[[], None]:
    """Ask for blocks and give them back in any order; with *empties* empty the cache now and then; go on where memory runs out."""
    chance = random.Random(seed)
    numbers = [torch.cuda.current_stream(device), *(torch.cuda.Stream() for _ in range(streams - 1))]
    sizes = [size_of(chance, most_mib) for _ in range(40)]  # a program asks for the same sizes again and again

    def step() -> None:
        held: list[int] = []
        for _ in range(requests):
            if held and chance.random() < 0.48:
                torch.cuda.caching_allocator_delete(held.pop(chance.randrange(len(held))))
            elif empties and chance.random() < 0.002:
                torch.cuda.empty_cache()
            else:
                size = chance.choice(sizes) if chance.random() < 0.8 else size_of(chance, most_mib)
                with contextlib.suppress(torch.OutOfMemoryError):
                    held.append(torch.cuda.caching_allocator_alloc(size, device=0, stream=chance.choice(numbers)))
        for address in held:
            torch.cuda.caching_allocator_delete(address)

    return step

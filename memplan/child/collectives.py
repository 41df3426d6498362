"""
Collectives of Python objects, on the simulated GPU.

PyTorch sends an object as bytes through the GPU and reads back how many there are. What a kernel may have overwritten reads zero there, and
of no bytes there is no object. The collective runs as ever, for what it allocates; what comes back is the object that was sent, for each
rank: those that are missing behave as copies of this one. What one certain rank sends (a broadcast, a message to the next stage of a
pipeline) is kept in the folder MEMPLAN_SENT, where the rehearsal of another rank finds it.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import pickle
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from memplan.child.followed_collectives import MAY_BE_SIZES
from memplan.child.one_rank import NeedsOtherRankError

Answering = Callable[[Callable[[int], bytes]], AbstractContextManager[None]]
"""Has what is read from the GPU answered by a function, for a while."""


class Seen(NamedTuple):
    """What was seen of other ranks."""

    peers: set[int]
    """Ranks that this one sent something to, or waited for, one by one."""
    needed: list[int]
    """The rank whose objects were waited for, and that has not been run."""


seen = Seen(set(), [])


def hand_objects_on(answering: Answering) -> None:
    """Have the collectives of objects return what copies of this process send, where PyTorch has them."""
    if not dist.is_available():
        return
    for name, give in _GIVEN.items():
        _replace(name, functools.partial(_completed, give=give, answering=answering))
    for name in ("send", "recv", "isend", "irecv"):
        _replace(name, _noting_peer)
    _replace("broadcast", _forgetting)


def _replace(name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module: Any = dist.distributed_c10d
    if hasattr(module, name):
        changed = change(getattr(module, name))
        setattr(module, name, changed)
        setattr(dist, name, changed)


def _completed(collective: Callable[..., Any], give: Callable[[dict[str, Any]], Any], answering: Answering) -> Callable[..., Any]:
    """Return *collective* with what it gives put right by *give*, which gets the same arguments by name."""
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        if give is _received:
            return give(given)
        lists = [each for each in given.values() if isinstance(each, list)]
        before = [list(each) for each in lists]
        with _sizes_known() as size_of, answering(size_of):
            done = collective(*arguments, **keywords)
        for changed, kept in zip(lists, before, strict=True):
            changed[:] = kept
        if dist.get_rank(given.get("group")) >= 0:
            give(given)
        return done

    return call


@contextmanager
def _sizes_known() -> Iterator[Callable[[int], bytes]]:
    """Give what answers questions for the sizes of objects: all are as large as this rank's own. Nothing is made of their bytes."""
    module: Any = dist.distributed_c10d
    to_tensor, to_object = module._object_to_tensor, module._tensor_to_object
    sizes = [0]

    @functools.wraps(to_tensor)
    def noted(*arguments: Any, **keywords: Any) -> Any:
        found = to_tensor(*arguments, **keywords)
        sizes.append(found[0].numel())
        return found

    module._object_to_tensor, module._tensor_to_object = noted, lambda *_: None
    try:
        yield lambda size: struct.pack("<q", max(sizes)) * (size // 8) if size % 8 == 0 else bytes(size)
    finally:
        module._object_to_tensor, module._tensor_to_object = to_tensor, to_object


def _noting_peer(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        peer = _peer(signature.bind(*arguments, **keywords).arguments)
        if peer is not None:
            seen.peers.add(peer)
        return function(*arguments, **keywords)

    return call


def _forgetting(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return a `broadcast` after which nobody knows what another rank has sent: a size, perhaps.

    PyTorch's own broadcasts (of DDP, whose ranks compare what they have) do not come through here, and keep what this rank has.
    """
    signature = inspect.signature(broadcast)

    @functools.wraps(broadcast)
    def call(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        done = broadcast(*arguments, **keywords)
        tensor = given["tensor"]
        if (_peer(given) or 0) != dist.get_rank() and tensor.is_cuda and tensor.dtype in MAY_BE_SIZES:
            place, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel() * tensor.element_size())
            ctypes.CDLL(None).card_memory_lost(place, size)
        return done

    return call


# what comes back


def _gathered(given: dict[str, Any]) -> None:
    given["object_list"][:] = [_sent(given["obj"]) for _ in given["object_list"]]


def _gathered_at_one(given: dict[str, Any]) -> None:
    if given.get("object_gather_list") is not None:
        given["object_gather_list"][:] = [_sent(given["obj"]) for _ in given["object_gather_list"]]


def _scattered(given: dict[str, Any]) -> None:
    group, source = given.get("group"), _peer(given) or 0
    if source == dist.get_rank():
        parts = [_sent(each) for each in given["scatter_object_input_list"]]
        keep(f"scatter {_name(group)}", parts)
    else:
        parts = kept(f"scatter {_name(group)}", source)
    given["scatter_object_output_list"][0] = parts[dist.get_rank(group)]


def _broadcast(given: dict[str, Any]) -> None:
    name, source = f"broadcast {_name(given.get('group'))}", _peer(given) or 0
    objects = given["object_list"]
    if source == dist.get_rank():
        keep(name, objects)
    else:
        objects[:] = kept(name, source)


def _sent_to_one(given: dict[str, Any]) -> None:
    destination = _peer(given) or 0
    keep(f"to {destination}", given["object_list"])


def _received(given: dict[str, Any]) -> int:
    source = _peer(given) or 0
    seen.peers.add(source)
    given["object_list"][:] = kept(f"to {dist.get_rank()}", source)
    return source


_GIVEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "all_gather_object": _gathered,
    "gather_object": _gathered_at_one,
    "scatter_object_list": _scattered,
    "broadcast_object_list": _broadcast,
    "send_object_list": _sent_to_one,
    "recv_object_list": _received,
}


def _peer(given: dict[str, Any]) -> int | None:
    """Return the rank that is sent to or waited for, as the world counts it; None: whichever comes, or that of rank 0."""
    for name in ("src", "dst"):
        if given.get(name) is not None:
            return int(given[name])
        if given.get(f"group_{name}") is not None:
            group: Any = given.get("group") or dist.group.WORLD
            return int(dist.get_global_rank(group, given[f"group_{name}"]))
    return None


def _name(group: Any) -> str:
    return str(getattr(group or dist.group.WORLD, "group_name", ""))


# from rank to rank, by files

_turns: Counter[tuple[str, int]] = Counter()


def _file(name: str, source: int) -> Path | None:
    """Return where rank *source* keeps what it sends for the next time under *name*; None: nowhere."""
    folder = os.environ.get("MEMPLAN_SENT")
    _turns[name, source] += 1
    return Path(folder, f"{source} {name} {_turns[name, source]}".replace(os.sep, "_")) if folder else None


def keep(name: str, objects: list[Any]) -> None:
    """Leave what this rank sends under *name*."""
    file = _file(name, dist.get_rank())
    if file is not None:
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_bytes(pickle.dumps(objects))
        partial.replace(file)


def kept(name: str, source: int) -> list[Any]:
    """Return what rank *source* sends under *name*. Raises NeedsOtherRankError where it has not been run."""
    file = _file(name, source)
    if file is None or not file.exists():
        seen.needed.append(source)
        raise NeedsOtherRankError(f"the program waits for an object that rank {source} sends: that rank is to be rehearsed first")
    objects: list[Any] = pickle.loads(file.read_bytes())
    return objects


def _sent(value: Any) -> Any:
    """Return *value* as it comes out of a collective: another object of the same content."""
    return pickle.loads(pickle.dumps(value))

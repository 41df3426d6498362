"""
A process group without its other processes, for PyTorch's own code to stand on.

What is PyTorch's stays PyTorch's: ProcessGroupNCCL runs on the simulated NCCL (csrc/nccl.c), DDP, FSDP and DTensor on that. Changed is how
ranks find each other, and what goes through the host, as Gloo's groups do. Each rank that is missing behaves as a copy of this one.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed

from memplan.child import script
from memplan.child.after_import import change_when_imported
from memplan.child.copies_store import CopiesStore
from memplan.child.one_rank import NeedsOtherRankError, World, say_rank, take_rank, wait_for_rank
from memplan.child.pipeline_votes import vote_as_this_rank
from memplan.child.sharded_checkpoints import know_all_parameters, need_senders, write_own_pieces


class _Launching:
    """Whether this process is a launcher, which talks to the processes that it starts, all of this machine."""

    is_on = False


def be_one_rank(ranks: World) -> None:
    """Have this process be the rank of *ranks* that is rehearsed."""
    try:
        from memplan.child.host_groups import HostGroup, hand_tensors_on  # noqa: PLC0415
    except ImportError as error:
        raise RuntimeError(f"PyTorch {torch.__version__} has no process group that waits for nobody: 2.6 has") from error
    c10d: Any = torch.distributed.distributed_c10d
    dist: Any = torch.distributed
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)  # its checks compare what the ranks do
    _replace(c10d, "rendezvous", _meeting(ranks, c10d.rendezvous))
    _replace(c10d, "init_process_group", _with_own_store(ranks, c10d.init_process_group))
    if _is_asked_by_others():
        _replace(c10d, "destroy_process_group", _written_first(c10d.destroy_process_group))
    _replace(c10d, "_new_process_group_helper", _telling_size(c10d._new_process_group_helper))
    for module in (c10d, dist, sys.modules["torch.distributed.rendezvous"]):
        if hasattr(module, "TCPStore"):
            module.TCPStore = _store_or(module.TCPStore)  # type: ignore[union-attr]
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # the copies say that their GPU is this one
    if hasattr(c10d, "ProcessGroupGloo"):
        c10d.ProcessGroupGloo = HostGroup
    if hasattr(dist.ProcessGroup, "split_group"):
        dist.ProcessGroup.split_group = _telling_number(dist.ProcessGroup.split_group)
    hand_tensors_on()
    dist.Reducer._rebuild_buckets = _after_collectives(dist.Reducer._rebuild_buckets)
    change_when_imported({
        "torch.distributed.run": _launch_here,
        "torch.distributed.fsdp._optim_utils": know_all_parameters,
        "torch.distributed.checkpoint.default_planner": write_own_pieces,
        "torch.distributed.optim.zero_redundancy_optimizer": need_senders,
        "torch.distributed.pipelining.stage": vote_as_this_rank,
        "torch.distributed._symmetric_memory": _share_with_copies,
    })  # fmt: skip


def be_alone() -> None:
    """Have a process that would wait for others end, where one GPU is rehearsed."""
    c10d: Any = torch.distributed.distributed_c10d
    meet = c10d.rendezvous

    @functools.wraps(meet)
    def meet_nobody(url: str, rank: int = -1, world_size: int = -1, **keywords: Any) -> Any:
        size = _said(url, "world_size", world_size, "WORLD_SIZE", 1)
        if size > 1:
            raise NeedsOtherRankError(f"the program waits for {size} processes, and one GPU is rehearsed: rehearse it with num_gpus={size}")
        return meet(url, rank, world_size, **keywords)

    _replace(c10d, "rendezvous", meet_nobody)


def _said(url: str, name: str, given: int, variable: str, default: int) -> int:
    """Return the rank, or how many there are: as an argument says it, else the address, else the environment."""
    if given is not None and given >= 0:
        return given
    found = parse_qs(urlsplit(url).query).get(name, [os.environ.get(variable, "")])[0]
    return int(found) if found.isdecimal() else default


def _replace(c10d: Any, name: str, function: Callable[..., Any]) -> None:
    before = getattr(c10d, name)
    for module in (c10d, torch.distributed):
        if getattr(module, name, None) is before:
            setattr(module, name, function)


def _meeting(ranks: World, rendezvous: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `rendezvous` that nobody else has to come to."""

    @functools.wraps(rendezvous)
    def meet(url: str, rank: int = -1, world_size: int = -1, **keywords: Any) -> Iterator[tuple[Any, int, int]]:
        if _Launching.is_on:
            yield from rendezvous(url, rank, world_size, **keywords)
            return
        size = _said(url, "world_size", world_size, "WORLD_SIZE", ranks.size)
        yield CopiesStore(size), _said(url, "rank", rank, "RANK", ranks.rank), size

    return meet


def _with_own_store(ranks: World, begin: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return an `init_process_group` for the rehearsed rank alone, whatever store the program gives.

    A process that says it is another rank, as `mp.spawn` starts them, waits until the rehearsed one has ended; one that others wait for
    does as this one, with copies of itself for the rest, and is not told of.
    """
    signature = inspect.signature(begin)

    @functools.wraps(begin)
    def call(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords)
        rank, size, store = (given.arguments.get(name) for name in ("rank", "world_size", "store"))
        if rank is not None and rank >= 0 and size is not None and size > 0:
            if rank == min(ranks.rank, size - 1):
                say_rank()
            elif _is_asked_by_others():
                script.leave_out()
            else:
                wait_for_rank()
        else:
            take_rank()  # a process that a launcher forked has loaded no hook
        if store is not None and not isinstance(store, CopiesStore):
            given.arguments["store"] = CopiesStore(size or 1)
        return begin(*given.args, **given.kwargs)

    return call


def _is_asked_by_others() -> bool:
    """Say whether this is a worker of Ray's, which has to answer the processes that direct it."""
    return any(word.endswith("/ray/_private/workers/default_worker.py") for word in sys.orig_argv)


def _written_first(end: Callable[..., Any]) -> Callable[..., Any]:
    """Have what was seen written when the group ends: soon after Ray kills its workers, as no signal and no exit of Python's."""

    @functools.wraps(end)
    def call(*arguments: Any, **keywords: Any) -> Any:
        script.write()
        return end(*arguments, **keywords)

    return call


def _store_or(real: Any) -> Any:
    """Return the class of the stores that a rank makes: nobody connects to them. A launcher's own are real."""

    class RankStore(CopiesStore):
        def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
            return real(*arguments, **keywords) if _Launching.is_on else super().__new__(cls)

        def __init__(self, host: str = "", port: int = 0, world_size: int | None = None, *rest: Any, **keywords: Any) -> None:
            del rest, keywords
            super().__init__(world_size or (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1))
            self.host, self.port = host, port

    return RankStore


def _after_collectives(rebuild: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return DDP's way to make its buckets anew, once the thread that watches collectives has let go of the first ones.

    That looks every tenth of a second, which most steps on a GPU take longer than; here a step may take less, and meet them or not.
    """

    @functools.wraps(rebuild)
    def call(reducer: Any) -> Any:
        for group in torch.distributed.distributed_c10d._world.pg_map:
            if torch.distributed.get_backend(group) == "nccl":
                group._wait_for_pending_works()
        return rebuild(reducer)

    return call


def _telling_size(make: Callable[..., Any]) -> Callable[..., Any]:
    """Have the simulated NCCL know how many ranks the group has that is made: one that is split off another does not say it."""

    @functools.wraps(make)
    def call(group_size: int, *arguments: Any, **keywords: Any) -> Any:
        _tell_size(group_size)
        return make(group_size, *arguments, **keywords)

    return call


def _telling_number(split: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(split)
    def call(group: Any, ranks: list[int], *arguments: Any, **keywords: Any) -> Any:
        _tell_size(len(ranks))
        return split(group, ranks, *arguments, **keywords)

    return call


def _tell_size(size: int) -> None:
    ctypes.CDLL(None).memplan_next_group(size)


def _launch_here(module: Any) -> None:
    """Have torchrun start the processes of this one machine, without waiting for others."""
    run = module.run

    @functools.wraps(run)
    def launch(arguments: Any) -> Any:
        arguments.nnodes, arguments.standalone = "1:1", True
        _Launching.is_on = True
        return run(arguments)

    module.run = launch


def _share_with_copies(module: Any) -> None:
    """Have a group's symmetric memory begin without a file by which its ranks would meet."""
    begin = module.enable_symm_mem_for_group

    @functools.wraps(begin)
    def enable(group_name: str) -> None:
        if group_name in module._group_name_to_store:
            return
        group = module.c10d._resolve_process_group(group_name)
        store = module._group_name_to_store[group_name] = CopiesStore(group.size())
        module._SymmetricMemory.set_group_info(group_name, group.rank(), group.size(), store)

    module.enable_symm_mem_for_group = enable

"""
The values pass: integers, booleans and small numbers computed on the host, beside the simulated device.

Labels, masks, lengths, edges and routing tables come from the host, and what a program makes of them on the device (comparisons, indexing,
nonzero, unique, sort, cumsum …) the host can compute as well. What it finds is kept in shadows of the device's storages (`shadows.py`), and
what a read gets is noted by line and turn (`recorded_values.py`). The memory pass behind it reads the same, and no mode follows it: a mode
keeps arguments alive for longer, and so changes what is allocated.

What a model computes from its weights has no value, and what is drawn at random on the device is no data: what stands in for them is in
`assumed_values.py`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data._utils import worker

from memplan.child.assumed_values import (
    ALL_PASS,
    CHOICES,
    COMPARISONS,
    FINITE,
    MANY_IN_A_ROW,
    SHARES,
    Draws,
    Variant,
    choices_in,
    chosen,
    is_for_ordinary_numbers,
)
from memplan.child.awaited_reads import Awaited, AwaitedReads, awaited_by, bytes_of
from memplan.child.cancelled_sums import CancelledSums
from memplan.child.device_reads import A_SEED, Reads
from memplan.child.followed_collectives import received, received_functionally
from memplan.child.host_arithmetic import MOST_COMPUTED, MOST_COPIED, at_places, computed, is_cheap, num_places
from memplan.child.moved_values import MOVED, learn_what_moved
from memplan.child.program_frames import frames_from
from memplan.child.recorded_values import ValueWriter
from memplan.child.shadows import HOST, Shadows, once, parts_of
from memplan.child.tensor_types import has_memory
from memplan.traces.read_basis import ALL_BUT_ONE

_MASKED_BY_ONE = {"masked_select", "masked_scatter_backward"}
"""The second argument is a mask."""

_MASKED = {
    *("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "nonzero"),
    *_MASKED_BY_ONE,
}
"""Operations that count the set elements of masks, and wait for the count."""

_DRAW_WITHOUT_A_TAG = {"binomial", "_sample_dirichlet"}
"""Operations that draw at random, which PyTorch's own mark of those (2.13) leaves out."""

_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_"}
_ALIKE: Mapping[str, int | None] = {
    "zeros_like": 0, "new_zeros": 0, "zero_": 0, "ones_like": 1, "new_ones": 1, "full_like": None, "new_full": None, "fill_": None,
}  # fmt: skip
"""Operations whose result is one number everywhere, whatever their argument holds; None: that number is their last argument."""

_SEEDS = {"philox_seed", "philox_offset", "rng_state", "unused"}
"""Results of attention, as schemas name them: the state of its dropout."""

_OF_LENGTHS = {"_ctc_loss", "_use_cudnn_ctc_loss", "_cudnn_ctc_loss", "_ctc_loss_backward"}
"""Operations on what a model computes that copy the lengths of the samples to the host."""

_OF_TENSORS = {
    "allreduce_", "allreduce_coalesced_", "reduce_", "broadcast_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
    "_allgather_base_", "gather_", "scatter_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
    "alltoall_", "alltoall_base_", "recv_", "recv_any_source_",
}  # fmt: skip
"""Collectives after which other tensors have values, or the same others."""


_OF_THEIR_OWN = {
    *("copy_", "set_", "lift_fresh", "_local_scalar_dense", "repeat_interleave", "scatter", "scatter_", "sub"),
    *(_MASKED | _EMPTY | _OF_LENGTHS | COMPARISONS), *_ALIKE, *FINITE, *CHOICES,
}  # fmt: skip
"""Operations that may have a value where none of their arguments has, or that copy something to the host."""

_PASSED_ON = {"wait_tensor", "_wrap_tensor_autograd"}
"""Of functional collectives: what returns the tensor that it is given."""


_NUMBERS = {bool, int, float, complex}


def _tensors_in(values: Any) -> Iterator[Any]:
    """
    Yield the tensors with memory in a list of lists, or among the arguments of an operation, for which PyTorch's own walk takes longer than
    most operations take. A list of millions of numbers, as of a text's tokens, is not looked at one by one.
    """
    given = values.values() if isinstance(values, dict) else values
    if _NUMBERS.issuperset(map(type, given)):
        return
    for value in given:
        if isinstance(value, torch.Tensor):
            if has_memory(value):
                yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from _tensors_in(value)


class HostValues(TorchDispatchMode):
    """Follows the tensors of the device whose values are known."""

    supports_higher_order_operators = True

    def __init__(self, reads: Reads, writer: ValueWriter, variant: Variant) -> None:
        super().__init__()
        self._reads = reads
        self._variant: Variant = "none" if variant == "none" else "all"
        self._leaves_one_out = variant == "most"
        self._shadows = Shadows()
        self._sums = CancelledSums(self._shadows)
        self._draws = Draws(is_again=variant == "redrawn")
        self._awaited = AwaitedReads(reads, writer)

    def follow_threads(self) -> None:
        """Follow every thread that is started from here on too, as one that prepares batches; a mode is of one thread."""
        start = threading.Thread.start

        @functools.wraps(start)
        def followed(thread: threading.Thread) -> None:
            run = thread.run

            def run_followed() -> None:
                vars(thread).pop("run")  # else the thread would hold itself
                with self:
                    run()

            vars(thread)["run"] = run_followed
            start(thread)

        setattr(threading.Thread, "start", followed)  # noqa: B010  (a method, as mypy sees it)

    def follow_factories(self) -> None:
        """Follow what `torch.tensor` reads of numbers on the device that it is given in a list: no mode sees that."""
        make = torch.tensor

        @functools.wraps(make)
        def made(data: Any, *arguments: Any, **keywords: Any) -> Any:
            given = _tensors_in(data) if isinstance(data, (list, tuple)) else ()
            read = [tensor for tensor in given if tensor.is_cuda and tensor.dim() == 0]
            awaited = [value for tensor in read if (value := self._shadows.value(tensor)) is not None]
            if not read or len(awaited) < len(read):
                return make(data, *arguments, **keywords)
            return self._awaited.run(lambda: make(data, *arguments, **keywords), awaited, self._shadows.assumption_of(read))

        torch.tensor = made

    def leave_traces(self) -> None:
        """Follow nothing while TorchScript traces a program: below any mode it takes weights of convolutions for constants, and fails."""
        for name in ("trace", "trace_module"):
            setattr(torch.jit, name, self._left(getattr(torch.jit, name)))

    def leave_loading(self) -> None:
        """Follow nothing in the worker processes of a DataLoader, which use no GPU: a fifth of their time went into it."""
        worker._worker_loop = self._left(worker._worker_loop)

    def _left(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def without(*arguments: Any, **keywords: Any) -> Any:
            with _disable_current_modes():
                return function(*arguments, **keywords)

        return without

    # operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._with_functions(func, args, kwargs)
        if FakeTensor in types:
            return func(*args, **kwargs)  # a mode below this one describes the result: DTensor asks it how an operation is sharded
        self._shadows.sweep()
        devices = [tensor for tensor in _tensors_in((args, kwargs)) if tensor.is_cuda]
        is_made = not devices and _is_device(kwargs.get("device"))
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a subclass says itself which operations on plain tensors it stands for: those are followed
        if torch.is_inference_mode_enabled():
            found = self._in_parts(func, args, kwargs)
            if found is not NotImplemented:
                return found
        if not devices and not is_made and func.overloadpacket.__name__ not in ("copy_", "_to_copy"):
            return func(*args, **kwargs)
        if devices and self._is_of_no_value(func, kwargs, devices):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if any(tensor.layout is torch.sparse_coo for tensor in devices) and name not in ("_to_copy", "copy_", "_indices", "_values"):
            return self._sparse(func, name, args, kwargs, devices)
        if func.is_view or name == "set_":  # shadows are of storages, whichever tensor lies in them
            return self._lifted(func(*args, **kwargs)) if name == "lift_fresh" else func(*args, **kwargs)
        return self._follow(func, name, args, kwargs, devices)

    def _is_of_no_value(self, func: Any, kwargs: Any, devices: list[Any]) -> bool:
        """
        Say, without much work, whether nothing is known of what *func* is given, nor of what it makes: most of what a model computes.

        Else `_follow` would find that out.
        """
        if not _is_ordinary(func) or (self._sums.are_waited_for and func.overloadpacket.__name__ == "add"):
            return False
        return _is_device(kwargs.get("device", "cuda")) and not any(map(self._shadows.may_know, devices))

    def _with_functions(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that takes functions or kernels, as flex_attention does: what it does within is not followed."""
        result = func(*args, **kwargs)
        if "mutation" in func.name():
            for tensor in tree_flatten((args, kwargs))[0]:
                if has_memory(tensor) and tensor.is_cuda:
                    self._shadows.forget(tensor)
        return result

    def _in_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run *func* by the operations that it consists of, which autograd, off in inference mode, would have called one by one."""
        with self:
            return func.decompose(*args, **kwargs)

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, devices: list[Any]) -> Any:
        def run() -> Any:
            return func(*args, **kwargs)

        if func.namespace == "c10d":
            return self._collective(func, name, args, kwargs, run)
        if func.namespace == "_c10d_functional":
            return run() if name in _PASSED_ON else self._functional_collective(func, name, args, kwargs, run)
        if name in ("_to_copy", "copy_"):
            return self._copied(func, run, name, args, kwargs)
        if name == "_local_scalar_dense":
            return self._scalar(run, args[0])
        if name in _MASKED:
            return self._masked(func, name, args, kwargs)
        if func.namespace == "torchvision" and name == "nms":
            return self._suppressed(run, args)
        if name in _OF_LENGTHS:
            known = [self._shadows.value(tensor) for tensor in devices if not tensor.is_floating_point()]
            lengths = [value for value in known if value is not None]
            return self._unknown(func, name, args, kwargs, self._awaited.run(run, lengths, self._shadows.assumption_of(devices), name=name))
        if name in _ALIKE and func._overloadname != "Tensor":
            return self._alike(run, name, args)
        if name in _EMPTY:
            made = run()
            if has_memory(made) and made.is_cuda and name != "resize_" and not made.is_floating_point() and not made.is_complex():
                self._shadows.fill(made, 0)  # to be filled part by part; floats without a content may be weights
            return made
        if _draws(func) and not self._can_draw(func, args, devices):
            return self._unknown(func, name, args, kwargs, run())
        if name == "repeat_interleave":
            self._apply_repeats(args[0])
        values = self._shadows.values(devices)
        if name in ("eq", "ne") and self._is_choice_beside_data(devices):
            return self._unknown(func, name, args, kwargs, run())
        if values is None or not is_cheap(func, values):
            result = self._unknown(func, name, args, kwargs, run())
            if name in ("add", "sub") and len(devices) == 2 and kwargs.get("alpha", 1) == 1 and devices[0].numel() <= MOST_COMPUTED:
                left = self._sums.left_by(1 if name == "add" else -1, devices[0], devices[1], result)
                if left is not None:
                    self._shadows.learn(result, left.value, left.assumption, is_new=True)
            return result
        return self._known(func, name, args, kwargs, devices)

    def _can_draw(self, func: Any, args: Any, devices: list[Any]) -> bool:
        """Say whether random numbers are to be drawn here: those of weights are not."""
        if devices:
            return all(tensor.numel() <= MOST_COMPUTED and self._shadows.value(tensor) is not None for tensor in devices)
        return func.overloadpacket.__name__ in ("randint", "randperm") or _num_elements(args) <= MOST_COMPUTED

    def _is_choice_beside_data(self, devices: list[Any]) -> bool:
        """
        Say whether what a model chose is compared with data, one by one: its classes with the labels.

        All may be right, or none. The experts that a router chose are compared with the numbers of the experts, each with all.
        """
        assumed = [self._shadows.assumption_of([tensor]) for tensor in devices]
        return (
            len(devices) == 2
            and devices[0].shape == devices[1].shape
            and devices[0].numel() > 1
            and set(assumed) == {None, SHARES[self._variant]}
        )

    def _known(self, func: Any, name: str, args: Any, kwargs: Any, devices: list[Any], counts: Sequence[int] = ()) -> Any:
        """Run *func* on the host and on the device, both with all that they need; *counts*: of places, which the device counts too."""
        assumption = self._shadows.assumption_of(devices)
        on_host = functools.partial(self._on_host, is_written=func._schema.is_mutable)
        host_args, host_kwargs = tree_map(on_host, (args, kwargs))
        if "device" in host_kwargs:
            host_kwargs["device"] = HOST
        host_kwargs.pop("pin_memory", None)
        if host_kwargs.get("generator") is not None:
            host_kwargs["generator"] = self._draws.generator
        try:
            with torch.random.fork_rng(devices=[], enabled=_draws(func)):
                if _draws(func):
                    torch.default_generator.manual_seed(self._draws.seed())
                found = computed(func, host_args, host_kwargs)
            if _draws(func):
                assumption = self._draws.settle(name, host_args, found)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # no kernel of the host does this
            return self._unknown(func, name, args, kwargs, func(*args, **kwargs))
        awaited, repeats = awaited_by(name, host_args, found)
        result = self._awaited.run(lambda: func(*args, **kwargs), [*awaited, *counts], assumption, repeats=repeats)
        for tensor, value in zip(tree_flatten(result)[0], tree_flatten(found)[0], strict=False):
            if has_memory(tensor) and tensor.is_cuda and isinstance(value, torch.Tensor):
                self._learn_unless_given(tensor, value, assumption, devices)
        return result

    def _learn_unless_given(self, tensor: Any, value: torch.Tensor, assumption: str | None, given: list[Any]) -> None:
        """Keep what was returned; an argument that was changed in place is returned too, and its shadow has been changed already."""
        if self._shadows.value(tensor) is None or all(tensor is not one for one in given):
            self._shadows.learn(tensor, value, assumption, is_new=True)
            return
        shadow = self._shadows.of(tensor)
        if shadow is not None:
            shadow.assumption = assumption or shadow.assumption  # as one_hot writes what was assumed into zeros

    def _on_host(self, value: Any, *, is_written: bool = False) -> Any:
        return self._shadows.value(value, is_written=is_written) if has_memory(value) and value.is_cuda else value

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Follow what the ranks hand to each other: each what this one does."""
        if name not in _OF_TENSORS:
            return run()
        changed = [each for each in received(name, args, self._value_of) if each.target.is_cuda]
        found = [(*each, self._shadows.assumption_of([each.source])) for each in changed]
        result = self._unknown(func, name, args, kwargs, run())
        for target, value, source, assumption in found:
            if value is not None and target.dtype == source.dtype:
                self._shadows.learn(target, value.view(target.shape), assumption)
            else:
                self._shadows.forget(target)  # the schema does not say that it is written to
        return result

    def _functional_collective(self, func: Any, name: str, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Follow what a collective returns, rather than changes."""
        # Some change in place what they are given.
        held = {id(tensor): self._value_of(tensor) for tensor in tree_flatten(args)[0] if has_memory(tensor)}
        result = run()
        found = list(received_functionally(name, args, result, lambda tensor: held[id(tensor)])) if "out" not in kwargs else []
        assumptions = [self._shadows.assumption_of([each.source]) for each in found]
        self._unknown(func, name, args, kwargs, result)
        for each, assumption in zip(found, assumptions, strict=True):
            if each.value is not None and each.target.is_cuda:
                self._shadows.learn(each.target, each.value.view(each.target.shape), assumption)
        return result

    def _value_of(self, tensor: Any) -> torch.Tensor | None:
        """Return what a tensor holds, on the device or on the host, where that is known."""
        return self._shadows.value(tensor) if tensor.is_cuda else tensor

    def _copied(self, func: Any, run: Callable[[], Any], name: str, args: Any, kwargs: Any) -> Any:
        source = args[1] if name == "copy_" else args[0]
        value = self._shadows.value(source) if source.is_cuda else source if _is_followed(source) else None
        is_read = source.is_cuda and not (args[0].is_cuda if name == "copy_" else _is_device(kwargs.get("device", source.device)))
        awaited = parts_of(value) if is_read and value is not None else []
        result = self._awaited.run(run, awaited, self._shadows.assumption_of([source] if source.is_cuda else []), dtype=source.dtype)
        if value is None:
            if result.is_cuda:
                self._shadows.forget(result)
                if name in MOVED and source.is_cuda:
                    learn_what_moved(self._shadows, func, args, kwargs, result)
        elif result.is_cuda:
            assumption = self._shadows.assumption_of([source]) if source.is_cuda else None
            copied = value.detach().to(result.dtype) if value.is_sparse else once(value.detach()).to(result.dtype).expand(value.shape)
            self._shadows.learn(result, copied if copied.is_sparse else copied.expand(result.shape), assumption)
        elif source.is_cuda and not source.is_sparse:
            result.copy_(value)  # whatever its strides
        return result

    def _lifted(self, made: Any) -> Any:
        """Keep what `torch.tensor(numbers, device="cuda")`, or a list as an index, has copied to the device without an operation."""
        if self._shadows.of(made) is None and made.numel() <= MOST_COPIED:
            content = self._reads.copied_back(made)
            if content is not None:
                self._shadows.learn(made, content)
        return made

    def _alike(self, run: Callable[[], Any], name: str, args: Any) -> Any:
        """Keep what a tensor holds that was made like another, or is overwritten: what that one holds does not count."""
        made = run()
        value: Any = args[-1] if _ALIKE[name] is None else _ALIKE[name]
        if not has_memory(made) or not made.is_cuda or made.layout is not torch.strided:
            return made
        is_all_of_it = made.numel() * made.element_size() == made.untyped_storage().nbytes()
        if is_all_of_it and value == 0:
            self._shadows.fill(made, 0)
        elif made.numel() <= MOST_COMPUTED or not made.is_floating_point():
            self._shadows.learn(made, torch.full((), value, dtype=made.dtype, device=HOST).expand(made.shape), is_new=is_all_of_it)
        else:
            self._shadows.forget(made)
        return made

    def _suppressed(self, run: Callable[[], Any], args: Any) -> Any:
        """Assume of non-maximum suppression that every box stays, or one: which do, the scores of the model decide."""
        count = args[0].shape[0] if self._variant == "all" else min(1, args[0].shape[0])
        result = self._awaited.run(run, [count], ALL_PASS[self._variant], repeats=True)
        if result.numel() == count:
            self._shadows.learn(result, torch.arange(count, device=HOST), ALL_PASS[self._variant], is_new=True)
        return result

    def _sparse(self, func: Any, name: str, args: Any, kwargs: Any, devices: list[Any]) -> Any:
        """
        Answer how many different places sparse tensors have, which operations on them count: the gradient of an embedding has those that
        the batch asked for, a product with an adjacency those of its edges.
        """
        operands = {id(tensor): self._places_of(tensor) for tensor in devices if tensor.layout is torch.sparse_coo}
        counts = [num_places(each) for each in operands.values() if each is not None]
        values = self._shadows.values(devices)
        if name != "_coalesce" and values is not None and is_cheap(func, values):
            return self._known(func, name, args, kwargs, devices, counts)
        assumption = self._shadows.assumption_of(devices)
        result = self._awaited.run(lambda: func(*args, **kwargs), counts, assumption, repeats=len(set(counts)) == 1)
        self._unknown(func, name, args, kwargs, result)
        made = [tensor for tensor in tree_flatten(result)[0] if has_memory(tensor) and tensor.layout is torch.sparse_coo and tensor.is_cuda]
        if len(made) == 1 and all(id(tensor) in operands for tensor in devices) and None not in operands.values():
            host_args, host_kwargs = tree_map(lambda value: operands.get(id(value), value), (args, kwargs))
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                found = computed(func, host_args, host_kwargs)
                self._shadows.learn(made[0]._indices(), found._indices(), assumption, is_new=True)
        return result

    def _places_of(self, sparse: Any) -> Any:
        """Return a tensor of the host with the places of *sparse*, without values of its own; None where they are not known."""
        places = self._shadows.value(sparse._indices())
        return None if places is None else at_places(places, sparse)

    def _scalar(self, run: Callable[[], Any], tensor: Any) -> Any:
        value = self._shadows.value(tensor)
        return self._awaited.run(run, [] if value is None else [value], self._shadows.assumption_of([tensor]), dtype=tensor.dtype)

    def _masked(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Answer how many elements of each mask are set; of one that nobody knows, all or none."""
        masks = [args[0]] if name == "nonzero" else [args[1]] if name in _MASKED_BY_ONE else list(args[1])
        masks = [mask for mask in masks if mask is not None and (name == "nonzero" or mask.dtype in (torch.bool, torch.uint8))]
        self._apply_share(masks)
        for mask in masks:
            if mask.is_cuda and self._shadows.value(mask) is None:
                self._assume(mask)  # floats too, whose nonzero is asked for: what is asked of them later agrees with that
        values = [self._shadows.value(mask) if mask.is_cuda else mask for mask in masks]
        counts = [None if value is None else int(torch.count_nonzero(value)) for value in values]
        if name in _MASKED_BY_ONE and counts[0]:  # which is as large as what it selects from, or becomes so
            counts[0] *= math.prod(torch.broadcast_shapes(args[0].shape, masks[0].shape)) // masks[0].numel()
        awaited: list[Awaited] = [count for count in counts if count is not None]
        assumption = self._shadows.assumption_of(mask for mask in masks if mask.is_cuda)
        if name == "index_put_" and not args[0].is_cuda:  # a tensor of the host, which the places are copied to
            places = [place for place in args[1] if place is not None and place.is_cuda]
            awaited += self._copied_places(places)
            assumption = self._shadows.assumption_of(places)
        result = self._awaited.run(lambda: func(*args, **kwargs), awaited, assumption)
        if name == "nonzero":
            if values[0] is not None and result.is_cuda:
                self._shadows.learn(result, values[0].nonzero(), assumption, is_new=True)
            return result
        flat = [value for value in tree_flatten((args, kwargs))[0] if has_memory(value) and value.is_cuda]
        known = self._shadows.values(flat)
        if known is not None and is_cheap(func, known):
            on_host = functools.partial(self._on_host, is_written=func._schema.is_mutable)
            host_args, host_kwargs = tree_map(on_host, (args, kwargs))
            try:
                found = func(*host_args, **host_kwargs)
            except (RuntimeError, NotImplementedError, IndexError):
                return self._unknown(func, name, args, kwargs, result)
            if has_memory(result) and result.is_cuda:
                self._learn_unless_given(result, found, self._shadows.assumption_of(flat), flat)
            return result
        return self._unknown(func, name, args, kwargs, result)

    def _copied_places(self, places: Iterable[Any]) -> Iterator[bytes]:
        """Yield what is copied to the host of *places*: their numbers; of a mask where its elements are set, by dimension."""
        for value in map(self._shadows.value, places):
            if value is not None:
                yield bytes_of(value.nonzero().t() if value.dtype in (torch.bool, torch.uint8) else value)

    def _apply_share(self, masks: Sequence[Any]) -> None:
        """Set as many elements of the masks as the user said for this line: what comes later, in backward too, sees the same mask."""
        said = self._reads.said(frames_from(sys._getframe())) if self._reads.answers else None
        if said is None or said.text in ("true", "false"):
            return
        for mask in masks:
            count = round(Fraction(said.text) * mask.numel()) if "/" in said.text else min(mask.numel(), int(float(said.text)))
            if mask.is_cuda:
                self._shadows.learn(mask, (torch.arange(mask.numel(), device=HOST) < count).view(mask.shape).to(mask.dtype), said.reason)

    def _apply_repeats(self, repeats: Any) -> None:
        """Repeat as often as the user said for this line: all together, or so many times for each element."""
        said = self._reads.said(frames_from(sys._getframe())) if self._reads.answers else None
        if said is None or said.text in ("true", "false") or not repeats.is_cuda or not repeats.numel():
            return
        total = round(Fraction(said.text) * repeats.numel()) if "/" in said.text else int(float(said.text))
        each, more = divmod(total, repeats.numel())
        self._shadows.learn(
            repeats, (each + (torch.arange(repeats.numel(), device=HOST) < more)).view(repeats.shape).to(repeats.dtype), said.reason
        )

    def _assume(self, mask: Any) -> None:
        self._shadows.learn(mask, torch.full(mask.shape, self._variant == "all", dtype=mask.dtype, device=HOST), ALL_PASS[self._variant])

    def _assume_of_comparison(self, mask: Any) -> None:
        if self._leaves_one_out and mask.dim() and mask.shape[-1] >= MANY_IN_A_ROW:
            row = torch.arange(mask.shape[-1], device=HOST) > 0
            self._shadows.learn(mask, row.expand(mask.shape), ALL_BUT_ONE, is_new=True)
        else:
            self._shadows.fill(mask, int(self._variant == "all"), ALL_PASS[self._variant])

    def _unknown(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        """Forget what was changed; assume what floats choose."""
        gates = self._gates(name, args)
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[at] if at < len(args) else kwargs.get(argument.name)
                for tensor in tree_flatten(given)[0]:
                    if has_memory(tensor) and tensor.is_cuda:
                        self._shadows.forget(tensor)
        for returned, value in zip(func._schema.returns, result if isinstance(result, tuple) else (), strict=False):
            if returned.name in _SEEDS and has_memory(value) and value.is_cuda:
                self._shadows.fill(value, 0, A_SEED)
        outs = [value for value in tree_flatten(result)[0] if has_memory(value) and value.is_cuda]
        certain = is_for_ordinary_numbers(name, args)
        if gates is not None and outs:
            self._shadows.learn(outs[0], gates, SHARES[self._variant], is_new=True)
        elif certain is not None and outs:
            self._shadows.fill(outs[0], int(certain))
        elif name in COMPARISONS and outs and outs[0].numel() > 1 and outs[0].dtype == torch.bool:
            self._assume_of_comparison(outs[0])
        elif name in FINITE and outs:
            self._shadows.fill(outs[0], int(FINITE[name]))
        elif name in MOVED:
            learn_what_moved(self._shadows, func, args, kwargs, result)
        else:
            self._choose(name, result, args)
        return result

    def _gates(self, name: str, args: Any) -> torch.Tensor | None:
        """Return what a router's gates are, which are scattered to the choices it made: some number there, and elsewhere what was there."""
        if name not in ("scatter", "scatter_") or not has_memory(args[3]) or args[0].numel() > MOST_COPIED:
            return None
        before, places = (self._value_of(tensor) for tensor in (args[0], args[2]))
        is_chosen = self._shadows.assumption_of([args[2]]) == SHARES[self._variant] if args[2].is_cuda else False
        return before.scatter(args[1], places, 1) if is_chosen and before is not None and places is not None else None

    def _choose(self, name: str, result: Any, args: Any) -> None:
        """Say which were chosen, where *name* chooses by what a model computes."""
        choices = choices_in(name, result)
        if choices is not None and choices.is_cuda:
            self._shadows.learn(choices, chosen(name, choices, args, self._variant), SHARES[self._variant])


def _is_followed(source: Any) -> bool:
    """Say whether what is copied to the device is worth following: anything but weights and images."""
    parts = parts_of(source)
    if source.is_floating_point() or source.is_complex():
        return bool(parts) and not isinstance(source, torch.nn.Parameter) and parts[-1].numel() <= MOST_COPIED
    return bool(parts)


@functools.cache
def _is_ordinary(func: Any) -> bool:
    """Say whether what *func* makes has a value only where what it is given has one."""
    is_own = func.namespace != "aten" or func.is_view or func.overloadpacket.__name__ in _OF_THEIR_OWN
    return not (is_own or _draws(func) or any(returned.name in _SEEDS for returned in func._schema.returns))


def _draws(func: Any) -> bool:
    """Say whether operation *func* draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket.__name__ in _DRAW_WITHOUT_A_TAG


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _num_elements(args: Any) -> int:
    """Return the elements of what a factory is asked for, whose first argument is the shape."""
    count = 1
    for size in args[0] if args and isinstance(args[0], (list, tuple)) else ():
        count *= int(size)
    return count

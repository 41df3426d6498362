"""
The recorder: follows a program's caching allocator, from inside its process.

It changes nothing that the program allocates. The allocator writes its own history; the recorder only counts, and notes at times when the
program does something that it can be told of: a backward begins, an optimizer steps, a gradient has been accumulated, memory ran out.
What the notes mean is worked out by whoever reads the record (`execution/run_record.py`, which says what each field is).
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memplan.child.batches import Batches
from memplan.child.compilers import Compilers
from memplan.child.device_reads import Reads
from memplan.child.habits import habits_asked_for
from memplan.child.host_values import HostValues, Variant
from memplan.child.not_compiled import not_compiled, not_followed
from memplan.child.one_rank import world
from memplan.child.program_frames import place_in
from memplan.child.recorded_values import RecordedValues, ValueWriter
from memplan.child.shard_buffers import bucket_buffers, classes_of_shards, whole_gradients
from memplan.child.tensor_types import TypeRecorder, has_memory
from memplan.traces.trace import ACTIONS, BUILD

MOST_EVENTS = 10_000_000
MOST_RECORDED = 600_000
MOST_IN_A_STEP = 2_000_000  # L-BFGS may have a closure called 50,000 times in one: PyTorch makes a dict of each event
"""Allocations and frees of which the events are kept; what comes behind them, in a long program, still counts for the peaks."""

SCANNED_STEPS = 10
"""Steps at whose end what lasts is looked for; from then on at every step whose number is a power of two."""

MOST_SCANS = 64
"""How often every object of the process is looked at when a backward begins; with many micro-batches the later ones are like the first."""

NOTED = ("parameters", "gradients", "optimizer_state", "workspaces", "batch_data")
"""What can be told of a tensor that is there; the rest are activations."""

VARYING_SHARE = 0.01
"""Of what a step allocates, by which another has to differ to be of another size."""

NOT_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""The variables that are set while values are sought."""

CHECKPOINT_FLAGS = (
    "gradient_checkpointing", "grad_checkpointing", "use_gradient_checkpointing", "use_checkpoint", "use_checkpointing",
    "activation_checkpointing", "use_activation_checkpointing",
)  # fmt: skip
"""How models call the switch: transformers, timm, and what people write."""


class Recorder:
    """Follows the caching allocator from CUDA's initialisation on."""

    def __init__(self, answers: dict[str, tuple[str, str | None]] | None = None, *, on_backward: Callable[[], None] = lambda: None) -> None:
        self._on_backward = on_backward
        """Called when a backward begins that no other one is in."""
        self.num_backwards = 0
        self.reads = Reads(answers or {})
        self.reads.num_allocs = self._num_allocs
        self.compilers = Compilers(self.reads)
        self._values: HostValues | None = None
        self._values_written, self._values_path = ValueWriter(), Path()
        self.steps: list[dict[str, int]] = []
        self._allocated_in_all: list[int] = []  # bytes, at the end of each step
        self.marks: list[tuple[int, int, int, str]] = []
        self.notes: dict[str, set[tuple[int, int]]] = {name: set() for name in NOTED}
        self.out_of_memory: dict[str, Any] | None = None
        self.checkpointing_off: set[str] = set()
        self.without_gradient: set[str] = set()
        self.without_gradient_bytes = 0
        self.types: TypeRecorder | None = None
        self.values: dict[str, Any] = {}
        self._step, self._phase = 0, BUILD
        self.batches = Batches(lambda: (self._step, self.num_backwards))
        self.is_on = False
        self._hooked: set[int] = set()
        self._at_backward: dict[int, weakref.ref[Any]] = {}
        """What may be a weight, as it was seen when the step's first backward began."""
        self._at_end: dict[int, weakref.ref[Any]] = {}
        """The same at the end of the last step."""
        self._has_looked = False
        self._num_scans = self._backwards = 0
        self._gradients_seen: set[int] = set()
        self._copies: set[tuple[int, int]] = set()  # what lasts as weights do: weights that no module has, or an optimizer's state
        self._has_accumulated = False  # a gradient, by backward
        self._has_optimizer = False  # of PyTorch
        self._gradients_missed: set[int] = set()
        self._checkpoints = self._flagged = 0
        self._events: list[dict[str, Any]] = []
        self._highest = {"peak_allocated_bytes": 0, "peak_reserved_bytes": 0}
        self._ends_at: tuple[int, int] | None = None
        self._step_seconds: list[float] = []
        self._began_at = time.monotonic()
        self._types_from: tuple[int, int] | None = None
        self._retries: int | None = None
        self._free_at_first = 0
        self._num_devices, self._own_device = 1, 0
        self._moves = self._most_walked = 0
        self._habits = habits_asked_for(lambda: self._step, lambda: self.num_backwards)
        self._buckets: list[tuple[int, int]] = []
        """Numbers of the allocations between which DDP's are."""

    def attach(self) -> None:
        """Follow this process: at once if CUDA is initialised, else as soon as it is."""
        self._watch_backward()
        self._watch_checkpointing()
        self._watch_buckets()
        self._watch_resets()
        self._watch_weights()
        self.batches.attach()
        self.compilers.attach()
        if self._habits is not None:
            self._habits.attach()
        self._most_walked = int(os.environ.get("MEMPLAN_WORST_BATCH") or 0)
        if self._most_walked:
            self.batches.lead_with_largest(self._most_walked, after_one=os.environ.get("MEMPLAN_STEPS") != "1")
        register_optimizer_step_pre_hook(not_compiled(self._optimizer_begins))
        register_optimizer_step_post_hook(not_compiled(self._optimizer_ends))
        if torch.cuda._initialization_lock.locked():  # CUDA is being initialised, below this call perhaps: it will see to the queue
            torch.cuda._queued_calls.append((self._cuda_began, traceback.format_stack()))
        else:
            torch.cuda._lazy_call(self._cuda_began)

    def use_values(self, path: str, variant: str) -> None:
        """
        Read values from the file at *path*; with a *variant*, find them and write them there when the program ends.

        While they are sought nothing is compiled, so that each operation can be followed. The host draws the same numbers each time.
        """
        if not path:
            return
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        if not variant:
            self.reads.recorded = RecordedValues(Path(path))
            return
        os.environ.update(NOT_COMPILED)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.disable = True
        self._values_path = Path(path)
        self._values = HostValues(self.reads, self._values_written, cast("Variant", variant))
        self._values.__enter__()
        self._values.follow_threads()

    def _end_values(self) -> None:
        if self._values is not None:
            self._values.__exit__(None, None, None)
            self._values = None
            self._values_written.write(self._values_path)

    def _cuda_began(self) -> None:
        if torch.cuda.get_allocator_backend() != "native":
            raise RuntimeError("only PyTorch's own caching allocator can be followed: take `backend:` out of PYTORCH_CUDA_ALLOC_CONF")
        torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_EVENTS)
        torch._C._cuda_attach_out_of_memory_observer(not_compiled(self._memory_ran_out))  # type: ignore[attr-defined]  # in no stub
        self.reads.attach()
        ranks, self._num_devices = world(), torch.cuda.device_count()
        self._own_device = ranks.local_rank if ranks and ranks.local_rank < self._num_devices else 0
        self._free_at_first = torch.cuda.mem_get_info(self._own_device)[0]
        self.is_on = True
        self.mark(self._phase)

    @property
    def _device(self) -> int:
        """Return the GPU that is told of: the rank's own, or the one that it uses instead."""
        if self._num_devices == 1 or torch.cuda.memory_reserved(self._own_device):
            return self._own_device
        return max(range(self._num_devices), key=torch.cuda.memory_reserved)

    # steps and phases

    def mark(self, phase: str) -> None:
        """Note that the program is in *phase* of the present step now."""
        self._phase = phase
        if self._is_recording:
            self.marks.append((*self._counts(), self._step, phase))

    def end_building(self, *, was_none: bool = False) -> None:
        """Note that what comes before the first step has ended; with *was_none*, that nobody can tell where it did."""
        if self._phase == BUILD:
            if was_none:
                self.marks = [(*mark[:3], "forward" if mark[3] == BUILD else mark[3]) for mark in self.marks]
            self.mark("forward")

    def begin_step(self, number: int) -> None:
        """Note that step *number* begins."""
        self._step = number
        self.reads.begin_step()
        self.mark("forward")
        if number == 1 and self._is_recording:  # what was built; a whole program builds within its first step
            self._note_what_lasts()

    def end_step(self) -> None:
        """Note the peaks so far, and where everything that lasts lies."""
        if not self.is_on:
            return
        if not torch.cuda.is_current_stream_capturing():  # an optimizer may step within a CUDA graph that is captured
            torch.cuda.synchronize()
        self._step_seconds.append(time.monotonic() - self._began_at)
        self._checkpoints = 0
        number = len(self.steps) + 1
        if self._is_recording and (number <= SCANNED_STEPS or number & (number - 1) == 0):
            self._note_what_lasts()
        self.steps.append({
            **self._peaks(),
            "allocated_bytes": torch.cuda.memory_allocated(self._device),
            "reserved_bytes": torch.cuda.memory_reserved(self._device),
        })  # fmt: skip
        self._allocated_in_all.append(torch.cuda.memory_stats(self._device).get("allocated_bytes.all.allocated", 0))
        if self._is_recording and sum(self._counts()) > MOST_RECORDED:
            self._events, _, self._ends_at = self._stop_history()
        self._began_at = time.monotonic()

    def varies(self) -> bool:
        """Say whether the last step allocated more or less in all than the one before."""
        before, last = (after - at for at, after in pairwise(self._allocated_in_all[-3:]))
        return abs(last - before) > VARYING_SHARE * max(last, before)

    def has_settled(self) -> bool:
        """Say whether each of the last two steps left all as it was, peaks and what is reserved too, and allocated as much as the other."""
        before, *last = self.steps[-3:]
        first, second = (after - at for at, after in pairwise(self._allocated_in_all[-3:]))
        return last == [before, before] and first == second

    def record_types(self) -> TypeRecorder:
        """Record the type of every tensor from here on: what is allocated from here on counts for nothing else."""
        self._retries = self._num_retries()
        self.types = TypeRecorder(self._num_allocs)
        self._types_from = self._counts()
        self.reads.is_counting = False
        os.environ.pop("MEMPLAN_LOG", None)  # the device has nothing to say of it either
        return self.types

    def _counts(self) -> tuple[int, int]:
        """Return how many allocations and how many frees there have been."""
        counts = torch.cuda.memory_stats_as_nested_dict(self._device).get("allocation", {}).get("all", {})  # nothing before the first
        return int(counts.get("allocated", 0)), int(counts.get("freed", 0))

    def _num_allocs(self) -> int:
        return self._counts()[0]

    def _num_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def _watch_backward(self) -> None:
        # Private, and the one door to the engine: `_engine_run_backward`, from 2.3 on, goes through it too.
        run_backward = torch.autograd.Variable._execution_engine.run_backward

        enter, leave = not_compiled(self._enter_backward), not_compiled(self._leave_backward)

        @functools.wraps(run_backward)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            if not enter(arguments[0] if arguments else ()):
                return run_backward(*arguments, **keywords)
            try:
                return run_backward(*arguments, **keywords)
            finally:
                leave()

        not_followed(watched)
        engine = type("WatchedEngine", (torch._C._ImperativeEngine,), {"run_backward": staticmethod(watched)})
        torch.autograd.Variable._execution_engine = engine()

    def _enter_backward(self, roots: Any) -> bool:
        """Note that a backward from *roots* begins, maybe within another; return whether it is run: torch.compile only works some out."""
        if self.types is None and not isinstance(_get_current_dispatch_mode(), HostValues | None):
            return False
        if self._backwards == 0:
            self._on_backward()
            if self._habits is not None:
                self._habits.backward_begins(roots)
            self.num_backwards += 1
            self._backward_begins()
        self._backwards += 1
        return True

    def _leave_backward(self) -> None:
        self._backwards -= 1
        if self._backwards == 0:
            self.mark("forward")

    def _peaks(self) -> dict[str, int]:
        """Return the peaks of the whole program, whatever it has reset."""
        self._highest = {
            "peak_allocated_bytes": max(self._highest["peak_allocated_bytes"], torch.cuda.max_memory_allocated(self._device)),
            "peak_reserved_bytes": max(self._highest["peak_reserved_bytes"], torch.cuda.max_memory_reserved(self._device)),
        }
        return self._highest

    def _watch_resets(self) -> None:
        """Keep the peaks where a program resets them, as many do at every epoch."""
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            reset = getattr(torch._C, name, None)
            if reset is not None:
                setattr(torch._C, name, self._noting_peaks_first(reset))

    def _noting_peaks_first(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reset)
        def call(*arguments: Any) -> Any:
            if self.is_on:
                self._peaks()
            return reset(*arguments)

        return call

    def _watch_checkpointing(self) -> None:
        """Count the regions that are checkpointed, under both implementations."""
        module: Any = torch.utils.checkpoint
        generator, apply = module._checkpoint_without_reentrant_generator, module.CheckpointFunction.apply

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*arguments: Any, **keywords: Any) -> Any:
                self._checkpoints += 1
                return function(*arguments, **keywords)

            return not_followed(call)

        module._checkpoint_without_reentrant_generator = counted(generator)
        module.CheckpointFunction.apply = counted(apply)

    def _watch_buckets(self) -> None:
        """Note what the reducer of DistributedDataParallel allocates: buckets of gradients, at first and again before the second step."""
        reducer: Any = getattr(torch.distributed, "Reducer", None)
        for name in ("__init__", "_rebuild_buckets"):
            if reducer is not None:
                setattr(reducer, name, self._noting_buckets(getattr(reducer, name)))

    def _noting_buckets(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            before = self._num_allocs() if self._is_recording else 0
            result = function(*arguments, **keywords)
            if self._is_recording:
                self._buckets.append((before, self._num_allocs()))
            return result

        return call

    def _watch_weights(self) -> None:
        """Note parameters when a module gets them, and when it moves: what shards them gives the whole ones up before the first step."""
        move, note_present = torch.nn.Module._apply, not_compiled(self._note_present)

        @functools.wraps(move)
        def moved(module: Any, *arguments: Any, **keywords: Any) -> Any:
            self._moves += 1
            try:
                return move(module, *arguments, **keywords)
            finally:
                self._moves -= 1
                if self._moves == 0:
                    note_present(module.parameters())

        torch.nn.Module._apply = not_followed(moved)  # type: ignore[method-assign]
        torch.nn.modules.module.register_module_parameter_registration_hook(
            not_compiled(lambda _, __, parameter: self._note_present([parameter]))
        )

    def _note_present(self, parameters: Iterable[Any]) -> None:
        found = addresses(parameter for parameter in parameters if parameter is not None) if self._is_recording else set()
        if found:
            count = self._num_allocs()
            self.notes["parameters"] |= {(address, count) for address in found}

    def _backward_begins(self) -> None:
        if self._is_recording and sum(self._counts()) > MOST_IN_A_STEP:
            self._note_what_lasts()
            self._events, _, self._ends_at = self._stop_history()
        if self._is_recording and self._num_scans < MOST_SCANS:
            self._num_scans += 1
            self._scan()
        self.mark("backward")

    def _optimizer_begins(self, optimizer: Any, arguments: Any, keywords: Any) -> Any:
        self._look_for_gradients(optimizer)
        self.mark("optimizer")
        closure, *rest = arguments[1:] or (keywords.get("closure"),)
        if not callable(closure):
            return None
        whole = self._as_forward(closure)  # Lightning's optimizers step so, and L-BFGS
        return ((arguments[0], whole, *rest), keywords) if arguments[1:] else (arguments, {**keywords, "closure": whole})

    def _as_forward(self, closure: Any) -> Any:
        """Return *closure*, by which an optimizer has the loss and its gradients computed: that is no work of the optimizer's own."""

        def called() -> Any:
            self.mark("forward")
            loss = closure()
            self.mark("optimizer")
            return loss

        return not_compiled(called)

    def _optimizer_ends(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        del arguments, keywords
        self._look_for_gradients(optimizer)  # a closure makes them within the step
        self.mark("forward")

    def _look_for_gradients(self, optimizer: Any) -> None:
        """Note which parameters have a gradient, and where it lies: FSDP puts it there itself, and autograd tells of none."""
        found = [parameter.grad for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]
        if self._is_recording and any(hasattr(gradient, "_local_tensor") for gradient in found):
            self.notes["gradients"] |= {(address, self._num_allocs()) for address in addresses(found)}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and getattr(parameter, "_local_tensor", parameter).numel():  # else its shard is empty
                    (self._gradients_missed if parameter.grad is None else self._gradients_seen).add(id(parameter))

    def _memory_ran_out(self, device: int, asked: int, total: int, free: int) -> None:
        del device, total
        if self.types is not None:
            return
        if self.out_of_memory is None and self._is_recording:
            self._note_what_lasts()  # no step ends here that would
        self.out_of_memory = self.out_of_memory or {
            "requested_bytes": asked,
            "free_bytes": free,
            "step": self._step,
            "phase": self._phase,
            "place": place_in(sys._getframe()),  # of the main thread where it is one of autograd's, without frames of the program
            "message": f"tried to allocate {asked} bytes with {free} bytes free",
            "batch_size": self.batches.last_size,
        }

    # what lies where

    def _scan(self) -> None:
        """Look at every object: hook new parameters, note the batch, see whether checkpointing is on and has no effect."""
        count = self._num_allocs()
        plain: list[Any] = []
        self._flagged = 0
        kinds = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
        fsdp, zero = classes_of_shards()
        modules, optimizers, tensors, checkpointed, *found_of_shards = objects_of(*kinds, _kept_by_checkpointing(), *fsdp, *zero)
        gradients = addresses(whole_gradients(each for found in found_of_shards[: len(fsdp)] for each in found))
        buffers = addresses(bucket_buffers(each for found in found_of_shards[len(fsdp) :] for each in found))
        compiled = _is_compiled()
        if not self._has_looked:
            self._has_looked = True
            self._at_backward = _possible_weights(modules, tensors)
            self._note_copies(_those_of_both(self._at_end, self._at_backward), modules, optimizers, count)
        for tensor in filter(_is_whole, tensors):
            if not isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and tensor.grad_fn is None:
                is_mask = tensor.dtype == torch.bool
                if not compiled or not (is_mask or tensor.is_floating_point()):  # what a compiled forward keeps looks the same as a batch
                    plain.append(tensor)
            elif tensor.is_leaf and tensor.requires_grad and id(tensor) not in self._hooked:
                self._hooked.add(id(tensor))
                tensor.register_post_accumulate_grad_hook(self._note_gradient)
        saved = addresses(kept.val for kept in checkpointed if isinstance(kept.val, torch.Tensor))
        weights = addresses(self._trained_or_of_modules(modules, tensors, count))  # a flat one is of no module
        weights |= addresses(plain) & addresses(tensor for tensor in tensors if _is_view_in_graph(tensor))  # gathered, of FSDP
        self.notes["parameters"] |= {(address, count) for address in weights}
        self.notes["gradients"] |= {(address, count) for address in gradients}
        self.notes["workspaces"] |= {(address, count) for address in buffers}
        for module in modules:
            self._check_checkpointing(module)
        self._note_weights(modules, optimizers, count)  # a program without an optimizer ends no step
        if self._flagged and not self._checkpoints and not compiled:
            modules_on = f"{self._flagged} module{'s' if self._flagged > 1 else ''}"
            self.checkpointing_off.add(f"the switch is on in {modules_on}, and not one region was checkpointed")
        self.notes["batch_data"] |= {(address, count) for address in addresses(plain) - saved - weights - gradients - buffers}

    def _check_checkpointing(self, module: Any) -> None:
        names = [name for name in CHECKPOINT_FLAGS if module.__dict__.get(name) is True]
        if not names:
            return
        if module.training:
            self._flagged += 1
        elif any(parameter.requires_grad for parameter in module.parameters()):  # else a frozen teacher: it has nothing to checkpoint
            self.checkpointing_off.add(f"{type(module).__name__} is in eval mode")

    def _note_gradient(self, parameter: Any) -> None:
        self._has_accumulated = True
        if self._is_recording and parameter.grad is not None:
            count = self._num_allocs()
            self.notes["gradients"] |= {(address, count) for address in addresses(parts_of(parameter.grad))}

    def _note_what_lasts(self) -> None:
        """Note where parameters, buffers and the optimizers' states lie now."""
        count = self._num_allocs()
        modules, optimizers, tensors = objects_of(torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
        self._note_weights(modules, optimizers, count)
        loose = self._trained_or_of_modules(modules, tensors, count)
        self.notes["parameters"] |= {(address, count) for address in addresses([*trained_by(optimizers), *loose])}
        self.notes["optimizer_state"] |= {(address, count) for address in addresses(states_of(optimizers))}
        self._at_end = _possible_weights(modules, tensors)
        self._note_copies(_those_of_both(self._at_backward, self._at_end), modules, optimizers, count, are_of_whole_models=True)
        self._has_looked = False
        missed = self._gradients_missed - self._gradients_seen
        self.without_gradient = (names_of(missed, modules) or {f"{len(missed)} parameters"}) if missed else set()
        self.without_gradient_bytes = sum(
            each.numel() * each.element_size()
            for each in {id(each): each for each in trained_by(optimizers)}.values()
            if id(each) in missed
        )

    def _note_weights(self, modules: list[Any], optimizers: list[Any], count: int) -> None:
        """Note parameters and buffers; of a step that is compiled, the module that it became has the optimizer's state as buffers."""
        buffers = addresses(tensor for module in modules for tensor in module.buffers(False)) - addresses(states_of(optimizers))
        weights = addresses(tensor for module in modules for tensor in module.parameters(False)) | buffers
        self.notes["parameters"] |= {(address, count) for address in weights}

    def _trained_or_of_modules(self, modules: list[Any], tensors: list[Any], count: int) -> list[Any]:
        """Return the Parameters among *tensors* that are weights for certain; the others, as which Keras keeps its moments, are copies."""
        found = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
        of_modules = {id(parameter) for module in modules for parameter in module.parameters(False)}
        others = {id(parameter): parameter for parameter in found if not parameter.requires_grad and id(parameter) not in of_modules}
        self._copies |= {(address, count) for address in addresses(others.values())}
        return [parameter for parameter in found if id(parameter) not in others]

    def _note_copies(
        self, lasting: list[Any], modules: list[Any], optimizers: list[Any], count: int, *, are_of_whole_models: bool = False
    ) -> None:
        """
        Note those of *lasting* that belong to no module and last as weights do, as an average or a teacher that is kept in a dict.

        They look like weights and were there at the end of the last step, as no batch is. Or, where they *are_of_whole_models*, they
        were there from a step's first backward to its end, and have most of the shapes of the weights: an average that is made anew in each
        step. A batch may have the shape of one.
        """
        weights = [weight for module in modules for weight in (*module.parameters(False), *module.buffers(False))]
        gradients = [weight.grad for weight in (*weights, *trained_by(optimizers)) if weight.grad is not None]
        taken = addresses([*weights, *gradients, *states_of(optimizers)])
        copies = {address: tensor for tensor in lasting for address in addresses([tensor]) if address not in taken}
        if not are_of_whole_models or len({tensor.shape for tensor in copies.values()}) > len(_shapes_of(modules)) / 2:
            for address, tensor in copies.items():
                (self.notes["parameters"] if tensor.requires_grad else self._copies).add((address, count))
        self._has_optimizer = self._has_optimizer or bool(optimizers)

    # the result

    def result(self, failure: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what was seen; *failure* says why the program ended early, where it did."""
        self._end_values()
        self.reads.detach()
        failure = failure and failure | {"phase": BUILD if self._phase == BUILD else f"step {self._step}"}
        if not self.is_on:
            return {"torch": torch.__version__, "gpu_name": None, "failure": failure}
        peaks = self.steps[-1] if self.types and self.steps else self._peaks()  # recording types keeps arguments alive for longer
        workspaces: set[tuple[int, int]] = set()
        was_stopped = not self._is_recording
        if self._is_recording:
            self._events, workspaces, self._ends_at = self._stop_history(clear=True)
        elif self._ends_at is not None:  # a long program, whose events ended while its workspaces were in use
            torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_EVENTS)
            _, given_back, _ = self._stop_history(clear=True, frees=0)
            workspaces = {(address, self._ends_at[0]) for address, _ in given_back}
        workspaces |= self._buckets_in(self._events)
        free, reserved = torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device)
        has_other_optimizer = self._has_accumulated and not self._has_optimizer  # fastai's, Keras's
        self.notes["optimizer_state" if has_other_optimizer else "parameters"] |= self._copies
        notes = {name: sorted(found) for name, found in self.notes.items()} | {"workspaces": sorted(workspaces | self.notes["workspaces"])}
        return {
            "gpu_name": torch.cuda.get_device_properties(self._device).name,
            "torch": torch.__version__,
            "steps": self.steps,
            "step_seconds": self._step_seconds,
            "peak_allocated_bytes": peaks["peak_allocated_bytes"],
            "peak_reserved_bytes": peaks["peak_reserved_bytes"],
            "reserved_bytes": reserved,
            "outside_bytes": max(0, self._free_at_first - free - reserved),  # what libraries took besides, and kernels as they were loaded
            "num_alloc_retries": self._num_retries() if self._retries is None else self._retries,
            "events": columns(self._events),
            "end": self._ends_at if was_stopped else self._types_from or self._ends_at,
            "was_stopped": was_stopped,
            "marks": self.marks,
            "notes": notes,
            "tensor_types": self.types.seen if self.types and not was_stopped and not _is_compiled() else [],
            "reads": self.reads.seen(),
            "chosen_by_time": self.compilers.chosen_by_time(),
            "batches": self.batches.seen,
            "num_backwards": self.num_backwards,
            "habits": self._habits and self._habits.seen(),
            "num_walked_batches": self.batches.num_walked if self._most_walked else None,
            "checkpointing_off": sorted(self.checkpointing_off),
            "without_gradient": sorted(self.without_gradient),
            "without_gradient_bytes": self.without_gradient_bytes,
            "out_of_memory": self.out_of_memory,
            "values": self.values,
            "failure": failure,
        }

    def _buckets_in(self, events: list[dict[str, Any]]) -> set[tuple[int, int]]:
        """Return where DDP's buckets lie: the events of allocations are in the order of their numbers."""
        if not self._buckets:
            return set()
        places = [event["addr"] for event in events if event["action"] == "alloc"]
        return {(places[number], number + 1) for begin, end in self._buckets for number in range(begin, min(end, len(places)))}

    @property
    def _is_recording(self) -> bool:
        return self.is_on and self._ends_at is None

    def _stop_history(
        self, *, clear: bool = False, frees: int | None = None
    ) -> tuple[list[dict[str, Any]], set[tuple[int, int]], tuple[int, int]]:
        """
        Return the events up to now, where cuBLAS's workspaces lie (*clear*: known by giving them back), and where the events end.

        *frees* are those of the history so far, where it is not that of the whole program.
        """
        count, all_frees = self._counts()
        frees = all_frees if frees is None else frees
        if clear:
            torch._C._cuda_clearCublasWorkspaces()
        events = torch.cuda.memory._snapshot()["device_traces"][self._device]
        torch.cuda.memory._record_memory_history(enabled=None)
        freed = [event["addr"] for event in events if event["action"] == "free_completed"][frees:]
        return events, {(address, count) for address in freed}, (count, all_frees)


def objects_of(*kinds: type) -> list[list[Any]]:
    """Return the objects of this process that are of each kind. Their classes are looked up first: a million objects take no second."""
    found: dict[type, list[Any]] = {}
    lists: list[list[Any]] = []
    for kind in kinds:
        lists.append([])
        for known in (kind, *subclasses(kind)):
            found[known] = lists[-1]
    candidates = gc.get_objects()  # millions, in a program that was compiled
    for candidate in itertools.compress(candidates, map(found.__contains__, map(type, candidates))):
        found[type(candidate)].append(candidate)
    return lists


def subclasses(kind: type) -> set[type]:
    """Return every class that is derived from *kind*."""
    direct: set[type] = set(type.__subclasses__(kind))
    return direct.union(*(subclasses(known) for known in direct))


def _kept_by_checkpointing() -> type:
    """Return the class that keeps a result of selective activation checkpointing as `val`: it has no graph, as a batch has none."""
    kind: type = getattr(torch.utils.checkpoint, "_VersionWrapper", _NoneBefore)  # private
    return kind


class _NoneBefore:
    """Nothing is of this class: PyTorch before 2.4 has no selective checkpointing of this kind."""


def _is_compiled() -> bool:
    """Say whether torch.compile has compiled anything: it has its own way with checkpoints."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def trained_by(optimizers: Iterable[Any]) -> list[Any]:
    """Return what *optimizers* train."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


def states_of(optimizers: Iterable[Any]) -> list[Any]:
    """Return the values of the states of *optimizers*."""
    return [value for optimizer in optimizers for state in optimizer.state.values() for value in tensors_of(state)]


def addresses(tensors: Iterable[Any]) -> set[int]:
    """Return where those of *tensors* that lie on the device begin."""
    found = set()
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in itertools.chain.from_iterable(map(_inner, tensors)):
            if has_memory(tensor) and tensor.is_cuda and tensor.layout is torch.strided and not _is_wrapped(tensor):
                found.add(tensor.untyped_storage().data_ptr())
    return found


def _inner(tensor: Any) -> Iterator[Any]:
    """Yield what *tensor* consists of: of a DTensor what lies here, of a quantised one its codes and scales; itself, where it is plain."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _inner(getattr(tensor, name))


def _shapes_of(modules: list[Any]) -> set[torch.Size]:
    weights = (weight for module in modules for weight in (*module.parameters(False), *module.buffers(False)))
    return {weight.shape for weight in weights if weight.dim()}


def _possible_weights(modules: list[Any], tensors: list[Any]) -> dict[int, weakref.ref[Any]]:
    """Return those of *tensors* that look like weights, by their identity."""
    shapes = _shapes_of(modules)
    return {id(tensor): weakref.ref(tensor) for tensor in filter(_is_whole, tensors) if _may_be_weight(tensor, shapes)}


def _those_of_both(before: dict[int, weakref.ref[Any]], now: dict[int, weakref.ref[Any]]) -> list[Any]:
    """Return what was there before and is there now."""
    found = ((before[key](), reference()) for key, reference in now.items() if key in before)
    return [tensor for earlier, tensor in found if tensor is not None and tensor is earlier]


def _may_be_weight(tensor: Any, shapes: set[torch.Size]) -> bool:
    """Say whether *tensor* has one of *shapes*, those of the weights, or is itself what gradients are accumulated for."""
    with torch._C.DisableTorchFunctionSubclass():
        if not has_memory(tensor) or not tensor.is_cuda or not tensor.is_floating_point() or not tensor.is_leaf:
            return False
        return tensor.requires_grad or tensor.shape in shapes


def _is_whole(tensor: Any) -> bool:
    """Say whether *tensor* has a content: one that is being made or has been given up, by another thread perhaps, is an object without."""
    try:
        _ = tensor.is_leaf
    except RuntimeError:
        return False
    return True


def _is_view_in_graph(tensor: Any) -> bool:
    """Say whether *tensor* is a part of another, and autograd goes on from it, as parameters are of a flat one."""
    return _is_whole(tensor) and tensor.grad_fn is not None and tensor._is_view()


def _is_wrapped(tensor: Any) -> bool:
    """Say whether *tensor* stands for another, as torch.compile and torch.func have them: it has no memory of its own."""
    return bool(torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def parts_of(gradient: Any) -> tuple[Any, ...]:
    """Return the tensors that hold *gradient*: that of an embedding may be sparse, its rows and which they are."""
    return (gradient._indices(), gradient._values()) if gradient.layout is torch.sparse_coo else (gradient,)


def tensors_of(state: Any) -> Iterable[Any]:
    """Return the values of an optimizer's state for one parameter, those of lists in it as well."""
    values = list(state.values()) if isinstance(state, dict) else []
    return [inner for value in values for inner in (value if isinstance(value, (list, tuple)) else (value,))]


def columns(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the allocator's events as columns: one letter each, addresses, bytes, streams."""
    kept = [event for event in events if event["action"] in ACTIONS]
    return {
        "actions": "".join(ACTIONS[event["action"]] for event in kept),
        "addresses": [event.get("addr", 0) for event in kept],
        "sizes": [event["size"] for event in kept],
        "streams": [event.get("stream", 0) for event in kept],
    }


def names_of(missed: set[int], modules: list[Any]) -> set[str]:
    """Return the names of the parameters whose id is in *missed*, as the models that are no part of another call them."""
    inner = {id(child) for module in modules for child in module._modules.values()}
    models = [module for module in modules if id(module) not in inner]
    return {name for model in models for name, parameter in model.named_parameters() if id(parameter) in missed}

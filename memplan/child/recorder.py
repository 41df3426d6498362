"""
The recorder: follows a program's caching allocator, from inside its process.

It changes nothing that the program allocates. The allocator writes its own history; the recorder only counts, and notes at times when the
program does something that it can be told of: a backward begins, an optimizer steps, a gradient has been accumulated, memory ran out.
What the notes mean is worked out by whoever reads the record (`execution/run_record.py`, which says what each field is).
"""

from __future__ import annotations

import functools
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memplan.child.assumed_values import Variant
from memplan.child.batches import Batches
from memplan.child.compilers import Compilers
from memplan.child.copied_masks import note_masks
from memplan.child.device_reads import Reads, counted_bytes, is_simulated
from memplan.child.evaluations import Evaluations
from memplan.child.event_history import MOST_IN_A_STEP, MOST_RECORDED, EventHistory
from memplan.child.failures import NO_ENGINE
from memplan.child.habits import habits_asked_for
from memplan.child.host_values import HostValues
from memplan.child.largest_batches import WalkLimits
from memplan.child.not_captured import capture_nothing
from memplan.child.not_compiled import not_compiled, not_followed
from memplan.child.one_rank import world
from memplan.child.program_frames import place_in
from memplan.child.recorded_values import RecordedValues, ValueWriter
from memplan.child.repeated_step import RepeatedStep
from memplan.child.tensor_notes import TensorNotes, is_compiled
from memplan.child.tensor_types import TypeRecorder
from memplan.child.tracked_objects import without_collections
from memplan.traces.trace import BUILD, EVALUATION, evaluation_before

SCANNED_STEPS = 10
"""Steps at whose end what lasts is looked for; from then on at every step whose number is a power of two."""

VARYING_SHARE = 0.01
"""Of what a step allocates, by which another has to differ to be of another size."""

NOT_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""The variables that are set while values are sought."""


class Recorder:
    """Follows the caching allocator from CUDA's initialisation on."""

    def __init__(self, answers: dict[str, tuple[str, str | None]] | None = None, *, on_backward: Callable[[], None] = lambda: None) -> None:
        self._on_backward = on_backward
        """Called when a backward begins that no other one is in."""
        self.num_backwards = 0
        self.reads = Reads(answers or {})
        self._history = EventHistory(lambda: self._device)
        self.reads.num_allocs = self._history.num_allocs
        self.compilers = Compilers(self.reads)
        self._values: HostValues | None = None
        self._values_written, self._values_path = ValueWriter(), Path()
        self.steps: list[dict[str, int]] = []
        self._allocated_in_all: list[int] = []  # bytes, at the end of each step
        self.marks: list[tuple[int, int, int, str]] = []
        self._tensors = TensorNotes(self._history.num_allocs, lambda: self._history.is_recording)
        self.out_of_memory: dict[str, Any] | None = None
        self.types: TypeRecorder | None = None
        self.values: dict[str, Any] = {}
        self._step, self._phase = 0, BUILD
        self.batches = Batches(lambda: (self._step, self.num_backwards))
        self.is_on = False
        self._backwards = 0
        self._highest = {"peak_allocated_bytes": 0, "peak_reserved_bytes": 0}
        self._step_seconds: list[float] = []
        self._began_at = time.monotonic()
        self._retries: int | None = None
        self._free_at_first = 0
        self._num_devices, self._own_device = 1, 0
        self._most_walked = 0
        self._habits = habits_asked_for(lambda: self._step, lambda: self.num_backwards)

    def attach(self) -> None:
        """Follow this process: at once if CUDA is initialised, else as soon as it is."""
        self._watch_backward()
        self._tensors.attach()
        if is_simulated():
            _draw_the_same()
        Evaluations(self._evaluates).attach()
        self._history.attach()
        self._watch_resets()
        self.batches.attach()
        self.compilers.attach()
        if is_simulated():
            note_masks(lambda: self._values is None)
        if self._habits is not None:
            self._habits.attach()
        limits = _walk_limits(os.environ)
        self._most_walked = limits.most
        if self._most_walked:
            own_first = int(os.environ.get("MEMPLAN_OWN_FIRST") or 1)
            self.batches.lead_with_largest(limits, after=0 if os.environ.get("MEMPLAN_STEPS") == "1" else own_first)
        register_optimizer_step_pre_hook(not_compiled(self._optimizer_begins))
        register_optimizer_step_post_hook(not_compiled(self._optimizer_ends))
        if torch.cuda._initialization_lock.locked():  # CUDA is being initialised, below this call perhaps: it will see to the queue
            torch.cuda._queued_calls.append((self._cuda_began, traceback.format_stack()))
        else:
            torch.cuda._lazy_call(self._cuda_began)

    def use_values(self, path: str, variant: str) -> None:
        """
        Read values from the file at *path*; with a *variant*, find them and write them there when the program ends.

        While they are sought nothing is compiled, so that each operation can be followed.
        """
        if not path:
            return
        if not variant:
            self.reads.recorded = RecordedValues(Path(path))
            return
        os.environ.update(NOT_COMPILED)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.disable = True
        capture_nothing()
        self._values_path = Path(path)
        self._values = HostValues(self.reads, self._values_written, cast("Variant", variant))
        self._values.__enter__()
        self._values.follow_threads()
        self._values.follow_factories()
        self._values.leave_traces()
        self._values.leave_loading()

    def _end_values(self) -> None:
        if self._values is not None:
            self._values.__exit__(None, None, None)
            self._values = None
            self._values_written.write(self._values_path)

    def _cuda_began(self) -> None:
        if torch.cuda.get_allocator_backend() != "native":
            raise RuntimeError("only PyTorch's own caching allocator can be followed: take `backend:` out of PYTORCH_CUDA_ALLOC_CONF")
        self._history.begin()
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
        if self._history.is_recording:
            self.marks.append((*self._history.counts(), self._step, phase))

    def end_building(self, *, was_none: bool = False) -> None:
        """Note that what comes before the first step has ended; with *was_none*, that nobody can tell where it did."""
        if self._phase == BUILD:
            if was_none:
                self.marks = [(*mark[:3], "forward" if mark[3] == BUILD else mark[3]) for mark in self.marks]
            self.mark("forward")

    def _evaluates(self, is_evaluating: bool) -> None:
        """Note that the model was put into eval mode, between backwards, or back."""
        if self._phase == ("forward" if is_evaluating else EVALUATION):
            self.mark(EVALUATION if is_evaluating else "forward")

    def _note_trained_in_eval_mode(self) -> None:
        """Take back that an evaluation began, where a backward follows: the program trains in eval mode."""
        if self._phase == EVALUATION and self.marks[-1][3] == EVALUATION:
            self.marks[-1] = (*self.marks[-1][:3], "forward")

    def begin_step(self, number: int) -> None:
        """Note that step *number* begins."""
        self._step = number
        self.reads.begin_step()
        self.mark("forward")
        if number == 1 and self._history.is_recording:  # what was built; a whole program builds within its first step
            self._tensors.note_what_lasts()

    def end_step(self) -> None:
        """Note the peaks so far, and where everything that lasts lies."""
        if not self.is_on:
            return
        if not torch.cuda.is_current_stream_capturing():  # an optimizer may step within a CUDA graph that is captured
            torch.cuda.synchronize()
        self._step_seconds.append(time.monotonic() - self._began_at)
        self._tensors.step_ends()
        number = len(self.steps) + 1
        if self._history.is_recording and (number <= SCANNED_STEPS or number & (number - 1) == 0):
            self._tensors.note_what_lasts()
        self.steps.append({
            **self._peaks(),
            "allocated_bytes": torch.cuda.memory_allocated(self._device),
            "reserved_bytes": torch.cuda.memory_reserved(self._device),
        })  # fmt: skip
        self._allocated_in_all.append(torch.cuda.memory_stats(self._device).get("allocated_bytes.all.allocated", 0))
        self._history.stop_beyond(MOST_RECORDED)
        self._began_at = time.monotonic()

    def repeated_step(self) -> RepeatedStep | None:
        """Return what asks again for all that the last step asked for; None where such a step has to be run. Nothing is noted of those."""
        if not self._history.is_recording:
            return None
        return self._history.repeated_step(next(mark[:2] for mark in self.marks if mark[2] == self._step))

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
        self.types = TypeRecorder(self._history.num_allocs)
        self._history.count_until_here()
        self.reads.is_counting = False
        os.environ.pop("MEMPLAN_LOG", None)  # the device has nothing to say of it either
        return self.types

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

    def _backward_begins(self) -> None:
        self._note_trained_in_eval_mode()
        if self._history.is_recording and sum(self._history.counts()) > MOST_IN_A_STEP:
            self._tensors.note_what_lasts()
            self._history.stop_beyond(MOST_IN_A_STEP)
        self._tensors.backward_begins()
        self.mark("backward")

    def _optimizer_begins(self, optimizer: Any, arguments: Any, keywords: Any) -> Any:
        self._tensors.look_for_gradients(optimizer)
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
        self._tensors.look_for_gradients(optimizer)  # a closure makes them within the step
        self.mark("forward")

    def _memory_ran_out(self, device: int, asked: int, total: int, free: int) -> None:
        del device, total
        if self.types is not None:
            return
        if self.out_of_memory is None and self._history.is_recording:
            self._tensors.note_what_lasts()  # no step ends here that would
        place = place_in(sys._getframe())  # of the main thread where it is one of autograd's, without frames of the program
        message = f"tried to allocate {asked} bytes with {free} bytes free"
        self.out_of_memory = self.out_of_memory or self._out_of_memory(asked, free, message=message, place=place)

    def _out_of_memory(self, asked: int, free: int, *, message: str, place: str | None) -> dict[str, Any]:
        return {
            "requested_bytes": asked,
            "free_bytes": free,
            "step": self._step,
            "phase": self._phase,
            "place": place,
            "message": message,
            "batch_size": self.batches.last_size,
        }

    def note_failure(self, error: BaseException) -> None:
        """
        Note that memory ran out where *error* says that none of cuDNN's engines runs, and what they want is not free.

        Under `torch.backends.cudnn.benchmark` PyTorch leaves out those that need more than is free, without asking for it (Conv_v8.cpp).
        """
        if not self.is_on or self.out_of_memory is not None or NO_ENGINE not in str(error):
            return
        reserved, most_reserved = torch.cuda.memory_reserved(self._device), torch.cuda.max_memory_reserved(self._device)
        given_back = most_reserved - reserved  # PyTorch empties its cache behind such trials
        refused, free = counted_bytes("memplan_refused_workspace"), max(0, torch.cuda.mem_get_info(self._device)[0] - given_back)
        asked = refused or counted_bytes("memplan_largest_workspace")
        if refused or asked > free:
            self.out_of_memory = self._out_of_memory(asked, free, message=str(error).splitlines()[0], place=None)

    def _where(self) -> str:
        if self._phase == EVALUATION:
            return evaluation_before(self._step)
        return BUILD if self._phase == BUILD or not self._has_begun else f"step {self._step}"

    @property
    def _has_begun(self) -> bool:
        """Say whether the first step has: loaders and loggers, which may be made behind the optimizer, take nothing of the GPU."""
        return self._step > 1 or not self.marks or self._history.counts() != self.marks[-1][:2]

    # the result

    @without_collections()
    def result(self, failure: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what was seen; *failure* says why the program ended early, where it did."""
        self._end_values()
        self.reads.detach()
        failure = failure and failure | {"phase": self._where()}
        if not self.is_on:
            return {"torch": torch.__version__, "gpu_name": None, "failure": failure}
        peaks = self.steps[-1] if self.types and self.steps else self._peaks()  # recording types keeps arguments alive for longer
        told = self._history.told(self._tensors.in_all, self.marks)
        free, reserved = torch.cuda.mem_get_info(self._device)[0], torch.cuda.memory_reserved(self._device)
        return {
            "gpu_name": torch.cuda.get_device_properties(self._device).name,
            "gpu_memory_bytes": torch.cuda.get_device_properties(self._device).total_memory,
            "torch": torch.__version__,
            "steps": self.steps,
            "step_seconds": self._step_seconds,
            "peak_allocated_bytes": peaks["peak_allocated_bytes"],
            "peak_reserved_bytes": peaks["peak_reserved_bytes"],
            "reserved_bytes": reserved,
            "outside_bytes": max(0, self._free_at_first - free - reserved),  # what libraries took besides, and kernels as they were loaded
            "num_alloc_retries": self._num_retries() if self._retries is None else self._retries,
            "events": told.columns,
            "end": told.end,
            "was_stopped": told.was_stopped,
            "marks": told.marks,
            "notes": told.notes,
            "tensor_types": self.types.seen if self.types and not told.was_stopped and not is_compiled() else [],
            "reads": self.reads.seen(),
            "chosen_by_time": self.compilers.chosen_by_time(),
            "tries_convolutions": bool(torch.backends.cudnn.benchmark),
            "batches": self.batches.seen,
            "whole_epochs": sorted(self.batches.whole_epochs),
            "epoch_samples": self.batches.epoch_samples,
            "num_backwards": self.num_backwards,
            "habits": self._habits and self._habits.seen(),
            "num_walked_batches": self.batches.num_walked if self._most_walked else None,
            "walk_cut_after": self.batches.walk_cut_after,
            "first_dimensions": self._tensors.first_dimensions,
            "checkpointing_off": sorted(self._tensors.checkpointing_off),
            "without_gradient": sorted(self._tensors.without_gradient),
            "without_gradient_bytes": self._tensors.without_gradient_bytes,
            "dropped_gradients": sorted(self._tensors.dropped_gradients),
            "dropped_bytes": self._tensors.dropped_bytes,
            "out_of_memory": self.out_of_memory,
            "values": self.values,
            "failure": failure,
        }


def _walk_limits(environment: Mapping[str, str]) -> WalkLimits:
    """Return how far *environment* has DataLoaders walked through: `WalkedBatches` in execution/recorded_run.py."""
    folder = environment.get("MEMPLAN_WALKS")
    return WalkLimits(
        most=int(environment.get("MEMPLAN_WORST_BATCH") or 0),
        seconds=float(environment.get("MEMPLAN_WALK_SECONDS") or math.inf),
        folder=Path(folder) if folder else None,
    )


def _draw_the_same() -> None:
    """
    Have the host draw the same random numbers in each run, unless the program sets a seed behind its import of PyTorch.

    The order of its data is mostly drawn, and the values that were sought in one run are those of its batches. PyTorch begins with other
    numbers in each process (`createCPUGenerator` in aten/src/ATen/CPUGeneratorImpl.cpp).
    """
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)

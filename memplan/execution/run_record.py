"""What one run of a program left behind: the one thing that crosses from the process that ran it to this one.

`child/recorder.py` writes it as JSON, so that pydantic need not be loaded beside the user's program; here it is checked and typed.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, NonNegativeInt, ValidationError

from memplan.description import Description
from memplan.execution.program_habits import Habits
from memplan.execution.rehearsal import DeviceRead, StepPeaks
from memplan.traces.trace import CountedMark, EventColumns, MemoryTrace, Note, make_trace


class Failure(Description):
    """Why a program ended early."""

    kind: Literal["mistake", "own_model", "out_of_memory", "error"]
    """A mistake is in what was asked for: no such function, a value of a wrong type; or memplan's own model cannot be trained so."""

    message: str
    """The exception's type and text; of an out-of-memory the text alone."""

    place: str | None
    """FILE:LINE, the last of the program's own that it came through."""

    phase: str
    """build, or which step, or before or after which one it evaluated."""

    is_chosen: bool = False
    """Whether the program ended itself: by a `raise` or an `assert` of its own."""

    is_of_one_sample: bool = False
    """Whether its dataset raised it for one sample: it has nothing to do with the batch."""


class AllocationFailure(Description):
    """The first allocation that could not be had, whether the program went on or not."""

    message: str
    requested_bytes: NonNegativeInt
    free_bytes: NonNegativeInt
    step: NonNegativeInt
    phase: str
    place: str | None
    batch_size: int | None = None
    """Samples of the last batch that a DataLoader had given by then."""


class Batch(NamedTuple):
    """A batch that the program took from a DataLoader."""

    step: int
    shapes: tuple[tuple[int, ...], ...]
    """Of its tensors."""
    num_backwards: int = 0
    """Backwards that had begun when it was taken."""
    epoch: int = 0
    """Equal for the batches of one iterator of a DataLoader."""
    num_samples: int | None = None
    """Those that its DataLoader asked the dataset for; None where nobody knows."""

    @property
    def size(self) -> int | None:
        """Return how many samples it has, where nobody knows by the first dimension of its first tensor that has one."""
        return next((shape[0] for shape in self.shapes if shape), None) if self.num_samples is None else self.num_samples

    @property
    def num_elements(self) -> int:
        """Return the elements of all its tensors."""
        return sum(math.prod(shape) for shape in self.shapes)

    def has_fewer_samples_than(self, full: Batch) -> bool:
        """Say whether every tensor is as in *full*, but for fewer samples."""
        pairs = list(zip(self.shapes, full.shapes, strict=False))
        return len(self.shapes) == len(full.shapes) and all(less[1:] == more[1:] and less[:1] < more[:1] for less, more in pairs)


class TensorType(NamedTuple):
    """A tensor that an operator returned, in the step that was run once more to see types."""

    address: int
    num_allocations: int
    """Allocations that there had been by then."""
    dtype: str
    size_bytes: int
    place: str | None
    """FILE:LINE of the program; None in autograd."""


class ChosenByTime(NamedTuple):
    """Something that a compiler chose by time."""

    by: str
    """The compiler's file."""
    place: str
    """FILE:LINE of the program, where it compiled."""


class CountedEnd(NamedTuple):
    """Where the events that count end."""

    num_allocations: int
    num_frees: int


class RecordedRead(DeviceRead):
    """A read with when it happened."""

    positions: tuple[NonNegativeInt, ...] = ()
    """Allocations that there had been before each, where it may decide anything."""


class RunRecord(Description):
    """One run."""

    torch: str
    """The PyTorch that ran."""

    gpu_memory_bytes: NonNegativeInt = 0
    """What the GPU has for programs."""

    gpu_name: str | None
    """The name of the GPU; None where the program never used one, and then nothing below was seen."""

    failure: Failure | None = None
    """Why the program ended early, where it did."""

    steps: tuple[StepPeaks, ...] = ()
    step_seconds: tuple[NonNegativeFloat, ...] = ()
    """What each of them took, with its loading; of use on a real GPU."""
    """Each step that ran to its end."""

    peak_allocated_bytes: NonNegativeInt = 0
    peak_reserved_bytes: NonNegativeInt = 0

    reserved_bytes: NonNegativeInt = 0
    """At the end."""

    outside_bytes: NonNegativeInt = 0
    """What libraries took of the GPU beside PyTorch's allocator, after CUDA had begun."""

    tries_convolutions: bool = False
    """`torch.backends.cudnn.benchmark`: cuDNN tries its kernels for a convolution when it first sees it, and takes the fastest."""

    shared_bytes: NonNegativeInt = 0
    """The most that it had handed on to other ranks, beside PyTorch's allocator."""

    others_bytes: NonNegativeInt = 0
    """The most that other processes of the program held of the GPU when this one asked for memory."""

    num_alloc_retries: NonNegativeInt = 0
    """How often the allocator gave cached memory back to go on."""

    events: EventColumns = EventColumns()
    """What the allocator did."""

    end: CountedEnd | None = None
    """Where the events that count end; None: at the last."""

    was_stopped: bool = False
    """Recording ended before the program did: a long one."""

    was_cut: bool = False
    """It was ended after the steps that were asked for."""

    was_interrupted: bool = False
    """Its last error was Ctrl-C's. Its exit code need not say so."""

    was_at_exit: bool = False
    """The program had run to its end, without an error: Python was leaving."""

    marks: tuple[CountedMark, ...] = ()
    """Where steps and phases begin."""

    notes: dict[str, list[Note]] = Field(default_factory=dict)
    """What lay where, by category."""

    tensor_types: list[TensorType] = Field(default_factory=list)
    """Large tensors by their type, where a step was run once more for that."""

    reads: tuple[RecordedRead, ...] = ()
    """Values that the program read from the device, the most frequent first."""

    chosen_by_time: tuple[ChosenByTime, ...] = ()
    """What a compiler chose by how long it took, and what may decide an allocation."""

    batches: tuple[Batch, ...] = ()
    """What came from DataLoaders, in order."""

    whole_epochs: tuple[int, ...] = ()
    """Epochs of which every batch was taken, as `Batch` numbers them."""

    epoch_samples: dict[int, NonNegativeInt] = Field(default_factory=dict)
    """How many samples an epoch has, as `Batch` numbers them, where that is known."""

    num_walked_batches: NonNegativeInt | None = None
    """Batches that were looked at so that the largest could come first; None where nobody asked for that."""

    walk_cut_after: NonNegativeInt = 0
    """How many were looked at of a DataLoader that has more; 0: none has."""

    first_dimensions: tuple[frozenset[int], ...] = ()
    """Of the tensors that may be of the batch, as each backward began that was looked at."""

    checkpointing_off: tuple[str, ...] = ()
    """Why activation checkpointing that is switched on has no effect."""

    without_gradient: tuple[str, ...] = ()
    """Parameters of an optimizer that got no gradient."""

    without_gradient_bytes: int = 0
    """What their gradients would take."""

    dropped_gradients: tuple[str, ...] = ()
    """Parameters of an optimizer whose gradients the program dropped before each step of it."""

    dropped_bytes: int = 0
    """What these gradients take, with the state that the optimizer would make for them."""

    out_of_memory: AllocationFailure | None = None
    """Where memory first ran out."""

    values: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """What `build` was called with, its own defaults included."""

    pid: int = 0
    """The number of the process."""

    command: tuple[str, ...] = ()
    """How the process was started, where it is one of a whole program."""

    python: str = ""
    """The Python that runs it."""

    given_variables: dict[str, str] = Field(default_factory=dict)
    """The environment that it was started with, but for memplan's own variables."""

    modules: tuple[str, ...] = ()
    """The modules of installed packages that it imported, in their order."""

    set_variables: dict[str, str] = Field(default_factory=dict)
    """The variables of the environment that it set itself."""

    num_backwards: NonNegativeInt = 0
    """Backward passes that began, those within another not counted."""

    habits: Habits | None = None
    """What the program does in its steps, where that was asked for."""

    peers: tuple[NonNegativeInt, ...] = ()
    """Ranks that it sent to, or waited for, one by one."""

    needed_rank: NonNegativeInt | None = None
    """The rank whose objects it waited for in vain."""

    num_optimizers: NonNegativeInt = 0
    """How many of PyTorch's were made."""

    never_stepped: tuple[str, ...] = ()
    """Optimizers that never stepped, though others did: each with what it has to train."""

    failed_beside: str = ""
    """Why another process of the program failed, which trained too."""

    lacks_update: bool = False
    """It was ended after its steps, without an optimizer of PyTorch's, before it had updated anything itself."""

    skipped_weights: tuple[str, ...] = ()
    """Pretrained models that were built without reading their weights, as the program names them."""

    lacks_weights: bool = False
    """It failed for weights of a pretrained model that are not there."""

    def trace(self, workspace_sizes: Collection[int] = ()) -> MemoryTrace:
        """
        Return the events that count as a trace, each allocation with what it was for.

        *workspace_sizes*: the bytes that libraries asked for as their workspaces.
        """
        return make_trace(self.events, marks=self.marks, notes=self.notes, end=self.end, workspace_sizes=workspace_sizes)

    def whole_trace(self) -> MemoryTrace:
        """Return all events, those of the step that was run once more included."""
        return make_trace(self.events, marks=self.marks, notes=self.notes)


def read_record(path: Path) -> RunRecord:
    """Return the record in the file at *path*. Raises RuntimeError for one that this memplan did not write."""
    try:
        return RunRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RuntimeError(f"{path} is not what the recorder writes: {error}") from error

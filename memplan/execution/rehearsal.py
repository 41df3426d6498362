"""What a rehearsal saw: an estimate that is exact, its trace, how the program ended, and what only the real program shows."""

import re
from functools import cached_property
from typing import Literal

from pydantic import Field, InstanceOf, NonNegativeInt, PositiveInt, computed_field

from memplan.description import Description
from memplan.execution.program_habits import Habits
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.traces.read_basis import Basis
from memplan.traces.requests import Requests, requests_of
from memplan.traces.trace import MemoryTrace


class StepPeaks(Description):
    """The allocator at the end of a step; peaks are those so far."""

    peak_allocated_bytes: NonNegativeInt
    """torch.cuda.max_memory_allocated()."""

    peak_reserved_bytes: NonNegativeInt
    """torch.cuda.max_memory_reserved()."""

    allocated_bytes: NonNegativeInt
    """torch.cuda.memory_allocated()."""

    reserved_bytes: NonNegativeInt
    """torch.cuda.memory_reserved()."""


class OutOfMemory(Description):
    """Where memory ran out first that could not be had."""

    message: str
    """PyTorch's first line: which allocation."""

    requested_bytes: NonNegativeInt
    """The allocation that failed."""

    free_bytes: NonNegativeInt
    """What the GPU had left."""

    step: NonNegativeInt
    """1 for the first; 0 while the model was built."""

    phase: str
    """build, forward, backward or optimizer."""

    place: str | None
    """The line of the program, FILE:LINE."""

    is_caught: bool = False
    """The error was caught, by the program or by PyTorch, and it went on."""

    is_of_workspace: bool = False
    """It was PyTorch that caught it: the allocation was for a workspace of cuDNN's, and another kernel does with less."""

    batch_size: int | None = None
    """Samples of the batch that it ran out with, where it came from a DataLoader."""

    batch_size_after: int | None = None
    """Samples of the batches with which the program went on, where it did with fewer."""

    first_step_after: int | None = None
    """The first step behind the last one in which memory ran out, where the program went on so far."""

    peak_allocated_after_bytes: int | None = None
    """What was allocated at most from that step on: the peak of the whole program has the attempt that failed in it."""


LONGEST_LINE = 300
"""Characters of a program's own words that are shown in one line: a compiler's command has thousands."""


_OF_A_WORKER = re.compile(r"\w+: Caught \w+ (?P<where>in .*)\.\nOriginal ")
_STACK = re.compile(r"^(?:Original )?Traceback \(most recent call last\):\n(?:[ \t].*\n)*", re.MULTILINE)


class ProgramFailure(Description):
    """Why a program ended before its time, where that was not for want of memory."""

    message: str
    """The exception's type and text, or the exit code."""

    place: str | None
    """FILE:LINE, the last of the program's own that it came through."""

    phase: str
    """build, or which step."""

    is_of_one_sample: bool = False
    """The dataset raised it for one sample: no batch is to blame."""

    @property
    def first_line(self) -> str:
        """
        Return the first line of the message, with dots at its end where there is more.

        A DataLoader says that it caught an error of a worker, and quotes the worker's stack (`ExceptionWrapper` in torch/_utils.py): the
        error is what stands behind that.
        """
        caught = _OF_A_WORKER.match(self.message)
        whole = self.message if caught is None else _STACK.split(self.message)[-1]
        line, *more = whole.strip().splitlines() or [""]
        shown = f"{line[:LONGEST_LINE]} …" if more or len(line) > LONGEST_LINE else line
        return shown if caught is None else f"{shown}, {caught['where']}"


Verdict = Literal["fits", "tight", "does_not_fit", "unknown"]


class DeviceRead(Description):
    """A line of the program that reads values from the device, where nothing is computed."""

    place: str
    """FILE:LINE, outside PyTorch."""

    text: str
    """The line itself."""

    count: NonNegativeInt
    """How often it read."""

    answer: str
    """What it got."""

    reason: str
    """Why that."""

    following_bytes: NonNegativeInt = 0
    """What was allocated between this read and the next one, and was in use at the peak: about what hangs on the answer."""

    basis: Basis = "zero"
    """What the answer stands on (`traces/read_basis.py`)."""

    given_for: str | None = None
    """The line that the user's answer was given for, where it got one: the read may be on another line, as that of a backward is."""


class Finding(Description):
    """Something that only the real program shows."""

    kind: Literal[
        "checkpointing_without_effect", "parameters_without_gradient", "wide_tensors", "growth", "library_workspaces", "device_values",
        "guessed_sizes", "unrecorded_peak", "not_served", "batch_shapes", "epoch_shapes", "cached_shapes", "peak_before_steps",
        "peak_before_state", "chosen_by_time", "nothing_walked", "drawn_values", "skipped_weights", "missing_weights", "varying_steps",
        "signal_at_exit", "dropped_gradients", "missing_gpu", "managed_memory", "uncounted_workspaces",
    ]  # fmt: skip
    """Which kind of finding."""

    message: str
    """What was seen, and what to do."""


class HeldBackFile(Description):
    """A file that the program wrote, and which went to the scratch folder of the rehearsal."""

    path: str
    """Where the program wrote it."""

    size_bytes: NonNegativeInt
    """At the end of the rehearsal."""


class RankPeaks(Description):
    """One of several ranks that were run."""

    rank: NonNegativeInt
    """Its number among all."""

    gpu_name: str = ""
    """Its GPU."""

    verdict: Verdict
    """What can be said of it."""

    peak_allocated_bytes: NonNegativeInt
    """torch.cuda.max_memory_allocated()."""

    peak_reserved_bytes: NonNegativeInt
    """torch.cuda.max_memory_reserved()."""


ValuesEffect = Literal["unread", "nothing", "sizes", "taken_for_nothing"]
"""What values decide that a program reads from the device: `Rehearsal.values_effect`."""


class Rehearsal(MemoryEstimate):
    """A training step that was run on the simulated GPU: its memory, exactly."""

    schema_version: int = 2
    """Of this format."""

    gpu_name: str
    """The GPU that was simulated."""

    gpu_memory_bytes: PositiveInt | None = None
    """What it had for programs; None: no limit."""

    torch: str
    """The PyTorch that ran."""

    out_of_memory: OutOfMemory | None = None
    """Where memory ran out, where it did."""

    num_alloc_retries: NonNegativeInt
    """How often the allocator had to give cached memory back before it could go on: a program with any is tight, unless `needs` fits."""

    takes_what_is_free: bool = Field(default=False, repr=False)
    """
    It lets cuDNN try kernels with as much workspace as is free (`torch.backends.cudnn.benchmark`), and does with less where there is less.
    """

    needs: MemoryRange | None = None
    """
    What such a program uses where these workspaces are small; only where it may otherwise take more than the GPU has. Of a program that had
    to release cached memory now and then: what it runs with, releasing it as often as need be, where that is clearly less.
    """

    steps: tuple[StepPeaks, ...]
    """Each step that ran to its end."""

    grows: bool = False
    """The peak still rose from the step before the last to the last."""

    findings: tuple[Finding, ...] = ()
    """What only the real program shows."""

    reads: tuple[DeviceRead, ...] = ()
    """Values that the program read from the device."""

    values_effect: ValuesEffect = "unread"
    """
    What those decide that may be sizes: none was read; nothing, since with every answer the program asks for the same memory; sizes, or
    nobody knows; or they were taken to decide nothing, as with another batch (a plan does so while it searches, and not for what it
    recommends).
    """

    deciding_reads: tuple[str, ...] = ()
    """The lines that read what may be sizes and decided none; empty where they decided some."""

    values: dict[str, object] = Field(default_factory=dict)
    """What build was called with, its own defaults included."""

    held_back_files: tuple[HeldBackFile, ...] = ()
    """What the program wrote and the user's disk did not get, the largest first, at most a thousand."""

    num_held_back_files: NonNegativeInt = 0
    """How many there were."""

    held_back_bytes: NonNegativeInt = 0
    """Their size."""

    held_back_removals: tuple[str, ...] = ()
    """Files and folders that the program removed or renamed and that are still there, at most a thousand."""

    read_files: tuple[str, ...] = Field(default=(), exclude=True, repr=False)
    """What the program opened for reading, but for files of the system and of installed packages."""

    exit_code: int = 0
    """How the program ended, where it was a whole one."""

    num_walked_batches: NonNegativeInt = Field(default=0, exclude=True, repr=False)
    """Batches that were looked at before the first step, so that it began with the largest."""

    was_interrupted: bool = Field(default=False, exclude=True, repr=False)
    """A signal that was sent to memplan ended it: what is told covers what ran until then."""

    failure: ProgramFailure | None = None
    """Why it ended before its time, where it did: what is told covers what ran until then, and there is no verdict."""

    lower_bound_reasons: tuple[str, ...] = ()
    """Why the step may take more than is said here: sizes that were guessed, a call that the simulated GPU does not serve."""

    assumed_range: MemoryRange | None = None
    """
    What the GPU uses at both ends of an assumption, where numbers that the model computes decide sizes, or times by which a compiler
    chooses; told is the larger end.
    """

    later_step_bytes: NonNegativeInt = 0
    """In the upper bound: what a later step may take more, where batches differ and nobody can look for the largest."""

    later_step_cached_bytes: NonNegativeInt = 0
    """What PyTorch may reserve besides while the GPU has room, since blocks that it has cached do not serve a larger step: it is not in the
    upper bound, and nothing under expandable segments."""

    rank: NonNegativeInt = 0
    """Which rank was run, where several train together."""

    num_ranks: PositiveInt = 1
    """How many train together; those that were not run are taken for copies of the one that was."""

    peers: tuple[NonNegativeInt, ...] = ()
    """Ranks that it sent to, or waited for, one by one: those of other stages of a pipeline."""

    needed_rank: NonNegativeInt | None = Field(default=None, exclude=True, repr=False)
    """The rank whose objects it waited for in vain."""

    rank_peaks: tuple[RankPeaks, ...] = ()
    """Every rank that was run, where several were; told is the one that takes most."""

    process: str | None = None
    """The process that is told of, where the program started others and it is not the first."""

    habits: Habits | None = Field(default=None, exclude=True, repr=False)
    """What the program does in its steps, where that was asked for."""

    trained_batch_sizes: tuple[int, ...] = Field(default=(), exclude=True, repr=False)
    """Samples of each batch that a DataLoader gave and that was trained with."""

    num_epoch_samples: int | None = Field(default=None, exclude=True, repr=False)
    """Samples in an epoch of the DataLoader that trained it, the most of several; None where nobody knows."""

    first_dimensions: tuple[frozenset[int], ...] = Field(default=(), exclude=True, repr=False)
    """Of the tensors that may be of the batch, as each backward began that was looked at: the samples that it is of are among them."""

    was_cut: bool = Field(default=False, repr=False)
    """The program was ended after the steps that were asked for: what comes behind them, as an evaluation, was not run."""

    has_evaluated: bool = Field(default=False, repr=False)
    """What it trains was in eval mode, before it was trained or between steps."""

    trace: InstanceOf[MemoryTrace] | None = Field(default=None, exclude=True, repr=False)
    """Every event of the allocator."""

    @cached_property
    def requests(self) -> Requests:
        """What was asked of the allocator; only where its trace is there."""
        assert self.trace is not None
        return requests_of(self.trace, torch=self.torch)

    def without_trace(self) -> "Rehearsal":
        """Return it without its trace, which has megabytes, and what is told of that."""
        found = self.model_copy(update={"trace": None})
        found.__dict__.pop("requests", None)
        return found

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorated properties
    @property
    def verdict(self) -> Verdict:
        """
        Return what can be said: it fits; it is tight, because it ran only by giving cached memory back (of four published such steps three
        ran out of memory on the real GPU) or with other kernels of cuDNN's, or because the upper bound is more than the GPU has, unless it
        goes with less (`needs`); it does not fit; or unknown, where the program failed, or sizes were guessed.
        """
        if self.failure is not None:
            return "unknown"
        missing = self.out_of_memory
        if missing is not None and not (missing.is_caught and (self.fits_with_less or missing.is_of_workspace)):
            return "does_not_fit"
        if self.lower_bound_reasons:
            return "unknown"
        if self.fits_with_less:
            return "fits"
        return "tight" if self.num_alloc_retries or self.may_be_too_large or missing is not None else "fits"

    @property
    def fits_with_less(self) -> bool:
        """Say whether what it needs is no more than the GPU has, where it takes what is free, or PyTorch has cached that."""
        return self.needs is not None and self.gpu_memory_bytes is not None and self.needs.high_bytes <= self.gpu_memory_bytes

    @property
    def may_be_too_large(self) -> bool:
        """Say whether the upper bound is more than the GPU has."""
        return self.gpu_memory_bytes is not None and self.gpu_memory_bytes < self.device_used.high_bytes

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fits(self) -> bool | None:
        """Return whether it fits, with nothing given back; None where nobody can say."""
        return None if self.verdict == "unknown" else self.verdict == "fits"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fragmentation(self) -> float:
        """Return the share of the reserved peak that was in no tensor at the allocated peak."""
        return 1 - self.peak_allocated_bytes / self.peak_reserved_bytes if self.peak_reserved_bytes else 0.0

"""From the record of a run to a Rehearsal. Pure: no process, no file."""

from __future__ import annotations

import bisect
import signal
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from memplan.execution.device_log import NO_LOG, DeviceLog
from memplan.execution.findings import FirstStepAgain, find, trained_batches
from memplan.execution.guessed_values import Cause, lower_bound_reasons, takes_as_much
from memplan.execution.later_steps import NO_LATER_STEP, LaterStep, are_draws, later_bytes, later_step, peaks_of_draws
from memplan.execution.program_process import USERS_SIGNALS
from memplan.execution.ranks import ONE_RANK, Ranks
from memplan.execution.rehearsal import DeviceRead, OutOfMemory, ProgramFailure, Rehearsal
from memplan.execution.released_memory import least_reserved
from memplan.execution.run_record import RecordedRead, RunRecord
from memplan.execution.runner import ended
from memplan.execution.unsure_workspaces import Spread, reserved_spread
from memplan.hardware.gpu import UNLIMITED_BYTES
from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.estimate import SET_UP, MemoryRange
from memplan.traces.block_sizes import MIN_LARGE_BYTES, reserved_bytes
from memplan.traces.kept import StepEnd, step_ends
from memplan.traces.requests import requests_of
from memplan.traces.trace import BUILD, EVALUATION, OOM, Block, Mark, MemoryTrace, bytes_by_category, evaluation_before, rounded

UNSPLIT_SHARE = 0.05
"""Of allocated bytes, at most what unsplit blocks hold beyond what was asked for: a trace whose peak is lower has not seen it."""


_CUT = "only its first step was run, and from the second on the optimizer's state is there from the beginning"


NO_MEMORY = MemoryRange(low_bytes=0, expected_bytes=0, high_bytes=0)


class Run(NamedTuple):
    """One run of a program: what its recorder wrote, and what the simulated GPU did."""

    record: RunRecord
    log: DeviceLog = NO_LOG


def rehearsal_of(
    run: Run,
    *,
    without: RunRecord | None = None,
    others: Mapping[Cause, Run] = MappingProxyType({}),
    context: MemoryRange,
    nccl: MemoryRange = NO_MEMORY,
    exit_code: int = 0,
    process: str | None = None,
    values_failure: str | None = None,
    ranks: Ranks = ONE_RANK,
) -> Rehearsal:
    """
    Return the rehearsal that *run* is.

    *without*: the same without the libraries' workspaces, where there were any. *others*: the same with the other end of an assumption, by
    which it takes less, each by what was assumed. *context*: what CUDA takes beside PyTorch's allocator, *nccl*: NCCL.
    *exit_code* and *process* are those of a whole program. *values_failure*: why the values that it reads were not found. *ranks*: those
    that train together, and which of them this is.
    """
    record = run.record
    assert record.gpu_name is not None
    trace = record.trace(run.log.workspace_sizes)
    position, blocks = trace.peak()
    allocated, reserved = record.peak_allocated_bytes, record.peak_reserved_bytes
    low = without.peak_reserved_bytes if without else max(0, reserved - run.log.largest_workspace_bytes)
    was_cut_short = record.failure is not None or record.out_of_memory is not None or record.was_interrupted
    where = _phase(trace, position, None if was_cut_short else len(record.steps))
    recorded = bytes_by_category(blocks.values())
    is_cut = (
        len(record.steps) == 1 and bool(record.notes.get("optimizer_state")) and (record.was_cut or is_ended_by_user(record, exit_code))
    )
    behind = record.was_stopped and sum(recorded.values()) < allocated * (1 - UNSPLIT_SHARE)
    beside_bytes = record.others_bytes + record.shared_bytes
    first_again = None if behind else first_step_again(record, trace, position)
    steps = step_ends(trace)[: len(record.steps)]
    later = _later_step(record, steps, trace)
    more_bytes = record.dropped_bytes + max(later.more_bytes, 0 if first_again is None else first_again.more_bytes)
    ends = {cause: other.record for cause, other in others.items()}
    outside = MemoryRange(
        low_bytes=context.low_bytes + nccl.low_bytes + record.shared_bytes,
        expected_bytes=context.expected_bytes + nccl.expected_bytes + beside_bytes,
        high_bytes=context.high_bytes + nccl.high_bytes + beside_bytes,
    )
    spread = _spread(run, trace)
    high_bytes = reserved + spread.more_bytes + more_bytes + outside.high_bytes
    return Rehearsal(
        method="rehearsed",
        breakdown=_breakdown(recorded, allocated, reserved, context.expected_bytes, nccl.expected_bytes, record),
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_used=MemoryRange(
            low_bytes=max(0, min(low, reserved) - spread.less_bytes) + outside.low_bytes,
            expected_bytes=reserved + outside.expected_bytes,
            high_bytes=high_bytes,
        ),
        peak_phase="a step behind those recorded" if behind else where,
        gpu_name=record.gpu_name,
        gpu_memory_bytes=record.gpu_memory_bytes if 0 < record.gpu_memory_bytes < UNLIMITED_BYTES else None,
        torch=record.torch,
        out_of_memory=_out_of_memory(run, exit_code, trace),
        num_alloc_retries=record.num_alloc_retries,
        needs=_needed(record, trace, most_bytes=high_bytes, outside=outside),
        takes_what_is_free=record.tries_convolutions and run.log.asks_cudnn,
        steps=record.steps,
        grows=len(record.steps) > 2 and record.steps[-1].peak_allocated_bytes > record.steps[-2].peak_allocated_bytes,
        findings=find(
            record,
            trace,
            ends=steps,
            later=later,
            log=run.log,
            unrecorded_peak=where if behind else None,
            is_before_steps=where == SET_UP,
            first_again=first_again,
            ended_at_exit=ended(exit_code) if is_ended_at_exit(record, exit_code) else None,
            others=ends,
        ),
        reads=reads_by_bytes(record.reads, blocks.values()),
        values=dict(record.values),
        exit_code=exit_code,
        failure=_failure(record, exit_code),
        lower_bound_reasons=(
            *lower_bound_reasons(record, run.log, others=ends, values_failure=values_failure),
            *([_CUT] * is_cut),
        ),
        assumed_range=_assumed_range(list(ends.values()), record, outside.expected_bytes),
        later_step_bytes=later.more_bytes,
        later_step_cached_bytes=later.cached_bytes,
        rank=ranks.rank,
        num_ranks=ranks.size,
        peers=record.peers,
        needed_rank=record.needed_rank,
        process=process,
        habits=record.habits,
        trained_batch_sizes=tuple(batch.size for batch in trained_batches(record) if batch.size is not None),
        num_epoch_samples=_epoch_samples(record),
        first_dimensions=record.first_dimensions,
        was_cut=record.was_cut,
        has_evaluated=any(mark.phase == EVALUATION for mark in record.marks),
        trace=trace,
    )


def _later_step(record: RunRecord, steps: Sequence[StepEnd], trace: MemoryTrace) -> LaterStep:
    """Return by how much a later step may be above the peak, which may be that of something else."""
    peaks = peaks_of_draws(record, steps, trained_batches(record))
    if not are_draws(peaks):
        return NO_LATER_STEP
    of_steps = max((step.peak_allocated_bytes for step in record.steps[1:]), default=0)
    allocated = max(0, later_bytes(peaks) - (record.peak_allocated_bytes - of_steps))
    requests = requests_of(trace, torch=record.torch)
    return later_step(trace, requests, reserved_bytes=record.peak_reserved_bytes, allocated_bytes=allocated)


SELDOM = 1 / 4
"""Of all steps, at most so many that release cached memory: more would train slowly."""

LEFT_FREE = 0.1
"""Share of the GPU that must stay free for a program that released cached memory to fit: of four published ones three ran out of memory."""


def _needed(record: RunRecord, trace: MemoryTrace, *, most_bytes: int, outside: MemoryRange) -> MemoryRange | None:
    """
    Return what a program needs that has released cached memory now and then, and runs with clearly less than there is; else None.

    *most_bytes*: the upper bound of what it uses, of which *outside* is outside of PyTorch's allocator.
    """
    is_seldom = 0 < record.num_alloc_retries <= SELDOM * len(record.steps)
    was_cut_short = record.failure is not None or record.was_interrupted or record.was_stopped or record.out_of_memory is not None
    if not is_seldom or was_cut_short or record.tries_convolutions:
        return None
    reserved = record.peak_reserved_bytes
    requests = requests_of(trace, torch=record.torch)
    least = least_reserved(requests, reserved_bytes=reserved, num_alloc_retries=record.num_alloc_retries)
    if least is None or least > (1 - LEFT_FREE) * reserved:  # it had no more than that: a share of the GPU may be its limit
        return None
    needed = MemoryRange(
        low_bytes=least + outside.low_bytes,
        expected_bytes=least + outside.expected_bytes,
        high_bytes=most_bytes - (reserved - least),
    )
    return needed if needed.high_bytes <= (1 - LEFT_FREE) * record.gpu_memory_bytes else None


def _epoch_samples(record: RunRecord) -> int | None:
    """Return how many samples an epoch of a DataLoader has that trained it, the most of several; None where one of them does not say."""
    trained = {record.epoch_samples.get(batch.epoch) for batch in trained_batches(record)}
    return max((count for count in trained if count is not None), default=None) if None not in trained else None


def _spread(run: Run, trace: MemoryTrace) -> Spread:
    """Return by how much what *run* reserved may differ on the GPU, where cuDNN's workspaces may."""
    if not run.log.unsure_sizes or run.record.out_of_memory is not None:
        return Spread()
    requests = requests_of(trace, torch=run.record.torch)
    return reserved_spread(requests, run.log.unsure_sizes)


def first_step_again(record: RunRecord, trace: MemoryTrace, position: int) -> FirstStepAgain | None:
    """
    Return what a later step takes that asks for as much as the first, where that has the peak, at event *position*; None where not.

    The optimizer's state is not there in the first, and is beside all that any later one asks for.
    """
    mark = trace.phase_at(position)
    if mark.step != 1 or mark.phase == BUILD or len(record.steps) < 2 or record.was_stopped or record.out_of_memory is not None:
        return None
    state_bytes = trace.state_missing_at(position)
    reserved = record.peak_reserved_bytes
    is_highest = record.steps[0].peak_reserved_bytes == reserved
    more_bytes = state_bytes if is_highest else max(0, record.peak_allocated_bytes + state_bytes - reserved)
    where = f"the {evaluation_before(1)}" if mark.phase == EVALUATION else "step 1"
    return FirstStepAgain(state_bytes, more_bytes, where) if more_bytes else None


_OF_A_STEP = ("activations", "batch_data", "workspaces")
"""Categories whose sizes a value that is read in a step may decide."""


def reads_by_bytes(reads: Sequence[RecordedRead], blocks: Iterable[Block]) -> tuple[DeviceRead, ...]:
    """Return *reads* with the bytes of those *blocks* that were allocated between each and the next one, the most bytes first."""
    turns = sorted((position, index) for index, read in enumerate(reads) for position in read.positions)
    following = [0] * len(reads)
    for block in blocks:
        turn = bisect.bisect_left(turns, (block.number, -1)) - 1  # a read saw the allocations before it
        if turn >= 0 and block.category in _OF_A_STEP:
            following[turns[turn][1]] += block.size_bytes
    told = (
        DeviceRead(**read.model_dump(exclude={"positions", "following_bytes"}), following_bytes=bytes_)
        for read, bytes_ in zip(reads, following, strict=True)
    )
    return tuple(sorted(told, key=lambda read: -read.following_bytes))


def _assumed_range(lower: Sequence[RunRecord], upper: RunRecord, outside_bytes: int) -> MemoryRange | None:
    """
    Return what the GPU uses from the lowest to the highest end of what was assumed, with what is outside the allocator; None where all take
    the same. An end that ran out of memory has taken, by then, less than the other perhaps; it is not told as less. Nor is one that failed,
    of which it is told how much more it had taken by then.
    """
    taken = [end.peak_reserved_bytes for end in lower if end.failure is None or end.peak_reserved_bytes > upper.peak_reserved_bytes]
    if all(takes_as_much(upper, end) for end in lower) or not taken:
        return None
    taken.append(upper.peak_reserved_bytes if upper.out_of_memory is None else max(upper.peak_reserved_bytes, *taken))
    low, high = min(taken) + outside_bytes, max(taken) + outside_bytes
    return MemoryRange(low_bytes=low, expected_bytes=high, high_bytes=high)


def _phase(trace: MemoryTrace, position: int, num_steps: int | None) -> str:
    """Say in which phase of which step event *position* is, of *num_steps* that ended; None: the last one may not have come to its end."""
    mark = trace.phase_at(position)
    if mark.phase == BUILD:
        return SET_UP
    if mark.phase == EVALUATION:
        return evaluation_before(mark.step)
    if num_steps is not None and mark.step > num_steps > 0:
        what = mark.phase if mark.phase == "backward" else "what came"  # no optimizer step followed that counts as one
        return f"{what} after step {num_steps}"
    return f"{mark.phase} of step {mark.step}" if mark.step else mark.phase


def _out_of_memory(run: Run, exit_code: int, trace: MemoryTrace) -> OutOfMemory | None:
    record = run.record
    seen, failure = record.out_of_memory, record.failure
    if seen is None:
        return None
    is_caught = failure is None and (exit_code == 0 or is_ended_at_exit(record, exit_code))
    workspaces = [size for size in run.log.workspace_sizes if size >= MIN_LARGE_BYTES]
    asked = {rounded(size) for size in workspaces} | {reserved_bytes(size) for size in workspaces}  # a segment for it
    first_after = _first_mark_after(record, trace)
    in_training = seen.phase != EVALUATION  # the batch of an evaluation says nothing of the training's
    after = next((batch.size for batch in reversed(trained_batches(record))), None) if in_training else None
    has_fewer = after is not None and seen.batch_size is not None and after < seen.batch_size
    failed = {size for action, size in zip(trace.actions, trace.sizes, strict=True) if action == OOM} | {seen.requested_bytes}
    raised = failure if failure is not None and failure.kind == "out_of_memory" else None
    return OutOfMemory(
        message=(raised.message if raised else "") or seen.message,
        requested_bytes=seen.requested_bytes,
        free_bytes=seen.free_bytes,
        step=seen.step,
        phase=seen.phase,
        place=seen.place or (raised.place if raised else None),
        is_caught=is_caught,
        is_of_workspace=is_caught and not has_fewer and failed <= asked,
        batch_size=seen.batch_size,
        batch_size_after=after if has_fewer else None,
        first_step_after=first_after.step if first_after else None,
        peak_allocated_after_bytes=trace.allocated_from(first_after.position) if first_after else None,
    )


def _first_mark_after(record: RunRecord, trace: MemoryTrace) -> Mark | None:
    """Return where the first whole step begins behind the last failed allocation; None where there is none, or where events are missing."""
    if record.was_stopped or OOM not in trace.actions:
        return None
    failed = trace.phase_at(trace.actions.rindex(OOM)).step
    return next((mark for mark in trace.marks if failed < mark.step <= len(record.steps)), None)


_ENDED_BY_USER = frozenset(exit_code for number in USERS_SIGNALS for exit_code in (-number, 128 + number))


def is_ended_by_user(record: RunRecord, exit_code: int) -> bool:
    """Say whether a signal of the user's ended the program, which had not come to its end."""
    return exit_code in _ENDED_BY_USER or record.was_interrupted


def is_ended_at_exit(record: RunRecord, exit_code: int) -> bool:
    """
    Say whether a signal ended the program when all of it had run.

    A thread of PyTorch's autograd that frees Python objects while Python is finalized aborts (PyTorch's issue 38228).
    """
    return record.was_at_exit and exit_code in (-signal.SIGABRT, -signal.SIGSEGV)


def _failure(record: RunRecord, exit_code: int) -> ProgramFailure | None:
    """Return why the program ended before its time; what its user ended by a signal has failed in nothing."""
    found = record.failure
    if found is not None and found.kind == "out_of_memory":
        return None
    if found is not None:
        return ProgramFailure(message=found.message, place=found.place, phase=found.phase, is_of_one_sample=found.is_of_one_sample)
    if is_ended_by_user(record, exit_code):
        return None if record.steps else ProgramFailure(message="a signal ended it", place=None, phase=BUILD)
    if exit_code == 0 or is_ended_at_exit(record, exit_code):
        return None
    last = record.marks[-1] if record.marks else None
    phase = BUILD if last is None or not last.step else evaluation_before(last.step) if last.phase == EVALUATION else f"step {last.step}"
    return ProgramFailure(message=f"it {ended(exit_code)}", place=None, phase=phase)


def _breakdown(
    found: Mapping[str, int], allocated: int, reserved: int, context_bytes: int, nccl_bytes: int, record: RunRecord
) -> MemoryBreakdown:
    """Allocated is exact; what of it is in no block of the trace (blocks that were not split) is counted with the activations."""
    known = sum(bytes_ for category, bytes_ in found.items() if category != "activations")
    return MemoryBreakdown(
        parameters_bytes=found["parameters"],
        gradients_bytes=found["gradients"],
        optimizer_state_bytes=found["optimizer_state"],
        batch_data_bytes=found["batch_data"],
        workspaces_bytes=found["workspaces"],
        activations_bytes=max(0, allocated - known),
        allocator_slack_bytes=reserved - allocated,
        cuda_context_bytes=context_bytes,
        nccl_buffers_bytes=nccl_bytes,
        symmetric_memory_bytes=record.shared_bytes,
        other_processes_bytes=record.others_bytes,
    )

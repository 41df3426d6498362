"""What only the real program shows, in words: a switch without effect, parameters that learn nothing, wide tensors, growth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from memplan.execution.device_log import NO_LOG, DeviceLog
from memplan.execution.guessed_values import Cause, guessed_loops, guesses
from memplan.execution.later_steps import NO_LATER_STEP, LaterStep, is_decided_by_data, peaks_of_draws
from memplan.execution.rehearsal import Finding
from memplan.execution.run_record import Batch, RunRecord
from memplan.execution.wording import SHOWN, listed, shown_place
from memplan.hardware.gpu import UNLIMITED_BYTES
from memplan.traces.kept import StepEnd
from memplan.traces.trace import ALLOC, MemoryTrace, Note, allocation_of, allocations_by_address
from memplan.units import KIB, format_bytes
from memplan.workload.published_models import WEIGHT_FILES

WIDE_SHARE = 0.1
"""Share of the peak from which tensors of a wide type are told of."""

SETTLING_SHARE = 0.01
"""Share of the peak by which it may rise without a word where nothing more is left at the end of a step."""

LEAST_GROWTH_BYTES = 64 * KIB
"""What has to be kept of each step to be told of: less is a number that is logged, and takes a thousand steps for 64 MiB."""

VARYING_SHARE = 0.05
"""Of a step's peak, by which another has to be lower for steps of several sizes to be told of."""

TOLD_SHARE = 0.01
"""Of a step's peak, by which a later one may be above it, for steps of several sizes to be told of though they differ by less than that."""

LEAST_STEPS = 3
"""The first makes what lasts; two more show whether anything is added."""

_WIDE = ("float64", "float32", "complex128")
_SHORT = ("float16", "bfloat16")


def find(
    record: RunRecord,
    trace: MemoryTrace,
    *,
    ends: Sequence[StepEnd],
    later: LaterStep = NO_LATER_STEP,
    log: DeviceLog = NO_LOG,
    unrecorded_peak: str | None = None,
    is_before_steps: bool = False,
    first_again: FirstStepAgain | None = None,
    ended_at_exit: str | None = None,
    others: Mapping[Cause, RunRecord] = MappingProxyType({}),
) -> tuple[Finding, ...]:
    """
    Return the findings of the run that *record* and its *trace* are of; *unrecorded_peak* is where the recorded events were highest.

    *ends*: those of its steps; *later*: what the upper bound includes for a later one. *is_before_steps*: the peak is;
    *first_again*: it is in the first step, and what one like it takes later.
    *ended_at_exit*: how the program ended, where that was not by itself and all of it had run.

    *others*: the runs with the other end of an assumption, by what was assumed.
    """
    return (
        *_unrecorded(unrecorded_peak),
        *(_before_steps(record, trace) if is_before_steps else ()),
        *_first_step(first_again),
        *_checkpointing(record.checkpointing_off),
        *_without_gradient(record),
        *_dropped_gradients(record),
        *_wide_tensors(record),
        *(list(_growth(record, ends, has_allowance=bool(later.more_bytes))) or _varying_steps(record, ends, later)),
        *_weights(record),
        *_missing_gpu(record),
        *_nothing_walked(record),
        *_batch_shapes(record),
        *_cached_shapes(record),
        *_workspaces(log, tries_convolutions=record.tries_convolutions, is_unlimited=record.gpu_memory_bytes >= UNLIMITED_BYTES),
        *guesses(record, others),
        *_at_exit(ended_at_exit),
    )


def _unrecorded(phase: str | None) -> Iterator[Finding]:
    if phase is not None:
        yield Finding(
            kind="unrecorded_peak",
            message=f"the peak came after the events that were recorded: the categories are those of {phase}, and what the peak took on "
            "top is counted with the activations; `steps=10` ends before that",
        )


def _at_exit(ended: str | None) -> Iterator[Finding]:
    if ended is not None:
        yield Finding(
            kind="signal_at_exit",
            message=f"the program {ended} after all of it had run, while Python was exiting: the figures are those of the whole program",
        )


def _before_steps(record: RunRecord, trace: MemoryTrace) -> Iterator[Finding]:
    """Tell of a peak that is none of a step's: what is loaded may be held twice for a moment."""
    first = trace.first_step
    if first is None or record.was_stopped or record.out_of_memory is not None or not record.steps:
        return
    yield Finding(
        kind="peak_before_steps",
        message="the peak is before the first step, while the model is made or loaded: the steps themselves allocate "
        f"{format_bytes(trace.allocated_from(first.position))} at most; a checkpoint that is loaded with "
        '`map_location="cpu"` is not on the GPU twice',
    )


class FirstStepAgain(NamedTuple):
    """A later step, or evaluation, that asks for as much as the first, which had the peak."""

    state_bytes: int
    """The optimizer's state, which the first did not have."""
    more_bytes: int
    """That may be reserved beyond what was."""
    where: str = "step 1"
    """In what the peak was."""


def _first_step(again: FirstStepAgain | None) -> Iterator[Finding]:
    if again is not None:
        yield Finding(
            kind="peak_before_state",
            message=f"the peak is in {again.where}, where the optimizer has no state yet ({format_bytes(again.state_bytes)}), and later "
            f"steps ask for less: one that asks for as much again takes up to {format_bytes(again.more_bytes)} more, which is in the upper "
            "bound",
        )


def _checkpointing(reasons: Sequence[str]) -> Iterator[Finding]:
    if not reasons:
        return
    yield Finding(
        kind="checkpointing_without_effect",
        message=f"activation checkpointing is switched on but has no effect: {listed(reasons)}; libraries checkpoint in training mode "
        "only: call `.train()` on the model, or on the part that was left out",
    )


def _without_gradient(record: RunRecord) -> Iterator[Finding]:
    names = record.without_gradient
    if not names or guessed_loops(record.reads):  # what a loop would have reached that was guessed to end at once is not known
        return
    count = f"{len(names)} parameter{'s' if len(names) > 1 else ''} of the optimizer"
    yield Finding(
        kind="parameters_without_gradient",
        message=f"{count} got no gradient in the steps that ran: {listed(names)}; freeze what is not trained, or look for a part that the "
        f"loss does not reach; not counted, if they are trained later: {format_bytes(record.without_gradient_bytes)} of gradients, and "
        "optimizer state",
    )


def _dropped_gradients(record: RunRecord) -> Iterator[Finding]:
    names = record.dropped_gradients
    if names and record.steps:  # before an optimizer's first step has ended, one that has a closure called has seen none yet
        count = f"{len(names)} parameter{'s' if len(names) > 1 else ''}"
        yield Finding(
            kind="dropped_gradients",
            message=f"the gradients of {count} ({listed(names)}) are computed and dropped before the optimizer steps; if the program keeps "
            f"them later, they and the optimizer's state for them take up to {format_bytes(record.dropped_bytes)} more, which is in the "
            "upper bound",
        )


MISSING_WEIGHTS = "the weights of a pretrained model are not there: `skip_weights=True` builds it from its configuration"


def _weights(record: RunRecord) -> Iterator[Finding]:
    if record.lacks_weights:
        yield Finding(kind="missing_weights", message=MISSING_WEIGHTS)
    if record.skipped_weights:
        names = tuple(dict.fromkeys(record.skipped_weights))
        has_models = not all(name.endswith(WEIGHT_FILES) for name in names)
        loading = "; transformers and diffusers load them as from files of 5 GB, in the type that the configuration names"
        yield Finding(
            kind="skipped_weights",
            message=f"weights were not read ({listed(names)}): the steps take the same memory; what is computed from the weights on "
            f"the host is of zeros{loading if has_models else ''}",
        )


_NO_SUCH_GPU = "invalid device ordinal"
"""What CUDA's runtime says of a device's number that is none (cudaErrorInvalidDevice)."""


def _missing_gpu(record: RunRecord) -> Iterator[Finding]:
    if record.failure is not None and _NO_SUCH_GPU in record.failure.message:
        message = "the program asks for a GPU by a number that is not among the simulated ones: `num_gpus=8` simulates as many as you have"
        yield Finding(kind="missing_gpu", message=message)


def _nothing_walked(record: RunRecord) -> Iterator[Finding]:
    if record.num_walked_batches == 0:
        yield Finding(
            kind="nothing_walked",
            message="the largest batch was asked for, and the program took none from a DataLoader: its batches were run in its own order, "
            "and the largest may be a later one",
        )


def _batch_shapes(record: RunRecord) -> Iterator[Finding]:
    """Tell of batches that are not all alike: the largest of an epoch decides, and it may not have been among them."""
    shapes = None if record.num_walked_batches else _shapes_that_differ(record)
    if shapes is None:
        return
    trained = trained_batches(record)
    taken = f"the shapes of the batches differ: {shapes} among the {len(trained)} that were taken"
    if any(batch.epoch in record.whole_epochs for batch in trained):
        yield Finding(kind="epoch_shapes", message=f"{taken}, a whole epoch; one in another order may have a larger batch")
    else:
        message = f"{taken}; the largest batch of an epoch decides, and it may be a later one"
        yield Finding(kind="batch_shapes", message=message)


def _cached_shapes(record: RunRecord) -> Iterator[Finding]:
    """Tell of what PyTorch caches of batches that are not all alike, where the largest was among them: more of it over an epoch."""
    shapes = _shapes_that_differ(record) if record.num_walked_batches else None
    if shapes is not None:
        looked_at = f"the first {record.walk_cut_after:,}, and a later one may be larger" if record.walk_cut_after else "all"
        yield Finding(
            kind="cached_shapes",
            message=f"the shapes of the batches differ: {shapes}, the largest of {looked_at}; what PyTorch has cached for one shape mostly "
            "does not serve a larger one, so that an epoch may reserve more from batch to batch, up to all of the GPU, and then gives "
            "cached memory back, which takes time: `PYTORCH_ALLOC_CONF=expandable_segments:True` avoids it",
        )


def _shapes_that_differ(record: RunRecord) -> str | None:
    """Return the smallest and the largest shape of the batches; None where they are alike, or the last of an epoch has what is left."""
    trained = trained_batches(record)
    if len({batch.shapes for batch in trained}) < 2 or len({batch.num_elements for batch in trained}) < 2:
        return None
    smallest, largest = (pick(trained, key=lambda batch: batch.num_elements) for pick in (min, max))
    if len({batch.shapes for batch in trained}) == 2 and trained[0].shapes == largest.shapes and smallest.has_fewer_samples_than(largest):
        return None
    first, last = _differing(smallest, largest)
    return f"{_shape(first)} to {_shape(last)}"


def batches_differ(record: RunRecord) -> bool:
    """Say whether batches of several shapes were taken, and nobody has looked for the largest."""
    return any(finding.kind == "batch_shapes" for finding in _batch_shapes(record))


def trained_batches(record: RunRecord) -> list[Batch]:
    """
    Return the batches of the epochs that are trained: those of which a batch was followed by a backward.

    Not every batch of them is, where several are taken at once to be accumulated, or one ahead. The others are evaluated.
    """
    following = [*(batch.num_backwards for batch in record.batches[1:]), record.num_backwards]
    trained = {batch.epoch for batch, then in zip(record.batches, following, strict=False) if then > batch.num_backwards}
    return [batch for batch in record.batches if not record.num_backwards or batch.epoch in trained]


def _differing(smallest: Batch, largest: Batch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the tensor by which the two differ most; of their largest, where they have not as many tensors."""
    pairs = list(zip(smallest.shapes, largest.shapes, strict=False)) if len(smallest.shapes) == len(largest.shapes) else []
    by_largest = max(smallest.shapes, key=math.prod), max(largest.shapes, key=math.prod)
    return max(pairs, key=lambda pair: math.prod(pair[1]) - math.prod(pair[0]), default=by_largest)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _wide_tensors(record: RunRecord) -> Iterator[Finding]:
    """Compare what is alive at the peak of the step that was run once more with the types seen in it."""
    if not record.tensor_types:
        return
    trace = record.whole_trace()
    numbers = allocations_by_address(trace, {seen.address for seen in record.tensor_types})
    types = {
        allocation_of(numbers, Note(seen.address, seen.num_allocations)): (seen.dtype, seen.place)
        for seen in reversed(record.tensor_types)  # the first that returned a tensor made it; the others took views of it
    }
    first = min(record.end.num_allocations, trace.actions.count(ALLOC)) if record.end else 0
    _, blocks = trace.peak(first_allocation=first)
    total = sum(block.size_bytes for block in blocks.values())
    wide: dict[str, Counter[str]] = {}
    is_mixed = any(dtype in _SHORT for dtype, _ in types.values())
    for block in blocks.values():
        dtype, place = types.get(block.number, ("", None))
        if dtype in _WIDE and (is_mixed or dtype.endswith(("64", "128"))) and block.category in ("activations", "batch_data"):
            wide.setdefault(dtype, Counter())[place or "autograd"] += block.size_bytes
    for dtype, places in wide.items():
        if places.total() > WIDE_SHARE * total:
            where = ", ".join(f"{format_bytes(size)} at {shown_place(place)}" for place, size in places.most_common(SHOWN))
            yield Finding(
                kind="wide_tensors",
                message=f"{dtype} tensors take {format_bytes(places.total())}, {places.total() / total:.0%} of the peak, "
                f"{'under mixed precision' if is_mixed else 'twice what fp32 would take'}: {where}",
            )


def _growth(record: RunRecord, ends: Sequence[StepEnd], *, has_allowance: bool) -> Iterator[Finding]:
    """
    Tell of what is kept from step to step, and of sizes that data decide, where the upper bound has no allowance for a later step.

    The allocator's own figures rise where blocks are not split; what one step adds may be an evaluation's, and is kept once.
    """
    if len(ends) < LEAST_STEPS:
        return
    kept = [end.kept_bytes for end in ends]
    rises = [all(_keeps_more(*pair) for pair in pairwise(three)) for three in zip(ends, ends[1:], ends[2:], strict=False)]
    peaks = [end.peak_bytes for end in ends]
    if rises[-1]:
        yield Finding(
            kind="growth",
            message=f"memory still grows: what is kept from earlier steps rose by {format_bytes(kept[-1] - kept[-2])} in step {len(ends)}, "
            f"and by {format_bytes(kept[-1] - kept[1])} since step 2 (losses that were not detached, or results that are collected?)",
        )
    elif not has_allowance and peaks[-1] > max(peaks[1:-1]) * (1 + SETTLING_SHARE) and is_decided_by_data(record):
        yield Finding(
            kind="growth",
            message=f"memory still grows: the peak rose by {format_bytes(peaks[-1] - max(peaks[1:-1]))} in step {len(ends)}; "
            "the data decide sizes that differ from step to step",
        )
    elif any(rises) and kept[-1] > kept[1]:  # what was let go of again is no growth
        settled = len(ends) - rises[::-1].index(True)
        yield Finding(
            kind="growth",
            message=f"what is kept from earlier steps rose by {format_bytes(kept[-1] - kept[1])} from step 2 to step {settled}, "
            "and then held",
        )


def _varying_steps(record: RunRecord, ends: Sequence[StepEnd], later: LaterStep) -> Iterator[Finding]:
    """Tell of steps that are of several sizes; the shapes of a DataLoader's batches, and an evaluation, tell more where there are any."""
    peaks = peaks_of_draws(record, ends, trained_batches(record))
    if len(peaks) > 1 and (
        min(peaks) < max(peaks) * (1 - VARYING_SHARE) or later.more_bytes + later.cached_bytes > TOLD_SHARE * max(peaks)
    ):
        taken = f"steps 2 to {len(peaks) + 1} take from {format_bytes(min(peaks))} to {format_bytes(max(peaks))} beside what lasts"
        advice = (
            "their batches differ, and a later one may take more; let the function make its largest"
            if not record.command
            else "the values in their batches, which are of one shape, decide sizes: a later step may take more"
            if trained_batches(record)
            else "they differ, and no DataLoader gives the batches, so that the largest cannot be looked for: a later step may take more"
        )
        allowed = f"; the upper bound includes {format_bytes(later.more_bytes)} for that" if later.more_bytes else ""
        yield Finding(kind="varying_steps", message=f"{taken}: {advice}{allowed}{_cached(later)}")


def _cached(later: LaterStep) -> str:
    """Say what PyTorch may cache besides."""
    if not later.cached_bytes:
        return ""
    more = format_bytes(later.cached_bytes)
    return (
        f". No block that PyTorch has cached serves a step that is larger than all before: each such step may reserve {more} besides, "
        "until the GPU is full and what is cached is released, which takes time; `PYTORCH_ALLOC_CONF=expandable_segments:True` avoids it"
    )


def _keeps_more(before: StepEnd, after: StepEnd) -> bool:
    """Say whether one step keeps more than the one before: more blocks, not larger ones, as of a batch that is loaded ahead."""
    return after.num_kept > before.num_kept and after.kept_bytes >= before.kept_bytes + LEAST_GROWTH_BYTES


def _workspaces(log: DeviceLog, *, tries_convolutions: bool, is_unlimited: bool) -> Iterator[Finding]:
    if log.has_unknown_attention:
        yield Finding(
            kind="uncounted_workspaces",
            message="cuDNN computes attention here: what PyTorch allocates for it is counted, what its kernels may ask for on top is not "
            "known (`torch.backends.cuda.enable_cudnn_sdp(False)` takes another kernel, which is counted whole)",
        )
    if log.managed_bytes:
        yield Finding(
            kind="managed_memory",
            message=f"{format_bytes(log.managed_bytes)} of CUDA's managed memory, as paged optimizers have it, are not counted: they lie "
            "on the GPU while it has room, and move to the host, which slows the steps down, where it has none",
        )
    if log.workspaces:
        kinds = ", ".join(f"{kind} up to {format_bytes(size)}" for kind, size in sorted(log.workspaces.items()))
        yield Finding(
            kind="library_workspaces",
            message=f"the libraries pick their algorithms, and with them workspaces, on the GPU: an allowance is counted ({kinds}); "
            "the lower bound is without it",
        )
    if tries_convolutions and log.asks_cudnn:
        yield Finding(
            kind="uncounted_workspaces",
            message="`torch.backends.cudnn.benchmark` has cuDNN try kernels in the first step, with as much workspace as is free"
            + (": the GPU may show more in use than is told here, where small ones are counted" if is_unlimited else ", which is counted")
            + ". Which of them is the fastest is not known: the one that cuDNN names first is counted, and the range "
            "allows for most others",
        )
    elif log.unsure_sizes:
        yield Finding(
            kind="library_workspaces",
            message="convolutions have the workspaces that cuDNN asks for. Some of its kernels leave partial sums, for as many blocks as "
            f"the GPU runs at once: such a workspace may be up to {format_bytes(max(log.unsure_sizes.values()))} larger, and others then "
            "lie elsewhere, which the range allows for",
        )
    if tries_convolutions and "convolution" in log.workspaces:
        yield Finding(
            kind="uncounted_workspaces",
            message="`torch.backends.cudnn.benchmark` has cuDNN try kernels with larger workspaces in the first step: what they take is "
            "not known, and not counted (on an H100 filters' gradients took 2.6 times the allowance's copies in the median, 13 times in "
            "one of ten)",
        )

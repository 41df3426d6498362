"""What the report of a rehearsal shows, as plain text in plain structures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from memplan.analysis.would_fit import WouldFit
from memplan.execution.guessed_values import guessed_places
from memplan.execution.rehearsal import OutOfMemory, Rehearsal
from memplan.execution.wording import shown_place
from memplan.hardware.gpu import GpuSpec
from memplan.memory.estimate import SET_UP
from memplan.reports.breakdown_view import Breakdown, breakdown_rows, count
from memplan.traces.trace import BUILD, EVALUATION, evaluation_before
from memplan.units import format_bytes

CHOSEN_ON_THE_GPU = {"library_workspaces", "uncounted_workspaces"}
"""Findings of workspaces that only a real GPU decides."""


class RehearsalView(NamedTuple):
    """The parts of a rehearsal's report."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    breakdown: Breakdown
    reads: tuple[str, ...]
    """Values that were read from the GPU and may decide sizes, those with the most memory behind them first."""
    warnings: tuple[str, ...]
    would_fit: tuple[str, ...]


def view_rehearsal(rehearsal: Rehearsal, gpu: GpuSpec, would_fit: WouldFit | None = None, *, shows_all: bool = False) -> RehearsalView:
    """
    Return what a report of *rehearsal* on *gpu* shows; *would_fit* is what would, where it does not fit.

    *shows_all*: every value that was read from the GPU, those that decide nothing too.
    """
    used = rehearsal.device_used
    facts = [
        ("GPU", f"{gpu.name}, {format_bytes(gpu.total_memory_bytes)} for programs"),
        ("PyTorch", f"{rehearsal.torch}, {count(len(rehearsal.steps), 'step')}{how_it_ended(rehearsal)}"),
        *_ranks(rehearsal),
        ("peak allocated", f"{format_bytes(rehearsal.peak_allocated_bytes)}, in {rehearsal.peak_phase}"),
        ("peak reserved", f"{format_bytes(rehearsal.peak_reserved_bytes)}, of which {rehearsal.fragmentation:.1%} fragmentation"),
        (
            "peak device used",
            f"{format_bytes(used.expected_bytes)}, with {_outside(rehearsal)}: "
            f"{format_bytes(used.low_bytes)} to {format_bytes(used.high_bytes)}",
        ),
        *_needs(rehearsal),
        ("retries", str(rehearsal.num_alloc_retries)),
        *_held_back(rehearsal),
    ]
    if rehearsal.assumed_range is not None:
        low, high = (format_bytes(end) for end in (rehearsal.assumed_range.low_bytes, rehearsal.assumed_range.high_bytes))
        if low != high:
            facts.append(("by assumption", f"{low} to {high}: {' and '.join(_assumed(rehearsal))} decide sizes"))
    if rehearsal.process is not None:
        facts.append(("process", rehearsal.process))
    what = "set-up" if rehearsal.peak_phase == SET_UP else "the step"
    breakdown = Breakdown(f"{what} at its peak", breakdown_rows(rehearsal, gpu.total_memory_bytes))
    fits = tuple(_would_fit(would_fit)) if would_fit else ()
    return RehearsalView(
        _rehearsal_headline(rehearsal, gpu),
        tuple(facts),
        breakdown,
        reads=tuple(_read_values(rehearsal, shows_all=shows_all)),
        warnings=tuple(_rehearsal_warnings(rehearsal, gpu)),
        would_fit=fits,
    )


def _needs(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    """Yield what a program needs that takes what is free, or whose cached memory does."""
    if rehearsal.needs is not None:
        used, most = format_bytes(rehearsal.needs.expected_bytes), format_bytes(rehearsal.needs.high_bytes)
        small = "with small workspaces for the kernels that cuDNN tries; more only while it is free"
        cached = "where PyTorch releases cached memory; it caches more while the GPU has room"
        yield "needs", f"{used}, at most {most}, {small if rehearsal.takes_what_is_free else cached}"


_MOST_READS = 3
_LEAST_SHARE = 0.01
"""Of the peak: what has less behind it is not worth a line."""


def _read_values(rehearsal: Rehearsal, *, shows_all: bool) -> Iterator[str]:
    """Yield the reads with memory behind them, and how their answers are known; those that were guessed are warnings as well."""
    least = rehearsal.peak_allocated_bytes * _LEAST_SHARE
    shown = [
        read
        for read in rehearsal.reads
        if shows_all or (read.following_bytes >= least and read.basis in ("data", "copied", "answer", "assumed", "drawn"))
    ]
    for read in shown if shows_all else shown[:_MOST_READS]:
        behind = f"{format_bytes(read.following_bytes)} behind it; " if read.following_bytes else ""
        yield f"{shown_place(read.place)} ({read.count}×): {behind}got {read.answer}, {read.reason}"
    if len(shown) > _MOST_READS and not shows_all:
        yield f"{len(shown) - _MOST_READS} more"


def _ranks(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    """Yield which rank is told of, and what the others take that were run."""
    if rehearsal.num_ranks == 1:
        return
    peaks = rehearsal.rank_peaks
    takes_most = peaks and rehearsal.peak_reserved_bytes == max(each.peak_reserved_bytes for each in peaks)
    which = ", which takes most of those that were run" if takes_most else ""
    yield "ranks", f"rank {rehearsal.rank} of {rehearsal.num_ranks}{which}; the others are taken for copies of it"
    by_size: dict[str, list[int]] = {}
    are_alike = len({each.gpu_name for each in peaks}) <= 1
    for each in peaks:
        where = "" if are_alike else f" on {each.gpu_name}"
        how = "" if each.verdict == "fits" else f" ({each.verdict.replace('_', ' ')})"
        by_size.setdefault(f"{format_bytes(each.peak_reserved_bytes)} reserved{where}{how}", []).append(each.rank)
    if peaks:
        yield "ranks that were run", "; ".join(f"{', '.join(map(str, numbers))}: {size}" for size, numbers in by_size.items())


def how_it_ended(rehearsal: Rehearsal) -> str:
    """Say whether an evaluation was run beside the steps, or what comes after those asked for was not: it may take more than they do."""
    if rehearsal.has_evaluated:
        return ", and an evaluation"
    return "; what comes after them, as an evaluation, was not run" if rehearsal.was_cut else ""


def _outside(rehearsal: Rehearsal) -> str:
    """Return what its range is for."""
    has_workspaces = any(finding.kind in CHOSEN_ON_THE_GPU for finding in rehearsal.findings)
    others = ["NCCL buffers"] * bool(rehearsal.breakdown.nccl_buffers_bytes) + ["workspaces"] * has_workspaces
    others += ["later steps"] * bool(rehearsal.later_step_bytes)
    return f"{', '.join(others)} and a CUDA context that vary" if others else "a CUDA context that varies"


def _assumed(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield what was assumed."""
    if any(read.basis == "assumed" for read in rehearsal.reads):
        yield "numbers that the model computes"
    if any(finding.kind == "drawn_values" for finding in rehearsal.findings):
        yield "numbers that are drawn at random"
    if any(read.basis == "compared" for read in rehearsal.reads):
        yield "numbers that the program compares"
    if any(finding.kind == "chosen_by_time" for finding in rehearsal.findings):
        yield "times by which torch.compile chooses"


_MOST_NAMES = 3
_LONGEST_NAME = 40


def _held_back(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    """Yield what the program would have done to the user's files."""
    written, removed = rehearsal.num_held_back_files, rehearsal.held_back_removals
    if written:
        names = _names([file.path for file in rehearsal.held_back_files], written)
        size = format_bytes(rehearsal.held_back_bytes)
        yield "files held back", f"{written} ({size}): {names}; `allow_writes=True` writes them"
    if removed:
        yield "removals held back", f"{len(removed)}: {_names(removed, len(removed))}; `allow_writes=True` removes them"


def _names(paths: Sequence[str], count: int) -> str:
    """Return some of *paths*, those below the working folder first, and as they are seen from there: caches elsewhere matter less."""
    here = f"{Path.cwd()}/"
    names = [path.removeprefix(here) for path in sorted(paths, key=lambda path: not path.startswith(here))[:_MOST_NAMES]]
    names = [name if len(name) <= _LONGEST_NAME else f"…{name[-_LONGEST_NAME:]}" for name in names]
    return ", ".join([*names, *(["…"] if count > len(names) else [])])


def _rehearsal_headline(rehearsal: Rehearsal, gpu: GpuSpec) -> str:
    peak = format_bytes(rehearsal.device_used_bytes)
    steps = f"the peak of {count(len(rehearsal.steps), 'step')}" if rehearsal.steps else "the peak"
    if rehearsal.peak_phase.startswith(EVALUATION):
        steps = f"the peak, in the {rehearsal.peak_phase}"
    missing, failure = rehearsal.out_of_memory, rehearsal.failure
    if rehearsal.fits_with_less or (missing is not None and missing.is_of_workspace and rehearsal.verdict == "unknown"):
        missing = None
    if failure is not None:
        where = f" at {failure.place}" if failure.place else ""
        when = "before its first step" if failure.phase == BUILD else f"in {'the ' * failure.phase.startswith(EVALUATION)}{failure.phase}"
        guessed = guessed_places(rehearsal.reads)
        cause = f"; a guessed value may be the cause: reads answered with zero at {guessed}" if guessed else ""
        return f"No verdict for {gpu.name}: the program failed {when}{where}: {failure.first_line}{cause}"
    if missing is not None and missing.is_of_workspace:
        wanted = format_bytes(missing.requested_bytes)
        return (
            f"Tight on {gpu.name}: {peak} at {steps}; no room {_when(missing)} for a workspace of {wanted}, and PyTorch took another kernel"
        )
    if missing is not None and missing.is_caught:
        size = f" with batches of {missing.batch_size_after} instead of {missing.batch_size}" if missing.batch_size_after else ""
        told = f"Does not fit as it is on {gpu.name}: out of memory {_when(missing)}, caught; the program went on{size}"
        if missing.peak_allocated_after_bytes is None:
            return f"{told}: {peak} at {steps}, with the attempt that failed"
        after = f"{format_bytes(missing.peak_allocated_after_bytes)} allocated at most from step {missing.first_step_after} on"
        return f"{told}: {after}; the peak of {peak} has the attempt that failed in it"
    if missing is not None:
        return f"Does not fit on {gpu.name}: out of memory {_when(missing)}"
    if rehearsal.lower_bound_reasons:
        return f"At least {_least(rehearsal)} on {gpu.name}: {rehearsal.lower_bound_reasons[0]}"
    if rehearsal.verdict == "tight" and not rehearsal.num_alloc_retries:
        high, total = (format_bytes(size) for size in (rehearsal.device_used.high_bytes, gpu.total_memory_bytes))
        return f"Tight on {gpu.name}: {peak} at {steps}, and up to {high} of {total}"
    if rehearsal.verdict == "tight":
        return f"Tight on {gpu.name}: it ran only by giving cached memory back ({count(rehearsal.num_alloc_retries, 'retry', 'retries')})"
    return f"Fits on {gpu.name}: {peak} at {steps}"


def _least(rehearsal: Rehearsal) -> str:
    """Return what the program takes whatever was guessed too small: of what was assumed, too, the end that takes less."""
    assumed, used_bytes = rehearsal.assumed_range, rehearsal.device_used_bytes
    if assumed is None or assumed.low_bytes >= used_bytes:
        return format_bytes(used_bytes)
    return f"{format_bytes(assumed.low_bytes)} ({format_bytes(used_bytes)} by the other end of what is assumed)"


def _when(missing: OutOfMemory) -> str:
    if missing.phase == EVALUATION:
        when = f"in the {evaluation_before(missing.step)}"
    else:
        when = f"in step {missing.step}, {missing.phase}" if missing.phase != BUILD else "before the first step"
    return f"{when}, at {missing.place}" if missing.place else when


def _rehearsal_warnings(rehearsal: Rehearsal, gpu: GpuSpec) -> list[str]:
    warnings = []
    if rehearsal.out_of_memory is not None:
        missing = rehearsal.out_of_memory
        asked, free = format_bytes(missing.requested_bytes), format_bytes(missing.free_bytes)
        then = (
            "the error was caught, as PyTorch does where a workspace of cuDNN's is not free"
            if rehearsal.fits_with_less or missing.is_of_workspace
            else "the program caught the error and went on with less memory than it asked for"
            if missing.is_caught
            else "the figures cover what ran before that"
        )
        warnings.append(f"tried to allocate {asked} with {free} of the GPU free; {then}")
    if rehearsal.failure is not None:
        warnings.append("the figures cover what ran before it failed")
    warnings.extend(f"it may take more: {reason}" for reason in rehearsal.lower_bound_reasons)
    is_over = rehearsal.device_used.high_bytes > gpu.total_memory_bytes and not rehearsal.fits_with_less
    if rehearsal.verdict in ("fits", "tight") and is_over:
        most, total = format_bytes(rehearsal.device_used.high_bytes), format_bytes(gpu.total_memory_bytes)
        nccl = ", NCCL's buffers" if rehearsal.breakdown.nccl_buffers_bytes else ""
        # More than the GPU has is expected where its process group of one GPU has buffers: nobody knew of them when the run began.
        how = "barely fits" if rehearsal.device_used_bytes <= gpu.total_memory_bytes else "runs only if PyTorch gives cached memory back"
        warnings.append(f"it {how}: the CUDA context{nccl} and libraries' workspaces vary, with which it may take {most} of {total}")
    if rehearsal.verdict == "tight" and rehearsal.num_alloc_retries:
        warnings.append(
            "the allocator had to release cached memory to go on; on a real GPU three of four published steps that had to ran out of memory"
        )
    elif rehearsal.num_alloc_retries and rehearsal.fits_with_less and not rehearsal.takes_what_is_free:
        times = count(rehearsal.num_alloc_retries, "time")
        warnings.append(
            f"the GPU was full of cached memory, which PyTorch released {times}, since it did not serve what was asked for: that takes "
            "time, and with `PYTORCH_ALLOC_CONF=expandable_segments:True` it need not"
        )
    return [*warnings, *(finding.message for finding in rehearsal.findings)]


def _would_fit(found: WouldFit) -> Iterator[str]:
    if found.is_of_program:
        yield (
            "perhaps a smaller batch on this GPU: a plan finds the largest, with `{micro_batch_size}` for it in the program's command, or "
            "with the key of the file that holds it given as a field"
        )
    elif found.name and found.value:
        yield f"{found.name}={found.value} on this GPU: the largest that fits"
    elif found.name is None:
        yield "perhaps a smaller batch: no value of the program is called batch (or batch_size, micro_batch, bs, n), so none was tried"
    else:
        yield f"no {found.name} on this GPU: not even 1"
    what = f"the {'program' if found.is_of_program else 'step'} as it is"
    if found.num_steps is not None:
        steps = "step" if found.num_steps == 1 else f"{found.num_steps} steps"
        what = f"the first {steps} of the program as it is"
    if found.device_used_bytes is None:
        yield f"more memory alone does not help: the {'program' if found.is_of_program else 'step'} fails with unlimited memory too"
    else:
        least = "at least " if found.is_lower_bound else ""
        need = f"{what} on a GPU of this kind with {least}{format_bytes(found.device_used_bytes)}"
        offered = f"GPUs with that much: {', '.join(found.gpus)} (rehearse on them to be sure)" if found.gpus else "no GPU has that much"
        yield f"{need}; {offered}"

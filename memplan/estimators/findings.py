"""What only the real program shows, in words: a switch without effect, parameters that learn nothing, wide tensors, growth."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memplan.memory.rehearsal import Finding, StepPeaks
from memplan.memory.trace import MemoryTrace, Note, allocation_of, allocations_by_address, make_trace
from memplan.units import format_bytes

WIDE_SHARE = 0.1
"""Share of the peak from which tensors of a wide type are told of."""

SHOWN = 3
"""Names and places that a sentence holds."""

_SCALAR = re.compile(r"\.item\(\)|\bfloat\(|\bprint\(|\blog\w*\(|f['\"]")
"""Lines that read a number for people to see, as far as words can tell: most programs have some, and nothing depends on them."""

_WIDE = ("float64", "float32", "complex128")
_SHORT = ("float16", "bfloat16")


def find(
    answer: Mapping[str, Any], *, steps: Sequence[StepPeaks], workspaces: Sequence[str], unrecorded_peak: str | None = None
) -> tuple[Finding, ...]:
    """Return the findings of a run: *answer* is what its recorder wrote; *unrecorded_peak* is where the recorded events were highest."""
    return (
        *_unrecorded(unrecorded_peak),
        *_checkpointing(answer["checkpointing_off"]),
        *_without_gradient(answer["without_gradient"]),
        *_wide_tensors(answer),
        *_growth(steps),
        *_workspaces(workspaces),
        *_reads(answer["reads"]),
    )


def _unrecorded(phase: str | None) -> Iterator[Finding]:
    if phase is not None:
        yield Finding(
            kind="unrecorded_peak",
            message=f"the peak came after the events that were recorded: the categories are those of {phase}, and what the peak took on "
            "top is counted with the activations; `--steps 10` ends before that",
        )


def _checkpointing(reasons: Sequence[str]) -> Iterator[Finding]:
    if not reasons:
        return
    yield Finding(
        kind="checkpointing_without_effect",
        message=f"activation checkpointing is switched on but has no effect: {_listed(reasons)}; libraries checkpoint in training mode "
        "only: call `.train()` on the model, or on the part that was left out",
    )


def _without_gradient(names: Sequence[str]) -> Iterator[Finding]:
    if not names:
        return
    count = f"{len(names)} parameter{'s' if len(names) > 1 else ''} of the optimizer"
    yield Finding(
        kind="parameters_without_gradient",
        message=f"{count} got no gradient in any step: {_listed(names)}; freeze what is not trained, or look for a part that the loss does "
        "not reach",
    )


def _wide_tensors(answer: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare what is alive at the peak of the step that was looked at closely with the types seen in it."""
    if not answer["looked_at"]:
        return
    trace = make_trace(answer["events"], counted_marks=map(tuple, answer["marks"]), notes=answer["notes"])
    numbers = allocations_by_address(trace)
    seen = reversed(answer["looked_at"])  # the first that returned a tensor made it; the others took views of it
    types = {allocation_of(numbers, Note(address, count)): (dtype, place) for address, count, dtype, _, place in seen}
    first = sum(action == "a" for action in trace.actions[: _begin(answer, trace)])
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
            where = ", ".join(f"{format_bytes(size)} at {_shown(place)}" for place, size in places.most_common(SHOWN))
            yield Finding(
                kind="wide_tensors",
                message=f"{dtype} tensors take {format_bytes(places.total())}, {places.total() / total:.0%} of the peak, "
                f"{'under mixed precision' if is_mixed else 'twice what fp32 would take'}: {where}",
            )


def _begin(answer: Mapping[str, Any], trace: MemoryTrace) -> int:
    allocations, _ = answer["end"]
    number = 0
    for position, action in enumerate(trace.actions):
        number += action == "a"
        if number > allocations:
            return position
    return len(trace.actions)


def _growth(steps: Sequence[StepPeaks]) -> Iterator[Finding]:
    if len(steps) < 3:
        return
    peaks = [step.peak_allocated_bytes for step in steps]
    if peaks[-1] > peaks[-2]:
        yield Finding(
            kind="growth",
            message=f"memory still grows: the peak rose by {format_bytes(peaks[-1] - peaks[-2])} in step {len(steps)}, and by "
            f"{format_bytes(peaks[-1] - peaks[1])} since step 2; something is kept from step to step (a list of losses that were not "
            "detached?), or the allocator has not settled",
        )
    elif len(steps) > 3 and peaks[2] > peaks[1]:
        settled = peaks.index(peaks[-1]) + 1
        yield Finding(
            kind="growth",
            message=f"the peak rose from step 2 to step {settled} by {format_bytes(peaks[-1] - peaks[1])} and then held for "
            f"{len(steps) - settled} steps: {len(steps)} steps were run instead of three",
        )


def _workspaces(lines: Sequence[str]) -> Iterator[Finding]:
    largest: dict[str, int] = {}
    for kind, size in (line.split()[1:] for line in lines if line.startswith("workspace ")):
        largest[kind] = max(largest.get(kind, 0), int(size))
    if "unknown attention" in lines:
        yield Finding(
            kind="library_workspaces",
            message="cuDNN computes attention here: what PyTorch allocates for it is counted, what its kernels may ask for on top is not "
            "known (`torch.backends.cuda.enable_cudnn_sdp(False)` takes another kernel, which is counted whole)",
        )
    if largest:
        kinds = ", ".join(f"{kind} up to {format_bytes(size)}" for kind, size in sorted(largest.items()))
        yield Finding(
            kind="library_workspaces",
            message=f"the libraries pick their algorithms, and with them workspaces, on the card: an allowance is counted ({kinds}); "
            "the low end of the range is without it",
        )


def _reads(reads: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    deciding = [read for read in reads if read["answer"] in ("true", "false") and read["reason"] != "your answer"]
    for read in deciding[:SHOWN]:
        yield Finding(
            kind="device_values",
            message=f"{_shown(read['place'])} asks the device for a yes or no and got {read['answer']} ({read['reason']}); if yours "
            f"differs: `--read {read['place'].rsplit('/', 1)[-1]}={'false' if read['answer'] == 'true' else 'true'}`",
        )
    zeros = _zeros(reads)
    if zeros:
        yield Finding(
            kind="device_values",
            message=f"read from the device and got zero, since nothing is computed: {_listed(zeros)}; where that decides a size (nonzero, "
            "x[mask], repeat_interleave, counts of tokens) say what it would be: `--read FILE.py:LINE=1/8`, or a number",
        )


def _zeros(reads: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the places that got a zero which may decide a size, each with how often."""
    sizes = (read for read in reads if read["answer"] == "0" and not _SCALAR.search(read["text"]))
    return [f"{_shown(read['place'])} ({read['count']}×)" for read in sizes]


def sizes_hint(reads: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what may be the cause where a program fails that reads sizes from the device: they were zero."""
    zeros = _zeros(reads)
    if not zeros:
        return None
    return f"it read from the device, where nothing is computed, and got zero: {_listed(zeros)}; if that is why, `--read FILE.py:LINE=1/8`"


def _shown(place: str) -> str:
    """Return *place* as a person would name it: from its package, or from here."""
    inside = place.rsplit("/site-packages/", 1)
    return inside[-1] if len(inside) > 1 else place.removeprefix(f"{Path.cwd()}/")


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

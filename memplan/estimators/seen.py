"""From what a recorder wrote to a Rehearsal. Pure: no process, no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from memplan.estimators.findings import find
from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.estimate import MemoryRange
from memplan.memory.rehearsal import DeviceRead, OutOfMemory, Rehearsal, StepPeaks
from memplan.memory.trace import MemoryTrace, bytes_by_category, make_trace

UNSPLIT_SHARE = 0.05
"""Of allocated bytes, at most what unsplit blocks hold beyond what was asked for: a trace whose peak is lower has not seen it."""


class Seen(NamedTuple):
    """What was seen of one run."""

    answer: Mapping[str, Any]
    """What the recorder wrote."""
    workspaces: tuple[str, ...] = ()
    """Lines of the device's log: what a library would have decided, "workspace KIND BYTES"."""


def largest_workspace(lines: Sequence[str]) -> int:
    """Return the largest allowance that a device's log tells of: what a run may have reserved less, where none was made without any."""
    return max((int(line.split()[2]) for line in lines if line.startswith("workspace ")), default=0)


def rehearsal_of(seen: Seen, *, without: Seen | None, context: MemoryRange, exit_code: int = 0) -> Rehearsal:
    """Return the rehearsal that *seen* is; *without* is the same without the libraries' workspaces, where there were
    any; *context* is what CUDA takes beside them.
    """
    answer = seen.answer
    trace = make_trace(answer["events"], counted_marks=map(tuple, answer["marks"]), notes=answer["notes"], end=answer["end"])
    position, blocks = trace.peak()
    steps = tuple(StepPeaks.model_validate(step) for step in answer["steps"])
    allocated, reserved = answer["peak_allocated_bytes"], answer["peak_reserved_bytes"]
    low = without.answer["peak_reserved_bytes"] if without else max(0, reserved - largest_workspace(seen.workspaces))
    where = _phase(trace, position, len(steps))
    recorded = bytes_by_category(blocks.values())
    behind = answer["was_stopped"] and sum(recorded.values()) < allocated * (1 - UNSPLIT_SHARE)
    return Rehearsal(
        method="rehearsed",
        breakdown=_breakdown(recorded, allocated, reserved, context.expected_bytes),
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_used=MemoryRange(
            low_bytes=min(low, reserved) + context.low_bytes,
            expected_bytes=reserved + context.expected_bytes,
            high_bytes=reserved + context.high_bytes,
        ),
        peak_phase="a step behind those recorded" if behind else where,
        card=answer["card"],
        torch=answer["torch"],
        fits=answer["out_of_memory"] is None,
        out_of_memory=_out_of_memory(answer, exit_code),
        num_alloc_retries=answer["num_alloc_retries"],
        steps=steps,
        grows=len(steps) > 2 and steps[-1].peak_allocated_bytes > steps[-2].peak_allocated_bytes,
        findings=find(answer, steps=steps, workspaces=seen.workspaces, unrecorded_peak=where if behind else None),
        reads=tuple(DeviceRead.model_validate({key: read[key] for key in DeviceRead.model_fields}) for read in answer["reads"]),
        values=answer.get("values", {}),
        exit_code=exit_code,
        trace=trace,
    )


def _phase(trace: MemoryTrace, position: int, num_steps: int) -> str:
    """Say in which phase of which step event *position* is."""
    mark = trace.phase_at(position)
    if mark.step > num_steps > 0:
        return f"what came after step {num_steps}"  # an evaluation: no optimizer step followed
    return f"{mark.phase} of step {mark.step}" if mark.step else mark.phase


def _out_of_memory(answer: Mapping[str, Any], exit_code: int) -> OutOfMemory | None:
    seen = answer["out_of_memory"]
    if seen is None:
        return None
    failure = answer["failure"]
    raised = failure if failure and failure["kind"] == "out_of_memory" else {}
    return OutOfMemory(
        message=raised.get("message") or seen["message"],
        requested_bytes=seen["requested_bytes"],
        free_bytes=seen["free_bytes"],
        step=seen["step"],
        phase=seen["phase"],
        place=seen["place"] or raised.get("place"),
        is_caught=failure is None and exit_code == 0,
    )


def _breakdown(found: Mapping[str, int], allocated: int, reserved: int, context_bytes: int) -> MemoryBreakdown:
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
    )

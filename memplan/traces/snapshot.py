"""
Memory snapshots as PyTorch dumps them (torch.cuda.memory._dump_snapshot) and its memory visualizer opens them.

A snapshot holds the allocator's state at its end, and the events that led there. To put the events to a simulated allocator, the state at
their beginning is needed: `read_snapshot` works it out, by undoing them from the last to the first.
"""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memplan.errors import UsageError, reason_of
from memplan.traces.block_sizes import SMALL_SEGMENT_BYTES
from memplan.traces.trace import (
    ACTIONS,
    ALLOC,
    CATEGORIES,
    FREE,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    MemoryTrace,
    events_of,
)
from memplan.traces.trace import rounded as round_up


class Segment(NamedTuple):
    """Memory that the allocator had from the driver."""

    address: int
    size_bytes: int
    stream: int
    is_small: bool
    is_expandable: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A recording of the allocator: how it was when it began, and what came then."""

    segments: tuple[Segment, ...]
    """When the recording began."""

    live: Mapping[int, int]
    """What was allocated then: bytes asked for, by address."""

    trace: MemoryTrace
    """Without purposes: nobody noted any."""

    settings: str
    """PYTORCH_CUDA_ALLOC_CONF of the program."""


class _PlainUnpickler(pickle.Unpickler):
    """Loads numbers, texts, lists and dicts, and nothing that could run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_snapshot(path: Path, *, device: int | None = None) -> Snapshot:
    """
    Return the snapshot in the file *path*, of the GPU with number *device*; None: of the only one with events.

    Raises UsageError for a file that is none, or that holds anything but plain values: a pickle can run code when it is loaded, so nothing
    of it is.
    """
    try:
        content = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        traces, segments = content["device_traces"], content["segments"]
        chosen = _device_with_events(traces, device, path)
        settings = content.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF") or ""
        if not isinstance(settings, str):
            raise ValueError(f"its settings are {settings!r}")
        if not any(entry["action"] in ACTIONS for entry in traces[chosen]):
            raise ValueError("none of its events are known")
        return snapshot_of(traces[chosen], [segment for segment in segments if segment["device"] == chosen], settings=settings)
    except OSError as error:
        raise UsageError(f"{path}: {reason_of(error)}", hint="name the file that torch.cuda.memory._dump_snapshot wrote") from error
    except UsageError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise UsageError(
            f"{path} is not a memory snapshot: {error}",
            hint="dump one with `torch.cuda.memory._dump_snapshot(FILE)`, after recording its history",
        ) from error


def _device_with_events(traces: Sequence[Sequence[Any]], device: int | None, path: Path) -> int:
    with_events = [number for number, trace in enumerate(traces) if trace]
    if device is None and len(with_events) == 1:
        return with_events[0]
    if device in with_events and device is not None:
        return device
    if not with_events:
        raise UsageError(f"{path} holds no events", hint="call `torch.cuda.memory._record_memory_history()` before the first allocation")
    raise UsageError(f"{path} has events of GPUs {', '.join(map(str, with_events))}", hint="choose one: `device=0`")


def snapshot_of(entries: Iterable[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]], *, settings: str = "") -> Snapshot:
    """Return the snapshot of PyTorch's trace *entries*, which led to *segments*."""
    known = events_of(entries)
    trace = MemoryTrace(
        "".join(ACTIONS[entry["action"]] for entry in known),
        array("Q", [entry["device_free"] if entry["action"] == "oom" else entry["addr"] for entry in known]),
        array("Q", [entry["size"] for entry in known]),
        array("Q", [entry["stream"] for entry in known]),
        purposes=b"",
        marks=(),
    )
    at_end = {
        segment["address"]: Segment(
            segment["address"],
            segment["total_size"],
            segment["stream"],
            segment["segment_type"] == "small",
            segment.get("is_expandable", False),
        )
        for segment in segments
    }
    live = {address: size for segment in segments for address, size in _allocated(segment)}
    begin, live = _rewound(trace, at_end, live)
    return Snapshot(tuple(begin), live, trace, settings or "")


def _allocated(segment: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    address = segment["address"]
    for block in segment["blocks"]:
        if block["state"] != "inactive":
            yield block.get("address", address), block.get("requested_size", block["size"])
        address += block["size"]


def _rewound(trace: MemoryTrace, segments: dict[int, Segment], live: dict[int, int]) -> tuple[list[Segment], dict[int, int]]:
    """Undo *trace*: what it allocated was not there, what it freed was."""
    mapped = sum(segment.size_bytes for segment in segments.values() if segment.is_expandable)
    segments = {address: segment for address, segment in segments.items() if not segment.is_expandable}
    events = zip(trace.actions, trace.addresses, trace.sizes, trace.streams, strict=True)
    for action, address, size, stream in reversed(list(events)):
        if action == ALLOC:
            live.pop(address, None)
        elif action == FREE:
            live[address] = size
        elif action == SEGMENT_ALLOC:
            segments.pop(address, None)
        elif action == SEGMENT_FREE:
            segments[address] = Segment(address, size, stream, size == SMALL_SEGMENT_BYTES)
        elif action in (SEGMENT_MAP, SEGMENT_UNMAP):
            mapped += size if action == SEGMENT_UNMAP else -size
    if mapped:
        raise UsageError(
            f"the recording began with {mapped} bytes mapped into expandable segments, and does not say where they were",
            hint="call `torch.cuda.memory._record_memory_history()` before the first allocation",
        )
    return sorted(segments.values()), live


def write_snapshot(path: Path, trace: MemoryTrace, *, settings: str = "") -> None:
    """
    Write *trace* to *path* as PyTorch dumps it; where it shows stack frames, this shows what an allocation was for, and in which phase.

    Its times are numbers of events: a step that was rehearsed took no time on any GPU. Raises UsageError where the file cannot be written.
    """
    content = {
        "segments": list(_segments_at_end(trace)),
        "device_traces": [list(_entries(trace))],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": settings},
        "external_annotations": [],
    }
    try:
        path.write_bytes(pickle.dumps(content, protocol=4))
    except OSError as error:
        raise UsageError(f"{path}: {reason_of(error)}", hint="name a file that can be written") from error


_NAMES = {letter: name for name, letter in ACTIONS.items()}


def _entries(trace: MemoryTrace) -> Iterator[dict[str, Any]]:
    number, of_address, requested = 0, dict[int, int](), set[int]()
    events = zip(trace.actions, trace.addresses, trace.sizes, trace.streams, strict=True)
    for position, (action, address, size, stream) in enumerate(events):
        if action == ALLOC:
            number += 1
            of_address[address] = number
        frames = _frames(trace, of_address.get(address), position)
        where = {"device_free": address} if action == OOM else {"addr": address}
        entry = {"action": _NAMES[action], "size": size, "stream": stream, "time_us": position, "frames": frames, **where}
        if action == FREE and address not in requested:  # PyTorch always tells of both
            yield entry | {"action": _NAMES[FREE_REQUESTED]}
        requested.discard(address)
        if action == FREE_REQUESTED:
            requested.add(address)
        yield entry


def _frames(trace: MemoryTrace, number: int | None, position: int) -> list[dict[str, Any]]:
    mark = trace.phase_at(position)
    where = {"filename": f"step {mark.step}" if mark.step else "before the first step", "line": mark.step, "name": mark.phase}
    if number is None:
        return [where]
    return [{"filename": "memplan", "line": number, "name": CATEGORIES[trace.purposes[number - 1]].replace("_", " ")}, where]


def _segments_at_end(trace: MemoryTrace) -> Iterator[dict[str, Any]]:
    """Yield the segments that are left when *trace* ends, with their blocks."""
    segments: dict[int, Segment] = {}
    live: dict[int, int] = {}
    for action, address, size, stream in zip(trace.actions, trace.addresses, trace.sizes, trace.streams, strict=True):
        if action == ALLOC:
            live[address] = size
        elif action == FREE:
            live.pop(address, None)
        elif action in (SEGMENT_ALLOC, SEGMENT_MAP):
            segments[address] = Segment(address, size, stream, size == SMALL_SEGMENT_BYTES, action == SEGMENT_MAP)
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            segments = dict(_without(segments, address, size))
    addresses = sorted(live)
    for segment in sorted(segments.values()):
        inside = [address for address in addresses if segment.address <= address < segment.address + segment.size_bytes]
        blocks = list(_blocks(segment, inside, live))
        active = [block for block in blocks if block["state"] == "active_allocated"]
        yield {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size_bytes,
            "allocated_size": sum(block["size"] for block in active),
            "active_size": sum(block["size"] for block in active),
            "requested_size": sum(block["requested_size"] for block in active),
            "stream": segment.stream,
            "segment_type": "small" if segment.is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": segment.is_expandable,
            "frames": [],
            "blocks": blocks,
        }


def _without(segments: Mapping[int, Segment], address: int, size: int) -> Iterator[tuple[int, Segment]]:
    """Yield *segments* without the *size* bytes at *address*, which may be a part of one, or of several."""
    for begin, segment in segments.items():
        end = begin + segment.size_bytes
        if end <= address or address + size <= begin:
            yield begin, segment
            continue
        if begin < address:
            yield begin, segment._replace(size_bytes=address - begin)
        if address + size < end:
            yield address + size, segment._replace(address=address + size, size_bytes=end - address - size)


def _blocks(segment: Segment, addresses: Sequence[int], live: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    at, end = segment.address, segment.address + segment.size_bytes
    for address in addresses:
        if address > at:
            yield _block(at, address - at, 0, "inactive")
        size = min(round_up(live[address]), end - address)
        yield _block(address, size, live[address], "active_allocated")
        at = address + size
    if at < end:
        yield _block(at, end - at, 0, "inactive")


def _block(address: int, size: int, requested: int, state: str) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}

"""`memplan replay`: a memory snapshot of a real GPU, replayed by the simulated allocator with other settings, or on another GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memplan.cli.options import format_option

if TYPE_CHECKING:
    from memplan.traces.requests import Replayed
    from memplan.traces.snapshot import Snapshot

EXAMPLES = """
\b
Examples:
  memplan replay snapshot.pickle                                            what other allocator settings would have reserved
  memplan replay snapshot.pickle --settings max_split_size_mb:128           with your own settings
  memplan replay snapshot.pickle --gpu t4                                   whether it would have run on another GPU
"""

USUAL = ("", "expandable_segments:True", "max_split_size_mb:256", "roundup_power2_divisions:8")


@click.command(epilog=EXAMPLES)
@click.argument("path", metavar="SNAPSHOT.pickle", type=click.Path(path_type=Path))
@click.option(
    "--settings",
    "texts",
    multiple=True,
    metavar="TEXT",
    help="A value of PYTORCH_ALLOC_CONF to try. May be repeated.  [default: a few usual ones]",
)
@click.option("--gpu", "gpu_name", metavar="NAME", help="A GPU to replay it on.  [default: unlimited memory]")
@click.option(
    "--gpu-memory", metavar="SIZE", help="A memory size to replay it on: 24 is the size that a GPU is sold with, 23.5GiB is exact."
)
@click.option("--device", type=click.IntRange(min=0), metavar="N", help="The GPU of the snapshot, if it has several.")
@format_option
def replay(
    *, path: Path, texts: Sequence[str], gpu_name: str | None, gpu_memory: str | None, device: int | None, output_format: str
) -> int:
    """
    Replay a memory snapshot, and show what it would have reserved with other allocator settings, or on another GPU.

    SNAPSHOT.pickle is what torch.cuda.memory._dump_snapshot wrote; nothing of the pickle is run. Best recorded from before the first
    allocation: earlier blocks are replayed in the order of their addresses. Exit code 1: out of memory on that GPU with all settings.
    """
    from memplan.allocator.replay import reproduces
    from memplan.traces.snapshot import read_snapshot

    recording = read_snapshot(path, device=device)
    same = reproduces(recording) is not None
    capacity_bytes = _capacity(gpu_name, gpu_memory)
    rows = _replayed(recording, list(dict.fromkeys((recording.settings, *(texts or USUAL)))), capacity_bytes)
    if output_format == "json":
        found = [{"settings": settings, **vars(seen), "fits": seen.fits} for settings, seen in rows]
        begins_empty = not recording.live
        answer = {"schema_version": 1, "events": len(recording.trace.actions), "recorded_settings": recording.settings}
        click.echo(json.dumps(answer | {"is_reproduced": same, "begins_empty": begins_empty, "replays": found}, indent=2))
    else:
        _show(recording, rows, is_reproduced=same)
    return 0 if any(seen.fits for _, seen in rows) else 1


def _capacity(gpu_name: str | None, gpu_memory: str | None) -> int:
    """Return what the allocator can have: without the CUDA context, at its largest."""
    from memplan.api.gpus import named_gpu
    from memplan.hardware.gpu import UNLIMITED_BYTES
    from memplan.memory.cuda_context import usual_context

    if gpu_name is None and gpu_memory is None:
        return UNLIMITED_BYTES
    gpu = named_gpu(gpu_name, gpu_memory)
    return max(0, gpu.total_memory_bytes - usual_context(gpu).high_bytes)


def _replayed(recording: Snapshot, texts: Sequence[str], capacity_bytes: int) -> list[tuple[str, Replayed]]:
    from memplan.allocator.config import read_settings
    from memplan.allocator.replay import what_if
    from memplan.allocator.simulator import CachingAllocator, Card

    return [(text, what_if(recording, CachingAllocator(Card(capacity_bytes, capacity_bytes), read_settings(text)))) for text in texts]


def _show(recording: Snapshot, rows: Sequence[tuple[str, Replayed]], *, is_reproduced: bool) -> None:
    from memplan.reports.terminal import print_table
    from memplan.units import format_bytes

    click.echo(f"{len(recording.trace.actions)} events; recorded with {recording.settings or 'the default settings'}\n")
    table = []
    for text, seen in rows:
        verdict = "runs" if not seen.gave_back else f"tight: {seen.num_alloc_retries} retries"
        sizes = (format_bytes(seen.peak_allocated_bytes), format_bytes(seen.peak_reserved_bytes))
        table.append((text or "default", *sizes, verdict if seen.fits else f"out of memory at allocation {seen.out_of_memory_at}"))
    print_table(("PYTORCH_ALLOC_CONF", "peak allocated", "peak reserved", ""), table)
    if not is_reproduced:
        click.echo(
            "\nwarning: the simulated allocator did not do what was recorded (another PyTorch, private pools, or a full GPU): "
            "these figures are near, not exact",
            err=True,
        )
    if recording.live:
        click.echo("\nwarning: the recording started with allocated memory, which was replayed in the order of its addresses", err=True)

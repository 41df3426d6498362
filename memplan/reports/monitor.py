"""What a monitor shows: a line, a table, a page, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from memplan.errors import MissingError
from memplan.hardware.host import described
from memplan.monitor.sampler import GpuSample, Sample, key_of
from memplan.reports.html import Axes, bullet_list, definitions, figure, grid, limit_line, page
from memplan.units import GIB, format_bytes

MOST_MARKS = 400
"""Samples of a drawing that say their numbers when the pointer rests on them."""
UNKNOWN = "?"


def columns(planned_bytes: int | None) -> tuple[str, ...]:
    """Return the head of the table."""
    return ("GPU", "", "used", "of GPU", *(["of plan"] if planned_bytes is not None else []), "peak", "busy", "processes")


def rows(sample: Sample, peaks: Mapping[str, int], planned_bytes: int | None) -> Iterator[tuple[str, ...]]:
    """Yield a row for each GPU. What the driver does not tell is a question mark."""
    for gpu in sample.gpus:
        peak = peaks.get(key_of(gpu))
        yield (
            str(gpu.number),
            gpu.name or f"lost ({'; '.join(gpu.notes[:1])})",
            _of(gpu.used_bytes, gpu.total_bytes),
            _share(gpu.used_bytes, gpu.total_bytes),
            *([_share(gpu.used_bytes, planned_bytes)] if planned_bytes is not None else []),
            UNKNOWN if peak is None else format_bytes(peak),
            UNKNOWN if gpu.utilization_percent is None else f"{gpu.utilization_percent}%",
            UNKNOWN if gpu.processes is None else described([(each.name, each.pid, each.used_bytes) for each in gpu.processes]),
        )


def _of(used: int | None, total: int | None) -> str:
    told = [UNKNOWN if value is None else format_bytes(value) for value in (used, total)]
    return f"{told[0]} of {told[1]}"


def _share(used: int | None, whole: int | None) -> str:
    return UNKNOWN if used is None or not whole else f"{used / whole:.0%}"


def host_line(sample: Sample) -> str:
    """Return the host's part, in words."""
    ram = f"RAM {format_bytes(sample.ram_used_bytes)} of {format_bytes(sample.ram_total_bytes)}"
    return f"{_clock(sample)}  CPU {sample.cpu_percent:.0f}%  {ram}" + (f"  {sample.problem}" if sample.problem else "")


def lines(sample: Sample, peaks: Mapping[str, int], planned_bytes: int | None) -> Iterator[str]:
    """Yield a line for each GPU, with all figures of the moment, for a file or a pipe."""
    host = host_line(sample).removeprefix(_clock(sample)).strip()
    if not sample.gpus:
        yield f"{_clock(sample)}  {host}"
    for number, name, used, of_card, *of_plan, peak, busy, processes in rows(sample, peaks, planned_bytes):
        plan = "".join(f", {share} of the plan" for share in of_plan)
        yield f"{_clock(sample)}  GPU {number} {name}  {used} ({of_card}{plan})  peak {peak}  busy {busy}  {host}  {processes}".rstrip()


def _clock(sample: Sample) -> str:
    return datetime.fromtimestamp(sample.time).astimezone().strftime("%H:%M:%S")


def as_html(samples: Sequence[Sample], *, advice: Sequence[str], planned_bytes: int | None) -> str:
    """Return a page with the memory of each GPU over time, its use, and warnings. Self-contained; light and dark."""
    begin = samples[0].time
    minutes = (samples[-1].time - begin) / 60
    first = datetime.fromtimestamp(begin).astimezone()
    facts = [("from", f"{first:%Y-%m-%d %H:%M:%S}, {minutes:.1f} minutes"), ("samples", str(len(samples)))]
    parts = ["<h1>GPU memory over time</h1>", definitions(facts)]
    for gpu in _gpus_of(samples):
        parts += _drawing(gpu, samples, planned_bytes)
    parts += bullet_list("Warnings", advice)
    return page("GPU memory over time", parts, "as the driver told it")


def _gpus_of(samples: Sequence[Sample]) -> list[GpuSample]:
    """Return each GPU that was seen, as it was seen first."""
    found: dict[str, GpuSample] = {}
    for sample in samples:
        for gpu in sample.gpus:
            found.setdefault(key_of(gpu), gpu)
    return list(found.values())


def series_of(gpu: GpuSample, samples: Sequence[Sample]) -> list[tuple[float, int, int | None]]:
    """Return seconds since the first sample, bytes, and percent busy, of every sample that tells the bytes."""
    begin = samples[0].time
    return [
        (sample.time - begin, each.used_bytes, each.utilization_percent)
        for sample in samples
        for each in sample.gpus
        if key_of(each) == key_of(gpu) and each.used_bytes is not None
    ]


def _drawing(gpu: GpuSample, samples: Sequence[Sample], planned_bytes: int | None) -> Iterator[str]:
    yield f"<h2>GPU {gpu.number}: {escape(gpu.name or 'unknown')}</h2>"
    series = series_of(gpu, samples)
    if not series:
        yield '<p class="dim">The driver did not tell its memory.</p>'
        return
    total = gpu.total_bytes or max(used for _, used, _ in series)
    axes = Axes(0, max(series[-1][0], 1e-9), total * 1.08)
    line = " ".join(f"{axes.x(second):.1f},{axes.y(used):.1f}" for second, used, _ in series)
    marks = "".join(
        f'<circle cx="{axes.x(second):.1f}" cy="{axes.y(used):.1f}" r="3" fill="var(--c0)"><title>{second:.0f} s: {format_bytes(used)}'
        f"{'' if busy is None else f', busy {busy}%'}</title></circle>"
        for second, used, busy in series[:: 1 + len(series) // MOST_MARKS]
    )
    limits = limit_line(axes, total, "GPU") + (
        limit_line(axes, planned_bytes, "plan", is_below=True) if planned_bytes and planned_bytes <= total else ""
    )
    ticks = [(axes.high * part / 4, f"{axes.high * part / 4:.0f} s") for part in range(5)]
    yield figure(grid(axes, ticks) + limits + f'<polyline class="curve" points="{line}"/>' + marks, "memory used over time")


def write_png(path: Path, samples: Sequence[Sample], *, planned_bytes: int | None) -> None:
    """Write the memory of each GPU over time as a picture. Raises MissingError without matplotlib."""
    pyplot = load_pyplot()
    drawing, axes = pyplot.subplots(figsize=(10, 5))
    for gpu in _gpus_of(samples):
        series = series_of(gpu, samples)
        axes.plot([second for second, _, _ in series], [used / GIB for _, used, _ in series], label=f"GPU {gpu.number} {gpu.name or ''}")
        if gpu.total_bytes:
            axes.axhline(gpu.total_bytes / GIB, linestyle="--", color="tab:red", linewidth=1)
    if planned_bytes:
        axes.axhline(planned_bytes / GIB, linestyle=":", color="tab:gray", label="plan")
    axes.set(xlabel="seconds", ylabel="GiB", ylim=(0, None), title="GPU memory over time")
    axes.legend()
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def load_pyplot() -> Any:
    """Return matplotlib's pyplot, which draws without a screen. Raises MissingError where it is not installed."""
    try:
        import matplotlib  # noqa: PLC0415  (only pictures need it)
    except ImportError as error:
        hint = "`pip install matplotlib`, or name a file that ends in .html"
        raise MissingError("a picture needs matplotlib, which is not installed", hint=hint) from error
    matplotlib.use("agg")
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot

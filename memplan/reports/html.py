"""
The plan as one HTML file: what the memory is made of, memory over time of a step, and the curves.

It needs no network and no script: drawings are SVG in the page, colours follow the reader's light or dark setting, and every mark says its
numbers when the pointer rests on it. The tables beside the drawings hold the same figures for whoever cannot see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from memplan.analysis.curves import Curve
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.gpu import GpuSpec
from memplan.planner.plan import Plan
from memplan.reports.breakdown_view import Breakdown
from memplan.reports.curve_view import CURVE_WORDS
from memplan.reports.plan_view import PlanView, view_plan
from memplan.reports.rehearsal_view import view_rehearsal
from memplan.traces.timeline import Sample, Timeline
from memplan.traces.trace import CATEGORIES
from memplan.units import GIB, format_bytes

WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 34
ROOM_FOR_A_WORD = 56.0
LEAST_PHASE = 0.005
"""Of a step: what is shorter gets no word."""

STYLE = """
.memplan { color-scheme: light dark; --ink: #1c2127; --dim: #5d6773; --paper: #ffffff; --line: #d6dbe1; --good: #1a7f4b; --bad: #b3261e;
  --c0: #4c6ef5; --c1: #12a5a0; --c2: #9c5fd0; --c3: #8a94a0; --c4: #e0a01b; --c5: #e4683a; --c6: #c3cad2; --c7: #e3e7eb; }
@media (prefers-color-scheme: dark) { .memplan { --ink: #e8ebee; --dim: #9aa5b1; --paper: #15181c; --line: #343b44; --good: #4ac586; --bad: #ff7b72;
  --c0: #7f97ff; --c1: #3ccfc9; --c2: #c08df0; --c3: #8d98a5; --c4: #f0c052; --c5: #ff9166; --c6: #4b545f; --c7: #2a3038; } }
.memplan { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 900px; padding: .5rem 1rem;
  h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
  .good { color: var(--good); } .bad { color: var(--bad); } .dim { color: var(--dim); }
  table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; white-space: nowrap; }
  th, td { text-align: right; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); }
  th { color: var(--dim); font-weight: normal; } th:first-child, td:first-child { text-align: left; } dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
  dt { color: var(--dim); } dd { margin: 0; } figure { margin: .5rem 0; overflow-x: auto; } svg { max-width: 100%; height: auto; }
  svg text { fill: var(--dim); font-size: 12px; } .axis { stroke: var(--line); } .limit { stroke: var(--bad); stroke-dasharray: 6 4; }
  .curve { fill: none; stroke: var(--c0); stroke-width: 2; } .key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .35em 0 1em; }
  details { margin: .5rem 0; } li { margin: .3rem 0; }
}
"""  # noqa: E501
"""Of everything inside an element of class memplan: a notebook has styles of its own."""

_COLOURS = {name: f"var(--c{number})" for number, name in enumerate(CATEGORIES)}
_SHARES = {
    "parameters": "--c0", "gradients": "--c1", "optimizer state": "--c2", "workspaces": "--c3", "batch data": "--c4", "activations": "--c5",
    "allocator slack": "--c6", "CUDA context": "--c7",
}  # fmt: skip


class Axes(NamedTuple):
    """From values to places in a drawing."""

    low: float
    high: float
    top_bytes: float

    def x(self, value: float) -> float:
        """Return where *value* stands from the left."""
        return LEFT + (value - self.low) / max(self.high - self.low, 1e-9) * (WIDTH - LEFT - RIGHT)

    def y(self, bytes_: float) -> float:
        """Return where *bytes_* stand from the top."""
        return HEIGHT - BOTTOM - bytes_ / max(self.top_bytes, 1) * (HEIGHT - TOP - BOTTOM)


def plan_as_html(
    plan: Plan,
    *,
    source: str,
    remembered: str = "",
    notes: Sequence[str] = (),
    curves: Sequence[Curve] = (),
    timeline: Timeline | None = None,
    stage: str = "",
    is_page: bool = True,
) -> str:
    """
    Return the report of *plan*, read from *source*: a whole page, or what a notebook shows.

    *timeline* is that of one step of the stage named *stage*; None: only formulas know of the plan, and they know no time.
    """
    view = view_plan(plan, source=source, remembered=remembered, notes=notes)
    parts = [
        f'<h1 class="{"good" if plan.fits else "bad"}">{escape(view.headline)}</h1>',
        definitions(view.facts),
        table(view.columns, view.rows),
        *_breakdowns(view),
        *(_timeline(timeline, plan, stage) if timeline is not None else ()),
        *(part for curve in curves for part in _curve(curve)),
        *bullet_list("Why", view.reasons),
        *bullet_list("Warnings", view.warnings),
        *bullet_list("What would help", view.levers),
    ]
    return page(view.headline, parts, f"figures by method {plan.method}") if is_page else fragment(parts)


def rehearsal_as_html(rehearsal: Rehearsal, gpu: GpuSpec) -> str:
    """Return the report of *rehearsal* on *gpu*, as a notebook shows it."""
    view = view_rehearsal(rehearsal, gpu)
    parts = [
        f'<h1 class="{"good" if rehearsal.fits else "bad"}">{escape(view.headline)}</h1>',
        definitions(view.facts),
        *_breakdown(view.breakdown),
        *bullet_list("Warnings", view.warnings),
    ]
    return fragment(parts)


def fragment(parts: Iterable[str]) -> str:
    """Return *parts*, which are HTML, as an element that brings its own style."""
    return f'<div class="memplan"><style>{STYLE}</style>{"".join(parts)}</div>'


def page(title: str, parts: Iterable[str], foot: str) -> str:
    """Return a whole page of *parts*, which are HTML."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>body {{ margin: 0; }} main {{ margin: 2rem auto; }}{STYLE}</style>\n</head>\n"
        f'<body>\n<main class="memplan">\n{body}\n<p class="dim">Made by memplan; {escape(foot)}.</p>\n</main>\n</body>\n</html>\n'
    )


def definitions(facts: Iterable[tuple[str, str]]) -> str:
    """Return names and what they stand for."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in facts)}</dl>"


def table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a head."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def bullet_list(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield a list with its title; nothing where it is empty."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    if items:
        yield f"<h2>{title}</h2><ul>{items}</ul>"


def _breakdowns(view: PlanView) -> Iterator[str]:
    for breakdown in view.breakdowns:
        yield from _breakdown(breakdown)


def _breakdown(breakdown: Breakdown) -> Iterator[str]:
    """Yield a bar for a group of stages, as long as the GPU's memory, and its figures."""
    yield f"<h2>Memory of {escape(breakdown.title)}</h2>"
    x, pieces = 0.0, []
    for name, size, share in breakdown.rows[:-1]:
        width = min(share, 1) * WIDTH
        pieces.append(
            f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="34" fill="var({_SHARES[name]})">'
            f"<title>{escape(name)}: {escape(size)}, {share:.1%} of the GPU</title></rect>"
        )
        x += width
    frame = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="33" fill="none" class="axis"/>'
    yield f'<figure><svg viewBox="0 0 {WIDTH} 34" role="img" aria-label="shares of the GPU">{"".join(pieces)}{frame}</svg></figure>'
    rows = [(name, size, f"{share:.1%}") for name, size, share in breakdown.rows]
    keyed = "".join(
        f'<tr><td><span class="key" style="background: var({_SHARES.get(name, "--paper")})"></span>{escape(name)}</td>'
        f"<td>{escape(size)}</td><td>{share}</td></tr>"
        for name, size, share in rows
    )
    yield f"<table><thead><tr><th>category</th><th>bytes</th><th>of GPU</th></tr></thead><tbody>{keyed}</tbody></table>"


def grid(axes: Axes, ticks: Iterable[tuple[float, str]]) -> str:
    """Return the lines and figures of both axes."""
    parts = []
    for part in range(5):
        bytes_ = axes.top_bytes * part / 4
        y = axes.y(bytes_)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{bytes_ / GIB:.1f} GiB</text>')
    for value, label in ticks:
        parts.append(f'<text x="{axes.x(value):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(label)}</text>')
    return "".join(parts)


def limit_line(axes: Axes, bytes_: int, label: str, *, is_below: bool = False) -> str:
    """Return a line across the drawing, with its figure above or below it at the left, where curves are low."""
    y = axes.y(bytes_)
    return (
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT + 6}" y="{y + (14 if is_below else -5):.1f}">{escape(label)}: {format_bytes(bytes_)}</text>'
    )


def figure(content: str, label: str) -> str:
    """Return a drawing of the usual size; *label* is for whoever cannot see it."""
    return f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label, quote=True)}">{content}</svg></figure>'


def _timeline(timeline: Timeline, plan: Plan, stage: str) -> Iterator[str]:
    """Yield the areas of the categories, one on the other, and the line of what is reserved."""
    samples = timeline.samples
    if not samples:
        return
    top = max(sample.reserved_bytes for sample in samples) * 1.08
    axes = Axes(samples[0].event, samples[-1].event, top)
    areas, below = [], [0] * len(samples)
    for number, category in enumerate(CATEGORIES):
        above = [low + sample.allocated[number] for low, sample in zip(below, samples, strict=True)]
        most = max(sample.allocated[number] for sample in samples)
        if most:
            areas.append(
                f'<polygon fill="{_COLOURS[category]}" points="{_outline(axes, samples, above, below)}">'
                f"<title>{category.replace('_', ' ')}: at most {format_bytes(most)}</title></polygon>"
            )
        below = above
    reserved = " ".join(f"{axes.x(sample.event):.1f},{axes.y(sample.reserved_bytes):.1f}" for sample in samples)
    reserved_line = f'<polyline fill="none" stroke="var(--dim)" points="{reserved}"><title>reserved</title></polyline>'
    shown = list(_phase_ticks(timeline, axes))
    keys = "".join(
        f'<span class="key" style="background: {_COLOURS[category]}"></span>{category.replace("_", " ")}' for category in CATEGORIES
    )
    where = f" of {escape(stage)}" if stage else ""
    highest = max(samples, key=lambda sample: sample.allocated_bytes)
    yield f"<h2>Memory over time, step {timeline.step}{where}</h2>"
    yield figure(grid(axes, shown) + "".join(areas) + reserved_line, f"memory over time by category; on {plan.gpu.name}")
    yield (
        f'<p class="dim">{keys}<br>The thin line is what is reserved. Time runs by events of the allocator, not by the clock; allocated is '
        f"highest at {format_bytes(highest.allocated_bytes)}, in {escape(_phase_at(timeline, highest.event))}.</p>"
    )


def _phase_ticks(timeline: Timeline, axes: Axes) -> Iterator[tuple[float, str]]:
    """Yield where phases begin, but for those whose word would lie on the one before it."""
    last_x, last_phase = -ROOM_FOR_A_WORD, ""
    ends = [mark.position for mark in timeline.phases[1:]] + [axes.high]
    for mark, end in zip(timeline.phases, ends, strict=True):
        position = max(axes.low, mark.position)
        if end - position < LEAST_PHASE * (axes.high - axes.low):
            continue
        if mark.phase != last_phase and axes.x(position) - last_x >= ROOM_FOR_A_WORD:
            last_x = axes.x(position)
            yield position, mark.phase
        last_phase = mark.phase


def _outline(axes: Axes, samples: Sequence[Sample], above: Sequence[int], below: Sequence[int]) -> str:
    events = [axes.x(sample.event) for sample in samples]
    there = [f"{x:.1f},{axes.y(bytes_):.1f}" for x, bytes_ in zip(events, above, strict=True)]
    back = [f"{x:.1f},{axes.y(bytes_):.1f}" for x, bytes_ in zip(events, below, strict=True)]
    return " ".join([*there, *reversed(back)])


def _phase_at(timeline: Timeline, event: int) -> str:
    return next((mark.phase for mark in reversed(timeline.phases) if mark.position <= event), "the step")


def _curve(curve: Curve) -> Iterator[str]:
    """Yield the line of a curve with its points, the limits, and its figures."""
    name = CURVE_WORDS[curve.variable]
    top = max(curve.gpu_bytes, *(point.high_bytes for point in curve.points)) * 1.08
    axes = Axes(curve.points[0].value, curve.points[-1].value, top)
    line = " ".join(f"{axes.x(point.value):.1f},{axes.y(point.high_bytes):.1f}" for point in curve.points)
    marks = "".join(
        f'<circle cx="{axes.x(point.value):.1f}" cy="{axes.y(point.high_bytes):.1f}" r="{6 if point.value == curve.planned else 4}" '
        f'fill="var({"--good" if point.fits else "--bad"})">'
        f"<title>{name} {point.value}: {format_bytes(point.high_bytes)}, {point.method}"
        f"{'' if point.fits else ', over the budget'}</title></circle>"
        for point in curve.points
    )
    limits = limit_line(axes, curve.gpu_bytes, "GPU") + limit_line(axes, curve.budget_bytes, "budget", is_below=True)
    ticks = [(point.value, str(point.value)) for point in curve.points]
    yield f"<h2>{escape(curve.stage)}: memory by {name}, upper bound</h2>"
    yield figure(
        grid(axes, ticks) + limits + f'<polyline class="curve" points="{line}"/>' + marks,
        f"peak memory by {name}, upper bound, with the limits",
    )
    rows = [
        (
            f"{point.value}{' (planned)' if point.value == curve.planned else ''}",
            format_bytes(point.high_bytes),
            "fits" if point.fits else "over the budget",
            point.method,
        )
        for point in curve.points
    ]
    yield f"<details><summary>figures</summary>{table((name, 'upper bound', '', 'found'), rows)}</details>"

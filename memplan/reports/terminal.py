"""Reports for a terminal. Nothing depends on colour, and a pipe gets the same words."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memplan.analysis.curves import Curve
from memplan.analysis.dataset_memory import DatasetMemory
from memplan.analysis.doctor_checks import Diagnosed
from memplan.analysis.loader_settings import Host, LoaderAdvice
from memplan.analysis.profile import Profile
from memplan.analysis.would_fit import WouldFit
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.gpu import GpuSpec
from memplan.planner.plan import Plan
from memplan.reports.curve_view import view_curve
from memplan.reports.dataset_view import view_dataset
from memplan.reports.doctor_view import view_diagnosis
from memplan.reports.loader_view import RATE_COLUMNS, typed, view_loader
from memplan.reports.plan_view import view_plan
from memplan.reports.profile_view import view_profile
from memplan.reports.rehearsal_view import view_rehearsal

WIDTH_WITHOUT_TERMINAL = 120
BAR_WIDTH = 24
CURVE_WIDTH = 48


class _Trimmed(io.StringIO):
    """A stream that drops the blanks with which rich fills its lines: they are noise in a file and in a test."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # io declares it as an attribute
        """Return the stream's: rich chooses its characters by it."""
        return self._stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        """Write *text* without the blanks at the ends of its lines."""
        return self._stream.write(re.sub(r"[ ]+(?=\n)", "", text))

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def _console(stream: TextIO | None) -> Console:
    stream = stream or sys.stdout
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=_Trimmed(stream), highlight=False, width=WIDTH_WITHOUT_TERMINAL)


def print_plan(
    plan: Plan,
    *,
    source: str,
    remembered: str = "",
    notes: Sequence[str] = (),
    is_short: bool = False,
    more: str = "",
    stream: TextIO | None = None,
) -> None:
    """
    Print the report of *plan*, read from *source*; *notes* are what was noticed on the way to it, *remembered* is what was not typed.

    A short one leaves out what matters less, and says with *more* how to see it.
    """
    console, view = _console(stream), view_plan(plan, source=source, remembered=remembered, notes=notes, is_short=is_short)
    console.print(Text(view.headline, style="bold green" if plan.fits else "bold red"))
    console.print()
    console.print(_facts(view.facts))
    console.print()
    console.print(_table(view.columns, view.rows))
    for breakdown in view.breakdowns:
        console.print()
        console.print(Text(f"memory of {breakdown.title}"))
        console.print(_bars(breakdown.rows))
    _print_list(console, "why", view.reasons)
    left_out = f" ({view.num_left_out} more{more})" if view.num_left_out else ""
    _print_list(console, f"warnings{left_out}", view.warnings)
    _print_list(console, "what would help", view.levers)


def print_curves(curves: Iterable[Curve], *, stream: TextIO | None = None) -> None:
    """Print each curve as bars on the GPU's scale; what is over the budget says so."""
    console = _console(stream)
    for curve in curves:
        view = view_curve(curve)
        console.print()
        console.print(Text(view.title))
        table = Table.grid(padding=(0, 2))
        for justify in ("right", "left", "right", "left"):
            table.add_column(justify=justify)
        for row in view.rows:
            bar = "█" * round(min(row.share, 1) * CURVE_WIDTH)
            budget = round(view.budget_share * CURVE_WIDTH)
            bar = bar if len(bar) > budget else f"{bar:{budget}}│"
            table.add_row(row.label, Text(bar, style="" if row.fits else "red"), row.size, row.remark)
        console.print(Padding(table, (0, 0, 0, 2)))


def print_rehearsal(
    rehearsal: Rehearsal,
    gpu: GpuSpec,
    *,
    would_fit: WouldFit | None = None,
    notes: Sequence[str] = (),
    in_words: Callable[[str], str] = str,
    shows_all: bool = False,
    stream: TextIO | None = None,
) -> None:
    """
    Print the report of *rehearsal* on *gpu*, and what would fit instead.

    *notes* are what the command noticed; *in_words* makes the command's options of the Python that the facts speak. *shows_all*: every
    value that was read from the GPU.
    """
    console, view = _console(stream), view_rehearsal(rehearsal, gpu, would_fit, shows_all=shows_all)
    console.print(Text(view.headline, style="bold green" if rehearsal.fits else "bold red"))
    console.print()
    console.print(_facts((name, in_words(value)) for name, value in view.facts))
    console.print()
    console.print(Text(f"memory of {view.breakdown.title}"))
    console.print(_bars(view.breakdown.rows))
    _print_list(console, "values read from the GPU", view.reads)
    _print_list(console, "warnings", (*view.warnings, *notes))
    _print_list(console, "what would fit", view.would_fit)


def print_profile(profile: Profile, *, stream: TextIO | None = None) -> None:
    """Print what the GPU said to a plan, for each step that was run."""
    console = _console(stream)
    for stage in profile.stages:
        view = view_profile(stage, num_ranks=profile.num_ranks)
        console.print()
        console.print(Text(view.title, style="bold red" if stage.contradiction else ""))
        console.print(Padding(_facts(view.facts), (0, 0, 0, 2)))
        console.print(Padding(_table(view.columns, view.rows), (0, 0, 0, 2)))
    if profile.is_kept:
        console.print()
        console.print(Text("What CUDA took beside PyTorch is kept: plans for this GPU use it from now on."))


def print_dataset(memory: DatasetMemory, *, beside: str, stream: TextIO | None = None) -> None:
    """Print what a dataset takes beside a training, and how much of it each GPU has memory for."""
    console, view = _console(stream), view_dataset(memory, beside=beside)
    console.print(Text(view.headline, style="bold green" if memory.fits else "bold red"))
    console.print()
    console.print(_facts(view.facts))
    console.print()
    console.print(_table(view.columns, view.rows))


def print_diagnosis(
    findings: Sequence[Diagnosed], gpu: GpuSpec, *, source: str, num_steps: int | None, stream: TextIO | None = None
) -> None:
    """Print the *findings* of *source* on *gpu*, each with what was seen, the change, and what that saves."""
    console, view = _console(stream), view_diagnosis(findings, gpu, source=source, num_steps=num_steps)
    console.print(Text(view.headline, style="bold green" if not findings else "bold red"))
    for finding in view.findings:
        console.print()
        console.print(Text(finding.title, style="bold"))
        console.print(Padding(_facts(finding.facts), (0, 0, 0, 2)))


def print_facts(facts: Iterable[tuple[str, str]], *, stream: TextIO | None = None) -> None:
    """Print names with what is said of each."""
    _console(stream).print(Padding(_facts(facts), (0, 0, 0, 2)))


def print_loader(advice: LoaderAdvice, host: Host, *, stream: TextIO | None = None) -> None:
    """Print the settings of a DataLoader on *host*, each with its reason, and what was measured."""
    console, view = _console(stream), view_loader(advice, host)
    console.print(Text(view.headline, style="bold"))
    console.print()
    console.print(_facts(view.facts))
    console.print()
    console.print(_table(("setting", "value", "why"), view.settings, has_numbers=False))
    if view.rates:
        console.print()
        console.print(_table(RATE_COLUMNS, view.rates))
    console.print()
    console.print(Text(typed(advice)))


def _facts(facts: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]], *, has_numbers: bool = True) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number and has_numbers else "left", no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(value, style="bold" if "→" in value else "") for value in row))
    return table


def _bars(shares: Iterable[tuple[str, str, float]]) -> Padding:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for name, size, share in shares:
        table.add_row(name, size, f"{share:.1%}", "█" * round(min(share, 1) * BAR_WIDTH))
    return Padding(table, (0, 0, 0, 2))


def _print_list(console: Console, title: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if not lines:
        return
    console.print()
    console.print(Text(title, style="dim"))
    grid = Table.grid(padding=(0, 1))
    for line in lines:
        grid.add_row("  -", Text(line))
    console.print(grid)


@contextmanager
def live_table(columns: Sequence[str]) -> Iterator[Callable[[Sequence[Sequence[str]], Sequence[str]], None]]:
    """Give what shows rows, and lines below them, in place of those before; the last stay when the block ends."""
    with Live(console=_console(None), auto_refresh=False) as live:

        def update(rows: Sequence[Sequence[str]], lines: Sequence[str]) -> None:
            live.update(Group(_table(columns, rows), *(Text(line) for line in lines)), refresh=True)

        yield update


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, has_numbers: bool = True, stream: TextIO | None = None) -> None:
    """Print a table with a head; numbers stand to the right."""
    _console(stream).print(_table(columns, rows, has_numbers=has_numbers))


def print_diff(lines: Iterable[str], *, stream: TextIO | None = None) -> None:
    """Print a unified diff, blanks at the ends of its lines included: `patch` should take it."""
    stream = stream or sys.stdout
    console = Console(file=stream, highlight=False)
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        console.print(Text(line, style=styles.get(line[:1], "")), soft_wrap=True)

"""`memplan monitor`: memory, use and processes of this machine's GPUs, as they are and over time."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memplan.cli.options import FiniteRange, format_option
from memplan.cli.typed_options import in_options
from memplan.errors import UsageError, reason_of

if TYPE_CHECKING:
    from memplan.monitor.advice import Advice
    from memplan.monitor.sampler import Sample, Sampler

EXAMPLES = """
\b
Examples:
  memplan monitor                                  a live table, until Ctrl-C
  memplan monitor --once --format json             one look, for a program
  memplan --auto --format json > plan.json; memplan monitor --plan plan.json
  memplan monitor --log run.jsonl --plot run.html  every sample in a file, and a page at the end
"""

MOST_KEPT = 86_400
"""Samples that are kept for the page: a day, by seconds."""

MOST_ADVISED = 900
"""Samples that the advice is from: every look goes through them."""


@click.command(epilog=EXAMPLES)
@click.option("--once", is_flag=True, help="Take one sample and exit.")
@click.option("--interval", type=FiniteRange(min=0.05), metavar="SECONDS", default=1.0, show_default=True, help="Time between samples.")
@click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Exit after this many samples.  [default: at Ctrl-C]")
@click.option(
    "--plan", "plan_file", type=click.Path(path_type=Path, dir_okay=False), help="A plan (`memplan --format json`) to compare with."
)
@click.option("--log", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.jsonl", help="Append every sample as a line of JSON.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.html|png", help="Write memory over time at the end.")
@format_option
def monitor(
    *, once: bool, interval: float, samples: int | None, plan_file: Path | None, log: Path | None, plot: Path | None, output_format: str
) -> int:
    """
    Watch this machine's GPUs: memory used and its peak (also as a share of a plan), utilization, processes, CPU and RAM.

    Warns when less than 50% or more than 92% of a GPU is used, when memory grows, and when a GPU waits for data. A figure that the driver
    does not tell is a question mark. On a terminal the table is live; elsewhere every look is a line.
    """
    from memplan.monitor.sampler import Sampler

    if once and samples is not None:
        raise UsageError("--once takes one sample, and --samples says how many", hint="leave one of them out")
    planned_bytes = _planned_bytes(plan_file) if plan_file else None
    _check_files(log, plot)
    kept: deque[Sample] = deque(maxlen=MOST_KEPT)
    recent: deque[Sample] = deque(maxlen=MOST_ADVISED)
    sampler = Sampler()
    count = 1 if once else samples
    with _shown(sampler, kept, planned_bytes, as_json=output_format == "json") as show:
        try:
            for sample in _samples(sampler, interval, count):
                kept.append(sample)
                if log is not None:
                    _add(log, sample)
                recent.append(sample)
                show(_advice(recent, planned_bytes))
        except KeyboardInterrupt:  # how it is ended
            pass
    advice = _advice(recent, planned_bytes)
    if output_format != "json" and not sys.stdout.isatty():
        for each in advice:
            click.echo(f"warning: {each.message}", err=True)
    if plot is not None and kept:
        _draw(plot, list(kept), advice, planned_bytes)
    return 0


def _advice(samples: Sequence[Sample], planned_bytes: int | None) -> list[Advice]:
    """Return what *samples* say, in the words of the command line, wherever it is shown."""
    from memplan.monitor.advice import advise

    return [each._replace(message=in_options(each.message)) for each in advise(samples, planned_bytes=planned_bytes)]


def _samples(sampler: Sampler, interval: float, count: int | None) -> Iterator[Sample]:
    """Yield *count* samples, or samples without end, every *interval* seconds by the clock."""
    begin, number = time.monotonic(), 0
    while count is None or number < count:
        if number:
            time.sleep(max(0.0, begin + number * interval - time.monotonic()))
        yield sampler.sample()
        number += 1


@contextmanager
def _shown(sampler: Sampler, kept: deque[Sample], planned_bytes: int | None, *, as_json: bool) -> Iterator[Callable[[list[Advice]], None]]:
    """Give what shows the last of *kept*: a live table on a terminal, else lines."""
    from memplan.reports import monitor as report

    if as_json:

        def show_json(advice: list[Advice]) -> None:
            told = {"advice": [each._asdict() for each in advice], "peaks": dict(sampler.peaks), "planned_bytes": planned_bytes}
            click.echo(json.dumps({"schema_version": 1, **kept[-1].model_dump(mode="json"), **told}))

        yield show_json
    elif sys.stdout.isatty():
        from memplan.reports.terminal import live_table

        with live_table(report.columns(planned_bytes)) as update:
            yield lambda advice: update(
                list(report.rows(kept[-1], sampler.peaks, planned_bytes)), [report.host_line(kept[-1]), *(each.message for each in advice)]
            )
    else:

        def show_lines(advice: list[Advice]) -> None:
            del advice
            for line in report.lines(kept[-1], sampler.peaks, planned_bytes):
                click.echo(line)
            sys.stdout.flush()

        yield show_lines


def _planned_bytes(path: Path) -> int:
    """Return what a plan counts on: its heaviest stage, and what others held when it was made."""
    from memplan.planner.saved_plan import read_saved_plan

    plan = read_saved_plan(path)
    return plan.device_used_bytes + plan.others_used_bytes


def _check_files(log: Path | None, plot: Path | None) -> None:
    """Raise UsageError for a file that could not be written when the run is over, or MissingError for a picture that could not be drawn."""
    import tempfile

    for path in filter(None, (log, plot)):
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: no such folder", hint="name a file in an existing folder")
        try:
            if path.exists():
                path.open("a").close()
            else:
                tempfile.TemporaryFile(dir=path.absolute().parent).close()
        except OSError as error:
            raise UsageError(f"{path}: {reason_of(error)}", hint="name a file that can be written") from error
    if plot is not None and plot.suffix.lower() not in (".html", ".png"):
        raise UsageError(f"--plot {plot}: neither HTML nor PNG", hint="name it FILE.html or FILE.png")
    if plot is not None and plot.suffix.lower() == ".png":
        from memplan.reports.monitor import load_pyplot

        load_pyplot()


def _add(log: Path, sample: Sample) -> None:
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(sample.model_dump_json() + "\n")
    except OSError as error:
        raise UsageError(f"{log}: {reason_of(error)}", hint="name a file that can be written") from error


def _draw(plot: Path, samples: list[Sample], advice: list[Advice], planned_bytes: int | None) -> None:
    from memplan.reports.monitor import as_html, write_png

    try:
        if plot.suffix.lower() == ".png":
            write_png(plot, samples, planned_bytes=planned_bytes)
        else:
            plot.write_text(as_html(samples, advice=[each.message for each in advice], planned_bytes=planned_bytes), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{plot}: {reason_of(error)}", hint="name a file that can be written") from error
    click.echo(f"Wrote {plot}.", err=True)

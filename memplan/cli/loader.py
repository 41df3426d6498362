"""`memplan loader`: the DataLoader's settings for this machine and dataset, measured where a dataset is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from memplan.cli.options import FiniteRange, format_option
from memplan.cli.typed_options import in_options
from memplan.errors import UsageError

if TYPE_CHECKING:
    from memplan.analysis.loader_settings import Host, LoaderAdvice
    from memplan.api.loading import Configured
    from memplan.edits.apply import FileChange
    from memplan.layouts.registry import Located

EXAMPLES = """
\b
Examples:
  memplan loader                                              by rule, for this machine
  memplan loader train.py:make_dataset --batch-size 32        measured: samples a second with several numbers of workers
  memplan loader my.data:Images --batch-size 32 --samples-per-second 900   the fewest workers that keep up with the step
  memplan loader my.data:Images --batch-size 32 --profile profile.json     the same, as the GPU itself showed
  memplan loader train.py:images --config-path conf --dry-run              what would be written, as a diff
"""


@click.command(epilog=EXAMPLES)
@click.argument("source", metavar="[FILE.py:make_dataset | module:Dataset]", required=False)
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Samples of a batch.  [default: the configuration's]")
@click.option("--seconds", type=FiniteRange(min=0.1), metavar="S", default=3.0, show_default=True, help="Time for each number of workers.")
@click.option("--samples-per-second", type=FiniteRange(min=0, min_open=True), metavar="N", help="What the step of one GPU eats.")
@click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.json",
    help="What `memplan --profile --format json` has printed: what the step of one GPU eats.",
)
@click.option(
    "--monitor-log",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.jsonl",
    help="A log of `memplan monitor` of the training: whether the GPU waits.",
)
@click.option("--num-gpus", type=click.IntRange(min=0), metavar="N", help="GPUs that train here.  [default: those that are found]")
@click.option("--num-samples", type=click.IntRange(min=1), metavar="N", help="Samples of the dataset, where none is named.")
@click.option("--config-path", type=click.Path(path_type=Path), help="The configuration to compare with, and to write.")
@click.option("--apply", "applies", is_flag=True, help="Write the settings into keys of the configuration that are empty; shows the diff.")
@click.option("--dry-run", is_flag=True, help="Show the diff, and write nothing.")
@click.option("--override", "overrides", is_flag=True, help="With --apply or --dry-run: also values that the configuration has.")
@format_option
def loader(
    *,
    source: str | None,
    batch_size: int | None,
    seconds: float,
    samples_per_second: float | None,
    profile: Path | None,
    monitor_log: Path | None,
    num_gpus: int | None,
    num_samples: int | None,
    config_path: Path | None,
    applies: bool,
    dry_run: bool,
    overrides: bool,
    output_format: str,
) -> int:
    """
    Recommend num_workers, prefetch_factor, pin_memory, persistent_workers, non_blocking and drop_last for this machine.

    A dataset that is named is made in a process of its own and loaded for some seconds with several numbers of workers; nothing else runs
    code. Without one the settings are by rule. What workers and pinned batches take is held against the host's free memory and /dev/shm.
    Values that a configuration has are never overridden unless --override asks for it.
    """
    from memplan.analysis.loader_settings import advise_loading
    from memplan.api.loading import batch_size_in, configured, located_at, measured, step_rate_in, this_host, waits_for_data

    writes = applies or dry_run
    if profile is not None and samples_per_second is not None:
        raise UsageError("--profile says what the step eats, and so does --samples-per-second", hint="leave one of them out")
    rate = None if profile is None else step_rate_in(profile)
    needed = samples_per_second if rate is None else rate.samples_per_second
    _check(source, config_path, writes=writes, both=applies and dry_run, overrides=overrides, needs=needed)
    located = None if config_path is None else located_at(config_path)
    size = batch_size or (batch_size_in(located) if located is not None else None)
    if source is not None and size is None:
        raise UsageError("the batch size is not known", hint="give it: `--batch-size 32`")
    notes = [] if rate is None else [rate.told]
    notes += [] if monitor_log is None else [waits_for_data(monitor_log)]
    host = this_host(num_gpus)
    found = None if source is None or size is None else measured(source, host, batch_size=size, seconds=seconds)
    advice = advise_loading(host, found, batch_size=size, num_samples=num_samples, needed=needed)
    entries = [] if located is None else configured(located, advice)
    notes += _differences(entries, overrides=overrides)
    return _told(advice, host, located, entries, notes, output_format, writes=writes, applies=applies, overrides=overrides)


def _check(source: str | None, config_path: Path | None, *, writes: bool, both: bool, overrides: bool, needs: float | None) -> None:
    """Raise UsageError for options that do not go together."""
    if both:
        raise UsageError("--apply writes, and --dry-run does not", hint="leave one of them out")
    if writes and config_path is None:
        raise UsageError("there is nothing to apply to: no configuration is named", hint="name it: `--config-path conf`")
    if overrides and not writes:
        raise UsageError("--override is for what is written", hint="give it with --apply or --dry-run")
    if source is None and needs is not None:
        raise UsageError(
            "what the step eats is held against what a dataset's loading brings", hint="name the dataset: `train.py:make_dataset`"
        )
    if source is not None and not all(source.rpartition(":")):
        raise UsageError(f"{source!r} is no dataset", hint="FILE.py:make_dataset or module:Dataset")


def _differences(entries: list[Configured], *, overrides: bool) -> list[str]:
    """Say where the configuration has something else, which stays as it is."""
    from memplan.edits.edit import as_text

    return [
        f"{entry.file}:{entry.line}: `{entry.key}` is {entry.present}, recommended {as_text(entry.setting.value)}; it is yours, and stays "
        "(--override writes it)"
        for entry in entries
        if entry.is_the_users and not overrides
    ]


def _told(
    advice: LoaderAdvice,
    host: Host,
    located: Located | None,
    entries: list[Configured],
    notes: list[str],
    output_format: str,
    *,
    writes: bool,
    applies: bool,
    overrides: bool,
) -> int:
    """Show *advice*; where it *writes*, the diff, and where it *applies*, write it."""
    from memplan.api.loading import changes_of, without_key, write
    from memplan.reports.diff import diff_lines

    changes: list[FileChange] = changes_of(entries, overrides=overrides) if writes else []
    if writes and located is not None:
        missing = without_key(located, advice)
        notes = [*notes, *([f"{located.main} has no key for these: add `{'`, `'.join(missing)}`"] if missing else [])]
    lines = list(diff_lines(changes))
    shown = [*in_options(advice.warnings), *notes]
    if output_format == "json":
        from memplan.reports.json import loader_as_json

        click.echo(loader_as_json(advice, host, diff="\n".join(lines) if writes else None, notes=shown))
    else:
        from memplan.reports.terminal import print_diff, print_loader

        print_loader(advice, host)
        if lines:
            click.echo()
            print_diff(lines)
        for note in shown:
            click.echo(f"\n{note}", err=True)
    if writes and not changes:
        click.echo("\nnothing to write", err=True)
    if applies and changes and located is not None:
        click.echo(f"\nwrote {', '.join(map(str, write(changes, located)))}; `memplan undo` puts back what was there", err=True)
    return 0

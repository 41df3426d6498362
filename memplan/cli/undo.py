"""`memplan undo`: put back what the last --apply changed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click

from memplan.cli.options import config_path_option, format_option

EXAMPLES = """
\b
Examples:
  memplan undo                        in the project's folder
  memplan undo --config-path conf     elsewhere
  memplan undo conf/01_stage.yaml     one file of the last --apply, where another was edited since
  memplan undo --dry-run              say which files would be put back
"""


@click.command(epilog=EXAMPLES)
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@config_path_option
@click.option("--dry-run", is_flag=True, help="Show which files would be put back, and write nothing.")
@format_option
def undo(*, files: Sequence[Path], config_path: Path | None, dry_run: bool, output_format: str) -> int:
    """
    Put every file of the last --apply back, byte for byte, or the FILEs of it; also of one that was interrupted.

    A folder stands for the configuration in it, as with --config-path.

    Run again it goes one apply further back. It refuses, and writes nothing, when a file that it would put back has changed since.
    """
    from memplan.api.journals import journal_root
    from memplan.edits.apply import plan_undo
    from memplan.edits.apply import undo as undo_apply

    if config_path is None and len(files) == 1 and os.path.isdir(files[0]):
        config_path, files = files[0], ()
    root = journal_root(config_path or Path(), files)
    if dry_run:
        _, journal, entries = plan_undo(root, only=files)
        paths, was_interrupted = tuple(entry.path for entry in entries), journal.state in ("applying", "undoing")
    else:
        undone = undo_apply(root, only=files)
        paths, was_interrupted = undone.restored, undone.was_interrupted
    if output_format == "json":
        answer = {"schema_version": 1, "restored": [str(path) for path in paths], "was_interrupted": was_interrupted, "dry_run": dry_run}
        click.echo(json.dumps(answer, indent=2))
        return 0
    if was_interrupted:
        click.echo("The last apply was interrupted.", err=True)
    for path in paths:
        click.echo(f"{'would put back' if dry_run else 'put back'} {_shown(path)}")
    if not paths:
        click.echo("Every file has its original content already.", err=True)
    return 0


def _shown(path: Path) -> Path:
    """Return *path* as seen from here, where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

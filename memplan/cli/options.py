"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

format_option = click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="For a person, or for a program: one JSON object on standard output.",
)

config_path_option = click.option(
    "--config-path",
    type=click.Path(path_type=Path),
    help="A configuration tree (its folder, the project's, or its main file), a workload.yaml, or a Hugging Face config.json. Default: the "
    "tree in this folder, else the built-in workload.",
)

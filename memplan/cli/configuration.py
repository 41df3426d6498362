"""From what the user typed to the workload to plan: a tree that a layout knows, a workload file, or the built-in one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memplan.errors import ConfigError
from memplan.layouts.registry import BUILT_IN_WORKLOAD, describe_layouts, locate
from memplan.layouts.templates import template_data, templates_folder
from memplan.workload.reader import read_workload, workload_from
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

if TYPE_CHECKING:
    from memplan.layouts.layout import Reading


@dataclass(frozen=True)
class Configuration:
    """A workload, and the tree that it was read from where there is one."""

    workload: Workload
    source: str
    """Where it is from, for the report."""
    reading: Reading | None = None
    """The tree; None for a workload file and for the built-in workload, which nothing is applied to."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what reading noticed."""
        return self.reading.warnings if self.reading else ()

    @property
    def other_stages(self) -> tuple[Stage, ...]:
        """Return files with a stage's keys outside the curriculum."""
        return self.reading.other_stages if self.reading else ()


def read_configuration(path: Path | None) -> Configuration:
    """
    Return the configuration at *path*; without one, that of this folder, or the built-in workload.

    Raises ConfigError for a path that is not there, that no layout knows, or whose values make no sense.
    """
    if path is not None and not path.exists():
        raise ConfigError("does not exist", file=path, hint="check --config-path")
    located = locate(path or Path())
    if located is not None:
        reading = located.read()
        return Configuration(reading.workload, f"{located.root} ({located.layout.name})", reading)
    if path is None:
        template = templates_folder() / BUILT_IN_WORKLOAD
        workload = workload_from(template_data(template), template)
        return Configuration(workload, "the built-in workload, since this folder has no configuration that memplan knows")
    if path.is_dir():
        raise ConfigError(
            "has no layout that memplan knows", file=path, hint=f"looked for {describe_layouts()}; a workload.yaml can be given too"
        )
    return Configuration(read_workload(path), str(path))

"""From what the user typed to the workload to plan: a tree that a layout knows, a workload file, or the built-in one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memplan.errors import ConfigError
from memplan.layouts.registry import BUILT_IN_WORKLOAD, describe_layouts, locate, main_files
from memplan.layouts.templates import template_data, templates_folder
from memplan.workload.reader import is_huggingface_config, read_workload, workload_from
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

if TYPE_CHECKING:
    from memplan.layouts.layout import Reading


class Configuration(NamedTuple):
    """A workload, and the tree that it was read from where there is one."""

    workload: Workload
    source: str
    """Where it is from, for the report."""
    reading: Reading | None = None
    """The tree; None for a workload file and for the built-in workload, which nothing is applied to."""
    has_batch: bool = True
    """Somebody chose a batch size; else the plan fills the card."""
    noticed: tuple[str, ...] = ()
    """What was noticed besides."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what reading noticed."""
        return (*(self.reading.warnings if self.reading else ()), *self.noticed)

    def with_note(self, note: str) -> Configuration:
        """Return a copy that has noticed *note* too."""
        return self._replace(noticed=(*self.noticed, note))

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
        source = "the built-in workload, since this folder has no configuration that memplan knows"
        return Configuration(workload, source, noticed=tuple(_passed_over()))
    if path.is_dir():
        raise ConfigError(
            "has no layout that memplan knows",
            file=path,
            hint=f"looked for {describe_layouts()}; a workload.yaml or a Hugging Face config.json can be given by its own name",
        )
    workload = read_workload(path)
    if is_huggingface_config(path):
        training = workload.training
        said = f"{path} says nothing of the training: planned with {training.precision}, sequence length {training.sequence_length} and "
        said += f"{workload.optimizer.name}; change them with --pin. Without a target the plan fills the card"
        return Configuration(workload, str(path), has_batch=False, noticed=(said,))
    chosen = workload.training.model_fields_set & {"micro_batch_size", "gradient_accumulation_steps", "target_effective_batch_size"}
    if not chosen:
        said = f"{path} names no batch: without a target the plan fills the card"
        return Configuration(workload, str(path), has_batch=False, noticed=(said,))
    return Configuration(workload, str(path))


def _passed_over() -> Iterator[str]:
    """Say of files in this folder that look like a configuration why they were not planned."""
    for file, keys in main_files(Path()):
        yield f"{file} is here but was not planned: it lacks one of {', '.join(keys)}"
    for name in ("workload.yaml", "config.json"):
        if Path(name).is_file():
            yield f"{name} is here but was not planned: name it with `--config-path {name}`"

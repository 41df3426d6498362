"""What a configuration says, field by field: its value, where that was read, and why it is that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from memplan.api.configuration import Configuration
from memplan.description import Description
from memplan.edits.config_file import load_config_file
from memplan.layouts.reader import Reading
from memplan.layouts.sources import Source
from memplan.programs.command_program import CommandProgram
from memplan.programs.function_program import FunctionProgram
from memplan.programs.user_program import UserProgram
from memplan.workload.parallelism import Parallelism
from memplan.workload.workload import Workload

NOT_TOLD = ("huggingface_config", "kind")
"""Parts of a model that say nothing to a reader."""


class ExplainedField(Description):
    """A field, and where it comes from."""

    field: str
    """Its name, dotted: training.micro_batch_size."""

    value: str
    """What it is; empty where nothing says it."""

    file: Path | None = None
    """The file that says it."""

    line: int | None = None
    """The line there."""

    why: str
    """In words: the key and its value, the framework's default, memplan's own."""


def explain(configuration: Configuration) -> list[ExplainedField]:
    """Return every field of *configuration* with its value, and where that comes from."""
    program = configuration.program
    if isinstance(program, UserProgram):
        return list(_variables(program))
    file = Path(configuration.source)
    return list(_fields(configuration.workload, configuration.reading, file=file if file.is_file() else None))


def _fields(workload: Workload, reading: Reading | None, *, file: Path | None) -> Iterator[ExplainedField]:
    """Yield the fields of *workload*, which was read from *file* (None: the built-in one), or as *reading* says."""
    starter = reading is not None and reading.layout.workload is not None
    told = _Told(reading.sources if reading is not None else {}, file, is_starter=starter)
    for part in ("model", "optimizer", "training", "contrastive", "stages", "parallelism"):
        value = getattr(workload, part)
        if isinstance(value, tuple):
            for number, each in enumerate(value):
                yield from told.of(each, f"{part}.{number}")
        elif value is not None:
            yield from told.of(value, part)


class _Told(NamedTuple):
    """What is known of where a workload comes from."""

    sources: Mapping[str, Source]
    file: Path | None
    is_starter: bool
    """A layout's starter workload says what the files do not."""

    def of(self, part: BaseModel, above: str) -> Iterator[ExplainedField]:
        """Yield the fields of *part*, whose name is *above*."""
        for name in type(part).model_fields:
            value = getattr(part, name)
            if name in NOT_TOLD or value in (None, "", ()) or (isinstance(part, Parallelism) and part.leaves_open(name)):
                continue
            if isinstance(value, BaseModel):
                yield from self.of(value, f"{above}.{name}")
            else:
                yield self._field(f"{above}.{name}", value, is_set=name in part.model_fields_set)

    def _field(self, field: str, value: Any, *, is_set: bool) -> ExplainedField:
        own = self.sources.get(field)
        model = self.sources.get("model") if is_set and field.count(".") == 1 and field.startswith("model.") else None
        source = own or model
        if source is not None:
            return ExplainedField(field=field, value=_text(value), file=source.file, line=source.line, why=_said(source, own))
        if not is_set:
            return ExplainedField(field=field, value=_text(value), why="memplan's default")
        why = "the layout's starter workload" if self.is_starter else "set there" if self.file else "what the framework does"
        return ExplainedField(field=field, value=_text(value), file=None if self.is_starter else self.file, why=why)


def _said(source: Source, own: Source | None) -> str:
    """Return why a value is what it is; *own* is None where it comes with the model that the file names."""
    if own is None:
        return f"the model that `{source.key}` names"
    if source.why == "default":
        return f"the framework's default: `{source.key}` is not set"
    if source.why == "rule":
        return f"since `{source.key}` is {source.value or 'not set'}"
    return f"`{source.key}`: {_text(source.value)}"


def _variables(program: UserProgram) -> Iterator[ExplainedField]:
    """Yield the variables of a program of the user's own."""
    for name in sorted(program.variables):
        known = name not in program.without_value
        value = program.text_of(name) if known else ""
        if isinstance(program, CommandProgram):
            places = [place for place in program.places if place.variable == name]
            for place in places:
                for stage, file in place.files(program.stages):
                    field = f"{stage.name}.{name}" if stage is not None else name
                    line = load_config_file(file).line_of(tuple(place.key.split(".")))
                    yield ExplainedField(field=field, value=program.text_in(stage, name), file=file, line=line, why=f"`{place.key}`")
                if place.is_of_environment:
                    yield ExplainedField(field=name, value=value, why=f"the environment's {place.key}")
            if not places:
                yield ExplainedField(field=name, value=value, why="a word of the command; nothing says its present value")
        if isinstance(program, FunctionProgram):
            yield ExplainedField(field=name, value=value, why=f"an argument of {program.source}")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(_text, value)) if isinstance(value, (list, tuple)) else str(value)

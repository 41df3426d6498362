"""
`.memplan/plan.yaml`: what is remembered of a plan, so that it can be asked for again without typing it.

It stands in the folder where the command was typed, and the paths in it are as seen from there. It is written whole, or not at all; a file
that says the same already is left alone, with whatever somebody has written into it. What is typed goes before what is remembered.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, PositiveInt, ValidationError, model_validator
from typing_extensions import Self

from memplan.description import Description, field_sentences
from memplan.edits.backups import make_journal_folder
from memplan.edits.edit import as_text
from memplan.edits.files import Files
from memplan.edits.interrupted import JOURNAL_FOLDER
from memplan.edits.yaml_file import YamlFile
from memplan.errors import ConfigError, UsageError, reason_of
from memplan.hardware.catalog import find_gpu
from memplan.programs.typed_places import read_place, read_short
from memplan.units import parse_size
from memplan.workload.workload_file import problem_of

PLAN_FILE = Path(JOURNAL_FOLDER, "plan.yaml")

_HEADER = """\
# What memplan remembers of the last plan that it wrote into the files of this project: where no program is named, it plans the same again.
# What is typed goes before it. It can be edited, and belongs into git. Paths are as seen from the folder that `.memplan` is in.
"""

_PLAIN = re.compile(r"(\.{0,2}/|\.?[A-Za-z]|_)[\w./=:+-]*\w")  # a point before a digit or _ begins a number
_NOT_A_WORD = frozenset({"true", "false", "null", "yes", "no", "on", "off", ".inf", ".nan"})


def _as_words(value: object) -> object:
    """Return a command that is written as at a prompt as its words."""
    return tuple(shlex.split(value)) if isinstance(value, str) else value


def _as_texts(value: object) -> object:
    return {name: _as_typed(each) for name, each in value.items()} if isinstance(value, dict) else value


def _as_typed(value: object) -> object:
    return as_text(value) if isinstance(value, bool | int | float) else value


class PlanSettings(Description):
    """What a plan is of, and what is asked of it."""

    version: Literal[1] = 1
    """Of this file's format."""

    command: Annotated[tuple[str, ...] | None, BeforeValidator(_as_words)] = None
    """The command that trains, as it is typed, with {micro_batch_size} and {gradient_accumulation_steps} where these are written in it."""

    function: str | None = None
    """Instead of a command: a function whose arguments are the variables, as train_step.py:build."""

    config: str | None = None
    """Instead of a command: a configuration, as conf."""

    fields: tuple[str, ...] = ()
    """Where else variables are written: NAME=FILE:KEY, or NAME=VARIABLE of the environment; of a function, NAME=ARGUMENT."""

    short: tuple[str, ...] = ()
    """What makes a rehearsal short, and is never written: FILE:KEY=VALUE, or VARIABLE=VALUE of the environment."""

    stages: tuple[str, ...] = ()
    """Files, or patterns of them, for each of which the command is run: {stage} in it is the file's name, STAGE in fields the file."""

    skip_weights: bool = False
    """Build the program's pretrained models without reading their weights."""

    num_gpus: PositiveInt | None = None
    """GPUs of each machine on which the command trains; without it, as its launcher is told."""

    num_nodes: PositiveInt | None = None
    """Machines on which the command trains."""

    launch_config: str | None = None
    """The file of `accelerate launch --config_file` beside a recipe: on how many GPUs it is trained, and how these share the model."""

    gpu: str | None = None
    """The GPU to plan for where none is typed; `memplan gpus` lists the names."""

    gpu_memory: Annotated[str | None, BeforeValidator(_as_typed)] = None
    """Its memory size: 24 is the size that a GPU is sold with, 23.5GiB is exact."""

    target_effective_batch_size: PositiveInt | Literal["max"] | None = None
    """Samples that an optimizer step should see; max: the largest batch that fits, without accumulation."""

    target_tolerance: Annotated[float | None, Field(ge=0, le=1, allow_inf_nan=False)] = None
    """Share by which the effective batch may be above the target: 0.05."""

    margin: Annotated[float | None, Field(ge=0, lt=1, allow_inf_nan=False)] = None
    """Share of the free memory that stays free; without it 0.05."""

    pins: Annotated[dict[str, str], BeforeValidator(_as_texts)] = Field(default_factory=dict)
    """Values that stay whatever the plan, by variable."""

    grow_negatives: bool = False
    """Give each stage as many negatives as fit."""

    @model_validator(mode="after")
    def _is_of_one_thing(self) -> Self:
        given = [name for name in ("command", "function", "config") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} exclude each other")
        return self

    @property
    def program(self) -> str | tuple[str, ...] | None:
        """Return the user's own program: the words of a command, or the name of a function."""
        return self.command or self.function

    @property
    def names_gpu(self) -> bool:
        """Say whether a GPU is named."""
        return self.gpu is not None or self.gpu_memory is not None


class Merged(NamedTuple):
    """What is asked for, and which of it was remembered."""

    settings: PlanSettings
    remembered: tuple[str, ...] = ()


def merge(typed: PlanSettings, remembered: PlanSettings, *, with_gpu: bool) -> Merged:
    """Return *typed*, with what it leaves open as it is *remembered*; *with_gpu*: its GPU too."""
    known = {name: getattr(remembered, name) for name in _given(remembered)}
    if typed.names_gpu or not with_gpu:
        known = {name: value for name, value in known.items() if name not in ("gpu", "gpu_memory")}
    together: dict[str, Any] = {name: getattr(typed, name) for name in _given(typed)}
    if typed.pins:
        together["pins"] = {**known.get("pins", {}), **typed.pins}
    if typed.fields:
        together["fields"] = _joined(known.get("fields", ()), typed.fields, lambda text: text.partition("=")[0])
    if typed.short:
        together["short"] = _joined(known.get("short", ()), typed.short, lambda text: text.partition("=")[0])
    taken = tuple(name for name in known if together.get(name) != getattr(typed, name) or name not in together)
    return Merged(PlanSettings.model_validate({**known, **together}), taken)


def _joined(known: Iterable[str], typed: tuple[str, ...], name_of: Callable[[str], str]) -> tuple[str, ...]:
    """Return what is *known*, but for the names that are *typed*, and these."""
    names = set(map(name_of, typed))
    return (*(text for text in known if name_of(text) not in names), *typed)


def _given(settings: PlanSettings) -> list[str]:
    """Return the names of what *settings* say beyond the defaults, in their order."""
    return [
        name for name, field in PlanSettings.model_fields.items() if getattr(settings, name) != field.get_default(call_default_factory=True)
    ]


# reading


def read_plan_file(folder: Path) -> PlanSettings | None:
    """
    Return what is remembered in *folder*; None where nothing is.

    Raises ConfigError, with file and line, for what makes no sense.
    """
    path = folder / PLAN_FILE
    if not path.is_file():
        return None
    file = YamlFile.load(path)
    data = file.to_python()
    if not isinstance(data, dict):
        raise ConfigError("has no keys and values", file=path, hint=f"its keys are {', '.join(PlanSettings.model_fields)}")
    try:
        settings = PlanSettings.model_validate({key: value for key, value in data.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(map(str, first["loc"]))
        known = f"its keys are {', '.join(PlanSettings.model_fields)}"
        raise ConfigError(f"`{'.'.join(where) or 'plan'}`: {problem_of(first)}", file=path, line=file.line_of(where), hint=known) from error
    _check_texts(file, settings)
    return settings


def _check_texts(file: YamlFile, settings: PlanSettings) -> None:
    """Raise ConfigError for a text that means nothing: a place, a GPU, a size."""
    texts: list[tuple[tuple[str, ...], Callable[[str], object], str]] = [
        *((("fields", str(number)), read_place, text) for number, text in enumerate(settings.fields)),
        *((("short", str(number)), read_short, text) for number, text in enumerate(settings.short)),
        *((("gpu",), find_gpu, name) for name in (settings.gpu,) if name is not None),
        *((("gpu_memory",), parse_size, size) for size in (settings.gpu_memory,) if size is not None),
    ]
    for where, read, text in texts:
        try:
            read(text)
        except UsageError as error:
            raise ConfigError(f"`{where[0]}`: {error.message}", file=file.path, line=file.line_of(where), hint=error.hint) from error


# writing


def write_plan_file(folder: Path, settings: PlanSettings, *, files: Files | None = None) -> Path | None:
    """
    Remember *settings* in *folder*, and return the file; None where it says so already.

    Raises ConfigError where it cannot be written; then the file is as it was.
    """
    path = folder / PLAN_FILE
    files = files or Files()
    try:
        if path.is_file() and read_plan_file(folder) == settings:
            return None
    except ConfigError:
        pass  # it makes no sense any more: it is written anew
    temporary = path.with_name(f".plan.yaml.memplan-{os.getpid()}")
    try:
        make_journal_folder(files, folder)
        try:
            files.write_new(temporary, as_yaml(settings).encode("utf-8"))
            files.move(temporary, path)
        finally:
            files.remove(temporary)
    except OSError as error:
        raise ConfigError(f"cannot be written: {reason_of(error)}", file=path) from error
    return path


def as_yaml(settings: PlanSettings) -> str:
    """Return the file that says *settings*: each key below what it means."""
    sentences = field_sentences(PlanSettings)
    parts = [f"\n# {sentences[name]}\n{name}:{_written(name, getattr(settings, name))}\n" for name in ("version", *_given(settings))]
    return _HEADER + "".join(parts)


def _written(name: str, value: object) -> str:
    if name == "command" and isinstance(value, tuple):
        return f" {_quoted(' '.join(map(_shell_word, value)))}"
    if isinstance(value, tuple):
        return "".join(f"\n  - {_scalar(each)}" for each in value)
    if isinstance(value, dict):
        return "".join(f"\n  {_scalar(key)}: {_number_or(each)}" for key, each in value.items())
    return f" {_number_or(value) if name == 'gpu_memory' else _scalar(value)}"


def _number_or(value: object) -> str:
    """Return a value that is read as it is typed: a whole number needs no quotes."""
    return value if isinstance(value, str) and re.fullmatch(r"0|[1-9]\d{0,17}", value, re.ASCII) else _scalar(value)


def _shell_word(word: str) -> str:
    """Return *word* as it is typed; the braces of a variable need no quotes."""
    return word if re.fullmatch(r"[\w@%+=:,./{}-]+", word, re.ASCII) else shlex.quote(word)


def _scalar(value: object) -> str:
    if not isinstance(value, str):
        return as_text(value)  # type: ignore[arg-type]  # numbers and truth values are left
    return value if _PLAIN.fullmatch(value) and value.lower() not in _NOT_A_WORD else _quoted(value)


def _quoted(text: str) -> str:
    """Return *text* in double quotes, whatever is in it."""
    return '"' + "".join(_escapes(text)) + '"'


def _escapes(text: str) -> Iterator[str]:
    for character in text:
        if character in '"\\':
            yield f"\\{character}"
        else:
            yield character if character.isprintable() else f"\\U{ord(character):08x}"

"""
From what the user typed to the program to plan.

A tree that a layout knows, a workload file, a model's config.json, or the built-in workload; a command, or a function of the user's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from memplan.edits.yaml_file import YamlFile
from memplan.errors import ConfigError, UsageError
from memplan.layouts.reader import Reading
from memplan.layouts.recognition import configurations_in, recognise
from memplan.layouts.registry import BUILT_IN_WORKLOAD, describe_layouts, locate, near_misses
from memplan.layouts.templates import template_data, templates_folder
from memplan.planner.plan import AnyProgram
from memplan.programs.command_program import PLACEHOLDER, CommandProgram
from memplan.programs.function_program import FunctionProgram
from memplan.workload.parallelism import Parallelism
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload, workload_of
from memplan.workload.workload_file import is_huggingface_config, read_huggingface_config, read_workload, workload_from

BUILT_IN = "built-in"
"""The source that stands for the workload that memplan has built in."""

PLAIN_FILES = ("workload.yaml", "config.json")
"""Files that are planned where they stand alone in a folder: a workload of memplan's own, and a Hugging Face model."""

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where PyTorch looks for allocator settings: the first that is set counts, empty or not (seen in rehearsals under PyTorch 2.13)."""

INSTEAD = (
    "describe the training in a workload.yaml, rehearse the program itself (`memplan rehearse`), or plan the "
    f'built-in workload: `source="{BUILT_IN}"`'
)


class Configuration(NamedTuple):
    """What is planned, and the tree that it was read from where there is one."""

    program: AnyProgram
    source: str
    """Where it is from, for the report."""
    reading: Reading | None = None
    """The tree; None for a workload file and for the built-in workload, which nothing is applied to."""
    has_batch: bool = True
    """Somebody chose a batch size; else the plan fills the GPU."""
    assumed: tuple[str, ...] = ()
    """Fields of the training that the files do not give, planned with memplan's defaults."""
    noticed: tuple[str, ...] = ()
    """What was noticed besides."""

    @property
    def is_own_program(self) -> bool:
        """Say whether it is the user's own program, which only a run can tell of."""
        return not isinstance(self.program, Workload)

    @property
    def workload(self) -> Workload:
        """Return the program as a workload. Raises NotEstimatedError for the user's own, which is run as it is."""
        return workload_of(self.program)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what reading noticed."""
        return (*(self.reading.warnings if self.reading else ()), *self._assumptions(), *self.noticed)

    def _assumptions(self) -> Iterable[str]:
        if self.assumed:
            values = {**self.workload.training.model_dump(), "optimizer": self.workload.optimizer.name}
            told = ", ".join(f"{name} {values[name]}" for name in self.assumed)
            yield f"{self.source} does not say how it is trained: planned with {told} (pin others)"
        if not self.has_batch:
            yield f"{self.source} names no batch size: without a target the plan fills the GPU"

    def with_pins(self, names: Iterable[str]) -> Configuration:
        """Return a copy in which what is pinned is not assumed."""
        return self._replace(assumed=tuple(name for name in self.assumed if name not in set(names)))

    def with_target(self, target: int | None) -> Configuration:
        """Return a copy that is planned for *target* samples in an optimizer step: with one it need not fill the GPU."""
        return self if target is None else self._replace(has_batch=True)

    def with_note(self, note: str) -> Configuration:
        """Return a copy that has noticed *note* too."""
        return self._replace(noticed=(*self.noticed, note))

    def with_allocator_settings_of(self, environment: Mapping[str, str]) -> Configuration:
        """
        Return a copy that is trained under the allocator settings of *environment*, where it names none itself.

        Raises UsageError for settings that PyTorch would refuse.
        """
        name = next((name for name in ALLOCATOR_VARIABLES if name in environment), None)
        if name is None or not environment[name] or self.program.training.allocator_settings:
            return self
        from memplan.allocator.config import read_settings  # noqa: PLC0415  (rarely needed)

        settings = environment[name]
        read_settings(settings)
        program = self.program.with_training(allocator_settings=settings)
        reading = replace(self.reading, workload=workload_of(program)) if self.reading else None
        return self._replace(program=program, reading=reading).with_note(f"planned under {name}={settings}, as this shell has it")

    @property
    def other_stages(self) -> tuple[Stage, ...]:
        """Return files with a stage's keys outside the curriculum."""
        return self.reading.other_stages if self.reading else ()


def read_configuration(path: Path | None) -> Configuration:
    """
    Return the configuration at *path*; without one, that of this folder, or the built-in workload where this folder has none.

    Raises ConfigError for a path that is not there, for a configuration that memplan cannot read, and for values that make no sense: it
    names the file and the missing key, or the framework that it looks like. Nothing else is planned in its place.
    """
    return _read(path).with_allocator_settings_of(os.environ)


def _read(path: Path | None) -> Configuration:
    if path == Path(BUILT_IN):
        return _built_in("the built-in workload")
    if path is not None and not path.exists():
        raise ConfigError("does not exist", file=path, hint="check the path")
    place = path or Path()
    located = locate(place)
    if located is not None:
        reading = located.read()
        return Configuration(reading.workload, f"{located.root} ({located.layout.name})", reading)
    if place.is_dir():
        file = _plain_file(place)
        if file is not None:
            return _of_file(file)
    _refuse_near_misses(place)
    if path is not None and not path.is_dir():
        return _of_file(path)
    _refuse_others(place)
    _refuse_unusable(place)
    if path is not None:
        hint = f"looked for {describe_layouts()}; {' and '.join(PLAIN_FILES)}"
        raise ConfigError("has no configuration that memplan reads", file=path, hint=hint)
    return _built_in("the built-in workload, since this folder has no configuration")


def command_configuration(
    words: Sequence[str],
    *,
    fields: Iterable[str] = (),
    short: Iterable[str] = (),
    num_gpus: int | None = None,
    num_nodes: int | None = None,
    pinned: Collection[str] = (),
) -> Configuration:
    """
    Return the program of the command *words* (`programs/command_line.py`).

    *num_gpus*, *num_nodes*: how many train together; None: as its launcher is told. *pinned*: variables that get a value besides. Raises
    UsageError for a program without a variable to plan, and as `command_program`.
    """
    from memplan.execution.ranks import launched_by  # noqa: PLC0415
    from memplan.programs.command_line import command_program  # noqa: PLC0415

    if not fields and not any(PLACEHOLDER.search(word) for word in words):
        fields = list(_fields_of_layout(Path()))
    told = launched_by(words)
    parallelism = Parallelism(devices=num_gpus or told.num_gpus, nodes=num_nodes or (told.num_nodes if num_gpus is None else 1))
    program = command_program(words, fields=fields, short=short, parallelism=parallelism, pinned=pinned)
    if "micro_batch_size" not in program.variables:
        raise UsageError(
            f"nothing says where the batch size of {program.name} is written",
            hint="write `{micro_batch_size}` in its place in the command, or name the place: "
            '`fields=["micro_batch_size=conf/config.yaml:data.batch_size"]`',
        )
    return _of_program(program)


def _fields_of_layout(folder: Path) -> Iterator[str]:
    """Yield where the batch is written in the tree at *folder*, where a layout knows it and the key is there."""
    located = locate(folder)
    for entry in located.layout.fields if located is not None else ():
        variable = entry.field.removeprefix("training.")
        file = located.root / entry.file if located is not None else folder
        if variable in ("micro_batch_size", "gradient_accumulation_steps") and YamlFile.load(file).get(entry.path) is not None:
            yield f"{variable}={file}:{entry.key}"


def function_configuration(source: str) -> Configuration:
    """Return the program of the function that *source* names. Raises UsageError as `function_program`."""
    from memplan.programs.function_program import function_program  # noqa: PLC0415

    return _of_program(function_program(source))


def is_function(text: str) -> bool:
    """Say whether *text* names a function, FILE.py:build or my.module:build, and no path."""
    place, colon, function = text.rpartition(":")
    return bool(colon) and function.isidentifier() and bool(place) and not Path(text).exists()


def source_of(build: Callable[..., Any]) -> str:
    """Return what names the function *build*. Raises UsageError for one that no other process can load by a name."""
    from memplan.execution.step_source import step_source_of  # noqa: PLC0415

    found = step_source_of(build)
    if found.pickled:
        raise UsageError(f"{build!r} is in no file, from which its arguments could be read", hint="put it at the top of a file")
    return f"{found.name}:{found.function}"


def _of_program(program: CommandProgram | FunctionProgram) -> Configuration:
    found = Configuration(program, program.name, has_batch=program.has_present_batch)
    return found.with_allocator_settings_of(os.environ)


def _built_in(source: str) -> Configuration:
    template = templates_folder() / BUILT_IN_WORKLOAD
    return Configuration(workload_from(template_data(template), template), source)


def _plain_file(folder: Path) -> Path | None:
    """Return the workload file or model of *folder*. Raises ConfigError where it has both: which is meant is not to be guessed."""
    found = [folder / name for name in PLAIN_FILES if (folder / name).is_file()]
    found = [file for file in found if file.name != "config.json" or is_huggingface_config(file)]
    if len(found) > 1:
        raise ConfigError(f"is beside {found[1].name}", file=found[0], hint=f'name the one to plan: `source="{found[0]}"`')
    return found[0] if found else None


def _refuse_near_misses(place: Path) -> None:
    for miss in near_misses(place):
        keys = " and ".join(f"`{key}`" for key in miss.missing)
        raise ConfigError(f"lacks {keys}, which a {miss.layout.name} configuration has", file=miss.file, hint=f"add it, or {INSTEAD}")


def _refuse_others(folder: Path) -> None:
    for found in configurations_in(folder):
        verb = "is" if found.is_known else "looks like"
        raise ConfigError(f"{verb} {found.title}, which memplan cannot plan from", file=found.file, hint=INSTEAD)


def _refuse_unusable(place: Path) -> None:
    for name in PLAIN_FILES:
        if (place / name).exists():
            problem = "has no `model_type`, so that it is not a Hugging Face config.json" if name == "config.json" else "is not a file"
            raise ConfigError(problem, file=place / name, hint=INSTEAD)


def _of_file(path: Path) -> Configuration:
    """Return the configuration that a single file is. Raises ConfigError as `read_configuration` does."""
    if is_huggingface_config(path):
        workload, told = read_huggingface_config(path)
        noticed = tuple(f"{path}: {each}" for each in told)
        return Configuration(workload, str(path), has_batch=False, assumed=("precision", "sequence_length", "optimizer"), noticed=noticed)
    _refuse_framework(path)
    workload = read_workload(path)
    chosen = workload.training.model_fields_set & {"micro_batch_size", "gradient_accumulation_steps", "target_effective_batch_size"}
    return Configuration(workload, str(path), has_batch=bool(chosen))


def _refuse_framework(path: Path) -> None:
    """Raise ConfigError for a file that is another framework's: it would only be told to be no workload."""
    keys = set() if path.suffix == ".toml" else YamlFile.load(path).keys()
    if "model.kind" in keys or (keys and {key.partition(".")[0] for key in keys} <= set(Workload.model_fields)):
        return
    found = recognise(path)
    if found is not None:
        verb = "is" if found.is_known else "looks like"
        raise ConfigError(f"{verb} {found.title}, which memplan cannot plan from", file=path, hint=INSTEAD)

"""
From what the user typed to the program to plan.

A tree that a layout knows, a workload file, a model's config.json, or the built-in workload; a command, or a function of the user's own.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from memplan.edits.config_file import load_config_file
from memplan.errors import ConfigError, UsageError, WorldSizeError
from memplan.layouts.reader import Reading, Unknown
from memplan.layouts.recognition import SUFFIXES, candidates_below, configurations_in, recognise
from memplan.layouts.registry import BUILT_IN_WORKLOAD, Located, describe_layouts, first_recipe, locate, near_misses
from memplan.layouts.sources import Source
from memplan.layouts.templates import template_data, templates_folder
from memplan.planner.plan import AnyProgram
from memplan.programs.command_program import PLACEHOLDER, STAGE_WORDS, CommandProgram
from memplan.programs.function_program import FunctionProgram
from memplan.workload.parallelism import ZERO_STAGES, Parallelism
from memplan.workload.stage import Stage
from memplan.workload.training import TargetBatch
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
    unknown: tuple[Unknown, ...] = ()
    """What the files leave to the data, and nobody has said."""
    noticed: tuple[str, ...] = ()
    """What was noticed besides."""
    remembered: str = ""
    """Where from, and what of it, is remembered of an earlier plan: `.memplan/plan.yaml: command, gpu`."""
    located: Located | None = None
    """Where a layout found it; None for what no layout knows."""

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
            yield f"{self._lacks_batch()}: without a target the plan fills the GPU"

    def _lacks_batch(self) -> str:
        if isinstance(self.program, FunctionProgram):
            return f"a default of {self.source} is not taken as the batch that is wanted"
        if self.is_own_program:
            return "the batch size in the command is a placeholder, without a present value"
        return f"{self.source} names no batch size"

    def with_pins(self, pins: Mapping[str, object]) -> Configuration:
        """Return a copy in which what is pinned is neither assumed nor unknown: what nothing else says is configured so."""
        said = {each.name: pins[each.name] for each in self.unknown if each.name in pins}
        program = self.program
        if said and isinstance(program, Workload):
            with suppress(ValidationError):  # which pinning it will tell of
                program = program.with_training(**said)
        unknown = tuple(each for each in self.unknown if each.name not in said)
        return self._replace(program=program, assumed=tuple(name for name in self.assumed if name not in pins), unknown=unknown)

    def refuse_unknown(self) -> None:
        """Raise ConfigError where a value decides the memory that the files leave to the data, and that nobody has said."""
        for each in self.unknown:
            hint = f'say it: `pins={{"{each.name}": 2048}}`, or set the key'
            raise ConfigError(f"`{each.key}` is not set: {each.why}", file=each.file, line=each.line, hint=hint)

    def with_target(self, target: TargetBatch | None) -> Configuration:
        """Return a copy that is planned for *target* samples in an optimizer step: what is asked for is no lack of a batch."""
        return self if target is None else self._replace(has_batch=True)

    def with_gpus(self, num_gpus: int | None, num_nodes: int | None) -> Configuration:
        """
        Return a copy that is trained on that many GPUs of each machine, and on that many machines; None: as it is.

        Raises UsageError where its files say it themselves, and for one GPU of what DeepSpeed trains.
        """
        given: dict[str, int | None] = {"devices": num_gpus, "nodes": num_nodes}
        changes = {name: count for name, count in given.items() if count is not None}
        for entry in self.reading.entries if self.reading and changes else ():
            if entry.field.removeprefix("parallelism.") in changes:
                raise UsageError(f"{self.source} says on how many GPUs it trains: `{entry.key}`", hint="change it there")
        if changes:
            workload = self.workload
            trained = workload.model_copy(update={"parallelism": _trained_on(workload.parallelism, changes)})
            reading = self.reading and replace(self.reading, workload=trained, sources=_without(self.reading.sources, changes))
            return self._replace(program=trained, reading=reading).with_gpus(None, None)
        self._refuse_lone_engine()
        return self

    def _refuse_lone_engine(self) -> None:
        """Raise UsageError for a recipe that DeepSpeed trains on one GPU: its engine keeps fp32 copies, and a plan for one GPU none."""
        source = self.reading.sources.get("parallelism.strategy") if self.reading else None
        parallelism = self.program.parallelism
        if source is None or parallelism.strategy not in ZERO_STAGES or parallelism.num_gpus > 1:
            return
        raise UsageError(
            f"{source.file}:{source.line}: `{source.key}` is {source.value}: the GPUs share the model ({parallelism.strategy}), "
            "and nothing says how many there are",
            hint="say how many: `num_gpus=8`; one GPU is planned through the recipe's command",
        )

    def with_note(self, note: str) -> Configuration:
        """Return a copy that has noticed *note* too."""
        return self._replace(noticed=(*self.noticed, note))

    def skipping_weights(self) -> Configuration:
        """Return a copy whose pretrained models are built without reading their weights. Raises UsageError for what is no program."""
        program = self.program
        if isinstance(program, Workload):
            raise UsageError(
                "skip_weights is for programs, whose models are loaded", hint="a configuration's model is planned without weights"
            )
        note = "weights of pretrained models are not read, which leaves the memory of the steps as it is"
        return self._replace(program=program.model_copy(update={"skips_weights": True})).with_note(note)

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


def read_configuration(path: Path | None, *, launch_config: Path | None = None, or_built_in: bool = True) -> Configuration:
    """
    Return the configuration at *path*; without one, that of this folder, or the built-in workload where this folder has none.

    *launch_config*: the launcher's own file beside a recipe, which says on how many GPUs it is trained and how they share the model.

    Raises ConfigError for a path that is not there, for a configuration that memplan cannot read, and for values that make no sense: it
    names the file and the missing key, or the framework that it looks like. Nothing else is planned in its place. Without *or_built_in*,
    UsageError for a folder without any.
    """
    found = _read(path, launch_config)
    if found is None:
        _refuse_recipes_below()
    if found is None and not or_built_in:
        looked_for = f"looked for {describe_layouts()}; {' and '.join(PLAIN_FILES)}"
        raise UsageError("this folder has no configuration", hint=f'name one, `source="conf"`, or a program; {looked_for}')
    built_in = "the built-in workload, since this folder has no configuration"
    return (found or _built_in(built_in)).with_allocator_settings_of(os.environ)


def _trained_on(parallelism: Parallelism, changes: Mapping[str, int]) -> Parallelism:
    """Return *parallelism* with other numbers of GPUs and machines. Raises WorldSizeError where its strategy does not go with them."""
    try:
        return Parallelism.model_validate(parallelism.model_dump() | dict(changes))
    except ValidationError as error:
        raise WorldSizeError(str(error.errors()[0]["msg"]), hint="change its `parallelism`") from error


def _without(sources: Mapping[str, Source], changes: Collection[str]) -> dict[str, Source]:
    """Return *sources* but for those of the parallelism that is given in their place."""
    return {field: source for field, source in sources.items() if field.removeprefix("parallelism.") not in changes}


def _read(path: Path | None, launch_config: Path | None) -> Configuration | None:
    """Return the configuration at *path*; None where none is named, and this folder has none."""
    if path == Path(BUILT_IN):
        _refuse_launch(launch_config, BUILT_IN)
        return _built_in("the built-in workload")
    if path is not None and not os.path.exists(path):
        raise ConfigError("does not exist", file=path, hint="check the path")
    place = path or Path()
    located = locate(place)
    is_plain = located is not None and located.is_recipe and os.path.isdir(place) and _plain_file(place)
    if located is not None and not is_plain and (located.can_be_described or located.has_batch):
        return _of_layout(located if launch_config is None else located.launched_with(launch_config))
    _refuse_launch(launch_config, "this folder" if path is None else str(path))
    if os.path.isdir(place):
        file = _plain_file(place)
        if file is not None:
            return _of_file(file)
    _refuse_near_misses(place)
    if path is not None and not os.path.isdir(path):
        return _of_file(path)
    _refuse_others(place)
    _refuse_unusable(place)
    if path is not None:
        hint = f"looked for {describe_layouts()}; {' and '.join(PLAIN_FILES)}"
        raise ConfigError("has no configuration that memplan reads", file=path, hint=hint)
    return None


def _refuse_launch(launch_config: Path | None, source: str) -> None:
    if launch_config is not None:
        raise UsageError(
            f"{source} is not a recipe that is planned with a launcher's configuration",
            hint=f"name the recipe, or plan the program: `-- accelerate launch --config_file {launch_config} train.py`",
        )


def _of_layout(located: Located) -> Configuration:
    """
    Return the workload that a layout makes of a configuration; nothing that the configuration names is run.

    Raises ConfigError for what memplan's own model is not true for, with what to type to plan the program itself.
    """
    if not located.can_be_described:
        program = trainer_of(located)
        if program is not None:
            return program
        raise ConfigError(
            f"is {located.layout.title}, which memplan plans through its command", file=located.main, hint=_by_itself(located)
        )
    try:
        reading = located.read()
    except ConfigError as error:
        if not located.is_recipe:
            raise
        program = trainer_of(located)
        if program is not None:
            return program.with_note(f"memplan's own model is not true for it: {error.message}")
        raise ConfigError(error.problem, file=error.file, line=error.line, hint=_either(error.hint, _by_itself(located))) from error
    if located.is_recipe:
        said = f"planned with memplan's own model of it; {_by_itself(located)}"
        reading = replace(reading, warnings=(said, *reading.warnings))
    return Configuration(reading.workload, located.source, reading, located=located, unknown=reading.unknown)


def trainer_of(located: Located, stages: Mapping[str, Path] = MappingProxyType({})) -> Configuration | None:
    """
    Return the program that trains from a configuration, its command run for each of the files of *stages*, by their names; None where no
    program is known, or it is not installed.
    """
    words = located.command if located.launch is None else None  # which launches on its own terms
    if words is None or not is_installed(words, package=located.layout.package):
        return None
    files = [str(path) for path in stages.values()]
    fields = [*located.fields(), *(located.stage_fields() if files else ())]
    try:
        found = command_configuration(words, fields=fields, short=located.short(), stages=files)
    except (UsageError, ConfigError):  # nothing says where its batch is written, for example
        return None
    other = '; `method="rehearsed"` plans memplan\'s own model of it' if located.can_be_described else ""
    return found.with_note(f"planned by running the program that trains from {located.source}, which is installed here{other}")


def is_installed(words: Sequence[str], *, package: str | None = None) -> bool:
    """
    Say whether the command *words* is an installed program's, on PATH or beside this Python: no script, which may be any of that name.

    *package*: the one that the program imports, as its file says; None: any.
    """
    from memplan.execution.command import command_from  # noqa: PLC0415

    if any(word.endswith(".py") for word in words):
        return False
    try:
        program = command_from(words).words[0]
    except UsageError:
        return False
    if package is None:
        return True
    with Path(program).open("rb") as file:
        beginning = file.read(4096).decode(errors="replace")
    return any(f"{word} {package}" in beginning for word in ("from", "import"))


def _by_itself(located: Located) -> str:
    """Return what to type to plan the program that trains from a recipe."""
    words = located.command or ["python", "train.py", str(located.main)]
    if located.launch is not None:
        words = ["accelerate", "launch", "--config_file", str(located.launch), "train.py", "--config", str(located.main)]
    several = "" if located.command_of_several is None else f", on several GPUs `-- {shlex.join(located.command_of_several)}`"
    absent = next((word for word in words if word.endswith(".py") and not os.path.isfile(word)), None)
    own = "" if absent is None else f", where {absent} stands for the project's own script"
    return (
        "to plan the program itself, where it is installed, give its command in place of the configuration: "
        f"`-- {shlex.join(words)}`{several}{own}"
    )


def _either(hint: str | None, other: str) -> str:
    return other if hint is None else f"{hint}; {other}"


def command_configuration(
    words: Sequence[str],
    *,
    fields: Iterable[str] = (),
    short: Iterable[str] = (),
    stages: Iterable[str] = (),
    num_gpus: int | None = None,
    num_nodes: int | None = None,
    pinned: Collection[str] = (),
    is_planned: bool = True,
) -> Configuration:
    """
    Return the program of the command *words* (`programs/command_line.py`).

    *num_gpus*, *num_nodes*: how many train together; None: as its launcher is told. *pinned*: variables that get a value besides. Raises
    UsageError for a program without a variable to plan, where it *is_planned*, and as `command_program`.
    """
    from memplan.execution.ranks import launched_by  # noqa: PLC0415
    from memplan.programs.command_line import command_program  # noqa: PLC0415
    from memplan.programs.run_script import launcher_words  # noqa: PLC0415
    from memplan.programs.typed_places import read_place  # noqa: PLC0415

    fields, composed = list(fields), []
    names = {name for word in words for name in PLACEHOLDER.findall(word)}
    if all(read_place(field).is_of_stage for field in fields) and names <= STAGE_WORDS:
        located = _named_by(words)
        composed = _composed_fields(words, located, is_planned=is_planned)
        fields += composed or (located.fields() if located is not None else ())
        short = [*short, *(located.short() if located is not None else ())]
    told = launched_by(launcher_words(words))
    parallelism = Parallelism(devices=num_gpus or told.num_gpus, nodes=num_nodes or (told.num_nodes if num_gpus is None else 1))
    program = command_program(words, fields=fields, short=short, stages=stages, parallelism=parallelism, pinned=pinned)
    if is_planned and not program.varies("micro_batch_size"):
        raise _nowhere_written(program.name, words)
    found = _of_program(program)
    return found.with_note(f"found by its name: {' and '.join(composed)}") if composed else found


def _named_by(words: Sequence[str]) -> Located | None:
    """Return the configuration that a command trains from: the recipe that it names, else the tree in this folder."""
    named = (locate(Path(word)) for word in words if Path(word).suffix in SUFFIXES and os.path.isfile(word))
    found = next((located for located in named if located is not None), None)
    return found or locate(Path())


def _nowhere_written(name: str, words: Sequence[str]) -> UsageError:
    from memplan.programs.named_files import absent_in, fields_of_files_below, fields_of_sources, unreadable_in, variables_in  # noqa: PLC0415

    placed, unreadable = variables_in(words), unreadable_in(words) or absent_in(words)
    fields = fields_of_files_below(words) or fields_of_sources(words)
    has_option = placed != list(words)
    command = f"`-- {' '.join(placed)}`" if has_option else "write `{micro_batch_size}` in its place in the command"
    # What a number stands for in a file that the command does not name is a guess beside an option.
    place = ", ".join(f'"{field}"' for field in (not has_option and fields) or ["micro_batch_size=FILE:KEY"])
    known = unreadable.hint if unreadable is not None and not has_option and not fields else None
    return UsageError(
        f"nothing says where the batch size of {name} is written" + (f"; {unreadable.message}" if unreadable else ""),
        hint=known or f"{command}, or name the place: `fields=[{place}]`",
    )


def _composed_fields(words: Sequence[str], located: Located | None, *, is_planned: bool) -> list[str]:
    """
    Return where a command's files hold what is planned, those that Hydra composes or that its words name; none where *located* says it.

    Raises UsageError where that is not certain and it *is_planned*.
    """
    from memplan.programs.hydra_program import composed_by_hydra, hydra_app  # noqa: PLC0415
    from memplan.programs.named_files import composed_by_words  # noqa: PLC0415

    try:
        if located is not None:
            composed = composed_by_words(words)
            # LightningCLI's configuration is often in several files, of which the last that has a key counts.
            # Where the layout's keys are not there, as with a data module whose batch is an argument of an argument, names are looked for.
            is_whole = located.can_be_described or composed is None or (len(composed.parts) == 1 and located.has_batch)
            return [] if is_whole or composed is None else composed.fields()
        app = hydra_app(words)
        composed = composed_by_words(words) if app is None else composed_by_hydra(app)
        return [] if composed is None else composed.fields()
    except UsageError:
        if is_planned:
            raise
        return []


def function_configuration(source: str, *, fields: Iterable[str] = ()) -> Configuration:
    """Return the program of the function that *source* names. Raises UsageError as `function_program`."""
    from memplan.programs.function_program import function_program  # noqa: PLC0415

    return _of_program(function_program(source, fields))


def is_function(text: str) -> bool:
    """Say whether *text* names a function, FILE.py:build or my.module:build, and no path."""
    place, colon, function = text.rpartition(":")
    return bool(colon) and function.isidentifier() and bool(place) and not os.path.exists(text)


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


def _refuse_recipes_below() -> None:
    """Raise ConfigError where a recipe lies further below this folder: a plan of the built-in workload would be one of something else."""
    found = first_recipe(candidates_below(Path()))
    if found is not None:
        hint = f'name the one to plan, `source="{found.main}"`; memplan\'s built-in workload is `source="{BUILT_IN}"`'
        raise ConfigError(f"is {found.layout.title}, below this folder, which has no configuration itself", file=found.main, hint=hint)


def _plain_file(folder: Path) -> Path | None:
    """Return the workload file or model of *folder*. Raises ConfigError where it has both: which is meant is not to be guessed."""
    found = [folder / name for name in PLAIN_FILES if os.path.isfile(folder / name)]
    found = [file for file in found if file.name != "config.json" or is_huggingface_config(file)]
    if len(found) > 1:
        raise ConfigError(f"is beside {found[1].name}", file=found[0], hint=f'name the one to plan: `source="{found[0]}"`')
    return found[0] if found else None


def _refuse_near_misses(place: Path) -> None:
    for miss in near_misses(place):
        keys = " and ".join(f"`{key}`" for key in miss.missing)
        raise ConfigError(f"lacks {keys}, which a {miss.layout.name} configuration has", file=miss.file, hint=f"add it, or {INSTEAD}")


def _refuse_hydra(place: Path) -> None:
    """Raise ConfigError for a file, or a folder, that a script of the project is configured by with Hydra: the script can be planned."""
    from memplan.programs.hydra_program import commands_for  # noqa: PLC0415

    commands = commands_for(place)
    if commands:
        said = " or ".join(f"`-- {shlex.join(command)}`" for command in commands[:3])
        what = (
            "has a program that Hydra configures"
            if os.path.isdir(place)
            else f"is a part of the configuration of {commands[0][1]}, which Hydra composes"
        )
        raise ConfigError(what, file=place, hint=f"plan the program; its batch is found in the configuration: {said}")


def _refuse_others(folder: Path) -> None:
    _refuse_hydra(folder)
    for found in configurations_in(folder):
        verb = "is" if found.is_known else "looks like"
        raise ConfigError(f"{verb} {found.title}", file=found.file, hint=found.hint)


def _refuse_unusable(place: Path) -> None:
    for name in PLAIN_FILES:
        if os.path.exists(place / name):
            problem = "has no `model_type`, so that it is not a Hugging Face config.json" if name == "config.json" else "is not a file"
            raise ConfigError(problem, file=place / name, hint=INSTEAD)


def _of_file(path: Path) -> Configuration:
    """Return the configuration that a single file is. Raises ConfigError as `read_configuration` does."""
    _refuse_framework(path)
    if is_huggingface_config(path):
        workload, told = read_huggingface_config(path)
        noticed = tuple(f"{path}: {each}" for each in told)
        return Configuration(workload, str(path), has_batch=False, assumed=("precision", "sequence_length", "optimizer"), noticed=noticed)
    workload = read_workload(path)
    chosen = workload.training.model_fields_set & {"micro_batch_size", "gradient_accumulation_steps", "target_effective_batch_size"}
    return Configuration(workload, str(path), has_batch=bool(chosen))


def _refuse_framework(path: Path) -> None:
    """Raise ConfigError for a file that is another framework's: it would only be told to be no workload."""
    keys = load_config_file(path).keys()
    if not keys:
        raise ConfigError("is empty", file=path, hint=INSTEAD)
    top = {key.partition(".")[0] for key in keys}
    if "model.kind" in keys or (keys and top <= set(Workload.model_fields)):
        return
    found = recognise(path)
    if "model_type" in keys and found is None:
        return  # a model, and no training
    _refuse_hydra(path)
    if found is not None:
        verb = "is" if found.is_known else "looks like"
        raise ConfigError(f"{verb} {found.title}", file=path, hint=found.hint)
    if not any(key.startswith("model.") for key in keys):
        problem = "describes no training that memplan recognises: no key has a usual name of a model or of a batch size"
        raise ConfigError(problem, file=path, hint=INSTEAD)
    if len(top & set(Workload.model_fields)) * 2 < len(top):  # else it is meant for a workload, whose mistakes are told
        raise ConfigError("describes a model, and no training that memplan knows: it has no batch size", file=path, hint=INSTEAD)

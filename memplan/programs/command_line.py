"""From what was typed to a command as a program: its placeholders and fields checked, its present values read from its files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from memplan.edits.apply import FileChange, prepare
from memplan.edits.config_file import load_config_file
from memplan.edits.edit import Edit, EditValue
from memplan.edits.yaml_file import YamlFile
from memplan.errors import ConfigError, UsageError
from memplan.programs.command_program import (
    KNOWN,
    PLACEHOLDER,
    STAGE,
    STAGE_WORDS,
    CommandProgram,
    CommandStage,
    Place,
)
from memplan.programs.named_files import composed_by_words, constant_of, unreadable_in
from memplan.programs.typed_places import read_place, read_short
from memplan.programs.user_program import PLANNED, did_you_mean
from memplan.workload.parallelism import MODEL_PARALLEL_SIZES, Parallelism
from memplan.workload.training import MOST_STEPS

ONE_GPU = Parallelism()

_OTHER_FORMATS = (".ini", ".cfg", ".xml")
"""Of configurations that programs have, which read as YAML would be nonsense or an error far from the cause."""


def command_program(
    words: Sequence[str],
    *,
    fields: Iterable[str] = (),
    short: Iterable[str] = (),
    stages: Iterable[str] = (),
    parallelism: Parallelism = ONE_GPU,
    pinned: Collection[str] = (),
) -> CommandProgram:
    """
    Return the program of the command *words*, the present values of its variables read from its files.

    *fields*: "NAME=FILE:KEY", "NAME=KEY" or "NAME=VARIABLE". *short*: "FILE:KEY=VALUE", "KEY=VALUE" or "VARIABLE=VALUE", for rehearsals
    alone. *stages*: files, or patterns of files, with which the command is run one after the other; in *fields* and *short* STAGE stands
    for each of them. *pinned*: names of other variables, which get a value besides. Raises UsageError for a placeholder, a field or stages
    that make no sense, ConfigError for a key that is not in its file, EditRefusedError for one whose value cannot be changed without
    guessing.
    """
    places = tuple(_in_named_file(read_place(field), words) for field in fields)
    shortened = tuple(_in_named_file(read_short(text), words) for text in short)
    files = stage_files(stages)
    named = {*pinned, *(place.variable for place in places), *(STAGE_WORDS if files else ())}
    _check_stages_are_named(words, (*places, *shortened), named, has_stages=bool(files))
    known = KNOWN | named
    _check_are_closed(words, known)
    for name in (name for word in words for name in PLACEHOLDER.findall(word)):
        if name not in known:
            raise UsageError(
                f"the command has a placeholder {{{name}}}, which names no variable{did_you_mean(name, known)}",
                hint=f'variables are {", ".join(sorted(known - STAGE_WORDS))}; another one needs a value: `pins={{"{name}": 8}}`',
            )
    program = CommandProgram(name=_name_of(words), command=tuple(words), places=places, shortened=shortened, parallelism=parallelism)
    program = _with_present_values(program.with_stages(files))
    training = program.training
    others = {name: getattr(training, name) + 1 for name in ("micro_batch_size", "gradient_accumulation_steps")}
    changed_files(program.with_training(**others))  # what cannot be changed is refused before anything is run
    return program


def _in_named_file(place: Place, words: Sequence[str]) -> Place:
    """
    Return *place*, a name alone taken for the key of a file that the command *words* names, where one has it.

    Raises UsageError for a name of several keys, and for one that no file has and that is no usual name of a variable of the environment:
    with lower-case letters, or that of a number in the script, and not set here.
    """
    if not place.is_of_environment or place.key in os.environ:
        return place
    composed = composed_by_words(words)
    held = composed.held(place.key) if composed is not None else None
    if held is not None and held.file is not None:
        return place.model_copy(update={"file": held.file, "key": held.key_in_file})
    if held is None and place.key.isupper() and place.key.isidentifier():
        _check_is_no_constant(place.key, words)
        return place
    is_key = held is not None or not place.key.isidentifier()
    keys = () if composed is None else composed.keys
    near = _near_key(place.key, keys, is_key=is_key)
    unreadable = unreadable_in(words) if held is None else None
    which = "no file that the command names" if unreadable is None else "no file that the command names and that can be read"
    problem = held.problem if held is not None else f"which {which} has{near}{f'; {unreadable.message}' if unreadable else ''}"
    or_variable = "" if is_key else f"; {_has_to_be_set(place.key)}"
    hint = (unreadable.hint if unreadable is not None else None) or f"name its file: `FILE:{place.key}`{or_variable}"
    raise UsageError(f"nothing is written at `{place.key}`, {problem}", hint=hint)


def _check_is_no_constant(name: str, words: Sequence[str]) -> None:
    """Raise UsageError where *name*, which is set nowhere in the environment, is that of a number in the script of the command *words*."""
    path = constant_of(words, name)
    if path is not None:
        message = f"no variable {name} of the environment is set, and {path} has a number of that name"
        raise UsageError(message, hint=f"name its file: `{path}:{name}`; {_has_to_be_set(name)}")


def _has_to_be_set(name: str) -> str:
    return f"a variable of the environment with such a name has to be set: `{name}=… memplan …`"


def _near_key(name: str, keys: Collection[str], *, is_key: bool = True) -> str:
    """
    Return the question whether one of *keys* is meant with *name*: the first value below it, the only one of its name, or one like it.

    Where *name* *is_key* not for certain, only the last parts of *keys* are compared.
    """
    below = next((key for key in keys if f".{name}." in f".{key}"), None)
    same = [key for key in keys if key.rpartition(".")[2] == name.rpartition(".")[2]]
    meant = below or (same[0] if len(same) == 1 else None)
    if meant is not None:
        return f": did you mean {meant}?"
    return did_you_mean(name, frozenset(keys if is_key else (key.rpartition(".")[2] for key in keys)))


def _check_are_closed(words: Sequence[str], known: Collection[str]) -> None:
    """Raise UsageError for a placeholder of a *known* variable that has lost its last brace."""
    begun = re.compile(rf"(?<!\$)\{{({'|'.join(map(re.escape, sorted(known)))})(?!\S)")  # {{lr: 1}} is Hydra's
    found = next(filter(None, map(begun.search, words)), None)
    if found is not None:
        raise UsageError(f"the command has `{{{found[1]}`, a placeholder without its last brace", hint=f"write `{{{found[1]}}}`")


def stage_files(patterns: Iterable[str]) -> list[Path]:
    """Return the files of the stages, sorted. Raises UsageError for a pattern that no file matches."""
    found: set[Path] = set()
    for pattern in patterns:
        files = {Path(path) for path in glob.glob(pattern, recursive=True) if Path(path).is_file()}  # noqa: PTH207  (absolute ones too)
        if not files:
            raise UsageError(f"no file matches the stages {pattern!r}", hint="check the path; each file that matches is a stage")
        found |= files
    return sorted(found)


def _check_stages_are_named(words: Sequence[str], places: Iterable[Place], named: Collection[str], *, has_stages: bool) -> None:
    """Raise UsageError for what is of a stage where there are none."""
    in_words = [f"{{{name}}}" for word in words for name in PLACEHOLDER.findall(word) if name in STAGE_WORDS and name not in named]
    in_places = [f"{STAGE}:{place.key}" for place in places if place.is_of_stage]
    if not has_stages and (in_words or in_places):
        raise UsageError(
            f"{(in_words + in_places)[0]} is of a stage, and no stages are named",
            hint='name their files: `stages=["conf/*_stage.yaml"]`',
        )


def _name_of(words: Sequence[str]) -> str:
    """Return what a report calls the command: its script or module."""
    script = next((Path(word).name for word in words if word.endswith((".py", ".sh"))), None)
    module = next((after for word, after in pairwise(words) if word == "-m"), None)
    return script or module or Path(words[0]).name


def _with_present_values(program: CommandProgram) -> CommandProgram:
    """Return *program* with what its files say now."""
    found = {place.variable: _read(place.file, place) for place in reversed(program.places) if place.file is not None}
    training = {name: _count(program, name, found[name]) for name in ("micro_batch_size", "gradient_accumulation_steps") if name in found}
    values = {name: str(value) for name, value in found.items() if name not in PLANNED}
    program = program.model_copy(update={"parallelism": _split_as(program, found)})
    stages = tuple(_with_its_values(stage, program.places) for stage in program.stages)
    present = program.with_training(**training).model_copy(update={"values": values, "stages": stages})
    if "effective_batch_size" in found:
        product = _count(program, "effective_batch_size", found["effective_batch_size"])
        present = present.with_training(target_effective_batch_size=product)
        if "micro_batch_size" not in program.variables:  # the rest of the product is the micro-batch
            others = program.parallelism.data_parallel_size * present.training.gradient_accumulation_steps
            present = present.with_training(micro_batch_size=max(1, product // others))
        elif "gradient_accumulation_steps" not in program.variables:
            present = present.with_training(gradient_accumulation_steps=max(1, product // present.effective_batch_size))
    without_value = tuple(sorted(program.variables & set(PLANNED) - found.keys()))
    is_known = bool({"micro_batch_size", "effective_batch_size"} & found.keys())
    return present.model_copy(update={"is_present_known": is_known, "without_value": without_value})


def _split_as(program: CommandProgram, found: Mapping[str, object]) -> Parallelism:
    """Return how the GPUs of *program* share the work, as *found* in its files. Raises ConfigError for sizes that do not go with them."""
    sizes = {name: _count(program, name, found[name]) for name in MODEL_PARALLEL_SIZES if name in found}
    try:
        return Parallelism.model_validate(program.parallelism.model_dump() | sizes)
    except ValidationError as error:
        place = next(place for place in program.places if place.variable in sizes)
        raise ConfigError(error.errors()[0]["msg"], file=place.file, hint="say on how many GPUs it trains: `num_gpus=8`") from error


def _read(path: Path, place: Place) -> object:
    if path.suffix in _OTHER_FORMATS:
        raise ConfigError(
            "is neither YAML, JSON, TOML, Python nor a shell script: the value of a field is written into no other file",
            file=path,
            hint=f"where the command takes it too, write {{{place.variable}}} there, for example `train.py batch={{{place.variable}}}`",
        )
    file = load_config_file(path)
    found = file.get(tuple(place.key.split(".")))
    if found is None and isinstance(file, YamlFile) and len(file.documents) > 1:
        hint = f"put them into one, or write {{{place.variable}}} in the command where it takes the value too"
        raise ConfigError(f"holds {len(file.documents)} documents, and no key `{place.key}` in the first one", file=path, hint=hint)
    if found is None:
        raise ConfigError(
            f"has no key `{place.key}`{_near_key(place.key, sorted(file.keys()))}",
            file=path,
            hint=f"name the key that holds {place.variable}",
        )
    return found.value


def _with_its_values(stage: CommandStage, places: Iterable[Place]) -> CommandStage:
    """Return *stage* with what its file says now. Raises ConfigError for a value that is no number of negatives or positives."""
    for place in (place for place in places if place.is_of_stage):
        value = _read(stage.file, place)
        try:
            stage = CommandStage.model_validate(stage.model_dump() | {place.variable: value}, strict=True)
        except ValidationError as error:
            least = 0 if place.variable == "n_negatives" else 1
            problem = f"`{place.key}` is {value!r}, where {place.variable} has to be a whole number from {least} on"
            raise ConfigError(problem, file=stage.file) from error
    return stage


def _count(program: CommandProgram, name: str, value: object) -> int:
    place = next(place for place in program.places if place.variable == name and place.file is not None)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_STEPS:
        raise ConfigError(f"`{place.key}` is {value!r}, where {name} has to be a whole number from 1 on", file=place.file)
    return value


def edits_of(program: CommandProgram) -> list[Edit]:
    """Return the edits that write the values of *program* into its files."""
    return [
        Edit(file, tuple(place.key.split(".")), _meant(program.text_in(stage, place.variable)))
        for place in program.places
        for stage, file in place.files(program.stages)
    ]


def edits_of_rehearsal(program: CommandProgram) -> list[Edit]:
    """Return the edits of the copies that a rehearsal of *program* reads: its values, and what makes it short."""
    short = [
        Edit(file, tuple(place.key.split(".")), _meant(place.text or ""))
        for place in program.shortened
        for _, file in place.files(program.stages)
    ]
    return [*edits_of(program), *short]


def changed_files(program: CommandProgram) -> list[FileChange]:
    """
    Return the files of *program* as a rehearsal has to find them.

    Raises EditRefusedError for a value that cannot be changed without guessing.
    """
    return prepare(edits_of_rehearsal(program))


def _meant(text: str) -> EditValue:
    """Return a number or a truth value as what it is, so that a file does not get a quoted one."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?(0|[1-9]\d*)", text) else text

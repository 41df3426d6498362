"""From what was typed to a command as a program: its placeholders and fields checked, its present values read from its files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from memplan.edits.apply import FileChange, prepare
from memplan.edits.edit import Edit, EditValue
from memplan.edits.yaml_file import YamlFile
from memplan.errors import ConfigError, UsageError
from memplan.programs.command_program import KNOWN, PLACEHOLDER, CommandProgram, Place
from memplan.programs.user_program import PLANNED, did_you_mean
from memplan.workload.parallelism import Parallelism
from memplan.workload.training import MOST_STEPS

ONE_GPU = Parallelism()

_ENVIRONMENT_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_FIELD = "micro_batch_size=conf/config.yaml:data.batch_size, or micro_batch_size=BATCH_SIZE for a variable of the environment"
_OTHER_FORMATS = (".py", ".toml", ".ini", ".sh", ".xml")
"""Of configurations that programs have, which read as YAML would be nonsense or an error far from the cause."""
_SHORT = "conf/config.yaml:trainer.limit_val_batches=0, or WANDB_MODE=offline for a variable of the environment"


def command_program(
    words: Sequence[str],
    *,
    fields: Iterable[str] = (),
    short: Iterable[str] = (),
    parallelism: Parallelism = ONE_GPU,
    pinned: Collection[str] = (),
) -> CommandProgram:
    """
    Return the program of the command *words*, the present values of its variables read from its files.

    *fields*: "NAME=FILE:KEY" or "NAME=VARIABLE". *short*: "FILE:KEY=VALUE" or "VARIABLE=VALUE", for rehearsals alone. *pinned*: names of
    other variables, which get a value besides. Raises UsageError for a placeholder or a field that makes no sense, ConfigError for a key
    that is not in its file, EditRefusedError for one whose value cannot be changed without guessing.
    """
    places = tuple(map(read_place, fields))
    named = {*pinned, *(place.variable for place in places)}
    for name in (name for word in words for name in PLACEHOLDER.findall(word)):
        if name not in KNOWN | named:
            raise UsageError(
                f"the command has a placeholder {{{name}}}, which names no variable{did_you_mean(name, KNOWN)}",
                hint=f'variables are {", ".join(sorted(KNOWN))}; another one needs a value: `pins={{"{name}": 8}}`',
            )
    program = CommandProgram(
        name=_name_of(words), command=tuple(words), places=places, shortened=tuple(map(read_short, short)), parallelism=parallelism
    )
    program = _with_present_values(program)
    training = program.training
    others = {name: getattr(training, name) + 1 for name in ("micro_batch_size", "gradient_accumulation_steps")}
    changed_files(program.with_training(**others))  # what cannot be changed is refused before anything is run
    return program


def _name_of(words: Sequence[str]) -> str:
    """Return what a report calls the command: its script or module."""
    script = next((Path(word).name for word in words if word.endswith((".py", ".sh"))), None)
    module = next((after for word, after in pairwise(words) if word == "-m"), None)
    return script or module or Path(words[0]).name


def read_place(text: str) -> Place:
    """Return where "NAME=FILE:KEY" or "NAME=VARIABLE" says that a variable is written. Raises UsageError for another text."""
    name, _, where = text.partition("=")
    place = _written_at(where)
    if place is None or not name.isidentifier():
        problem = "does not say where a variable is written: it has neither FILE:KEY nor the name of a variable"
        raise UsageError(f"{text!r} {problem}", hint=f"write it as {_FIELD}")
    if name not in KNOWN and did_you_mean(name, KNOWN):
        raise UsageError(f"{text!r} names no variable{did_you_mean(name, KNOWN)}", hint=f"variables are {', '.join(sorted(KNOWN))}")
    return place.model_copy(update={"variable": name})


def read_short(text: str) -> Place:
    """Return what "FILE:KEY=VALUE" or "VARIABLE=VALUE" changes for rehearsals. Raises UsageError for another text."""
    where, equals, value = text.partition("=")
    place = _written_at(where)
    if place is None or not equals:
        raise UsageError(f"{text!r} does not say what makes a rehearsal short", hint=f"write it as {_SHORT}")
    return place.model_copy(update={"text": value})


def _written_at(where: str) -> Place | None:
    """Return the place that *where*, FILE:KEY or the name of a variable of the environment, says; None where it is neither."""
    file, colon, key = where.rpartition(":")
    if not colon:
        return Place(key=where) if _ENVIRONMENT_VARIABLE.fullmatch(where) else None
    return Place(file=Path(file), key=key) if file and all(key.split(".")) else None


def _with_present_values(program: CommandProgram) -> CommandProgram:
    """Return *program* with what its files say now."""
    found = {place.variable: _read(place) for place in reversed(program.places) if place.file is not None}
    training = {name: _count(program, name, found[name]) for name in ("micro_batch_size", "gradient_accumulation_steps") if name in found}
    values = {name: str(value) for name, value in found.items() if name not in PLANNED}
    present = program.with_training(**training).model_copy(update={"values": values})
    if "effective_batch_size" in found:
        product = _count(program, "effective_batch_size", found["effective_batch_size"])
        present = present.with_training(target_effective_batch_size=product)
        if "micro_batch_size" not in program.variables:  # the product is all that is written of the batch
            present = present.with_training(micro_batch_size=max(1, product // program.parallelism.data_parallel_size))
        elif "gradient_accumulation_steps" not in program.variables:
            present = present.with_training(gradient_accumulation_steps=max(1, product // present.effective_batch_size))
    without_value = tuple(sorted(program.variables & set(PLANNED) - found.keys()))
    is_known = bool({"micro_batch_size", "effective_batch_size"} & found.keys())
    return present.model_copy(update={"is_present_known": is_known, "without_value": without_value})


def _read(place: Place) -> object:
    assert place.file is not None
    if place.file.suffix in _OTHER_FORMATS:
        raise ConfigError(
            "is neither YAML nor JSON: the value of a field is written into no other file",
            file=place.file,
            hint=f"where the command takes it too, write {{{place.variable}}} there, for example `--batch-size {{{place.variable}}}`",
        )
    file = YamlFile.load(place.file)
    found = file.get(tuple(place.key.split(".")))
    if found is None:
        near = did_you_mean(place.key, frozenset(file.keys()))
        raise ConfigError(f"has no key `{place.key}`{near}", file=place.file, hint=f"name the key that holds {place.variable}")
    return found.value


def _count(program: CommandProgram, name: str, value: object) -> int:
    place = next(place for place in program.places if place.variable == name and place.file is not None)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_STEPS:
        raise ConfigError(f"`{place.key}` is {value!r}, where {name} has to be a whole number from 1 on", file=place.file)
    return value


def edits_of(program: CommandProgram) -> list[Edit]:
    """Return the edits that write the values of *program* into its files."""
    return [_edit(place, program.text_of(place.variable)) for place in program.places if place.file is not None]


def edits_of_rehearsal(program: CommandProgram) -> list[Edit]:
    """Return the edits of the copies that a rehearsal of *program* reads: its values, and what makes it short."""
    return [*edits_of(program), *(_edit(place, place.text or "") for place in program.shortened if place.file is not None)]


def changed_files(program: CommandProgram) -> list[FileChange]:
    """
    Return the files of *program* as a rehearsal has to find them.

    Raises EditRefusedError for a value that cannot be changed without guessing.
    """
    return prepare(edits_of_rehearsal(program))


def _edit(place: Place, text: str) -> Edit:
    assert place.file is not None
    return Edit(place.file, tuple(place.key.split(".")), _meant(text))


def _meant(text: str) -> EditValue:
    """Return a number or a truth value as what it is, so that a file does not get a quoted one."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?(0|[1-9]\d*)", text) else text

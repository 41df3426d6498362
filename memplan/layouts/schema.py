"""A layout: the table key <-> field for one framework's files, as data (`templates/*/layout.yaml`), so that a user can add one.

Reading a configuration and editing it use the same table. A mistake in a layout is reported in the layout's own file and line, before any
file of the user is read.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from memplan.description import Description
from memplan.edits.edit import KeyPath
from memplan.edits.yaml_file import YamlFile
from memplan.errors import ConfigError
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload
from memplan.workload.workload_file import problem_of

PARTS = ("model", "training", "parallelism", "optimizer", "contrastive")
"""What of a workload a table can name; its stages have a table of their own."""


def _relative(pattern: str) -> str:
    if not pattern or Path(pattern).is_absolute():
        raise ValueError("must be a path below the tree's folder")
    return pattern


def _dotted(key: str) -> str:
    if not all(key.split(".")):
        raise ValueError("must be keys joined by dots, as trainer.precision")
    return key


def _as_families(values: Any) -> Any:
    families = [values] if isinstance(values, dict) else values
    return [{spelled(key): value for key, value in family.items()} for family in families] if isinstance(families, list) else families


def _as_list(values: Any) -> Any:
    return values if isinstance(values, (list, tuple)) else [values]


def spelled(value: Any) -> Any:
    """Return a switch, a number or nothing as the text by which a layout calls it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (int, float)) else value


_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}
"""Words that are switches in YAML 1.1, as PyYAML reads them. In a layout they may be words too: a strategy is `no`."""


def readings_of(spelling: str) -> tuple[str, ...]:
    """Return *spelling*, and the switch that it is to a program that reads it with PyYAML."""
    switch = _SWITCHES.get(spelling.lower())
    return (spelling,) if switch is None else (spelling, switch)


RelativePath = Annotated[str, AfterValidator(_relative)]
DottedKey = Annotated[str, AfterValidator(_dotted)]


Spelling = Annotated[str, BeforeValidator(spelled)]
"""A value as a file spells it; true and false for a switch, an empty text for a key that is not there or empty."""

ANYTHING = "*"
"""In conditions: whatever stands at the key, as long as something does; beside other signs, any text in this place."""

Conditions = dict[DottedKey, Annotated[tuple[Spelling, ...], BeforeValidator(_as_list)]]
"""Keys of the main file and the spellings of which each has to have one; `*` stands for any text, by itself for any but an empty one."""


class FieldEntry(Description):
    """One line of the table."""

    field: DottedKey
    """The workload's field, dotted: training.micro_batch_size."""

    file: RelativePath | None = None
    """The file, as seen from the tree's folder. None: the main file, by which the layout was recognised."""

    key: DottedKey
    """The key in it, dotted."""

    values: Annotated[tuple[dict[str, str], ...], BeforeValidator(_as_families)] = ()
    """How the file's values are spelled in memplan. Several mappings are families of spellings: what is written stays in the family of the
    present value where it can; of several spellings with one meaning the first is written."""

    allowed: tuple[str, ...] = ()
    """The only spellings that the framework's own validation accepts; empty for all of `values`."""

    when: Conditions = Field(default_factory=dict)
    """The line counts only where the main file says so, as `{adapter: [lora, qlora]}`."""

    counts: bool = False
    """A list stands for its length, -1 and "auto" for what is not known here."""

    is_list: bool = False
    """The value is a list, or words joined by commas; an element that is not in `values` stands for itself."""

    default: bool | int | float | str | None = None
    """What the framework takes where the key is not there or empty, in its own spelling."""

    if_null: str | None = None
    """Why an empty value is refused. None: it is the same as a key that is not there."""

    if_unknown: str | None = None
    """Why a value has to be said for the plan where the key is not there or empty, in the files or beside them. None: memplan's default is
    planned, or the layout's."""

    @property
    def path(self) -> KeyPath:
        """Return the key as a path."""
        return tuple(self.key.split("."))

    def meaning_of(self, spelling: str) -> str | None:
        """Return what *spelling* means in memplan, or None where the table does not know it."""
        return next((family[each] for each in readings_of(spelling) for family in self.values if each in family), None)


class Case(Description):
    """A value that a field has where several keys together say so."""

    when: Conditions = Field(default_factory=dict)
    """What the main file has to say; nothing: it is what is left."""

    value: bool | int | str
    """What the field then is, in memplan's words."""


class Rule(Description):
    """A field that no single key decides: the first case whose conditions hold does. It is read, and never written."""

    field: DottedKey
    """The workload's field, dotted: training.precision."""

    cases: tuple[Case, ...]
    """In the order in which they are tried."""


class Note(Description):
    """What a plan does not follow, where the files say so: what takes less than planned, or is no part of a training step."""

    when: Conditions
    """What the main file has to say."""

    text: str
    """The warning."""


class ModelEntry(Description):
    """The key that names the model: a folder or config.json, a name in the Hugging Face hub's cache, or in memplan's catalogue."""

    key: DottedKey
    """The key in the main file."""

    names: dict[str, str] = Field(default_factory=dict)
    """The published models that the framework's own names stand for, `*` in one being any text. Empty: the key holds the name or the folder
    itself."""

    builder: Literal["transformers", "torchtune"] = "transformers"
    """Whose code builds the model."""

    is_decoder: bool = False
    """The framework trains decoders of text; another model is refused, as what it reads besides is not in a plan."""


class Detection(Description):
    """How a tree is recognised, or a recipe: a single file of any name."""

    file: RelativePath | None = None
    """A file that is there. None: a recipe."""

    suffixes: tuple[str, ...] = (".yaml", ".yml")
    """What the name of a recipe ends with."""

    keys: tuple[DottedKey, ...]
    """Keys that it has."""

    one_of: tuple[DottedKey, ...] = ()
    """Keys of which it has one at least."""

    without: tuple[DottedKey, ...] = ()
    """Keys that it does not have."""

    unless_named: tuple[str, ...] = ()
    """Of a recipe: words in its file's name, or its folder's whole name, by which it is of another kind, whatever its keys are."""

    where: Conditions = Field(default_factory=dict)
    """Of a recipe: what stands at keys by which alone it could be another's."""


class Assumption(Description):
    """A value that memplan's own model is true for; with any other, only the program itself can be planned."""

    file: RelativePath | None = None
    """The file. None: the main file."""

    key: DottedKey
    """The key in it."""

    values: Annotated[tuple[Spelling, ...], BeforeValidator(_as_list)]
    """What it may be; an empty text stands for a key that is not there or empty."""

    when: Conditions = Field(default_factory=dict)
    """It is assumed only where the main file says so."""

    is_list: bool = False
    """The value is a list, each element of which has to be one of `values`."""

    at_most: float | None = None
    """A number up to this is as good as `values`."""

    same_as: DottedKey | None = None
    """What another key of the same file says is as good as `values`."""

    otherwise: str
    """Why any other value is refused."""

    @property
    def path(self) -> KeyPath:
        """Return the key as a path."""
        return tuple(self.key.split("."))


class FirstStage(Description):
    """Where the configuration names the stage that training starts with: a choice in Hydra's defaults list."""

    file: RelativePath
    """The file with the defaults list."""

    group: str
    """The config group whose choice is the stage, as `curriculum` in `- curriculum: default`."""

    files: RelativePath
    """The stage's file, as seen from the folder of stages; {} stands for the choice."""


class StageFiles(Description):
    """Where the stages are: a folder of them, one file each, or the main file, which is the only one."""

    folders: Annotated[tuple[RelativePath, ...], BeforeValidator(_as_list)] = (".",)
    """Where the stages' files may be, as seen from the tree's folder: the first that has some counts."""

    files: Annotated[tuple[RelativePath, ...], BeforeValidator(_as_list)] = ()
    """Pattern of the stages' files, or several, of which the first that fits any counts; their order is that of their names. None: the
    main file is the only stage."""

    first: FirstStage | None = None
    """The stage that training starts with, where the configuration names one: it comes before the others."""

    others: RelativePath | None = None
    """Pattern of further files in that folder with the same keys that are not stages."""

    fields: dict[str, DottedKey]
    """Field of a stage -> key in its file."""


LoaderField = Literal["num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "drop_last"]
"""An argument of PyTorch's DataLoader."""


class NamedFile(Description):
    """A further file that a key may name: beside the file that names it, or in a folder above from which the path leads there."""

    name: DottedKey
    """Below what conditions and assumptions find its keys: deepspeed, for `deepspeed.zero_optimization.stage`."""

    key: DottedKey
    """The key of the main file, or of the launcher's own below `launch`, that names it; a content in place of a name is read as well."""


class OptionalPrefix(Description):
    """Keys that may be spelled with a prefix or without it: `fsdp_offload_params` and `offload_params`."""

    below: DottedKey
    """The mapping that they stand in, as conditions and assumptions name it."""

    prefix: str
    """The prefix, which the layout itself leaves out."""


class LaunchFile(Description):
    """The launcher's own file, which is named beside a recipe: conditions and assumptions find its keys below `launch`."""

    title: str
    """What it is, in a few words."""

    keys: tuple[DottedKey, ...]
    """Keys that it has."""

    num_processes: DottedKey
    """The key that says how many processes there are in all, one for each GPU."""

    num_machines: DottedKey
    """The key that says on how many machines; 1 where it is not there."""


class LayoutPart(Description):
    """What layouts can share."""

    model: ModelEntry | None = None
    """Where the files name the model, if they do."""

    fields: tuple[FieldEntry, ...] = ()
    """Lines of the table."""

    named_files: tuple[NamedFile, ...] = ()
    """Further files that keys may name."""

    optional_prefixes: tuple[OptionalPrefix, ...] = ()
    """Mappings whose keys may have a prefix that the layout leaves out."""

    launch: LaunchFile | None = None
    """The launcher's own file, where a recipe of this kind may have one."""

    rules: tuple[Rule, ...] = ()
    """Fields that several keys decide together."""

    notes: tuple[Note, ...] = ()
    """What is planned on the safe side."""

    assumes: tuple[Assumption, ...] = ()
    """What the starter workload was written for."""


class Layout(LayoutPart):
    """The table of one framework."""

    name: str
    """What it is called."""

    title: str
    """What it is for, in a few words."""

    roots: tuple[str, ...] = (".",)
    """Where the tree's folder may be, as seen from the path that the user gives."""

    detect: Detection
    """How a tree is recognised."""

    parts: tuple[str, ...] = ()
    """Files of memplan's `parts/` with what several layouts share, by their names: lines of the table, rules, assumptions, notes."""

    workload: RelativePath | None = None
    """The starter workload, beside the layout: what the files do not say. None: they say it all, or only the program itself can tell."""

    fields: tuple[FieldEntry, ...]
    """The table."""

    command: str | None = None
    """The command that trains from the main file, {file} being its path, as `axolotl train {file}`; where the stages have files, one of
    them, {stage} being its name."""

    command_without: tuple[DottedKey, ...] = ()
    """Keys that this program passes over: from a file with one of them another program trains."""

    command_of_several: str | None = None
    """The command on several GPUs, where it is another."""

    package: str | None = None
    """The Python package that its program is of, where other packages have programs of the same name, as Ray has `tune`."""

    short: dict[DottedKey, Spelling] = Field(default_factory=dict)
    """Values that make a rehearsal of the command short, for keys that stand in the main file: no evaluation, no saving, no upload."""

    stages: StageFiles | None = None
    """Where the stages are."""

    checkpoints: Annotated[tuple[DottedKey, ...], BeforeValidator(_as_list)] = ()
    """Keys of the main file that name the folder where the training keeps its checkpoints."""

    loader: dict[LoaderField, Annotated[tuple[DottedKey, ...], BeforeValidator(_as_list)]] = Field(default_factory=dict)
    """Where the main file has the arguments of the training's DataLoader; of several keys that which is there."""


def known_keys(layout: Layout) -> set[str]:
    """Return every key of the main file that *layout* knows, dotted."""
    conditions = [
        *(entry.when for entry in layout.fields if entry.file is None),
        *(case.when for rule in layout.rules for case in rule.cases),
        *(assumption.when for assumption in layout.assumes),
        *(note.when for note in layout.notes),
        layout.detect.where,
    ]
    return {
        *(entry.key for entry in layout.fields if entry.file is None),
        *(assumption.key for assumption in layout.assumes if assumption.file is None),
        *(key for when in conditions for key in when),
        *(layout.detect.keys + layout.detect.one_of + layout.checkpoints),
        *(key for keys in layout.loader.values() for key in keys),
        *layout.short,
        *([layout.model.key] if layout.model is not None else []),
    }


def layout_from(data: Any, template: Path) -> Layout:
    """
    Return the layout that *data*, the content of *template*, describes.

    Raises ConfigError, with the line of *template*, for what makes no sense: a key that is missing or unknown, a field that no workload
    has, a value that its field cannot have.
    """
    try:
        layout = Layout.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(str(part) for part in first["loc"])
        raise _mistake(template, where, f"`{'.'.join(where) or 'layout'}`: {problem_of(first)}") from error
    for number, entry in enumerate(layout.fields):
        for key, problem in _problems_of(entry):
            raise _mistake(template, ("fields", str(number), key), problem)
    for number, rule in enumerate(layout.rules):
        for key, problem in _problems_of_rule(rule):
            raise _mistake(template, ("rules", str(number), key), problem)
    if layout.workload is None and layout.model is None and layout.command is None:
        raise _mistake(template, (), "has neither `workload`, `model` nor `command`: nothing says what is trained")
    for field in layout.stages.fields if layout.stages else ():
        if field == "name" or field not in Stage.model_fields:
            known = ", ".join(name for name in Stage.model_fields if name != "name")
            raise _mistake(template, ("stages", "fields", field), f"`{field}` is not a field of a stage ({known})")
    return layout


def _mistake(template: Path, where: KeyPath, problem: str) -> ConfigError:
    return ConfigError(problem, file=template, line=YamlFile.load(template).line_of(where), hint="this is a mistake in the layout itself")


def _problems_of(entry: FieldEntry) -> Iterator[tuple[str, str]]:
    """Yield what of *entry* does not go with the workload's models: its key, and the problem."""
    if not _values_of(entry.field):
        yield "field", _no_field(entry.field)
        return
    for spelling, meaning in ((spelling, meaning) for family in entry.values for spelling, meaning in family.items()):
        if not _accepts(entry.field, [meaning] if entry.is_list else meaning):
            yield "values", f"`{spelling}` is spelled {meaning!r}, which `{entry.field}` cannot be"
    for spelling in entry.allowed:
        if entry.values and entry.meaning_of(spelling) is None:
            yield "allowed", f"`{spelling}` is allowed and has no meaning in `values`"
    if entry.default is None or (entry.counts and entry.default in ("auto", -1)):
        return
    default = entry.meaning_of(spelled(entry.default)) if entry.values else entry.default
    if default is None or not _accepts(entry.field, default):
        yield "default", f"the default {entry.default!r} is not a value of `{entry.field}`"


def _problems_of_rule(rule: Rule) -> Iterator[tuple[str, str]]:
    """Yield what of *rule* does not go with the workload's models: its key, and the problem."""
    is_known = bool(_values_of(rule.field))
    if not is_known:
        yield "field", _no_field(rule.field)
    for case in rule.cases if is_known else ():
        if not _accepts(rule.field, case.value):
            yield "cases", f"{case.value!r} is not a value of `{rule.field}`"


def _no_field(field: str) -> str:
    return f"`{field}` is not a field of a workload's {', '.join(PARTS[:-1])} or {PARTS[-1]}"


def _declarations(field: str) -> Iterator[FieldInfo]:
    """Yield how a workload's field is declared, by its dotted name: once for each kind of model that has it."""
    first, *rest = field.split(".")
    if first not in PARTS or not rest:
        return
    found = list(_types_in(Workload.model_fields[first].annotation))
    for name in rest[:-1]:
        found = [inner for model in found if name in model.model_fields for inner in _types_in(model.model_fields[name].annotation)]
    for model in found:
        declared = model.model_fields.get(rest[-1])
        if declared is not None and not list(_types_in(declared.annotation)):  # a part with fields of its own is not a value
            yield declared


def _types_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that *annotation* names, those of unions too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)


def _accepts(field: str, value: Any) -> bool:
    """Say whether *field* can be *value*, in some kind of model that has it."""
    for kind in _values_of(field):
        with suppress(ValidationError):
            kind.model_validate({"value": value})
            return True
    return False


@cache
def _values_of(field: str) -> tuple[type[BaseModel], ...]:
    """Return a model of one value for each declaration of *field*: there are a thousand values in the layouts, and few fields."""
    definitions: list[Any] = [(declared.annotation, declared) for declared in _declarations(field)]
    return tuple(create_model("Value", value=definition) for definition in definitions)

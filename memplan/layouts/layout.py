"""A layout: the table key <-> field for one framework's files. Reading a configuration and editing it use the same table.

Layouts are data (`templates/*/layout.yaml`), so that a user can add one; they know nothing of the planner.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memplan.description import Description
from memplan.edits.edit import Edit, EditValue, KeyPath
from memplan.edits.yaml_file import Found, YamlFile
from memplan.errors import ConfigError
from memplan.layouts.templates import template_data
from memplan.workload.reader import problem_of
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload


class FieldEntry(Description):
    """One line of the table."""

    field: str
    """The workload's field, dotted: training.micro_batch_size."""

    file: str
    """The file, as seen from the tree's folder."""

    key: str
    """The key in it, dotted."""

    values: dict[str, str] | None = None
    """How the file's values are spelled in memplan; the first of those that mean the same is written back."""

    counts: bool = False
    """A list stands for its length, -1 and "auto" for what is not known here."""

    default: int | float | str | None = None
    """What the framework takes where the key is not there or empty, in its own spelling."""


class Detection(Description):
    """How a tree is recognised."""

    file: str
    """A file that is there."""

    keys: tuple[str, ...]
    """Keys that it has."""


class Assumption(Description):
    """A value that the starter workload was written for."""

    file: str
    """The file."""

    key: str
    """The key in it."""

    values: tuple[str, ...]
    """What it may be; an empty text stands for a key that is not there or empty."""

    otherwise: str
    """Why any other value is refused."""


class StageFiles(Description):
    """A folder of stages, one file each."""

    files: str
    """Pattern of the stages' files; their order is that of their names."""

    others: str | None = None
    """Pattern of further files with the same keys that are no stages."""

    fields: dict[str, str]
    """Field of a stage -> key in its file."""


class Layout(Description):
    """The table of one framework."""

    name: str
    """What it is called."""

    title: str
    """What it is for, in a few words."""

    roots: tuple[str, ...] = (".",)
    """Where the tree's folder may be, as seen from the path that the user gives."""

    detect: Detection
    """How a tree is recognised."""

    workload: str
    """The starter workload, beside the layout: what the files do not say."""

    fields: tuple[FieldEntry, ...]
    """The table."""

    assumes: tuple[Assumption, ...] = ()
    """What the starter workload was written for."""

    stages: StageFiles | None = None
    """Where the stages are."""


@dataclass(frozen=True)
class Reading:
    """A configuration tree, read."""

    layout: Layout
    root: Path
    workload: Workload
    other_stages: tuple[Stage, ...]
    """Files with a stage's keys outside the curriculum."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Source:
    """Where a field's value was read."""

    file: Path
    line: int
    key: str
    value: Any


def layout_from(data: dict[str, Any], template: Path) -> Layout:
    """Return the layout that *data*, the content of *template*, describes. Raises ConfigError for what makes no sense."""
    try:
        layout = Layout.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(str(part) for part in first["loc"])
        line = YamlFile.load(template).line_of(where)
        raise ConfigError(f"`{'.'.join(where)}`: {problem_of(first)}", file=template, line=line) from error
    for number, entry in enumerate(layout.fields):
        if entry.field.split(".")[0] not in ("model", "training", "parallelism", "optimizer"):
            line = YamlFile.load(template).line_of(("fields", str(number), "field"))
            raise ConfigError(
                f"`{entry.field}` is no field of a workload's model, training, parallelism or optimizer", file=template, line=line
            )
    return layout


def matches(layout: Layout, root: Path) -> bool:
    """Say whether the tree at *root* is of *layout*. Raises ConfigError where its file cannot be parsed."""
    path = root / layout.detect.file
    if not path.is_file():
        return False
    file = YamlFile.load(path)
    return all(_stands(file, key) for key in layout.detect.keys)


def _stands(file: YamlFile, key: str) -> bool:
    try:
        return file.get(_path(key)) is not None
    except ConfigError:
        return True  # it is there, if not readable: reading it will say why


def _path(key: str) -> KeyPath:
    return tuple(key.split("."))


def read(layout: Layout, root: Path, *, starter: Path) -> Reading:
    """
    Return the workload that the tree at *root* describes; *starter* says what its files do not.

    Raises ConfigError with file, line and value for what makes no sense.
    """
    return _Reader(layout, root, starter).read()


class _Reader:
    """One reading of one tree."""

    def __init__(self, layout: Layout, root: Path, starter: Path) -> None:
        self.layout = layout
        self.root = root
        self.starter = starter
        self.sources: dict[tuple[str | int, ...], _Source] = {}
        self.files: dict[Path, YamlFile] = {}
        self.warnings: list[str] = []

    def read(self) -> Reading:
        data = template_data(self.starter)
        # What the tree does itself is its target: the starter's is for planning without a tree.
        data["training"].pop("target_effective_batch_size", None)
        data["name"] = self.root.resolve().parent.name if self.root.name == "conf" else self.root.resolve().name
        for entry in self.layout.fields:
            self._read_field(entry, data)
        others: tuple[Stage, ...] = ()
        if self.layout.stages is not None:
            data["stages"] = list(self._stages(self.layout.stages))
            others = tuple(self._others(self.layout.stages))
        for assumption in self.layout.assumes:
            self._check(assumption)
        self._warn_of_duplicates()
        return Reading(self.layout, self.root, self._validated(data), others, tuple(self.warnings))

    def _file(self, path: Path) -> YamlFile:
        if path not in self.files:
            self.files[path] = YamlFile.load(path)
        return self.files[path]

    def _read_field(self, entry: FieldEntry, data: dict[str, Any]) -> None:
        path = self.root / entry.file
        file = self._file(path)
        found = self._found(file, entry)
        if found is None or found.value is None:
            found = self._default(entry, found, path)
        if found is None:
            return
        if entry.counts:
            found = self._counted(entry, found, path)
        value = self._translated(entry, found, path)
        field = tuple(entry.field.split("."))
        source = _Source(path, found.line, entry.key, found.value)
        earlier = self.sources.get(field)
        if earlier is not None and earlier.value != found.value:
            self.warnings.append(
                f"{path}: `{earlier.key}` is {earlier.value} (line {earlier.line}) and `{entry.key}` is {found.value} (line {found.line}); "
                f"planned for the larger"
            )
            if _number(earlier.value) >= _number(found.value):
                return
        self.sources[field] = source
        _put(data, field, value)

    def _default(self, entry: FieldEntry, found: Found | None, path: Path) -> Found | None:
        """Return the framework's default for a key that says nothing, and say that it was taken; None leaves the starter's value."""
        if entry.default is None:
            return None
        line = found.line if found else 1
        self.warnings.append(f"{path}: `{entry.key}` is not set; planned with the default, {entry.default}")
        return Found(entry.default, line)

    def _found(self, file: YamlFile, entry: FieldEntry) -> Found | None:
        """Return what stands at the key; of a list that counts, its length."""
        key = _path(entry.key)
        length = file.length_of(key) if entry.counts else None
        return file.get(key) if length is None else Found(length, file.line_of(key) or 1)

    def _counted(self, entry: FieldEntry, found: Found, path: Path) -> Found:
        """Return a count that is written as a number or as "0,1"; "auto" and -1 are 1 with a warning."""
        text = str(found.value)
        if text in ("auto", "-1"):
            self.warnings.append(f"{path}:{found.line}: `{entry.key}` is {text}, which depends on the machine; planned for 1")
            return Found(1, found.line)
        return Found(len([part for part in text.split(",") if part.strip()]), found.line) if "," in text else found

    def _translated(self, entry: FieldEntry, found: Found, path: Path) -> Any:
        if isinstance(found.value, bool):
            raise ConfigError(f"`{entry.key}` is {found.value}, where a number or a name belongs", file=path, line=found.line)
        if entry.values is None:
            return found.value
        value = entry.values.get(str(found.value))
        if value is None:
            known = ", ".join(entry.values)
            raise ConfigError(
                f"`{entry.key}` is {found.value!r}, which memplan does not know", file=path, line=found.line, hint=f"known: {known}"
            )
        return value

    def _stages(self, stages: StageFiles) -> Iterator[dict[str, Any]]:
        paths = sorted(self.root.glob(stages.files))
        if not paths:
            raise ConfigError(f"has no stages: no file is named like {stages.files}", file=self.root, hint="check --config-path")
        for number, path in enumerate(paths):
            values: dict[str, Any] = {"name": path.stem}
            for field, key in stages.fields.items():
                found = self._file(path).get(_path(key))
                if found is None or found.value is None:
                    raise ConfigError(f"has no value for `{key}`", file=path, hint=f"add a line `{key}: 8`")
                if isinstance(found.value, bool):
                    raise ConfigError(f"`{key}` is {found.value}, where a number belongs", file=path, line=found.line)
                self.sources["stages", number, field] = _Source(path, found.line, key, found.value)
                values[field] = found.value
            yield values

    def _others(self, stages: StageFiles) -> Iterator[Stage]:
        """Yield the files with a stage's keys that are no stages, where their values make sense."""
        planned = set(self.root.glob(stages.files))
        for path in sorted(set(self.root.glob(stages.others)) - planned) if stages.others else []:
            found = {field: self._file(path).get(_path(key)) for field, key in stages.fields.items()}
            if all(value is not None for value in found.values()):
                values = {field: value.value for field, value in found.items() if value is not None}
                try:
                    yield Stage.model_validate({"name": path.stem} | values)
                except ValidationError as error:
                    self.warnings.append(f"{path}: left alone: {problem_of(error.errors()[0])}")

    def _check(self, assumption: Assumption) -> None:
        path = self.root / assumption.file
        found = self._file(path).get(_path(assumption.key))
        value = "" if found is None or found.value is None else str(found.value)
        if value not in assumption.values:
            said = f"`{assumption.key}` is {value}" if value else f"`{assumption.key}` is not set"
            raise ConfigError(
                f"{said}: {assumption.otherwise}", file=path, line=found.line if found else None, hint="plan it as a workload.yaml"
            )

    def _warn_of_duplicates(self) -> None:
        for path, file in self.files.items():
            for duplicate in file.duplicate_keys():
                self.warnings.append(
                    f"{path}:{duplicate.line}: `{duplicate.key}` stands here and in line {duplicate.first_line}; one of them has no effect"
                )

    def _validated(self, data: dict[str, Any]) -> Workload:
        try:
            return Workload.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            location = tuple(part for part in first["loc"] if part not in ("contrastive_encoder", "transformer", "parameters"))
            nearest = [source for field, source in self.sources.items() if field[: len(location)] == location]
            if not nearest:
                raise ConfigError(problem_of(first), file=self.root) from error
            source = nearest[-1]
            # Where it is no single value, several contradict each other.
            value = f"`{source.key}` is {source.value!r}: " if location in self.sources else ""
            raise ConfigError(value + problem_of(first), file=source.file, line=source.line, hint="correct the value") from error


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _put(data: dict[str, Any], field: tuple[str, ...], value: Any) -> None:
    for name in field[:-1]:
        data = data.setdefault(name, {})
    data[field[-1]] = value


def edits_for(reading: Reading, after: Workload) -> list[Edit]:
    """Return the edits that turn the tree that was read into one that describes *after*, for the fields that the layout has."""
    before, wanted = reading.workload.model_dump(), after.model_dump()
    edits = []
    for entry in reading.layout.fields:
        old, new = _value_at(before, entry.field), _value_at(wanted, entry.field)
        if old != new:
            edits.append(Edit(reading.root / entry.file, _path(entry.key), _spelled(entry, new)))
    if reading.layout.stages is not None:
        edits += _stage_edits(reading, reading.layout.stages, after)
    return edits


def _stage_edits(reading: Reading, stages: StageFiles, after: Workload) -> Iterator[Edit]:
    paths = {path.stem: path for path in reading.root.glob(stages.files)}
    for old, new in zip(reading.workload.stages, after.stages, strict=True):
        for field, key in stages.fields.items():
            value: EditValue = getattr(new, field)
            if value != getattr(old, field):
                yield Edit(paths[new.name], _path(key), value)


def _value_at(data: dict[str, Any], field: str) -> Any:
    value: Any = data
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _spelled(entry: FieldEntry, value: Any) -> EditValue:
    if entry.values is None:
        spelled: EditValue = value
        return spelled
    spellings = [theirs for theirs, ours in entry.values.items() if ours == value]
    if not spellings:
        raise ConfigError(f"the layout has no spelling of {value!r} for `{entry.key}`", hint="add one to its `values`")
    return spellings[0]


def unwritable(reading: Reading, after: Workload) -> list[str]:
    """Return the fields in which *after* differs from the tree and for which the layout has no key: an apply would lose them."""
    written = {entry.field for entry in reading.layout.fields}
    before, wanted = _leaves(reading.workload.model_dump()), _leaves(after.model_dump())
    changed = [field for field in wanted if before.get(field) != wanted[field] and field not in written]
    # Whether the encoder is in eval mode only the trainer's code decides: a pin of it says what that does, and nothing is lost.
    not_theirs = ("stages", "training.target_effective_batch_size", "model.encoder.is_in_eval_mode", "model.is_in_eval_mode")
    return [field for field in changed if field not in not_theirs]


def _leaves(data: Any, path: str = "") -> dict[str, Any]:
    """Return every value of nested dicts by its dotted path; sequences are values."""
    if not isinstance(data, dict):
        return {path: data}
    return {leaf: value for name, part in data.items() for leaf, value in _leaves(part, f"{path}.{name}" if path else name).items()}

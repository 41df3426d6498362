"""Reading a configuration tree by its layout: the workload that its files describe, and what was noticed on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memplan.edits.yaml_file import Found, YamlFile
from memplan.errors import ConfigError, reason_of
from memplan.layouts.schema import Assumption, FieldEntry, FirstStage, Layout, StageFiles
from memplan.layouts.templates import template_data
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload
from memplan.workload.workload_file import location_of, problem_of, workload_from

PREFIXES = ("", "/", "override ", "override /")
"""How a group may stand in Hydra's defaults list."""


@dataclass(frozen=True)
class Reading:
    """A configuration tree, read."""

    layout: Layout
    root: Path
    workload: Workload
    stage_files: Mapping[str, Path]
    """The file of each stage, by its name."""
    other_stages: tuple[Stage, ...]
    """Files with a stage's keys that no training runs by itself."""
    spellings: Mapping[str, str]
    """The present values, as they stand in the files or as the framework's defaults, by key."""
    present: frozenset[str]
    """The keys that stand in the files."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Source:
    """Where a field's value was read."""

    file: Path
    line: int
    key: str
    value: Any


def missing_keys(layout: Layout, root: Path) -> list[str] | None:
    """
    Return the keys by which *layout* recognises a tree and which that at *root* lacks; None where not even its main file is there.

    Raises ConfigError where that file cannot be parsed.
    """
    path = root / layout.detect.file
    if not path.is_file():
        return None
    file = YamlFile.load(path)
    return [key for key in layout.detect.keys if not _stands(file, key)]


def _stands(file: YamlFile, key: str) -> bool:
    try:
        return file.get(tuple(key.split("."))) is not None
    except ConfigError:
        return True  # it is there, if not readable: reading it will say why


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
        self.spellings: dict[str, str] = {}
        self.present: set[str] = set()
        self.files: dict[Path, YamlFile] = {}
        self.warnings: list[str] = []

    def read(self) -> Reading:
        data = self._starting()
        for entry in self.layout.fields:
            self._read_field(entry, data)
        paths: list[Path] = []
        others: tuple[Stage, ...] = ()
        if self.layout.stages is not None:
            paths = self._stage_paths(self.layout.stages)
            data["stages"] = [self._stage(self.layout.stages, number, path) for number, path in enumerate(paths)]
            others = tuple(self._others(self.layout.stages, paths))
        for assumption in self.layout.assumes:
            self._check(assumption)
        self._warn_of_duplicates()
        workload = self._validated(data)
        files = {path.stem: path for path in paths}
        return Reading(self.layout, self.root, workload, files, others, self.spellings, frozenset(self.present), tuple(self.warnings))

    def _starting(self) -> dict[str, Any]:
        """Return the starter workload as data. Raises ConfigError, naming the starter, where it is not a workload."""
        data = template_data(self.starter)
        if not isinstance(data, dict):
            raise ConfigError(
                "is not a workload: it has no keys and values", file=self.starter, hint="this is a mistake in the layout itself"
            )
        workload_from(data, self.starter)
        # What the tree does itself is its target: the starter's is for planning without a tree.
        data["training"] = {key: value for key, value in data.get("training", {}).items() if key != "target_effective_batch_size"}
        data["name"] = self.root.resolve().parent.name if self.root.name == "conf" else self.root.resolve().name
        return data

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
        else:
            self.present.add(entry.key)
        if found is None:
            return
        if entry.counts:
            found = self._counted(entry, found, path)
        value = self._translated(entry, found, path)
        self.spellings[entry.key] = str(found.value)
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
        key = entry.path
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
        if not entry.values:
            return found.value
        value = entry.meaning_of(str(found.value))
        if value is None:
            known = ", ".join(spelling for family in entry.values for spelling in family)
            raise ConfigError(
                f"`{entry.key}` is {found.value!r}, which memplan does not know", file=path, line=found.line, hint=f"known: {known}"
            )
        return value

    def _stage_paths(self, stages: StageFiles) -> list[Path]:
        """Return the stages' files: the one that training starts with, and the others by their names."""
        paths = self._matching(stages.files)
        first = self._first_stage(stages.first) if stages.first is not None else None
        if first is not None:
            paths = [first, *(path for path in paths if path != first)]
        if not paths:
            raise ConfigError(
                f"has no stages: no file is named like {stages.files}", file=self.root, hint="name the folder of the configuration"
            )
        return paths

    def _matching(self, pattern: str) -> list[Path]:
        """Return the files of that pattern. Raises ConfigError for a folder that cannot be listed."""
        folder = self.root / Path(pattern).parent
        try:
            if folder.is_dir():
                next(folder.iterdir(), None)  # globbing passes over a folder that it may not list
            return sorted(self.root.glob(pattern))
        except OSError as error:
            raise ConfigError(f"cannot be listed: {reason_of(error)}", file=folder, hint="check its permissions") from error

    def _first_stage(self, first: FirstStage) -> Path | None:
        """Return the file of the stage that training starts with, as the defaults list names it; None where it names none."""
        path = self.root / first.file
        file = self._file(path)
        for number in range(file.length_of(("defaults",)) or 0):
            for prefix in PREFIXES:
                found = self._choice(file, ("defaults", str(number), prefix + first.group))
                if found is None or not isinstance(found.value, (str, int)):
                    continue
                stage = self.root / first.files.replace("{}", str(found.value))
                if stage.is_file():
                    return stage
                self.warnings.append(
                    f"{path}:{found.line}: `{first.group}: {found.value}` names the stage that training starts with, and "
                    f"{first.files.replace('{}', str(found.value))} does not exist"
                )
        return None

    def _choice(self, file: YamlFile, key: tuple[str, ...]) -> Found | None:
        """Return the choice at *key* of a defaults list; None where nothing, or a list of choices, stands there."""
        try:
            return file.get(key)
        except ConfigError:
            return None

    def _stage(self, stages: StageFiles, number: int, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {"name": path.stem}
        for field_name, key in stages.fields.items():
            found = self._file(path).get(tuple(key.split(".")))
            if found is None or found.value is None:
                raise ConfigError(f"has no value for `{key}`", file=path, hint=f"add a line `{key}: 8`")
            if isinstance(found.value, bool):
                raise ConfigError(f"`{key}` is {found.value}, where a number belongs", file=path, line=found.line)
            self.sources["stages", number, field_name] = _Source(path, found.line, key, found.value)
            values[field_name] = found.value
        return values

    def _others(self, stages: StageFiles, planned: list[Path]) -> Iterator[Stage]:
        """Yield the files with a stage's keys that are no stages, where their values make sense."""
        for path in self._matching(stages.others) if stages.others else []:
            if path in planned:
                continue
            found = {name: self._file(path).get(tuple(key.split("."))) for name, key in stages.fields.items()}
            if all(value is not None for value in found.values()):
                values = {name: value.value for name, value in found.items() if value is not None}
                try:
                    yield Stage.model_validate({"name": path.stem} | values)
                except ValidationError as error:
                    self.warnings.append(f"{path}: left alone: {problem_of(error.errors()[0])}")

    def _check(self, assumption: Assumption) -> None:
        path = self.root / assumption.file
        found = self._file(path).get(assumption.path)
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
                    f"{path}:{duplicate.line}: `{duplicate.key}` is set here and in line {duplicate.first_line}; one of them has no effect"
                )

    def _validated(self, data: dict[str, Any]) -> Workload:
        try:
            return Workload.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            location = location_of(first)
            nearest = [source for read, source in self.sources.items() if location and read[: len(location)] == location]
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

"""Reading a configuration by its layout, a tree of files or a recipe: the workload that it describes, and what was noticed on the way."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from memplan.edits.config_file import ConfigFile, load_config_file
from memplan.edits.edit import Found
from memplan.errors import ConfigError, NotDescribedError
from memplan.layouts.places import Places, is_one_of
from memplan.layouts.schema import Assumption, FieldEntry, LaunchFile, Layout, ModelEntry, Rule, known_keys, spelled
from memplan.layouts.sources import ParsedFiles, Source, file_of
from memplan.layouts.stages import StageReader
from memplan.layouts.templates import template_data
from memplan.workload.huggingface import ConfigJson, model_from_config, torchtune_model
from memplan.workload.model import KERNEL_PACKAGES, HuggingFaceModel, TransformerModel, is_pattern
from memplan.workload.model_catalog import find_model, is_hub_name
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload
from memplan.workload.workload_file import location_of, problem_of, workload_from

TARGET = ("training", "target_effective_batch_size")
ACCUMULATION = ("training", "gradient_accumulation_steps")

BY_TRANSFORMERS = frozenset(HuggingFaceModel.model_fields) - frozenset(TransformerModel.model_fields)
"""What only a model that transformers builds has."""


MISSPELT = 0.9
"""How like two keys are (difflib's ratio) of which one is taken for a slip: in 434 recipes of four projects one was, and it was one."""


class _Count(NamedTuple):
    """A number, and where it was read."""

    number: int
    source: Source


class Unknown(NamedTuple):
    """A value that the files leave to the data, which has to be said for a plan."""

    field: str
    """The workload's field, dotted."""
    file: Path
    line: int | None
    key: str
    why: str

    @property
    def name(self) -> str:
        """Return what it is pinned by."""
        return self.field.rpartition(".")[2]


@dataclass(frozen=True)
class Reading:
    """A configuration, read."""

    layout: Layout
    main: Path
    """The file by which the layout was recognised."""
    workload: Workload
    entries: tuple[FieldEntry, ...]
    """The lines of the layout's table that count for it."""
    sources: Mapping[str, Source]
    """Where each field that the files say was read, by its dotted name; `model` is the whole of it."""
    stage_files: Mapping[str, Path]
    """The file of each stage, by its name."""
    other_stages: tuple[Stage, ...]
    """Files with a stage's keys that no training runs by itself."""
    spellings: Mapping[str, str]
    """The present values, as they stand in the files or as the framework's defaults, by key."""
    present: frozenset[str]
    """The keys that stand in the files."""
    warnings: tuple[str, ...]
    unknown: tuple[Unknown, ...] = ()
    """What has to be said beside the files."""

    @property
    def root(self) -> Path:
        """Return the folder of the configuration."""
        return self.main.parent

    def text_at(self, key: str) -> str:
        """Return the text at *key* of the main file, an empty one where there is none."""
        file, where = load_config_file(self.main), tuple(key.split("."))
        found = file.get(where) if file.kind_of(where) == "scalar" else None
        return found.value if found is not None and isinstance(found.value, str) else ""

    def file_of(self, file: str | None) -> Path:
        """Return the path of a file that the layout names."""
        return file_of(self.main, file)


def missing_keys(path: Path, keys: Collection[str]) -> list[str] | None:
    """
    Return those of *keys* that the file at *path* lacks; None where there is no such file.

    Raises ConfigError where that file cannot be parsed.
    """
    if not os.path.isfile(path):
        return None
    file = load_config_file(path)
    return [key for key in keys if not _stands(file, key)]


def _stands(file: ConfigFile, key: str) -> bool:
    try:
        return file.get(tuple(key.split("."))) is not None
    except ConfigError:
        return True  # it is there, if not readable: reading it will say why


def is_recipe_of(layout: Layout, path: Path, keys: Set[str]) -> bool:
    """Say whether the file at *path*, which has those *keys*, is a recipe of *layout*."""
    detect = layout.detect
    if detect.file is not None or path.suffix not in detect.suffixes:
        return False
    has_all = keys >= set(detect.keys) and keys.isdisjoint(detect.without)
    if not has_all or (detect.one_of and keys.isdisjoint(detect.one_of)):
        return False
    words = {*re.split(r"[^a-z]+", path.stem.lower()), path.absolute().parent.name.lower()}
    if not words.isdisjoint(detect.unless_named):
        return False
    return not detect.where or Places(path, None, layout, ParsedFiles()).holds(detect.where)


def read(layout: Layout, main: Path, *, starter: Path | None, launch: Path | None = None) -> Reading:
    """
    Return the workload that the configuration with the main file *main* describes; *starter* says what its files do not.

    *launch*: the launcher's own file, which says on how many GPUs it is trained and how they share the model. Raises ConfigError with file,
    line and value for what makes no sense, and for what memplan's own model is not true for.
    """
    return _Reader(layout, main, starter, launch).read()


class _Reader:
    """One reading of one configuration."""

    def __init__(self, layout: Layout, main: Path, starter: Path | None, launch: Path | None = None) -> None:
        self.layout = layout
        self.main = main
        self.launch = launch
        self.root = main.parent
        self.starter = starter
        self.sources: dict[tuple[str | int, ...], Source] = {}
        self.spellings: dict[str, str] = {}
        self.present: set[str] = set()
        self.files = ParsedFiles()
        self.places = Places(main, launch, layout, self.files)
        self.warnings: list[str] = []
        self.unknown: list[Unknown] = []

    def read(self) -> Reading:
        for assumption in self.layout.assumes:
            self._check(assumption)
        self._warn_of_misspellings()
        data = self._starting()
        for rule in self.layout.rules:
            self._read_rule(rule, data)
        if self.launch is not None and self.layout.launch is not None:
            self._read_launch(self.launch, self.layout.launch, data)
        entries = tuple(entry for entry in self.layout.fields if self.places.holds(entry.when))
        for entry in entries:
            self._read_field(entry, data)
        self._imply_accumulation(data)
        self._leave_out_kernels(data)
        _settle_kind(data)
        for note in self.layout.notes:
            if self.places.holds(note.when):
                said = next((self.places.of(self.main, key).file for key in note.when), self.main)
                self.warnings.append(f"{said}: {note.text}")
        paths: list[Path] = []
        others: tuple[Stage, ...] = ()
        if self.layout.stages is not None:
            stages = StageReader(self.layout.stages, self.main, self.files)
            paths = stages.paths()
            data["stages"] = [stages.read(number, path) for number, path in enumerate(paths)]
            others = tuple(stages.others(paths))
            self.sources |= stages.sources
            self.warnings += stages.warnings
        self._warn_of_duplicates()
        workload = self._validated(data)
        files = {path.stem: path for path in paths}
        present = frozenset(self.present)
        sources = {".".join(map(str, field)): source for field, source in self.sources.items()}
        return Reading(
            self.layout,
            self.main,
            workload,
            entries,
            sources,
            files,
            others,
            self.spellings,
            present,
            warnings=tuple(self.warnings),
            unknown=tuple(self.unknown),
        )

    def _starting(self) -> dict[str, Any]:
        """Return what the files do not say as data, and the model that they name. Raises ConfigError for one that nobody knows."""
        data: dict[str, Any] = {"name": self.main.stem} if self.starter is None else self._of_starter(self.starter)
        data["stands_for_a_program"] = self.layout.detect.file is None
        if self.layout.model is not None:
            data["model"] = self._named_model(self.layout.model)
        return data

    def _named_model(self, entry: ModelEntry) -> dict[str, Any]:
        """Return the fields of the model that the main file names."""
        found = self._file(self.main).get(tuple(entry.key.split(".")))
        if found is None or not isinstance(found.value, str):
            raise ConfigError(
                f"names no model: `{entry.key}` is not set",
                file=self.main,
                line=found.line if found else None,
                hint="name a folder with a config.json, or a model of the Hugging Face hub",
            )
        self.spellings[entry.key] = found.value
        name = found.value
        if entry.names:
            known = next((known for pattern, known in entry.names.items() if fnmatchcase(found.value, pattern)), None)
            if known is None:
                problem = f"`{entry.key}`: memplan does not know the sizes of {found.value}"
                raise NotDescribedError(problem, file=self.main, line=found.line)
            name = known
        try:
            model = find_model(name, folders=(self.root, Path()))
        except ConfigError as error:
            hint = "name a folder that has its config.json"
            if is_hub_name(found.value):
                hint = f"download what describes it (`hf download {found.value} config.json`), or {hint}"
            raise NotDescribedError(f"`{entry.key}`: {error.problem}", file=self.main, line=found.line, hint=hint) from error
        self.sources["model",] = Source(self.main, found.line, entry.key, found.value)
        self.warnings.append(f"{self.main}:{found.line}: the sizes of {found.value} are from {model.origin}")
        fields = model_from_config(model.config) if entry.builder == "transformers" else torchtune_model(model.config)
        if entry.is_decoder and not _is_decoder(model.config, fields):
            problem = f"`{entry.key}` is {found.value}, which is not a decoder of text alone: a plan knows nothing of what it reads besides"
            raise NotDescribedError(problem, file=self.main, line=found.line, hint="rehearse your own program (`memplan rehearse`)")
        return fields

    def _of_starter(self, starter: Path) -> dict[str, Any]:
        """Return the starter workload as data. Raises ConfigError, naming the starter, where it is not a workload."""
        data = template_data(starter)
        if not isinstance(data, dict):
            raise ConfigError("is not a workload: it has no keys and values", file=starter, hint="this is a mistake in the layout itself")
        workload_from(data, starter)
        # What the tree does itself is its target: the starter's is for planning without a tree.
        data["training"] = {key: value for key, value in data.get("training", {}).items() if key != "target_effective_batch_size"}
        data["name"] = self.root.resolve().parent.name if self.root.name == "conf" else self.root.resolve().name
        return data

    def _file(self, path: Path) -> ConfigFile:
        return self.files.of(path)

    def _imply_accumulation(self, data: dict[str, Any]) -> None:
        """Work accumulation out of the global batch where the files hold that in its place."""
        if TARGET not in self.sources or ACCUMULATION in self.sources:
            return
        training, parallelism = data["training"], data.get("parallelism", {})
        at_once = [training.get("micro_batch_size", 1), parallelism.get("devices", 1), parallelism.get("nodes", 1)]
        if all(isinstance(value, int) and value > 0 for value in [*at_once, training[TARGET[-1]]]):
            training[ACCUMULATION[-1]] = max(1, training[TARGET[-1]] // prod(at_once))
            self.sources[ACCUMULATION] = replace(self.sources[TARGET], why="rule")

    def _read_launch(self, path: Path, launch: LaunchFile, data: dict[str, Any]) -> None:
        """Take on how many GPUs of how many machines the launcher's file starts a process each."""
        processes, machines = (self._count_at(path, key) for key in (launch.num_processes, launch.num_machines))
        if processes is None:
            self.warnings.append(f"{path}: `{launch.num_processes}` is not set, and depends on the machine; planned for one GPU")
            return
        nodes = 1 if machines is None else machines.number
        if processes.number % nodes:
            problem = f"`{launch.num_processes}` is {processes.number}, which cannot be divided over {nodes} machines"
            raise ConfigError(problem, file=path, line=processes.source.line, hint="each machine has as many GPUs")
        _put(data, ("parallelism", "devices"), processes.number // nodes)
        self.sources["parallelism", "devices"] = processes.source
        if machines is not None:
            _put(data, ("parallelism", "nodes"), nodes)
            self.sources["parallelism", "nodes"] = machines.source

    def _count_at(self, path: Path, key: str) -> _Count | None:
        """Return the number at *key*, None where there is none. Raises ConfigError for what is no number of processes or machines."""
        found = self._file(path).get(tuple(key.split(".")))
        if found is None or found.value in (None, -1):
            return None
        if isinstance(found.value, bool) or not isinstance(found.value, int) or found.value < 1:
            raise ConfigError(
                f"`{key}` is {found.value!r}, which is no whole number from 1 on", file=path, line=found.line, hint="correct it"
            )
        return _Count(found.value, Source(path, found.line, key, found.value, "rule"))

    def _read_rule(self, rule: Rule, data: dict[str, Any]) -> None:
        for case in rule.cases:
            if self.places.holds(case.when):
                field = tuple(rule.field.split("."))
                asked = [key for each in rule.cases for key in each.when]
                for key in [*case.when, *asked][:1]:  # what is left where no condition holds follows from the first key too
                    place = self.places.of(self.main, key)
                    line = place.parsed.line_of(place.key) or 1
                    self.sources[field] = Source(place.file, line, ".".join(place.key), self.places.spelling(self.main, key), "rule")
                _put(data, field, case.value)
                return

    def _read_field(self, entry: FieldEntry, data: dict[str, Any]) -> None:
        path = file_of(self.main, entry.file)
        file = self._file(path)
        if entry.is_list:
            self._read_list(entry, path, data)
            return
        found = self._found(file, entry)
        if found is not None and found.value is None and entry.if_null is not None:
            raise ConfigError(f"`{entry.key}` is empty: {entry.if_null}", file=path, line=found.line, hint="give it a value")
        is_written = found is not None and found.value is not None
        if is_written:
            self.present.add(entry.key)
        else:
            if entry.if_unknown is not None:
                self.unknown.append(Unknown(entry.field, path, found.line if found else None, entry.key, entry.if_unknown))
            found = self._default(entry, found, path)
        if found is None:
            return
        if entry.counts:
            found = self._counted(entry, found, path)
        value = self._translated(entry, found, path)
        self.spellings[entry.key] = str(found.value)
        field = tuple(entry.field.split("."))
        source = Source(path, found.line, entry.key, found.value, "written" if is_written else "default")
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

    def _read_list(self, entry: FieldEntry, path: Path, data: dict[str, Any]) -> None:
        """Read a list, each element of which is translated."""
        key = entry.path
        file = self._file(path)
        length = file.length_of(key)
        if length is not None:
            found = [file.get((*key, str(number))) for number in range(length)]
        else:
            single = file.get(key)
            text = str(entry.default or "") if single is None or single.value is None else str(single.value)
            parts = [text] if is_pattern(text) else text.split(",")
            found = [Found(part.strip(), single.line if single else 1) for part in parts if part.strip()]
        values = [self._element(entry, each) for each in found if each is not None]
        if not values:
            return
        field = tuple(entry.field.split("."))
        self.sources[field] = Source(path, file.line_of(key) or 1, entry.key, values)
        ruled = _at(data, field)  # what a rule says counts beside the list
        _put(data, field, list(dict.fromkeys([*([ruled] if isinstance(ruled, str) else []), *values])))

    def _element(self, entry: FieldEntry, found: Found) -> Any:
        """Return what an element of a list means: as the table translates it, else as it is."""
        meaning = entry.meaning_of(spelled(found.value))
        return found.value if meaning is None else meaning

    def _default(self, entry: FieldEntry, found: Found | None, path: Path) -> Found | None:
        """Return the framework's default for a key that says nothing, and say that it was taken; None leaves the starter's value."""
        if entry.default is None:
            return None
        line = found.line if found else 1
        meaning = entry.meaning_of(spelled(entry.default)) if entry.values else None
        name = entry.field.removesuffix(".name").rpartition(".")[2]
        told = f" ({name} {meaning})" if meaning not in (None, spelled(entry.default)) else ""
        self.warnings.append(f"{path}: `{entry.key}` is not set; planned with the default, {spelled(entry.default)}{told}")
        return Found(entry.default, line)

    def _found(self, file: ConfigFile, entry: FieldEntry) -> Found | None:
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
        if not entry.values:
            if isinstance(found.value, bool):
                problem = f"`{entry.key}` is {found.value}, where a number or a name belongs"
                raise ConfigError(problem, file=path, line=found.line, hint="correct the value")
            return found.value
        value = entry.meaning_of(spelled(found.value))
        if value is None:
            known = ", ".join(spelling for family in entry.values for spelling in family)
            raise ConfigError(
                f"`{entry.key}` is {found.value!r}, which memplan does not know", file=path, line=found.line, hint=f"known: {known}"
            )
        return value

    def _check(self, assumption: Assumption) -> None:
        if not self.places.holds(assumption.when):
            return
        path = file_of(self.main, assumption.file)
        value = self.places.spelling(path, assumption.key)
        if assumption.is_list:
            value = next((each for each in self._elements(path, assumption.path) if not is_one_of(each, assumption.values)), "")
            if not value:
                return
        same = assumption.same_as is not None and value == self.places.spelling(path, assumption.same_as)
        if not same and not is_one_of(value, assumption.values) and not _is_at_most(value, assumption.at_most):
            verb = "has" if assumption.is_list else "is"
            place = self.places.of(path, assumption.key)
            said = f"`{'.'.join(place.key)}` {f'{verb} {value}' if value else 'is not set'}"
            line = place.parsed.line_of(place.key) if value else None
            raise NotDescribedError(f"{said}: {assumption.otherwise}", file=place.file, line=line, hint="plan it as a workload.yaml")

    def _elements(self, path: Path, key: tuple[str, ...]) -> list[str]:
        """Return the spellings of the elements of a list; none where there is no list."""
        file = self._file(path)
        return [self.places.spelling(path, ".".join((*key, str(number)))) for number in range(file.length_of(key) or 0)]

    def _warn_of_misspellings(self) -> None:
        """Warn of keys that the table does not know and that are nearly one of it that is not set: what is meant is not planned."""
        file, known = self._file(self.main), known_keys(self.layout)
        written = file.keys()
        prefixed = {(other.below, other.prefix) for other in self.layout.optional_prefixes}
        found: list[tuple[int, str]] = []
        for key in written - known:
            above, _, name = key.rpartition(".")
            missing = [other.rpartition(".")[2] for other in known - written if other.rpartition(".")[0] == above]
            near = next(iter(get_close_matches(name, missing, n=1, cutoff=MISSPELT)), None)
            if near is not None and _digits(near) == _digits(name) and (above, name.removesuffix(near)) not in prefixed:
                line = file.line_of(tuple(key.split("."))) or 1
                found.append((line, f"`{key}` in line {line} (`{near}`?)"))
        if found:
            listed = ", ".join(text for _, text in sorted(found))
            self.warnings.append(f"{self.main}: planned as if they were not there, keys that look misspelt: {listed}")

    def _warn_of_duplicates(self) -> None:
        for path, file in self.files.all.items():
            for duplicate in file.duplicate_keys():
                self.warnings.append(
                    f"{path}:{duplicate.line}: `{duplicate.key}` is set here and in line {duplicate.first_line}; one of them has no effect"
                )

    def _leave_out_kernels(self, data: dict[str, Any]) -> None:
        """Plan without kernels whose package is not here; they take less memory."""
        kernels = _at(data, ("model", "kernels"))
        if kernels is None or PathFinder.find_spec(KERNEL_PACKAGES[kernels]) is not None:
            return
        del data["model"]["kernels"]
        source = self.sources.pop(("model", "kernels"))
        package = KERNEL_PACKAGES[kernels].replace("_", "-")
        self.warnings.append(
            f"{source.file}:{source.line}: `{source.key}` is not followed, since {package} is not installed here: the step takes less "
            f"memory than planned"
        )

    def _validated(self, data: dict[str, Any]) -> Workload:
        try:
            return Workload.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            location = location_of(first)
            nearest = [source for read, source in self.sources.items() if location and read[: len(location)] == location]
            if not nearest:
                raise ConfigError(problem_of(first), file=self.main, hint="correct the values that contradict each other") from error
            source = nearest[-1]
            # Where it is no single value, several contradict each other.
            value = f"`{source.key}` is {source.value!r}: " if location in self.sources else ""
            raise ConfigError(value + problem_of(first), file=source.file, line=source.line, hint="correct the value") from error


def _digits(name: str) -> list[str]:
    """Return the digits of *name*: `load_in_4bit` is no slip for `load_in_8bit`."""
    return [character for character in name if character.isdigit()]


def _at(data: dict[str, Any], field: tuple[str, ...]) -> Any:
    """Return what stands at *field*, None where nothing does."""
    value: Any = data
    for name in field:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _is_decoder(config: ConfigJson, fields: dict[str, Any]) -> bool:
    """Say whether a model reads text alone and predicts the next token."""
    if any(name in config.values for name in ("vision_config", "audio_config", "text_config")) or config.values.get("is_encoder_decoder"):
        return False
    if config.architecture is not None:
        return config.architecture.endswith(("ForCausalLM", "LMHeadModel"))
    return fields.get("architecture") != "encoder"


def _settle_kind(data: dict[str, Any]) -> None:
    """Leave a model to transformers where the files say of it what only that knows: PEFT's adapters, quantized layers, types of weights."""
    model = data.get("model", {})
    if model.get("kind") == "torchtune" or BY_TRANSFORMERS.isdisjoint(model) or "huggingface_config" not in model:
        return
    data["model"] = {name: value for name, value in model.items() if name in HuggingFaceModel.model_fields} | {"kind": "huggingface"}


def _is_at_most(spelling: str, most: float | None) -> bool:
    """Say whether *spelling* is a number up to *most*."""
    try:
        return most is not None and float(spelling) <= most
    except ValueError:
        return False


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _put(data: dict[str, Any], field: tuple[str, ...], value: Any) -> None:
    for name in field[:-1]:
        data = data.setdefault(name, {})
    data[field[-1]] = value

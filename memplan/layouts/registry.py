"""The layouts that are there, and which of them a path is."""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from memplan.edits.config_file import load_config_file
from memplan.errors import ConfigError
from memplan.layouts.places import Places
from memplan.layouts.reader import Reading, is_recipe_of, missing_keys, read
from memplan.layouts.recognition import candidates
from memplan.layouts.schema import Layout, LayoutPart, layout_from
from memplan.layouts.sources import ParsedFiles, file_of, is_number
from memplan.layouts.templates import template_data, template_files, template_folders, templates_folder
from memplan.workload.parallelism import MODEL_PARALLEL_SIZES

BUILT_IN_WORKLOAD = "hydra-contrastive/workload.yaml"
LAYOUT_FILE = "layout.yaml"
PARTS_FOLDER = "parts"

VARIABLES = {
    "training.micro_batch_size": "micro_batch_size",
    "training.gradient_accumulation_steps": "gradient_accumulation_steps",
    "training.target_effective_batch_size": "effective_batch_size",
    "training.sequence_length": "sequence_length",
    **{f"parallelism.{name}": name for name in MODEL_PARALLEL_SIZES},
}
"""Fields of the table that are variables of the program itself."""


class Located(NamedTuple):
    """A tree or a recipe that a layout fits."""

    layout: Layout
    folder: Path
    """Where the layout stands."""
    main: Path
    """The file by which it was recognised."""
    launch: Path | None = None
    """The launcher's own file, where one was named with it."""

    @property
    def root(self) -> Path:
        """Return the folder of the configuration."""
        return self.main.parent

    @property
    def is_recipe(self) -> bool:
        """Say whether it is a single file, and no tree."""
        return self.layout.detect.file is None

    @property
    def source(self) -> str:
        """Return what a report calls it."""
        launched = f", launched with {self.launch}" if self.launch is not None else ""
        return f"{self.main if self.is_recipe else self.root} ({self.layout.name}{launched})"

    @property
    def can_be_described(self) -> bool:
        """Say whether the layout knows of a model, memplan's own or by its name; else only the program itself can be planned."""
        return self.layout.workload is not None or self.layout.model is not None

    def read(self) -> Reading:
        """Return the workload that it describes. Raises ConfigError for what makes no sense in it."""
        starter = self.layout.workload
        return read(self.layout, self.main, starter=None if starter is None else self.folder / starter, launch=self.launch)

    def launched_with(self, file: Path) -> "Located":
        """Return a copy that is launched with the launcher's own *file*. Raises ConfigError where that is none, or not for such recipes."""
        known = self.layout.launch
        if known is None:
            raise ConfigError(
                f"is {self.layout.title}, which is planned without a launcher's configuration",
                file=self.main,
                hint=f"leave it out, or plan the program: `-- accelerate launch --config_file {file} train.py`",
            )
        missing = missing_keys(file, known.keys)
        if missing is None:
            raise ConfigError("does not exist", file=file, hint="check the path")
        if missing:
            raise ConfigError(f"is not {known.title}: it lacks `{missing[0]}`", file=file, hint="name the file that the launcher is given")
        return self._replace(launch=file)

    @property
    def command(self) -> list[str] | None:
        """Return the words of the command that trains from it, where the layout knows one."""
        if self.layout.command is None or not load_config_file(self.main).keys().isdisjoint(self.layout.command_without):
            return None
        return self._words(self.layout.command)

    @property
    def command_of_several(self) -> list[str] | None:
        """Return the words of the command on several GPUs, where that is another."""
        return None if self.layout.command_of_several is None else self._words(self.layout.command_of_several)

    def _words(self, command: str) -> list[str]:
        return [word.replace("{file}", str(self.main)) for word in shlex.split(command)]

    @property
    def has_batch(self) -> bool:
        """Say whether its files hold a batch size."""
        return any(field.partition("=")[0] in ("micro_batch_size", "effective_batch_size") for field in self.fields())

    def fields(self) -> Iterator[str]:
        """Yield where the batch is written, NAME=FILE:KEY each, for the keys that are there."""
        files = ParsedFiles()
        places = Places(self.main, self.launch, self.layout, files)
        for entry in filter(lambda entry: places.holds(entry.when), self.layout.fields):
            variable, file = VARIABLES.get(entry.field), file_of(self.main, entry.file)
            least = 2 if variable in MODEL_PARALLEL_SIZES else None  # one GPU, or none, splits nothing
            if variable is not None and is_number(files.of(file), entry.key, least=least):
                yield f"{variable}={file}:{entry.key}"
        if self.layout.stages is not None and not self.layout.stages.files:
            main = files.of(self.main)
            yield from (f"{name}={self.main}:{key}" for name, key in self.layout.stages.fields.items() if is_number(main, key))

    def stage_fields(self) -> Iterator[str]:
        """Yield what each stage's file holds, NAME=STAGE:KEY each."""
        if self.layout.stages is not None and self.layout.stages.files:
            yield from (f"{name}=STAGE:{key}" for name, key in self.layout.stages.fields.items())

    def short(self) -> Iterator[str]:
        """Yield what makes a rehearsal of the command short, FILE:KEY=VALUE each, for the keys that are there."""
        file = load_config_file(self.main)
        for key, value in self.layout.short.items():
            found = file.get(tuple(key.split(".")))
            if found is not None and found.value is not None:
                yield f"{self.main}:{key}={value}"


class NearMiss(NamedTuple):
    """A tree that has some of the keys by which a layout recognises its own, and lacks others."""

    layout: Layout
    file: Path
    """The tree's main file."""
    missing: tuple[str, ...]
    """The keys that it lacks."""


def locate(path: Path, environment: Mapping[str, str] = os.environ) -> Located | None:
    """
    Return the configuration that *path* is or belongs to, or None where no layout fits.

    *path*: a tree's folder, its project's or its main file; a recipe, or a folder with one. Raises ConfigError where a folder has several
    recipes, of which one has to be named.
    """
    known = list(layouts(environment))
    for layout, template in known:
        for main in _mains(layout, path):
            if missing_keys(main, layout.detect.keys) == []:
                return Located(layout, template.parent, main)
    if os.path.isfile(path):
        return _recipe(path, known)
    found = [recipe for file in candidates(path) for recipe in [_recipe(file, known)] if recipe is not None]
    found.sort(key=lambda recipe: recipe.main.suffix == ".json")  # one of DeepSpeed is a part of a recipe, perhaps
    if len(found) > 1:
        others = ", ".join(str(recipe.main) for recipe in found[:5])
        raise ConfigError(f"has {len(found)} recipes: {others}", file=path, hint=f'name the one to plan: `source="{found[0].main}"`')
    return found[0] if found else None


def first_recipe(paths: Iterable[Path], environment: Mapping[str, str] = os.environ) -> Located | None:
    """Return the first of the files at *paths* that is a recipe of some layout; None where none is."""
    known = list(layouts(environment))
    return next((recipe for path in paths if (recipe := _recipe(path, known)) is not None), None)


def _recipe(path: Path, known: Sequence[tuple[Layout, Path]]) -> Located | None:
    """
    Return the recipe that the file at *path* is, None where none of the *known* layouts is for it.

    Where several do, a layout of the user's own goes first, then one that knows the model, then one that looks for values, then one that
    looks for more keys.
    """
    keys = _keys_of(path)
    found = [Located(layout, template.parent, path) for layout, template in known if is_recipe_of(layout, path, keys)]
    return max(found, key=_precedence, default=None)


def _precedence(located: Located) -> tuple[bool, bool, int, int]:
    detect = located.layout.detect
    is_own = located.folder.parent != templates_folder()
    return is_own, located.can_be_described, len(detect.where), len(detect.keys) + len(detect.without)


def _keys_of(path: Path) -> set[str]:
    """Return the keys of a file that may be anything; none for one that is no YAML, which recognising it will say."""
    try:
        return load_config_file(path).keys()
    except ConfigError:
        return set()


def near_misses(path: Path, environment: Mapping[str, str] = os.environ) -> Iterator[NearMiss]:
    """Yield the trees at *path* that have lost keys by which a layout would recognise them, and kept others."""
    for layout, _ in layouts(environment):
        for main in _mains(layout, path):
            missing = missing_keys(main, layout.detect.keys)
            if missing and len(missing) < len(layout.detect.keys):
                yield NearMiss(layout, main, tuple(missing))


def roots_of(path: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yield every folder that some layout would take for the tree's when *path* is given."""
    for layout, _ in layouts(environment):
        yield from (main.parent for main in _mains(layout, path))


def layouts(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[Layout, Path]]:
    """
    Yield every layout and the file that it stands in, the user's own (MEMPLAN_TEMPLATES) first.

    Raises ConfigError for a folder that is not there, and for a layout that makes no sense.
    """
    for folder in template_folders(environment):
        if not os.path.isdir(folder):
            raise ConfigError("is not a folder", file=folder, hint="MEMPLAN_TEMPLATES names folders of layouts, joined by `:`")
        for template in template_files(folder, LAYOUT_FILE):
            yield _with_parts(layout_from(template_data(template), template), template), template


def _with_parts(layout: Layout, template: Path) -> Layout:
    """Return *layout*, which stands in *template*, with what it shares with others. Raises ConfigError for a part that nobody has."""
    for name in layout.parts:
        file = templates_folder() / PARTS_FOLDER / f"{name}.yaml"
        if not os.path.isfile(file):
            raise ConfigError(f"`parts`: there is no {name}", file=template, hint="this is a mistake in the layout itself")
        part = LayoutPart.model_validate(template_data(file))
        single = ("launch", "model")
        joined: dict[str, object] = {field: getattr(layout, field) or getattr(part, field) for field in single}
        for field in LayoutPart.model_fields.keys() - single:
            joined[field] = (*getattr(layout, field), *getattr(part, field))
        layout = layout.model_copy(update=joined)
    return layout


def _mains(layout: Layout, path: Path) -> list[Path]:
    """Return where the main file of a tree would be when *path* is given; none for the layout of a recipe."""
    file = layout.detect.file
    if file is None:
        return []
    if os.path.isfile(path):
        return [path] if path.name == Path(file).name else []
    return [Path(os.path.normpath(path / root)) / file for root in layout.roots]


def describe_layouts(environment: Mapping[str, str] = os.environ) -> str:
    """Return what a path would need to have to be known, for an error."""
    found = [layout for layout, _ in layouts(environment)]
    trees = [f"{layout.detect.file} with {', '.join(layout.detect.keys)} ({layout.name})" for layout in found if layout.detect.file]
    recipes = ", ".join(layout.name for layout in found if layout.detect.file is None)
    return "; ".join([*trees, *([f"recipes of {recipes}"] if recipes else [])])

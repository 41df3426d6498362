"""
What a file is that no layout reads: the framework whose configuration it looks like, or a training that nobody here knows.

A plan of something else in its place would be worse than none, so such a file is named and refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Set
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from memplan.edits.config_file import load_config_file
from memplan.errors import ConfigError
from memplan.layouts.sources import is_number
from memplan.layouts.templates import template_data, templates_folder

FRAMEWORKS = "recognised/frameworks.yaml"

FOLDERS = (".", "conf", "config", "configs", "recipes")
"""Where projects keep their configuration, as seen from the project's folder."""

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
MOST_FILES = 200
MOST_FILES_BELOW = 100
MOST_FOLDERS = 200
MOST_DEEP = 3
MOST_BYTES = 2**20
"""A larger file is data."""

NOT_CONFIGURATIONS = ("package.json", "package-lock.json", "tsconfig.json", "pyproject.toml", "mkdocs.yml", "tokenizer.json")
NOT_OF_TRAINING = ("node_modules", "tests", "test", "docs", "templates", "build", "dist")
"""Folders of a project whose files are not what it trains from."""

MAIN_NAMES = ("config", "train", "recipe", "params", "hparams", "experiment", "workload", "ds_config")
"""What a configuration is called that should not be passed over when it cannot be parsed."""


class Recognised(NamedTuple):
    """A file that describes a training, and that no layout reads."""

    file: Path
    title: str
    """What it looks like, with an article: "an axolotl configuration"."""
    is_known: bool
    """A framework that memplan knows by name."""
    hint: str
    """What to do with it."""


def recognise(path: Path) -> Recognised | None:
    """Return what the file at *path* looks like, or None where it describes no training. Raises ConfigError where it cannot be parsed."""
    keys = _keys_of(path)
    table = template_data(templates_folder() / FRAMEWORKS)
    for framework in table["frameworks"]:
        if path.suffix not in framework.get("suffixes", SUFFIXES):
            continue
        if keys and keys >= set(framework["keys"]) and (not framework.get("any") or not keys.isdisjoint(framework["any"])):
            return Recognised(path, framework["title"], is_known=True, hint=framework["hint"].replace("FILE", str(path)))
    trained = [key for name in table["training_keys"] if (key := _trained_by(keys, name)) is not None]
    if not trained:
        return None
    found = trained[0]
    with suppress(ConfigError):  # a key that stands twice, which its program may read all the same
        file = load_config_file(path)
        found = next((key for key in trained if is_number(file, key)), found)  # another may stand for one, in a language of its program
    variable = _variable_of(found)
    hint = f'plan the program that reads it, by its command and `fields=["{variable}={path}:{found}"]`'
    return Recognised(path, f"a training configuration (it has `{found}`)", is_known=False, hint=hint)


def _variable_of(key: str) -> str:
    """Return the variable that the batch or the accumulation at *key* is."""
    if "accum" in key.rpartition(".")[2]:
        return "gradient_accumulation_steps"
    is_of_all_gpus = "global" in key or key.lower().endswith("ims_per_batch")  # detectron2's
    return "effective_batch_size" if is_of_all_gpus else "micro_batch_size"


_OF_NO_TRAINING = frozenset(
    {"valid", "validation", "val", "test", "eval", "evaluation", "inference", "infer", "predict", "prediction", "generation", "rollout"}
)
"""Words in a key that say that its batch is not trained with."""


def _trained_by(keys: Set[str], name: str) -> str | None:
    """Return the dotted key with the last part *name* that a training's batch stands at, where one does."""
    found = [key for key in keys if key.rpartition(".")[2].lower() == name]
    trained = [key for key in found if _OF_NO_TRAINING.isdisjoint(re.split(r"[._]", key.lower()))]
    return min(trained or found, key=lambda key: ("train" not in key, key.count("."), key), default=None)


def configurations_in(folder: Path) -> Iterator[Recognised]:
    """
    Yield the files of a project's *folder* that describe a training and that no layout reads, those of known frameworks first.

    Raises ConfigError for one that is called like a configuration and cannot be parsed.
    """
    found = []
    for path in candidates(folder):
        try:
            recognised = recognise(path)
        except ConfigError:
            if path.stem in MAIN_NAMES:
                raise
            continue  # not every YAML file of a project is one for Python: charts, templates
        if recognised is not None:
            found.append(recognised)
    yield from sorted(found, key=lambda each: not each.is_known)


def candidates(folder: Path) -> list[Path]:
    """Return the files of a project's *folder* that may be configurations."""
    found: list[Path] = []
    for name in FOLDERS:
        place = folder / name
        if place.is_dir():
            found += sorted(path for path in place.iterdir() if path.suffix in SUFFIXES and path.name not in NOT_CONFIGURATIONS)
    return [path for path in found[:MOST_FILES] if path.is_file() and path.stat().st_size <= MOST_BYTES]


def candidates_below(folder: Path) -> list[Path]:
    """Return a few files further below in a project's *folder* that may be configurations, as `recipes/llama/sft.yaml`; the usual first."""
    tops = [*(folder / name for name in FOLDERS[1:]), folder]
    found = dict.fromkeys(
        path for top in tops for path in _files_below(top) if path.suffix in SUFFIXES and path.name not in NOT_CONFIGURATIONS
    )
    return [path for path in islice(found, MOST_FILES_BELOW) if path.is_file() and path.stat().st_size <= MOST_BYTES]


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in *folder* and three folders deep in it; none that is hidden, nor those of an environment or of packages."""
    for path, folders, files in islice(os.walk(folder), MOST_FOLDERS):
        place = Path(path)
        is_deep = len(place.relative_to(folder).parts) == MOST_DEEP
        inner = (name for name in folders if not is_deep and name[0] not in "._" and name not in NOT_OF_TRAINING)
        folders[:] = sorted(name for name in inner if not (place / name / "pyvenv.cfg").exists())
        yield from (place / name for name in sorted(files))


def _keys_of(path: Path) -> Set[str]:
    """Return the dotted keys of every mapping in the file. Raises ConfigError where it cannot be read or parsed."""
    if path.suffix == ".json":
        try:
            return set(_flat(json.loads(path.read_bytes())))
        except ValueError:
            pass  # comments, or trailing commas: YAML takes some of them
    return load_config_file(path).keys()


def _flat(data: Any, above: str = "") -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield f"{above}{key}"
            yield from _flat(value, f"{above}{key}.")

"""Models by name: the folder or the config.json that a name is, the copy in the Hugging Face cache of this machine, or the catalogue."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from memplan.errors import ConfigError
from memplan.workload.huggingface import ConfigJson
from memplan.workload.published_models import CATALOG, cached_config, catalog_model, config_files, near_names

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class FoundModel(NamedTuple):
    """The configuration that a name stands for."""

    name: str
    """As it was asked for."""
    config: ConfigJson
    """What the model is."""
    origin: str
    """Where the configuration comes from, for a report."""
    file: Path | None
    """The config.json that was read; None for a model of the catalogue."""


def find_model(name: str, *, folders: Sequence[Path]) -> FoundModel:
    """
    Return the model that *name* means: a local folder or config.json, relative to one of *folders*, else a published model by its name.

    Published models are looked up in the Hugging Face cache of this machine first, which has the file itself. A path of another machine is
    the published model that its last part names. Raises ConfigError where nothing answers to the name.
    """
    places = [folder / Path(name).expanduser() for folder in folders]
    local = next((path for place in places for path in config_files(place)), None)
    if local is not None:
        return FoundModel(name, read_config_json(local), str(local), local)
    cached = cached_config(name)
    if cached is not None:
        return FoundModel(name, read_config_json(cached), f"the Hugging Face cache ({cached})", cached)
    entry = catalog_model(name)
    how = ""
    if entry is None and not is_hub_name(name) and not any(map(os.path.exists, places)):
        entry, how = catalog_model(Path(name).name), ", by the last part of its path: there is no such folder here"
    if entry is None:
        raise ConfigError(f"unknown model: {name!r}", hint=_suggest(name))
    return FoundModel(name, ConfigJson(entry.config, CATALOG), f"memplan's catalogue ({entry.names[0]}){how}", None)


def is_hub_name(name: str) -> bool:
    """Say whether *name* may be one of the Hugging Face hub, as most paths may not."""
    return _HUB_NAME.fullmatch(name) is not None


def read_config_json(path: Path) -> ConfigJson:
    """Return the Hugging Face config.json at *path*. Raises ConfigError for a file that is none."""
    from memplan.edits.yaml_file import YamlFile  # here, since a model of the catalogue does without it

    file = YamlFile.load(path)
    return ConfigJson(file.to_python(), path, file.line_of)


def _suggest(name: str) -> str:
    near = near_names(name)
    how = 'name its folder or its config.json (`source="FOLDER/config.json"`; in a workload file `config: FOLDER/config.json`)'
    return f"did you mean {', '.join(near)}? Else {how}" if near else how

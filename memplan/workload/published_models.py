"""Published models by their names on the Hugging Face hub: what this machine's cache has of them, and the catalogue.

The catalogue is data (`models.json`, each model with where its configuration and its number of parameters were read): what its published
config.json says, as far as sizes depend on it. It is read when it is first asked; nothing is asked of a network. Python alone is needed:
a rehearsed program asks it too (`child/skipped_weights.py`).
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

CATALOG = Path(__file__).with_name("models.json")

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".pth.tar", ".ckpt")
"""What the names of files end with that hold weights for PyTorch; other names of a model are on the Hugging Face hub, or folders."""


class CatalogModel(NamedTuple):
    """One entry of `models.json`."""

    names: tuple[str, ...]
    """Its names on the Hugging Face hub; models of the same configuration share an entry."""
    config: dict[str, Any]
    """What its config.json says, as far as sizes depend on it."""
    published: str
    """How many parameters it has, as published: a whole number, or one that is rounded ("7B")."""
    counted_class: str
    """The class of transformers whose parameters these are."""


def catalog_model(name: str) -> CatalogModel | None:
    """Return the model of the catalogue that *name* means, without regard to case; its organisation may be left out where that is clear."""
    wanted = name.lower()
    for entry in catalog_models():
        if wanted in (known.lower() for known in entry.names):
            return entry
    alike = [entry for entry in catalog_models() if wanted in (known.lower().rpartition("/")[2] for known in entry.names)]
    return alike[0] if len(alike) == 1 else None


@lru_cache(maxsize=1)
def catalog_models() -> tuple[CatalogModel, ...]:
    """Return every model of the catalogue."""
    entries = json.loads(CATALOG.read_text(encoding="utf-8"))["models"]
    return tuple(
        CatalogModel(tuple(entry["names"]), entry["config"], entry["parameters"]["published"], entry["parameters"]["of"])
        for entry in entries
    )


def cached_config(name: str) -> Path | None:
    """Return the config.json of the model *name* in the Hugging Face cache of this machine; None where it has none. Nothing is written."""
    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        main = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        main = ""
    snapshots = folder / "snapshots"
    current = [snapshots / main] if main else []
    return next((path for snapshot in [*current, *_newest_first(snapshots)] for path in config_files(snapshot)), None)


def near_names(name: str) -> list[str]:
    """Return names of the catalogue that come near to *name*, the nearest first."""
    known = {each.lower(): each for entry in catalog_models() for each in entry.names}
    short = {each.rpartition("/")[2]: full for each, full in reversed(known.items())}
    wanted = name.lower()
    near = [known[each] for each in difflib.get_close_matches(wanted, known, n=3, cutoff=0.75)]
    near += [short[each] for each in difflib.get_close_matches(wanted.rpartition("/")[2], short, n=3, cutoff=0.6)]
    return list(dict.fromkeys(near))[:4]


def config_files(path: Path) -> Iterator[Path]:
    """Yield the file that *path* is, or the config.json in the folder that it is."""
    if os.path.isfile(path) and path.suffix == ".json":
        yield path
    elif os.path.isfile(path / "config.json"):
        yield path / "config.json"


def _newest_first(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return []


def _hub_cache() -> Path:
    """Return where huggingface_hub 0.36 keeps models (its constants.py): HF_HUB_CACHE, else below HF_HOME, XDG_CACHE_HOME or ~/.cache."""
    environment = os.environ
    named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(os.path.expandvars(named)).expanduser()
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "hub"

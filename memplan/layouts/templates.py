"""The templates folder: layouts, starter workloads, and what is made from them.

Templates are YAML, since people read and copy them. Parsing YAML takes a tenth of a second that a plan does not have, so their content also
lies in `compiled.json`, with a checksum each; a template that was edited since is parsed. `make templates` writes that file and the
JSON Schemas of a workload and a layout, and a test holds them to their sources.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

COMPILED = "compiled.json"
SCHEMA = "workload.schema.json"
LAYOUT_SCHEMA = "layout.schema.json"


def templates_folder() -> Path:
    """Return memplan's own templates: inside the package once it is installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "templates"
    return installed if installed.is_dir() else package.parent / "templates"


def template_folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders to look for templates in: those of MEMPLAN_TEMPLATES first, then memplan's own."""
    own = [Path(part) for part in environment.get("MEMPLAN_TEMPLATES", "").split(os.pathsep) if part]
    return [*own, templates_folder()]


def template_files(folder: Path, name: str = "*.yaml") -> Iterator[Path]:
    """Yield the templates of that name in *folder*, one level down."""
    yield from sorted(folder.glob(f"*/{name}"))


def template_data(path: Path) -> Any:
    """
    Return the content of the template at *path* as dicts, lists and scalars.

    Raises ConfigError when it cannot be read or is not YAML.
    """
    folder = path.parents[1]
    entry = _compiled(folder).get(path.relative_to(folder).as_posix())
    if entry is not None and path.is_file() and entry["crc32"] == zlib.crc32(path.read_bytes()):
        return json.loads(json.dumps(entry["data"]))  # a copy of its own for each caller
    return _parsed(path)


@lru_cache(maxsize=8)
def _compiled(folder: Path) -> dict[str, Any]:
    path = folder / COMPILED
    compiled: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return compiled


def _parsed(path: Path) -> Any:
    from memplan.edits.yaml_file import YamlFile

    return YamlFile.load(path).to_python()


def compiled_text(folder: Path) -> str:
    """Return what `compiled.json` of *folder* has to hold."""
    entries = {
        path.relative_to(folder).as_posix(): {"crc32": zlib.crc32(path.read_bytes()), "data": _parsed(path)}
        for path in template_files(folder)
    }
    return json.dumps(entries, indent=1) + "\n"


def schema_text() -> str:
    """Return the JSON Schema of a workload file."""
    from memplan.workload.workload import Workload

    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Workload.model_json_schema()
    return json.dumps(schema, indent=2) + "\n"


def layout_schema_text() -> str:
    """Return the JSON Schema of a layout."""
    from memplan.layouts.schema import Layout

    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Layout.model_json_schema()
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    own_folder = templates_folder()
    (own_folder / COMPILED).write_text(compiled_text(own_folder), encoding="utf-8")
    (own_folder / SCHEMA).write_text(schema_text(), encoding="utf-8")
    (own_folder / LAYOUT_SCHEMA).write_text(layout_schema_text(), encoding="utf-8")

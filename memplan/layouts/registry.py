"""The layouts that are there, and which of them a path is."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from memplan.errors import ConfigError
from memplan.layouts.templates import template_data, template_files, template_folders

if TYPE_CHECKING:
    from memplan.layouts.layout import Layout, Reading

BUILT_IN_WORKLOAD = "hydra-contrastive/workload.yaml"
LAYOUT_FILE = "layout.yaml"


class Located(NamedTuple):
    """A tree that a layout fits."""

    layout: "Layout"
    folder: Path
    """Where the layout stands."""
    root: Path
    """Where the tree stands."""

    def read(self) -> "Reading":
        """Return the workload that the tree describes. Raises ConfigError for what makes no sense in it."""
        from memplan.layouts.layout import read

        return read(self.layout, self.root, starter=self.folder / self.layout.workload)


def locate(path: Path, environment: Mapping[str, str] = os.environ) -> "Located | None":
    """Return the tree that *path* (its folder, the project's, or the tree's main file) belongs to, or None where no layout fits."""
    for template, data in _layout_templates(environment):
        for root in _roots(data, path):
            if (root / data["detect"]["file"]).is_file():
                located = _fitting(template, data, root)
                if located is not None:
                    return located
    return None


def roots_of(path: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yield every folder that some layout would take for the tree's when *path* is given."""
    for _, data in _layout_templates(environment):
        yield from _roots(data, path)


def main_files(path: Path, environment: Mapping[str, str] = os.environ) -> Iterator[tuple[Path, list[str]]]:
    """Yield every file that some layout would take for its tree's main one, with the keys that it would have to have."""
    for _, data in _layout_templates(environment):
        for root in _roots(data, path):
            if (root / data["detect"]["file"]).is_file():
                yield root / data["detect"]["file"], data["detect"].get("keys", [])


def _layout_templates(environment: Mapping[str, str]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for folder in template_folders(environment):
        for template in template_files(folder, LAYOUT_FILE):
            data = template_data(template)
            if not (isinstance(data, dict) and isinstance(data.get("detect"), dict) and isinstance(data["detect"].get("file"), str)):
                raise ConfigError("does not say `detect.file`: how its trees are recognised", file=template)
            yield template, data


def _roots(data: dict[str, Any], path: Path) -> list[Path]:
    if path.is_file():
        return [path.parent] if path.name == Path(data["detect"]["file"]).name else []
    return [Path(os.path.normpath(path / root)) for root in data.get("roots", ["."])]


def _fitting(template: Path, data: dict[str, Any], root: Path) -> "Located | None":
    """Return the tree at *root* when it has the keys that the layout at *template* asks for."""
    from memplan.layouts.layout import layout_from, matches

    layout = layout_from(data, template)
    return Located(layout, template.parent, root) if matches(layout, root) else None


def describe_layouts(environment: Mapping[str, str] = os.environ) -> str:
    """Return what a path would need to have to be known, for an error."""
    return "; ".join(
        f"{data['detect']['file']} with {', '.join(data['detect'].get('keys', []))} ({data.get('name')})"
        for _, data in _layout_templates(environment)
    )

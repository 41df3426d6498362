"""The layouts that are there, and which of them a path is."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from memplan.errors import ConfigError
from memplan.layouts.reader import Reading, missing_keys, read
from memplan.layouts.schema import Layout, layout_from
from memplan.layouts.templates import template_data, template_files, template_folders

BUILT_IN_WORKLOAD = "hydra-contrastive/workload.yaml"
LAYOUT_FILE = "layout.yaml"


class Located(NamedTuple):
    """A tree that a layout fits."""

    layout: Layout
    folder: Path
    """Where the layout stands."""
    root: Path
    """Where the tree stands."""

    def read(self) -> Reading:
        """Return the workload that the tree describes. Raises ConfigError for what makes no sense in it."""
        return read(self.layout, self.root, starter=self.folder / self.layout.workload)


class NearMiss(NamedTuple):
    """A tree that has some of the keys by which a layout recognises its own, and lacks others."""

    layout: Layout
    file: Path
    """The tree's main file."""
    missing: tuple[str, ...]
    """The keys that it lacks."""


def locate(path: Path, environment: Mapping[str, str] = os.environ) -> Located | None:
    """Return the tree that *path* (its folder, the project's, or the tree's main file) belongs to, or None where no layout fits."""
    for layout, template in layouts(environment):
        for root in _roots(layout, path):
            if missing_keys(layout, root) == []:
                return Located(layout, template.parent, root)
    return None


def near_misses(path: Path, environment: Mapping[str, str] = os.environ) -> Iterator[NearMiss]:
    """Yield the trees at *path* that have lost keys by which a layout would recognise them, and kept others."""
    for layout, _ in layouts(environment):
        for root in _roots(layout, path):
            missing = missing_keys(layout, root)
            if missing and len(missing) < len(layout.detect.keys):
                yield NearMiss(layout, root / layout.detect.file, tuple(missing))


def roots_of(path: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yield every folder that some layout would take for the tree's when *path* is given."""
    for layout, _ in layouts(environment):
        yield from _roots(layout, path)


def layouts(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[Layout, Path]]:
    """
    Yield every layout and the file that it stands in, the user's own (MEMPLAN_TEMPLATES) first.

    Raises ConfigError for a folder that is not there, and for a layout that makes no sense.
    """
    for folder in template_folders(environment):
        if not folder.is_dir():
            raise ConfigError("is not a folder", file=folder, hint="MEMPLAN_TEMPLATES names folders of layouts, joined by `:`")
        for template in template_files(folder, LAYOUT_FILE):
            yield layout_from(template_data(template), template), template


def _roots(layout: Layout, path: Path) -> list[Path]:
    if path.is_file():
        return [path.parent] if path.name == Path(layout.detect.file).name else []
    return [Path(os.path.normpath(path / root)) for root in layout.roots]


def describe_layouts(environment: Mapping[str, str] = os.environ) -> str:
    """Return what a path would need to have to be known, for an error."""
    return "; ".join(f"{layout.detect.file} with {', '.join(layout.detect.keys)} ({layout.name})" for layout, _ in layouts(environment))

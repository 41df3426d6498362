"""Reading a curriculum: the files of its stages, the one that training starts with first. A recipe is the only stage of its training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memplan.edits.config_file import ConfigFile
from memplan.edits.edit import Found
from memplan.errors import ConfigError, reason_of
from memplan.layouts.schema import FirstStage, StageFiles
from memplan.layouts.sources import ParsedFiles, Source
from memplan.workload.stage import Stage
from memplan.workload.workload_file import problem_of

PREFIXES = ("", "/", "override ", "override /")
"""How a group may stand in Hydra's defaults list."""


class StageReader:
    """One reading of the stages of one configuration."""

    def __init__(self, stages: StageFiles, main: Path, files: ParsedFiles) -> None:
        self.stages = stages
        self.main = main
        self.root = main.parent
        self.folder = self.root
        """Where the stages are."""
        self.files = files
        self.sources: dict[tuple[str | int, ...], Source] = {}
        self.warnings: list[str] = []

    def paths(self) -> list[Path]:
        """Return the files, that of the stage that training starts with first. Raises ConfigError where none is there."""
        if not self.stages.files:
            return [self.main]
        paths = self._stages()
        first = self._first_stage(self.stages.first) if self.stages.first is not None else None
        if first is not None:
            paths = [first, *(path for path in paths if path != first)]
        if not paths:
            named = " or ".join((Path(folder) / pattern).as_posix() for folder in self.stages.folders for pattern in self.stages.files)
            raise ConfigError(f"has no stages: no file is named like {named}", file=self.root, hint="name the folder of the configuration")
        return paths

    def _stages(self) -> list[Path]:
        """Return the files of the first folder and pattern that have some."""
        for folder in self.stages.folders:
            for pattern in self.stages.files:
                self.folder = self.root / folder
                paths = self._matching(pattern)
                if paths:
                    return paths
        self.folder = self.root / self.stages.folders[0]
        return []

    def _matching(self, pattern: str) -> list[Path]:
        """Return the files of that pattern. Raises ConfigError for a folder that cannot be listed."""
        folder = self.folder / Path(pattern).parent
        try:
            if os.path.isdir(folder):
                next(folder.iterdir(), None)  # globbing passes over a folder that it may not list
            return sorted(self.folder.glob(pattern))
        except OSError as error:
            raise ConfigError(f"cannot be listed: {reason_of(error)}", file=folder, hint="check its permissions") from error

    def _first_stage(self, first: FirstStage) -> Path | None:
        """Return the file of the stage that training starts with, as the defaults list names it; None where it names none."""
        path = self.root / first.file
        file = self.files.of(path)
        for number in range(file.length_of(("defaults",)) or 0):
            for prefix in PREFIXES:
                found = self._choice(file, ("defaults", str(number), prefix + first.group))
                if found is None or not isinstance(found.value, (str, int)):
                    continue
                stage = self.folder / first.files.replace("{}", str(found.value))
                if os.path.isfile(stage):
                    return stage
                self.warnings.append(
                    f"{path}:{found.line}: `{first.group}: {found.value}` names the stage that training starts with, and "
                    f"{stage.relative_to(self.root)} does not exist"
                )
        return None

    def _choice(self, file: ConfigFile, key: tuple[str, ...]) -> Found | None:
        """Return the choice at *key* of a defaults list; None where nothing, or a list of choices, stands there."""
        try:
            return file.get(key)
        except ConfigError:
            return None

    def read(self, number: int, path: Path) -> dict[str, Any]:
        """Return the values of the stage in *path*. Raises ConfigError for one that is missing, or that is no number."""
        values: dict[str, Any] = {"name": path.stem}
        for field_name, key in self.stages.fields.items():
            found = self.files.of(path).get(tuple(key.split(".")))
            if found is None or found.value is None:
                raise ConfigError(f"has no value for `{key}`", file=path, hint=f"add a line `{key}: 8`")
            if isinstance(found.value, bool):
                raise ConfigError(f"`{key}` is {found.value}, where a number belongs", file=path, line=found.line, hint="correct the value")
            self.sources["stages", number, field_name] = Source(path, found.line, key, found.value)
            values[field_name] = found.value
        return values

    def others(self, planned: list[Path]) -> Iterator[Stage]:
        """Yield the files with a stage's keys that are no stages, where their values make sense."""
        for path in self._matching(self.stages.others) if self.stages.others else []:
            if path in planned:
                continue
            found = {name: self.files.of(path).get(tuple(key.split("."))) for name, key in self.stages.fields.items()}
            if all(value is not None for value in found.values()):
                values = {name: value.value for name, value in found.items() if value is not None}
                try:
                    yield Stage.model_validate({"name": path.stem} | values)
                except ValidationError as error:
                    self.warnings.append(f"{path}: left alone: {problem_of(error.errors()[0])}")

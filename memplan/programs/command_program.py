"""
A command as a program: the user's whole training, with variables in its words, in keys of its files and in its environment.

    train.py 32 -> train.py {micro_batch_size}               a word of the command
    micro_batch_size=conf/config.yaml:data.batch_size        a key of a file
    micro_batch_size=BATCH_SIZE                              a variable of the environment
    n_negatives=STAGE:data.n_negatives                       a key of each stage's file

Another value is tried without touching a file: the program finds changed copies where it opens them (`overlay.py`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from memplan.description import Description
from memplan.errors import UsageError
from memplan.programs.user_program import PLANNED, UserProgram
from memplan.workload.parallelism import MODEL_PARALLEL_SIZES
from memplan.workload.stage import Stage

KNOWN = frozenset({*PLANNED, "sequence_length", "n_positives", "n_negatives", *MODEL_PARALLEL_SIZES})
"""Names of variables that need no explanation."""

PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
"""A variable in a word of a command; `${name}` is Hydra's own."""


STAGE = "STAGE"
"""What stands for the file of each stage where a variable's place is typed."""

STAGE_VARIABLES = ("n_positives", "n_negatives")
"""The variables that each stage has for itself."""

STAGE_WORDS = frozenset({"stage", "stage_file"})
"""In the words of a command: the name of the stage that is run, and the path of its file."""


class CommandStage(Stage):
    """A stage with a file of its own."""

    file: Path
    """The file."""


class Place(Description):
    """Where a variable is written, outside the command's words."""

    variable: str = ""
    """Its name; none where a text stands there in a rehearsal alone."""

    file: Path | None = None
    """A file of the user's; None: the environment, or each stage's own."""

    is_of_stage: bool = False
    """The file is that of each stage."""

    key: str = ""
    """The key in the file, dotted; or the name of the environment's variable."""

    text: str | None = None
    """What is written there in a rehearsal alone, whatever is planned; None: the variable's value."""

    @property
    def is_of_environment(self) -> bool:
        """Say whether it is a variable of the environment."""
        return self.file is None and not self.is_of_stage

    def files(self, stages: Iterable[CommandStage]) -> list[tuple[CommandStage | None, Path]]:
        """Return the files that it is in, each with the stage whose file it is: one of *stages*, or None for a file of all."""
        if self.is_of_stage:
            return [(stage, stage.file) for stage in stages]
        return [] if self.file is None else [(None, self.file)]


class CommandProgram(UserProgram):
    """A command that trains."""

    kind: Literal["command"] = "command"
    """Which kind of program."""

    command: tuple[str, ...]
    """Its words, with `{micro_batch_size}` where a variable is."""

    places: tuple[Place, ...] = ()
    """Where else variables are written."""

    shortened: tuple[Place, ...] = ()
    """What makes a rehearsal short: other values, for no more than that."""

    stages: tuple[CommandStage, ...] = ()
    """Its stages, in order: the command is run for each."""

    @property
    def variables(self) -> frozenset[str]:
        """Return the names of all variables that it has; what a stage is called is none."""
        in_words = {name for word in self.command for name in PLACEHOLDER.findall(word)}
        return frozenset({*(in_words - STAGE_WORDS if self.stages else in_words), *(place.variable for place in self.places)})

    @property
    def stage_variables(self) -> frozenset[str]:
        """Return the names of the variables that are written in the files of its stages."""
        return frozenset(place.variable for place in self.places if place.is_of_stage)

    def text_of(self, name: str) -> str:
        """Return the value of the variable *name*, as it is written; its name in braces where each of several stages has its own."""
        if name not in self.stage_variables and not (self.stages and name in STAGE_WORDS):
            return super().text_of(name)
        return self.text_in(self.stages[0], name) if len(self.stages) == 1 else f"{{{name}}}"

    def text_in(self, stage: CommandStage | None, name: str) -> str:
        """Return the value of the variable *name* in *stage*, as it is written; None: in all alike."""
        if stage is None:
            return self.text_of(name)
        return str({"stage": stage.name, "stage_file": stage.file}.get(name) or getattr(stage, name))

    def with_stages(self, files: Iterable[Path]) -> CommandProgram:
        """
        Return a copy with a stage for each of *files*, which is named by it.

        Raises UsageError for two of one name, and where nothing of the command says which of them is run: then only one of them would be
        rehearsed.
        """
        stages: dict[str, CommandStage] = {}
        for file in files:
            if file.stem in stages:
                raise UsageError(
                    f"two stages are called {file.stem}: {stages[file.stem].file} and {file}",
                    hint="a stage is named by its file: rename one",
                )
            stages[file.stem] = CommandStage(name=file.stem, file=file)
        in_words = {name for word in self.command for name in PLACEHOLDER.findall(word)}
        has_keys = any(place.is_of_stage for place in (*self.places, *self.shortened))
        if stages and not in_words & STAGE_WORDS and (len(stages) > 1 or not has_keys):
            raise UsageError(
                "nothing differs from stage to stage: the command is the same for all, and would run one of them",
                hint="write `{stage}` (the file's name) or `{stage_file}` (its path) where the command says which one is run",
            )
        return self.model_copy(update={"stages": tuple(stages.values())})

    @property
    def words(self) -> list[str]:
        """Return the command with its values, those of the environment in front."""
        words = [PLACEHOLDER.sub(lambda found: self.text_of(found[1]), word) for word in self.command]
        return [*(f"{place.key}={self.text_of(place.variable)}" for place in self.places if place.is_of_environment), *words]

    @property
    def words_of_rehearsal(self) -> list[str]:
        """Return the command as it is rehearsed."""
        return [*(f"{place.key}={place.text}" for place in self.shortened if place.is_of_environment), *self.words]

    @property
    def typed(self) -> str:
        """Return the command with its values, as it is typed at a prompt."""
        return shlex.join(self.words)

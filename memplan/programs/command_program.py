"""
A command as a program: the user's whole training, with variables in its words, in keys of its files and in its environment.

    train.py 32 -> train.py {micro_batch_size}               a word of the command
    micro_batch_size=conf/config.yaml:data.batch_size        a key of a file
    micro_batch_size=BATCH_SIZE                              a variable of the environment

Another value is tried without touching a file: the program finds changed copies where it opens them (`overlay.py`).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Literal

from memplan.description import Description
from memplan.programs.user_program import PLANNED, UserProgram

KNOWN = frozenset({*PLANNED, "sequence_length", "n_positives", "n_negatives"})
"""Names of variables that need no explanation."""

PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
"""A variable in a word of a command; `${name}` is Hydra's own."""


class Place(Description):
    """Where a variable is written, outside the command's words."""

    variable: str = ""
    """Its name; none where a text stands there in a rehearsal alone."""

    file: Path | None = None
    """A file of the user's; None: the environment."""

    key: str = ""
    """The key in the file, dotted; or the name of the environment's variable."""

    text: str | None = None
    """What is written there in a rehearsal alone, whatever is planned; None: the variable's value."""


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

    @property
    def variables(self) -> frozenset[str]:
        """Return the names of all variables that it has."""
        in_words = (name for word in self.command for name in PLACEHOLDER.findall(word))
        return frozenset({*in_words, *(place.variable for place in self.places)})

    @property
    def words(self) -> list[str]:
        """Return the command with its values, those of the environment in front."""
        values = {name: self.text_of(name) for name in self.variables}
        words = [PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in self.command]
        return [*(f"{place.key}={values[place.variable]}" for place in self.places if place.file is None), *words]

    @property
    def words_of_rehearsal(self) -> list[str]:
        """Return the command as it is rehearsed."""
        return [*(f"{place.key}={place.text}" for place in self.shortened if place.file is None), *self.words]

    @property
    def typed(self) -> str:
        """Return the command with its values, as it is typed at a prompt."""
        return shlex.join(self.words)

"""Where a variable is written, as people type it: micro_batch_size=conf/config.yaml:data.batch_size."""

from __future__ import annotations

import re
from pathlib import Path

from memplan.errors import UsageError
from memplan.programs.command_program import KNOWN, STAGE, STAGE_VARIABLES, Place
from memplan.programs.user_program import PLANNED, did_you_mean

_NAME = re.compile(r"[A-Za-z_][\w/-]*(\.[\w/-]+)*")
"""Of a variable of the environment, or of a key, dotted where it stands below others; a key may have dashes and slashes."""
_FIELD = "micro_batch_size=conf/config.yaml:data.batch_size, or micro_batch_size=BATCH_SIZE for a variable of the environment"
_SHORT = "conf/config.yaml:trainer.limit_val_batches=0, or WANDB_MODE=offline for a variable of the environment"


def read_place(text: str) -> Place:
    """Return where "NAME=FILE:KEY" or "NAME=VARIABLE" says that a variable is written. Raises UsageError for another text."""
    name, _, where = text.partition("=")
    place = _written_at(where)
    if place is None or not name.isidentifier():
        problem = "does not say where a variable is written: it has neither FILE:KEY nor the name of a variable"
        raise UsageError(f"{text!r} {problem}", hint=f"write it as {_FIELD}")
    if name not in KNOWN and did_you_mean(name, KNOWN):
        raise UsageError(f"{text!r} names no variable{did_you_mean(name, KNOWN)}", hint=f"variables are {', '.join(sorted(KNOWN))}")
    if place.is_of_stage and name not in STAGE_VARIABLES:
        raise _not_of_a_stage(text, name)
    return place.model_copy(update={"variable": name})


def _not_of_a_stage(text: str, name: str) -> UsageError:
    """Return the error for a variable that no stage can have for itself."""
    if name in PLANNED:
        return UsageError(
            f"{text!r}: {name} is one value for all stages, and a plan of one for each is not supported",
            hint="name the key of a file that all stages read, or plan each stage with its own command",
        )
    return UsageError(
        f"{text!r}: only {' and '.join(STAGE_VARIABLES)} can be variables of a stage",
        hint="leave the field out: each stage is run with the other values of its file as they are",
    )


def read_short(text: str) -> Place:
    """Return what "FILE:KEY=VALUE" or "VARIABLE=VALUE" changes for rehearsals. Raises UsageError for another text."""
    where, equals, value = text.partition("=")
    place = _written_at(where)
    if place is None or not equals:
        raise UsageError(f"{text!r} does not say what makes a rehearsal short", hint=f"write it as {_SHORT}")
    return place.model_copy(update={"text": value})


def _written_at(where: str) -> Place | None:
    """
    Return the place that *where* says, FILE:KEY or a name; None where it is neither.

    A name is a variable of the environment, or a key of a file that the command names (`command_line.py` looks).
    """
    file, colon, key = where.rpartition(":")
    if not colon:
        return Place(key=where) if _NAME.fullmatch(where) and not Path(where).exists() else None
    if not file or not all(key.split(".")):
        return None
    return Place(is_of_stage=True, key=key) if file == STAGE else Place(file=Path(file), key=key)

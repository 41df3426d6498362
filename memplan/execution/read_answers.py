"""Answers to reads of device values, remembered beside the program: what a user said once for a line holds until the line changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from memplan.errors import UsageError
from memplan.execution.rehearsal import DeviceRead
from memplan.traces.read_basis import USERS

REMEMBERED = Path(".memplan") / "reads.json"
"""Where answers are kept, below the folder of the program."""


class Answers(NamedTuple):
    """What reads get, by FILE.py:LINE."""

    given: dict[str, str]
    """The answers of this call."""
    remembered: dict[str, tuple[str, str]]
    """Those of earlier calls, each with the line that it was given for."""

    def request(self) -> dict[str, tuple[str, str | None]]:
        """Return answer and line (None: any) by place, as the recorder takes them: those of this call first."""
        given: dict[str, tuple[str, str | None]] = {place: (answer, None) for place, answer in self.given.items()}
        return given | {place: kept for place, kept in self.remembered.items() if place not in given}


def read_answers(texts: Iterable[str], folder: Path) -> Answers:
    """Return the answers that *texts* ("FILE.py:LINE=true") say, and those remembered in *folder*. Raises UsageError for bad ones."""
    given: dict[str, str] = {}
    for text in texts:
        place, _, answer = text.partition("=")
        if not re.fullmatch(r".+\.py:[0-9]+", place) or not _is_answer(answer):
            raise UsageError(
                f"{text!r} does not say FILE.py:LINE=ANSWER",
                hint="an answer is true, false, a number (3, 0.5), or for a count of nonzero elements a share of them (1/8)",
            )
        given[place] = answer
    return Answers(given, _load(folder / REMEMBERED))


def _is_answer(text: str) -> bool:
    if text in ("true", "false"):
        return True
    try:
        return bool(re.fullmatch(r"-?[0-9]+(\.[0-9]*)?|[0-9]+/[0-9]+", text)) and Fraction(text) is not None
    except ZeroDivisionError:
        return False


def _load(path: Path) -> dict[str, tuple[str, str]]:
    if not path.exists():
        return {}
    try:
        kept: Mapping[str, Mapping[str, str]] = json.loads(path.read_text(encoding="utf-8"))
        return {place: (entry["answer"], entry["line"]) for place, entry in kept.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not what memplan wrote: {error!r}", hint="delete it, and give your answers again") from error


def _is_same(place: str, other: str) -> bool:
    """Say whether two spellings, as `train.py:3` and `tool/train.py:3`, may be of one line."""
    return f"/{place}".endswith(f"/{other}") or f"/{other}".endswith(f"/{place}")


def remember(answers: Answers, reads: Iterable[DeviceRead], folder: Path) -> list[str]:
    """Keep the given answers that were used, each with its line, in *folder*; return those that no read asked for."""
    lines = {read.reason.removeprefix(USERS): read.given_for for read in reads if read.basis == "answer"}
    used = {place: text for place in answers.given if (text := lines.get(place)) is not None}
    if used:
        path = folder / REMEMBERED
        earlier = {place: kept for place, kept in answers.remembered.items() if not any(_is_same(place, new) for new in used)}
        kept = earlier | {place: (answers.given[place], text) for place, text in used.items()}
        path.parent.mkdir(exist_ok=True)
        listing = {place: {"answer": answer, "line": line} for place, (answer, line) in sorted(kept.items())}
        path.write_text(json.dumps(listing, indent=2) + "\n", encoding="utf-8")
    return [place for place in answers.given if place not in lines]

"""
Configurations of real projects: each is planned, or named with what to do; the table in docs/frameworks.md says how many.

`python -m tests.layouts.test_corpus` writes the table anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from memplan.api.configuration import read_configuration
from memplan.edits.apply import prepare
from memplan.errors import ConfigError, EditRefusedError
from memplan.layouts.recognition import recognise
from memplan.layouts.registry import locate
from memplan.layouts.writer import edits_for
from tests.conftest import SHARED, skip_without

CORPUS = SHARED / "real-configs"
DOCUMENT = Path(__file__).parents[2] / "docs" / "frameworks.md"
BEGIN, END = "<!-- corpus -->\n", "<!-- end of corpus -->\n"
OUTCOMES = ("planned", "through its command", "named as a part", "refused", "no training", "unknown")


def files() -> list[Path]:
    return sorted(path for path in CORPUS.rglob("*") if path.suffix in (".yaml", ".yml", ".json") and path.is_file())


@cache
def outcome_of(path: Path) -> tuple[str, ConfigError | None]:
    """Return what memplan makes of the file, and what it says where it does not plan it."""
    try:
        read_configuration(path)
    except ConfigError as error:
        return _refusal(path, error), error
    return "planned", None


def _refusal(path: Path, error: ConfigError) -> str:
    if error.problem.startswith(("is not valid YAML", "is not valid JSON")) or isinstance(error, EditRefusedError):
        return "refused"
    located = locate(path)
    if located is not None and located.can_be_described:
        return "refused"
    if located is not None and located.has_batch:
        return "through its command"
    found = recognise(path)
    if found is None:
        return "no training"
    return "named as a part" if found.is_known else "unknown"


def table() -> str:
    """Return the table of the corpus, a row for each project."""
    counts: dict[str, Counter[str]] = {}
    for path in files():
        project = path.relative_to(CORPUS).parts[0]
        counts.setdefault(project, Counter())[outcome_of(path)[0]] += 1
    counts["**all**"] = sum(counts.values(), Counter[str]())
    return "".join(_rows(counts))


def _rows(counts: dict[str, Counter[str]]) -> Iterator[str]:
    yield f"| project | files | {' | '.join(OUTCOMES)} |\n"
    yield "|---" * (len(OUTCOMES) + 2) + "|\n"
    for project, found in counts.items():
        yield f"| {project} | {found.total()} | {' | '.join(str(found[outcome] or '') for outcome in OUTCOMES)} |\n"


@pytest.fixture(autouse=True)
def _corpus() -> None:
    skip_without(CORPUS)


def test_the_table_in_the_docs_is_that_of_the_corpus() -> None:
    """After a change: `python -m tests.layouts.test_corpus`."""
    assert DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0] == table()


def test_every_refusal_says_what_to_do_next() -> None:
    """And none that a file of another framework lacks a field of memplan's own."""
    for path in files():
        _, error = outcome_of(path)
        if error is not None:
            assert error.hint, path
            assert "`model`: is missing" not in error.problem, path


def test_no_key_of_a_real_recipe_is_taken_for_a_slip() -> None:
    """Frameworks have many keys that memplan's tables do not know, and that are like others."""
    notes = [note for path in files() if outcome_of(path)[0] == "planned" for note in read_configuration(path).notes]

    assert notes
    assert not [note for note in notes if "look misspelt" in note]


def test_a_plan_changes_exactly_its_values_in_real_files() -> None:
    """Every recipe that is read: the batch changes in place, and every other byte stays."""
    planned = 0
    for path in files():
        if outcome_of(path)[0] != "planned":
            continue
        configuration = read_configuration(path)
        training = configuration.workload.training
        changed = configuration.workload.with_training(micro_batch_size=training.micro_batch_size + 3)
        assert configuration.reading is not None
        for change in prepare(edits_for(configuration.reading, changed)):
            before, after = change.before.splitlines(keepends=True), change.after.splitlines(keepends=True)
            assert len(before) == len(after)
            assert sum(old != new for old, new in zip(before, after, strict=True)) == len(change.edits)
            planned += 1
    assert planned >= 4


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(text.partition(BEGIN)[0] + BEGIN + table() + END + text.partition(END)[2], encoding="utf-8")

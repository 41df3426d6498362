"""
Twenty thousand files of all frameworks, generated and damaged: each is read, or refused with what to do, and none is harmed.

Where a file can be edited, exactly the intended values change, as parsers say that are not ours (PyYAML and Python's own for JSON), and an
undo brings every byte back. A seed names each file: `pytest tests/layouts/test_mutations.py -k "[7]" -m heavy`.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from memplan.api.configuration import read_configuration
from memplan.edits.apply import apply, prepare, undo
from memplan.edits.edit import Edit
from memplan.errors import MemplanError
from memplan.layouts.registry import locate
from memplan.layouts.writer import edits_for
from tests.edits.test_properties import flat
from tests.layouts.recipe_texts import mutated, recipes
from tests.layouts.test_corpus import CORPUS, files

NUM_SHARDS = 20
FILES_OF_A_SHARD = 1000
SECONDS = 20
"""For one file: what takes longer hangs."""


class Shard:
    """The files of one seed, and what became of them."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chosen = random.Random(seed)
        self.folder = folder
        self.outcomes: Counter[str] = Counter()

    def files(self, number: int) -> Iterator[Path]:
        """Write that many files, each with others of its kind beside it, as they would stand in a project."""
        seeds = [(f"{path.parent.name}-{path.name}", path.read_bytes()) for path in files()] if CORPUS.is_dir() else []
        while number:
            for name, data in [*recipes(self.chosen), *seeds][:number]:
                number -= 1
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir()
                path = self.folder / name
                path.write_bytes(mutated(data, self.chosen))
                yield path


@contextmanager
def no_longer_than(seconds: int, path: Path) -> Iterator[None]:
    """Fail where reading *path* hangs."""

    def hangs(*_: object) -> None:
        pytest.fail(f"hangs: {path.read_bytes()!r}")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def edits_of(path: Path) -> list[Edit]:
    """Return the edits of a plan with another batch. Raises MemplanError for a file that is refused."""
    located = locate(path)
    if located is None or located.can_be_described:
        configuration = read_configuration(path)
        if configuration.reading is None:
            return []
        workload = configuration.workload
        return edits_for(configuration.reading, workload.with_training(micro_batch_size=workload.training.micro_batch_size + 3))
    found = [field.partition("=")[2].rpartition(":") for field in located.fields()]
    return [Edit(Path(file), tuple(key.split(".")), 77) for file, _, key in found]


def by_another(path: Path) -> dict[tuple[str, ...], Any] | None:
    """Return what another parser reads, by path; None where it cannot."""
    try:
        data = path.read_bytes()
        return dict(flat(json.loads(data.decode("utf-8-sig")) if path.suffix == ".json" else yaml.safe_load(data)))
    except (ValueError, yaml.YAMLError, RecursionError):
        return None


def check(path: Path, outcomes: Counter[str]) -> None:
    """Read the file, edit it as a plan would, and undo that."""
    before = path.read_bytes()
    try:
        changes = prepare(edits_of(path))
    except MemplanError as refusal:
        outcomes["refused" if refusal.message and refusal.hint else f"refused without a hint: {refusal}"] += 1
        changes = []
    else:
        outcomes["edited" if changes else "nothing to change"] += 1
    assert path.read_bytes() == before
    if not changes:
        return
    read = by_another(path)
    apply(changes, root=path.parent, now=datetime(2026, 1, 1, tzinfo=timezone.utc))
    if read is not None:
        written = by_another(path)
        assert written is not None, before
        wanted = {edit.key: edit.value for change in changes for edit in change.edits}
        changed = {key for key in read.keys() | written.keys() if read.get(key) != written.get(key)}
        assert changed <= wanted.keys(), before
        assert {key: int(written[key].strip("'")) for key in changed} == {key: wanted[key] for key in changed}, before
        outcomes["compared"] += 1
    undo(path.parent)
    assert path.read_bytes() == before


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(NUM_SHARDS))
def test_no_file_of_any_framework_is_harmed(seed: int, tmp_path: Path) -> None:
    """Read or refused with a hint, in time, without a traceback."""
    shard = Shard(seed, tmp_path / "project")
    for path in shard.files(FILES_OF_A_SHARD):
        with no_longer_than(SECONDS, path):
            check(path, shard.outcomes)

    assert set(shard.outcomes) == {"refused", "nothing to change", "edited", "compared"}
    assert shard.outcomes["compared"] > FILES_OF_A_SHARD / 10


def test_a_recipe_of_every_framework_is_read_or_refused(tmp_path: Path) -> None:
    """One for each table of memplan's, as it is and damaged."""
    shard = Shard(0, tmp_path / "project")
    for path in shard.files(80):
        with no_longer_than(SECONDS, path):
            check(path, shard.outcomes)

    assert shard.outcomes["compared"]
    assert set(shard.outcomes) <= {"refused", "nothing to change", "edited", "compared"}


def test_generated_recipes_are_recognised(tmp_path: Path) -> None:
    """As those of the table that they were generated from, or of one that is more exact."""
    found = set()
    for name, data in recipes(random.Random(1)):
        path = tmp_path / name
        path.write_bytes(data)
        located = locate(path)
        found |= {located.layout.name} if located is not None else set()

    assert len(found) > 20

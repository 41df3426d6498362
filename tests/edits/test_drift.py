"""What has been changed of the values that applied plans wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.edits.apply import apply, prepare, undo
from memplan.edits.drift import drift_in
from memplan.edits.edit import Edit, EditValue
from memplan.errors import UsageError
from tests.edits.conftest import moment


def write(folder: Path, minutes: int, **values: EditValue) -> None:
    """Apply values to a.yaml, at that time."""
    apply(prepare([Edit(folder / "a.yaml", (key,), value) for key, value in values.items()]), root=folder, now=moment(minutes))


def test_the_last_apply_of_a_key_counts_and_an_undone_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("batch: 1  # here\nsteps: 1\n")
    write(tmp_path, 0, batch=2, steps=3)
    write(tmp_path, 1, batch=4)
    assert drift_in(tmp_path) == (2, ())

    file.write_text("batch: 2\nsteps: 3\n")
    [drift] = drift_in(tmp_path).drifts
    assert (drift.file, drift.line, drift.key, drift.planned, drift.present) == (file, 1, "batch", "4", "2")

    file.write_text("batch: 4  # here\nsteps: 3\n")
    undo(tmp_path)
    assert drift_in(tmp_path) == (2, ())


@pytest.mark.parametrize("now", ["steps: 3\n", "batch: [4]\n", "batch: 4: 5\n", None])
def test_a_value_that_is_gone_has_drifted(tmp_path: Path, now: str | None) -> None:
    """Its key, or its file, or it is no single value any more."""
    file = tmp_path / "a.yaml"
    file.write_text("batch: 1\n")
    write(tmp_path, 0, batch=4)
    file.unlink() if now is None else file.write_text(now)

    [drift] = drift_in(tmp_path).drifts
    assert (drift.planned, drift.present, drift.line) == ("4", None, None)


def test_without_an_apply_nothing_can_be_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no plan has been applied here"):
        drift_in(tmp_path)

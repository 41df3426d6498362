"""What other reports say of how fast a step takes samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.api.loading import step_rate_in
from memplan.errors import UsageError


def profile(folder: Path, *seconds: float, accumulation: int = 4) -> Path:
    """A plan of two stages with a profile, as it is printed; the second stage is ten times as slow."""
    planned = {"micro_batch_size": 8, "gradient_accumulation_steps": accumulation}
    stages = [{"name": name, "planned": planned} for name in ("first", "second")]
    measured = [
        {"stages": [name], "measured": {"step_seconds": [each * factor for each in seconds]}}
        for name, factor in (("first", 1), ("second", 10))
    ]
    path = folder / "profile.json"
    path.write_text(json.dumps({"stages": stages, "profile": {"stages": measured}}))
    return path


def test_the_fastest_step_of_the_fastest_stage_decides(tmp_path: Path) -> None:
    """Two micro-batches of 8 were run; the first step, which loads kernels, says nothing: 16 samples in a fifth of a second."""
    rate = step_rate_in(profile(tmp_path, 0.1, 0.25, 0.2))

    assert rate.samples_per_second == pytest.approx(80)
    assert rate.told.endswith("profile.json: the step takes 80 samples a second on the GPU that it was profiled on")


def test_without_accumulation_a_step_is_one_micro_batch(tmp_path: Path) -> None:
    """Of 8 samples."""
    assert step_rate_in(profile(tmp_path, 1.0, 0.2, accumulation=1)).samples_per_second == pytest.approx(40)


def test_what_did_not_run_has_no_rate(tmp_path: Path) -> None:
    """Memory ran out in the first step, or there is no profile at all."""
    with pytest.raises(UsageError, match="has no step after the first"):
        step_rate_in(profile(tmp_path, 1.0))
    with pytest.raises(UsageError, match="No such file"):
        step_rate_in(tmp_path / "none.json")
    (tmp_path / "plan.json").write_text(json.dumps({"stages": [], "profile": None}))
    with pytest.raises(UsageError, match="is not a plan with a profile"):
        step_rate_in(tmp_path / "plan.json")

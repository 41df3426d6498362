"""Trackers log to files in a rehearsal."""

from __future__ import annotations

from pathlib import Path

from memplan.programs.offline import offline_variables


def test_trackers_are_offline_and_write_where_the_rehearsal_ends(tmp_path: Path) -> None:
    """W&B's folder is there: it would take another."""
    variables = offline_variables(tmp_path, {})

    assert variables["WANDB_MODE"] == "offline"
    assert Path(variables["WANDB_DIR"]).is_dir()
    assert variables["MLFLOW_TRACKING_URI"] == (tmp_path / "mlruns").as_uri()


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    """Disabled is not offline."""
    variables = offline_variables(tmp_path, {"WANDB_MODE": "disabled", "MLFLOW_TRACKING_URI": "http://mine"})

    assert not {"WANDB_MODE", "MLFLOW_TRACKING_URI"} & set(variables)
    assert variables["NEPTUNE_MODE"] == "offline"


def test_downloads_from_the_hub_work(tmp_path: Path) -> None:
    """Only its uploads are held back (`child/held_back.py`)."""
    assert "HF_HUB_OFFLINE" not in offline_variables(tmp_path, {})

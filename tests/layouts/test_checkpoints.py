"""Checkpoints of the training that a configuration describes, where it keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.api.configuration import read_configuration
from memplan.layouts.checkpoints import checkpoint_beside


def found_beside(path: Path) -> Path | None:
    reading = read_configuration(path).reading
    assert reading is not None
    return checkpoint_beside(reading)


@pytest.mark.parametrize("name", ["checkpoint-500", "epoch_0", "step-00100", "last.ckpt", "version_0/checkpoints/last.ckpt"])
def test_a_checkpoint_is_found_in_the_folder_that_the_recipe_names(recipes: Path, name: str) -> None:
    """As transformers, torchtune, LitGPT and Lightning call theirs."""
    checkpoint = recipes / "saves" / "tiny" / name
    checkpoint.mkdir(parents=True)

    assert found_beside(recipes / "llama_factory.yaml") == checkpoint


def test_a_folder_of_the_working_folder_is_found_too(recipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where training is mostly started."""
    (tmp_path / "saves" / "tiny" / "checkpoint-500").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert found_beside(recipes / "llama_factory.yaml") == Path("saves/tiny/checkpoint-500")


def test_what_is_no_checkpoint_is_none(recipes: Path) -> None:
    """Logs and models of a training that ended, and a recipe that names no folder."""
    (recipes / "saves" / "tiny" / "runs").mkdir(parents=True)
    (recipes / "saves" / "tiny" / "model.safetensors").touch()
    (recipes / "checkpoint-500").mkdir()

    assert found_beside(recipes / "llama_factory.yaml") is None
    assert found_beside(recipes / "axolotl.yml") is None

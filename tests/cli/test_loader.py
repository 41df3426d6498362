"""`memplan loader` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run, content

DATASETS = """
import time

import torch


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(0.01)
        return {"image": torch.zeros(3, 32, 32), "label": index}


class Raising(Images):
    def __getitem__(self, index):
        if index == 17:
            raise OSError("the file is truncated")
        return torch.zeros(3)


class Growing(Images):
    def __getitem__(self, index):
        return torch.zeros(index + 1)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(3)])
"""

LIGHTNING = """
trainer: {accumulate_grad_batches: 2}
model: {class_path: my.Model}
data:
  class_path: my.Images
  init_args:
    batch_size: 4        # samples
    num_workers:         # to be decided
    pin_memory: false
"""


@pytest.fixture
def datasets(tmp_path: Path) -> Path:
    """The file of a user's datasets, in the working folder."""
    file = tmp_path / "data.py"
    file.write_text(DATASETS)
    return file


def as_json(run_memplan: Run, *arguments: str | Path) -> dict[str, Any]:
    """What `memplan loader` tells a program."""
    done = run_memplan("loader", *arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.usefixtures("datasets")
def test_a_dataset_is_measured_with_several_numbers_of_workers(run_memplan: Run) -> None:
    """A sample of 10 ms: no more than 100 a second without workers, and a batch has the bytes of its tensors."""
    found = as_json(run_memplan, "data.py:Images", "--batch-size", "4", "--seconds", "0.3")

    rates = {rate["num_workers"]: rate["samples_per_second"] for rate in found["rates"]}
    assert found["is_measured"]
    assert {0, 1} <= set(rates)
    assert 20 < rates[0] <= 100
    settings = {setting["name"]: setting["value"] for setting in found["settings"]}
    assert set(settings) == {"num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "non_blocking", "drop_last"}
    assert found["shared_bytes"] == settings["num_workers"] * (settings["prefetch_factor"] or 0) * 4 * (3 * 32 * 32 * 4 + 8)
    assert settings["drop_last"] is False  # 100 samples are 25 batches


@pytest.mark.usefixtures("datasets")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("data.py:Raising", "--batch-size", "8"), "data.py:Raising: sample 17: OSError: the file is truncated"),
        pytest.param(
            ("data.py:Growing", "--batch-size", "8"), "data.py:Growing: a batch of 8 samples could not be made", marks=pytest.mark.heavy
        ),
        pytest.param(("data.py:Stream", "--batch-size", "8"), "data.py:Stream: the dataset has no length: Stream", marks=pytest.mark.heavy),
        (("data.py:Nothing", "--batch-size", "8"), "data.py has no Nothing"),
        (("none.py:Images", "--batch-size", "8"), "none.py does not exist"),
        (("data.py:Images",), "the batch size is not known"),
        (("images", "--batch-size", "8"), "'images' is no dataset"),
        (("--samples-per-second", "100"), "what the step eats is held against what a dataset's loading brings"),
        (("--profile", "data.py"), "data.py is not a plan with a profile"),
        (("--apply",), "there is nothing to apply to"),
        (("--apply", "--dry-run", "--config-path", "."), "--apply writes, and --dry-run does not"),
        (("--config-path", ".", "--dry-run"), ".: no configuration that memplan knows"),
        (("--monitor-log", "data.py"), "data.py is not a log of `memplan monitor`"),
    ],
)
def test_what_cannot_be_is_one_clear_line(run_memplan: Run, words: tuple[str, ...], said: str) -> None:
    """The sample is named, and nothing is shown."""
    done = run_memplan("loader", *words, "--seconds", "0.2")

    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[0]


def test_without_a_dataset_it_is_by_rule(run_memplan: Run) -> None:
    """With the reason."""
    done = run_memplan("loader", "--num-gpus", "0")

    assert done.returncode == 0
    assert "for each DataLoader, by rule\n" in done.stdout
    assert "name the dataset to have it measured" in " ".join(done.stdout.split())


@pytest.mark.heavy
def test_a_key_that_is_empty_is_filled_and_what_the_user_has_set_stays(run_memplan: Run, tmp_path: Path) -> None:
    """Unless --override asks for it; undo puts the file back."""
    file = tmp_path / "config.yaml"
    file.write_text(LIGHTNING)
    words = ("loader", "--num-gpus", "1", "--config-path", file)
    found = as_json(run_memplan, *words[1:], "--dry-run")
    workers = next(setting["value"] for setting in found["settings"] if setting["name"] == "num_workers")
    shown = file.read_text()
    done = run_memplan(*words, "--apply")
    written = file.read_text()
    run_memplan(*words, "--apply", "--override")
    overridden = file.read_text()
    run_memplan("undo", file)
    run_memplan("undo", file)

    assert shown == LIGHTNING
    assert written == LIGHTNING.replace("num_workers:", f"num_workers: {workers}")
    assert f"{file}:9: `data.init_args.pin_memory` is false, recommended true; it is yours, and stays" in done.stderr
    assert "add `data.init_args.prefetch_factor: " in done.stderr
    assert "    pin_memory: true\n" in overridden
    assert file.read_text() == LIGHTNING


def test_a_recipe_of_axolotl_has_its_own_keys(run_memplan: Run, tmp_path: Path) -> None:
    """An empty one is filled; of what it has no key for (persistent_workers) nothing is said."""
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("base_model: gpt2\nsequence_len: 512\nmicro_batch_size: 2\ndataloader_pin_memory:\ndataloader_num_workers: 9\n")

    done = run_memplan("loader", "--num-gpus", "1", "--config-path", recipe, "--apply")

    assert "dataloader_pin_memory: true\ndataloader_num_workers: 9\n" in recipe.read_text()
    assert f"{recipe}:5: `dataloader_num_workers` is 9, recommended" in done.stderr
    assert "add `dataloader_prefetch_factor: 2`" in done.stderr
    assert "persistent" not in done.stderr


@pytest.mark.heavy
def test_the_batch_is_that_of_the_configuration(run_memplan: Run, tree: Path, datasets: Path) -> None:
    """Nothing is written where nothing was asked for."""
    before = content(tree)
    found = as_json(run_memplan, f"{datasets}:Images", "--config-path", tree, "--seconds", "0.2")

    assert content(tree) == before
    assert found["settings"][-1]["reason"].startswith("4 of 100 samples are left over")  # batches of 8
    assert any("`data_loader.num_workers` is 0, recommended" in note for note in found["notes"])


def test_a_log_of_a_monitor_says_whether_the_gpu_waits(run_memplan: Run, tmp_path: Path) -> None:
    """By the median of how busy it was."""
    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps({"gpus": [{"number": 0, "utilization_percent": busy}]}) + "\n" for busy in (35, 40, 99)))

    assert as_json(run_memplan, "--monitor-log", log)["notes"] == [f"{log}: the GPU was in use 40% of the time; it waits, perhaps for data"]

"""`memplan dataset` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.hardware.catalog import catalog_gpus
from tests.conftest import Run

GIB = 2**30

DATASETS = """
import torch

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return {"image": torch.zeros(3, 32, 32, dtype=torch.uint8), "label": index, "name": f"image {index}"}

images = Images()

class Growing(Images):
    def __getitem__(self, index):
        return torch.zeros(index + 1)

class Raising(Images):
    def __getitem__(self, index):
        if index:
            raise OSError("the file is truncated")
        return torch.zeros(3)

class Empty(Images):
    def __len__(self):
        return 0

def broken():
    print("reading the index", flush=True)
    raise FileNotFoundError("no such folder: images")
"""


@pytest.fixture
def datasets(tmp_path: Path) -> Path:
    """The file of a user's datasets, in the working folder."""
    path = tmp_path / "datasets.py"
    path.write_text(DATASETS)
    return path


def answer_of(run: Run, *arguments: str, code: int = 0, **options: Any) -> Any:
    """The JSON that the command prints."""
    done = run("dataset", *arguments, "--format", "json", **options)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_every_gpu_of_the_catalogue_is_shown(run_memplan: Run) -> None:
    """Beside a CUDA context; 56 GiB of images fit on those that have that, in half the type on more."""
    single = answer_of(run_memplan, "--sample", "3x224x224:fp32", "--num-samples", "100000")
    half = answer_of(run_memplan, "--sample", "3x224x224:bf16", "--num-samples", "100000")

    assert len(single["gpus"]) == sum(not card.is_mig for card in catalog_gpus())
    assert (single["sample_bytes"], half["sample_bytes"]) == (602_112, 301_056)
    assert 0 < sum(gpu["fits"] for gpu in single["gpus"]) < sum(gpu["fits"] for gpu in half["gpus"])
    for gpu in single["gpus"]:
        assert gpu["fits"] == (gpu["num_samples_that_fit"] >= 100_000)


def test_what_the_training_takes_is_taken_off(run_memplan: Run) -> None:
    """Given as a size, or by the plan for that GPU."""
    arguments = ("--sample", "3x224x224:bf16", "--gpu", "rtx4090")
    (alone,) = answer_of(run_memplan, *arguments)["gpus"]
    (beside,) = answer_of(run_memplan, *arguments, "--beside", "12GiB")["gpus"]

    assert beside["training_bytes"] == 12 * GIB
    assert beside["left_bytes"] == beside["budget_bytes"] - 12 * GIB
    assert beside["num_samples_that_fit"] < alone["num_samples_that_fit"]


@pytest.mark.heavy
def test_the_plan_of_a_configuration_says_what_it_takes(run_memplan: Run, tree: Path) -> None:
    """At its upper bound; without a pinned micro-batch it says that the plan takes what there is."""
    arguments = ("--sample", "3x224x224:bf16", "--gpu", "a100-80", "--config-path", str(tree))
    plan = json.loads(run_memplan("--gpu", "a100-80", "--config-path", str(tree), "--pin", "micro_batch_size=4", "--format", "json").stdout)
    pinned = answer_of(run_memplan, *arguments, "--pin", "micro_batch_size=4")
    free = answer_of(run_memplan, *arguments)

    assert pinned["gpus"][0]["training_bytes"] == max(stage["estimate"]["device_used"]["high_bytes"] for stage in plan["stages"])
    assert pinned["notes"] == []
    assert "`--pin micro_batch_size=8` leaves more for samples" in free["notes"][-1]


def test_a_plan_that_does_not_fit_leaves_nothing(run_memplan: Run, tree: Path) -> None:
    """The row says so, and the exit code is 1."""
    arguments = ("--sample", "3x224x224:bf16", "--gpu", "t4", "--config-path", str(tree), "--pin", "micro_batch_size=512")
    done = run_memplan("dataset", *arguments)

    assert done.returncode == 1
    assert "does not fit" in done.stdout.splitlines()[-1]


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["Images", "images"])
def test_a_dataset_of_a_file_tells_its_samples(name: str, run_memplan: Run, datasets: Path) -> None:
    """A class, or an object; its number too. Texts stay on the host."""
    answer = answer_of(run_memplan, f"datasets.py:{name}", "--gpu", "t4")

    assert (answer["sample_bytes"], answer["num_samples"], answer["dataset_bytes"]) == (3 * 32 * 32 + 8, 1000, 3_080_000)
    assert answer["host_values"] == ["['name']"]
    assert answer["fits"]


@pytest.mark.heavy
def test_a_module_is_found_in_the_working_folder(run_memplan: Run, datasets: Path) -> None:
    """As `python -m` finds it. A number that is given is taken."""
    assert answer_of(run_memplan, "datasets:Images", "--num-samples", "7", "--gpu", "t4")["num_samples"] == 7


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Growing", "sample 142: sample has shape (143,), and not (1,)"),
        ("Raising", "sample 142: OSError: the file is truncated"),
        ("Empty", "the dataset is empty: it has 0 samples"),
        ("nothing", "datasets.py has no nothing"),
        ("broken", "datasets.py:broken failed: FileNotFoundError: no such folder: images"),
    ],
)
def test_a_dataset_that_fails_is_one_clear_line(name: str, error: str, run_memplan: Run, datasets: Path) -> None:
    """With the sample and the reason; exit code 2."""
    done = run_memplan("dataset", f"datasets.py:{name}")

    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("Error: ")
    assert error in done.stderr.splitlines()[0]
    assert not done.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "name a dataset or a file, or describe a sample"),
        (("a.npy", "--sample", "3:fp32"), "a sample is described, and a dataset or file is named"),
        (("images",), "'images' is no dataset and no sample"),
        (("none.py:Images",), "none.py does not exist"),
        (("none.npy",), "none.npy: No such file or directory"),
        (("--sample", "3:fp32", "--beside", "1GiB", "--config-path", "conf"), "the training is given twice"),
        (("--sample", "3:fp32", "--auto", "--gpu", "t4"), "this machine's GPUs are asked for, and others"),
        (("--sample", "3:fp32", "--gpu", "t5"), "unknown GPU: 't5'"),
        (("--sample", "0:fp32"), "a sample takes no bytes"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(arguments: tuple[str, ...], error: str, run_memplan: Run) -> None:
    """Exit code 2."""
    done = run_memplan("dataset", *arguments)

    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith(f"Error: {error}")


def test_without_a_gpu_this_machines_cannot_be_asked_for(run_memplan: Run) -> None:
    """Exit code 3, as for a plan."""
    done = run_memplan("dataset", "--sample", "3:fp32", "--auto", CUDA_VISIBLE_DEVICES="")

    assert done.returncode == 3
    assert done.stderr.startswith("Error: ")


def test_a_dataset_that_fits_nowhere_has_exit_code_1(run_memplan: Run) -> None:
    """The report says how much of it would."""
    done = run_memplan("dataset", "--sample", "3x224x224:fp32", "--num-samples", "100000", "--gpu", "t4")

    assert done.returncode == 1
    assert done.stdout.startswith("Does not fit on Tesla T4: 100,000 samples take 56.08 GiB, and 13.40 GiB are left\n")
    assert done.stdout.rstrip().endswith("23.8%")


def test_without_a_number_it_says_how_many_fit(run_memplan: Run) -> None:
    """On a size as on a name."""
    done = run_memplan("dataset", "--sample", "512:int64", "--gpu-memory", "24")

    assert done.returncode == 0
    assert done.stdout.startswith("Fits on a GPU with 24 GB: a sample takes 4.0 KiB of ")
    assert "of dataset" not in done.stdout

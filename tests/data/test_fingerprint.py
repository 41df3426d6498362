"""What a dataset is made of: the same in the next process, and another after a change of its code or attributes."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from memplan.data.fingerprint import fingerprint_of
from memplan.errors import UsageError

PROGRAM = """
import torch
from torch.utils.data import TensorDataset
from memplan.data.fingerprint import fingerprint_of

class Base:
    def scale(self):
        return {scale}

class Images(Base):
    def __init__(self):
        self.paths, self.factor, self.weights = ["a", "b"], {factor}, torch.arange({numbers})

def normalize(sample, mean={mean}):
    return sample - mean

def times(number):
    return lambda sample: sample * number

def fingerprints():
    return [fingerprint_of(Images(), normalize), fingerprint_of(times({closed}))]
"""
VALUES = {"scale": 1, "factor": 2.0, "numbers": 3, "mean": 0.5, "closed": 4}


def fingerprints(folder: Path, **values: float) -> list[str]:
    """The fingerprints of the dataset and transform, and of the closure, of a program with these values."""
    file = folder / "-".join(["program", *values]) / "program.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(PROGRAM.format(**VALUES | values))
    return list(runpy.run_path(str(file), run_name="program")["fingerprints"]())


@pytest.mark.heavy
def test_it_is_the_same_in_the_next_process_and_another_after_a_change(tmp_path: Path) -> None:
    """The code of a base class, an attribute, a tensor, a default, and what a function has closed over."""
    before = fingerprints(tmp_path)
    code = "import runpy; print(runpy.run_path('program/program.py', run_name='program')['fingerprints']())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{before}\n"

    for name in ("scale", "factor", "numbers", "mean"):
        assert fingerprints(tmp_path, **{name: 7})[0] != before[0], name
    assert fingerprints(tmp_path, closed=5)[1] != before[1]


def test_tensors_are_told_apart_by_their_content() -> None:
    """Not by where they are."""
    one, same, other = (fingerprint_of(TensorDataset(torch.full((3,), value))) for value in (1, 1, 2))

    assert one == same != other


def test_what_cannot_be_pickled_needs_a_name(tmp_path: Path) -> None:
    """An open file tells nothing of its content."""
    with (tmp_path / "data").open("w") as file, pytest.raises(UsageError, match="cannot be identified: TypeError") as caught:
        fingerprint_of([file])

    assert "fingerprint=" in (caught.value.hint or "")

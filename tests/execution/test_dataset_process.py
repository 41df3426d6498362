"""A dataset is described by a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.errors import UsageError
from memplan.execution.dataset_process import describe_dataset

PROGRAM = """
import os, time

samples = [(1, 2.5)] * 20

def here():
    print("noise on standard output")
    return [os.getpid()]

def slow():
    time.sleep(60)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A file with datasets."""
    (tmp_path / "data.py").write_text(PROGRAM)
    return str(tmp_path / "data.py")


@pytest.mark.heavy
def test_a_dataset_is_described_by_its_samples(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A list is one, whatever is printed on the way."""
    values = [{"name": "[0]", "shape": [], "dtype": "int64"}, {"name": "[1]", "shape": [], "dtype": "float64"}]

    assert describe_dataset(f"{program}:samples") == {"num_samples": 20, "values": values, "host_values": []}
    assert describe_dataset(f"{program}:here")["num_samples"] == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.heavy
def test_a_dataset_that_takes_too_long_is_ended(program: str) -> None:
    """And said so."""
    with pytest.raises(UsageError, match=r"data.py:slow took longer than 6 seconds"):
        describe_dataset(f"{program}:slow", timeout_seconds=6)

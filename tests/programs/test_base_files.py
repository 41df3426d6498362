"""Which files a configuration builds on."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.errors import ConfigError
from memplan.programs.base_files import with_bases
from memplan.programs.named_files import composed_by_words

STEPS = "gradient_accumulation_steps=base/run.py:optim_wrapper.accumulative_counts"

LAZY = """
from mmengine.config import read_base
with read_base():
    from ..base.data import *
    from .small import model
    import torch
"""

FILES = {
    "train.py": "",
    "base/data.py": "train_dataloader = dict(batch_size=32, num_workers=4)\nval_dataloader = dict(batch_size=1)\n",
    "base/run.py": "optim_wrapper = dict(accumulative_counts=2)\n",
    "nets/small.py": "_base_ = ['../base/data.py', '../base/run.py', '../base/missing.py', f()]\nmodel = dict(type='Net')\n",
    "nets/large.py": "_base_ = './small.py'\ntrain_dataloader = dict(batch_size=8)\n",
    "nets/lazy.py": LAZY,
    "nets/circle.py": "_base_ = ['circle.py', 'other.py']\nbatch_size = 2\n",
    "nets/other.py": "_base_ = 'circle.py'\nbatch_size = 1\n",
    "nets/broken_base.py": "_base_ = 'broken.py'\nbatch_size = 3\n",
    "nets/broken.py": "print 2\n",
    "nets/lazy_package.py": "with read_base():\n    from . import small, missing\n    from .. import train\n",
    "nets/odd.py": f"# coding: foo\n_base_ = {'x' * 5000!r}\nbatch_size = 3\n",
    "nets/deleted.py": "_base_ = '../base/data.py'\ntrain_dataloader = dict(_delete_=True, num_workers=1)\n",
    "yacs/base.yaml": "SOLVER: {BATCH_SIZE: 16}\n",
    "yacs/large.yaml": "_BASE_: base.yaml\nMODEL: {DEPTH: 101}\n",
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with these files, in which the commands run."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("file", "built_on"),
    [
        ("base/data.py", []),
        ("nets/small.py", ["base/data.py", "base/run.py"]),
        ("nets/large.py", ["base/data.py", "base/run.py", "nets/small.py"]),
        ("nets/lazy.py", ["base/data.py", "base/run.py", "nets/small.py"]),
        ("nets/lazy_package.py", ["base/data.py", "base/run.py", "nets/small.py", "train.py"]),
        ("nets/odd.py", []),
        ("nets/circle.py", ["nets/other.py"]),
        ("nets/broken_base.py", []),
        ("yacs/large.yaml", ["yacs/base.yaml"]),
    ],
)
def test_each_file_stands_before_those_that_override_it(file: str, built_on: list[str]) -> None:
    """Once, however often it is named; one that cannot be read is left out."""
    assert [path.resolve() for path, _ in with_bases(Path(file))] == [Path(name).resolve() for name in [*built_on, file]]


def test_a_file_that_cannot_be_read_is_an_error() -> None:
    """The one that was asked for."""
    with pytest.raises(ConfigError, match=r"broken\.py:1: is not valid Python"):
        with_bases(Path("nets/broken.py"))


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        (
            "train.py nets/small.py",
            [
                "micro_batch_size=base/data.py:train_dataloader.batch_size",
                STEPS,
            ],
        ),
        (
            "train.py nets/large.py",
            [
                "micro_batch_size=nets/large.py:train_dataloader.batch_size",
                STEPS,
            ],
        ),
        ("train.py nets/deleted.py", []),
        ("train.py --config-file yacs/large.yaml", ["micro_batch_size=yacs/base.yaml:SOLVER.BATCH_SIZE"]),
    ],
)
def test_the_batch_is_found_in_the_last_file_that_holds_it(command: str, fields: list[str]) -> None:
    """Of the configuration and of what it builds on."""
    composed = composed_by_words(command.split())

    assert composed is not None
    assert composed.fields() == fields

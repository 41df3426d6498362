"""From the Python of memplan's messages to what is typed at a prompt."""

from __future__ import annotations

import inspect

import pytest

import memplan
from memplan.cli.app import cli
from memplan.cli.typed_options import COMMANDS, OPTIONS, in_options
from memplan.execution.ranks import Ranks
from tests.test_architecture import options_of


@pytest.mark.parametrize(
    ("python", "typed"),
    [
        ('use `method="analytic"`', "use `--method analytic`"),
        ("`target_tolerance=0.05`", "`--target-tolerance 5%`"),
        ("`target_tolerance=0`", "`--target-tolerance 0%`"),
        ("`grow_negatives=True`", "`--grow-negatives`"),
        ('`pins={"is_in_eval_mode": False}`', "`--pin is_in_eval_mode=false`"),
        ('`pins={"n_negatives": 8, "micro_batch_size": 2}`', "`--pin n_negatives=8 --pin micro_batch_size=2`"),
        ('`gpu="a100-80"`, `gpu_memory=24`', "`--gpu a100-80`, `--gpu-memory 24`"),
        ('`source="my conf"`', "`--config-path 'my conf'`"),
        ('`answers={"train.py:12": "1/8"}`', "`--read train.py:12=1/8`"),
        ("`memplan.gpus()` lists them", "`memplan gpus` lists them"),
        ("`memplan.plan(with_levers=True)`", "`memplan --auto --levers`"),
        ('`memplan.plan("conf", gpu="t4")`', "`memplan --config-path conf --gpu t4`"),
        ("`memplan.rehearse(steps=10)`", "`memplan rehearse --steps 10`"),
        ('`plan.save("plan.json")`', "`memplan --auto --format json > plan.json`"),
        ("`plan.profile()`", "`memplan --auto --profile`"),
    ],
)
def test_an_argument_becomes_its_option_and_a_call_its_command(python: str, typed: str) -> None:
    """As a person would type it."""
    assert in_options(python) == typed


@pytest.mark.parametrize(
    "text",
    ["`.train()`", "`loss.item()`", "`positive_level`", "`fused=True`", "`a = b`", "`batch_size: 4`", "no quotes: steps=3", "`", "``"],
)
def test_what_is_no_argument_of_memplan_stays(text: str) -> None:
    """The user's own code, and a key of a file."""
    assert in_options(text) == text


def test_texts_are_found_in_whatever_holds_them() -> None:
    """Lists, tuples and mappings."""
    assert in_options({"hints": ["`steps=3`", ("`steps=4`", 5)]}) == {"hints": ["`--steps 3`", ("`--steps 4`", 5)]}


def test_every_option_and_argument_that_is_named_is_there() -> None:
    """The table knows no option that no command has, and no argument that no function has."""
    functions = [getattr(memplan, name) for name in COMMANDS if hasattr(memplan, name)]
    arguments = {name for function in functions for name in inspect.signature(function).parameters} | {"device", *Ranks._fields}

    assert set(OPTIONS.values()) <= options_of(cli)
    assert set(OPTIONS) <= arguments
    assert {words.split()[-1] for words in COMMANDS.values()} - {"memplan"} <= set(cli.commands)

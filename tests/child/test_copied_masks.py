"""What a program asks of a mask that it copied to the GPU is known without a values pass, as long as nothing has changed it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.execution.rehearsal import Rehearsal
from tests.conftest import RehearserOf

STEPS = Path(__file__).with_name("mask_steps.py")
MIB = 2**20

Run = Callable[..., Rehearsal]


pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python says which call is running from 3.11 on")


@pytest.fixture
def run(rehearser_of: RehearserOf) -> Run:
    """Rehearse two steps of a program by its name."""
    return lambda program, **values: rehearser_of(f"{STEPS}:build").rehearse(gpu="a100-80", values={"program": program, **values}, steps=2)


@pytest.mark.parametrize(("num_padded", "answer", "mib"), [(3, "false", 4), (0, "true", 1)])
@pytest.mark.parametrize("program", ["copied", "called for", "compared"])
def test_a_mask_that_was_copied_says_whether_it_has_padding(run: Run, program: str, num_padded: int, answer: str, mib: int) -> None:
    """By whichever method it came to the GPU, as numbers or as booleans, and in a condition of several lines."""
    seen = run(program, num_padded=num_padded)

    assert {(read.basis, read.answer) for read in seen.reads} == {("copied", answer)}
    assert mib * MIB <= seen.peak_allocated_bytes < mib * MIB + 4096
    assert (seen.findings, seen.lower_bound_reasons) == ((), ())


def test_a_mask_of_numbers_has_all_set_and_not_all_one(run: Run) -> None:
    """The numbers of documents, as packed sequences have them."""
    seen = run("numbered", num_padded=0)

    assert 4 * MIB <= seen.peak_allocated_bytes < 4 * MIB + 4096
    assert {(read.basis, read.answer) for read in seen.reads} == {("copied", "true"), ("copied", "false")}


@pytest.mark.parametrize("program", ["changed", "cut"])
def test_of_a_mask_that_is_another_by_then_its_values_are_computed(run: Run, program: str) -> None:
    """Three tokens of padding, which are set on the GPU, or cut off."""
    seen = run(program)

    assert {(read.basis, read.answer) for read in seen.reads} == {("data", "true")}
    assert seen.peak_allocated_bytes < 2 * MIB


def test_to_ask_holds_nothing_that_the_program_lets_go(run: Run) -> None:
    """16 MiB, and then 16 others."""
    assert run("lets go").peak_allocated_bytes < 17 * MIB

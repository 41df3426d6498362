"""Which process of several this is."""

from __future__ import annotations

import pytest

from memplan.hardware.torchrun import Rank, rank_of

OF_A_JOB = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}


def test_torchrun_numbers_its_processes() -> None:
    """All five variables are there; the run's name may be "none", which is torchrun's own for one machine."""
    assert rank_of(OF_A_JOB | {"TORCHELASTIC_RUN_ID": "none"}) == Rank(3, 1, 4)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        OF_A_JOB,
        {"TORCHELASTIC_RUN_ID": "none"},
        OF_A_JOB | {"TORCHELASTIC_RUN_ID": "none", "RANK": "first"},
        OF_A_JOB | {"TORCHELASTIC_RUN_ID": "none", "RANK": "²"},
    ],
)
def test_elsewhere_a_process_is_the_only_one(environment: dict[str, str]) -> None:
    """A shell, a cluster's shell, and variables that are no numbers."""
    assert rank_of(environment) == Rank(0, 0, 1)

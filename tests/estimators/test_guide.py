"""The guide's rule of thumb to the last batch (DESIGN, section 8)."""

from __future__ import annotations

import pytest

from memplan.errors import UsageError
from memplan.estimators import guide
from memplan.hardware.gpu import GpuSpec
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

MIB = 2**20
GRID = {
    24: {8: (10, 25), 12: (19, 13), 16: (28, 9), 24: (46, 5), 32: (64, 4), 40: (82, 3), 48: (99, 2), 80: (128, 2), 23.5: (45, 5)},
    8: {8: (28, 9), 12: (51, 5), 16: (74, 3), 24: (120, 2), 32: (128, 2), 40: (128, 2), 48: (128, 2), 80: (128, 2)},
}


@pytest.mark.parametrize("n_negatives", GRID)
def test_the_grid(built_in: Workload, a100: GpuSpec, n_negatives: int) -> None:
    """Batch and accumulation for every GPU of the guide's table."""
    stage = Stage(name="stage", n_negatives=n_negatives)

    batches = {memory: guide.largest_batch(built_in, stage, memory_gib=memory) for memory in GRID[n_negatives]}

    assert {memory: (batch, guide.accumulation(batch)) for memory, batch in batches.items()} == GRID[n_negatives]


def test_the_parts_of_its_formula(built_in: Workload, a100: GpuSpec) -> None:
    """105,207,680 parameters; at batch 45 with 24 negatives 17,554.43 MiB of activations, 36.56 of batch data, 19.82 GiB in all."""
    estimate = guide.estimate(built_in.with_training(micro_batch_size=45), Stage(name="stage", n_negatives=24))

    assert estimate.breakdown.parameters_bytes == 105_207_680 * 2
    assert round(estimate.breakdown.activations_bytes / MIB, 2) == 17_554.43
    assert round(estimate.breakdown.batch_data_bytes / MIB, 2) == 36.56
    assert round(estimate.device_used_bytes / 2**30, 2) == 19.82


def test_it_recommends_a_batch_of_one_where_nothing_fits(built_in: Workload, a100: GpuSpec) -> None:
    """Its mistake is kept: on a GPU of 2 GiB it says 1."""
    assert guide.largest_batch(built_in, Stage(name="stage", n_negatives=24), memory_gib=2) == 1


def test_it_knows_contrastive_encoders_only(built_in: Workload, a100: GpuSpec) -> None:
    """Any other workload is refused."""
    with pytest.raises(UsageError, match="contrastive encoders only"):
        guide.estimate(built_in, None)

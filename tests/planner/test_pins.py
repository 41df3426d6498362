"""Pinned values."""

from __future__ import annotations

import pytest

from memplan.errors import UsageError
from memplan.planner.pins import pin, read_pins
from memplan.workload.workload import Workload


def test_pins_are_put_in_place(built_in: Workload) -> None:
    """Training fields, GPUs, the optimizer, a field of all stages and of one."""
    pins = read_pins(["sequence_length=128", "devices=2", "optimizer=sgd", "n_positives=4", "02_stage.n_negatives = 30"])

    pinned = pin(built_in, pins)

    assert (pinned.training.sequence_length, pinned.parallelism.devices, pinned.optimizer.name) == (128, 2, "sgd")
    assert {stage.n_positives for stage in pinned.stages} == {4}
    assert [stage.n_negatives for stage in pinned.stages] == [24, 30, 8, 8, 8]
    assert pins.pins("n_negatives", "02_stage")
    assert not pins.pins("n_negatives", "03_stage")


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["micro_batch_size"], "expected FIELD=VALUE"),
        (["=3"], "expected FIELD=VALUE"),
        (["micro_batch_size=8", "micro_batch_size=9"], "given twice: 8 and 9"),
        (["micro_batch_size=-1"], "greater than 0"),
        (["micro_batch_size=many"], "valid integer"),
        (["batch_size=8"], "no such field"),
        (["09_stage.n_negatives=8"], "no stage '09_stage'"),
        (["n_negatives=-1"], "greater than or equal to 0"),
        (["optimizer=adamax"], "Input should be"),
        (["devices=0"], "greater than 0"),
    ],
)
def test_pins_that_make_no_sense_are_refused(built_in: Workload, texts: list[str], problem: str) -> None:
    """Each with what was typed."""
    with pytest.raises(UsageError, match=problem) as caught:
        pin(built_in, read_pins(texts))

    assert texts[0].split("=")[0] in caught.value.message


def test_a_stage_of_a_workload_without_stages_cannot_be_pinned(built_in: Workload) -> None:
    """There is nothing that n_negatives could mean."""
    model = built_in.model.encoder  # type: ignore[union-attr]

    with pytest.raises(UsageError, match="the workload has no stages"):
        pin(Workload(model=model), read_pins(["n_negatives=8"]))


@pytest.mark.parametrize(
    "texts", [["sharding_degree=4", "devices=8", "strategy=fsdp"], ["strategy=fsdp", "sharding_degree=4", "devices=8"]]
)
def test_pins_that_make_sense_together_may_come_in_any_order(built_in: Workload, texts: list[str]) -> None:
    """A degree of sharding is for a strategy, and for as many ranks."""
    parallelism = pin(built_in, read_pins(texts)).parallelism

    assert (parallelism.strategy, parallelism.shards, parallelism.data_parallel_size) == ("fsdp", 4, 8)

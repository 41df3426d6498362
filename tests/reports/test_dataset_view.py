"""What the report of a dataset's memory says beside its numbers."""

from memplan.analysis.dataset_memory import SampleValue, Training, dataset_memory
from memplan.hardware.catalog import find_gpu
from memplan.reports.dataset_view import view_dataset


def test_a_gpu_that_others_use_is_told_with_how_much() -> None:
    """Else nobody could see why nothing is left of 14.75 GiB."""
    full = find_gpu("t4").model_copy(update={"others_used_bytes": 14 * 2**30})

    memory = dataset_memory([SampleValue(shape=(512,), dtype="int64")], [full, find_gpu("l4")], lambda _: Training(2**30))

    facts = [fact for fact in view_dataset(memory, beside="a training").facts if fact[0] == "in use"]
    assert facts == [("in use", "14.00 GiB of Tesla T4 by other processes")]

"""What storages hold, as far as it is known."""

from __future__ import annotations

import pytest
import torch

from memplan.child.shadows import MANY, Shadows, once

LENGTH = 300
assert LENGTH * LENGTH > MANY


@pytest.fixture
def mask() -> torch.Tensor:
    """A mask of 2 sequences, which is the same for each of their queries: (2, 1, 300, 300)."""
    return torch.randint(0, 2, (2, 1, 1, LENGTH)).expand(2, 1, LENGTH, LENGTH)


def test_what_repeats_is_kept_once(mask: torch.Tensor) -> None:
    """In another type too, and as a copy: what it was made of may change."""
    shadows, tensor = Shadows(), torch.empty(mask.shape, dtype=torch.float32)
    expected = mask.clone()

    shadows.learn(tensor, mask, "assumed")
    once(mask).zero_()

    known = shadows.value(tensor)
    assert known is not None
    assert torch.equal(known, expected.float())
    assert once(known).numel() == 2 * LENGTH
    assert shadows.assumption_of([tensor]) == "assumed"


def test_views_of_what_repeats_have_its_values(mask: torch.Tensor) -> None:
    """A slice, a transposition, other bytes."""
    shadows, tensor = Shadows(), torch.empty(mask.shape, dtype=torch.int64)
    shadows.learn(tensor, mask)

    for view, expected in (
        (tensor[:, :, 3:7, 1::2], mask[:, :, 3:7, 1::2]),
        (tensor.transpose(2, 3), mask.transpose(2, 3)),
        (tensor.view(torch.int32), mask.clone().view(torch.int32)),
    ):
        known = shadows.value(view)
        assert known is not None
        assert torch.equal(known, expected)


def test_what_is_written_into_what_repeats_changes_that_alone(mask: torch.Tensor) -> None:
    """One query's row is another than before; the whole is then what it was but for that row."""
    shadows, tensor = Shadows(), torch.empty(mask.shape, dtype=torch.int64)
    shadows.learn(tensor, mask)

    written = shadows.value(tensor, is_written=True)
    assert written is not None
    written[0, 0, 5] += 7
    expected = mask.clone()
    expected[0, 0, 5] += 7
    assert torch.equal(shadows.value(tensor), expected)  # type: ignore[arg-type]

    shadows.learn(tensor[1], mask[0] + 1)
    expected[1] = mask[0] + 1
    assert torch.equal(shadows.value(tensor), expected)  # type: ignore[arg-type]


def test_a_part_of_what_nobody_knows_is_not_known(mask: torch.Tensor) -> None:
    """However often it repeats."""
    shadows, tensor = Shadows(), torch.empty((2, *mask.shape), dtype=torch.int64)

    shadows.learn(tensor[0], mask)

    assert shadows.value(tensor) is None

"""What storages hold, as far as it is known."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

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


def test_values_are_those_of_all_tensors_or_of_none() -> None:
    """Where one of them is not known, no bytes are made for another that is zero everywhere: it may be large."""
    shadows, zeros, ones, unknown = Shadows(), torch.zeros(4), torch.ones(4), torch.rand(4)
    shadows.fill(zeros, 0)
    shadows.learn(ones, ones)

    assert shadows.values([ones, zeros[:2], unknown]) is None
    kept = shadows.of(zeros)
    assert kept is not None
    assert kept._content is None
    found = shadows.values([ones, zeros[:2]])
    assert found is not None
    assert [value.tolist() for value in found] == [[1, 1, 1, 1], [0, 0]]
    shadows.forget(ones[1:2])
    assert shadows.values([ones]) is None
    assert shadows.values([]) == []


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


def test_what_is_written_into_a_part_leaves_the_rest_known() -> None:
    """A buffer of a constant and a statistic of the model: the constant stays, until all is overwritten."""
    shadows, tensor = Shadows(), torch.empty(5)
    shadows.learn(tensor, torch.tensor([16384.0, 0.07, -1.0, -1.0, 0.5]))

    shadows.forget(tensor[2])

    assert shadows.value(tensor) is None
    assert shadows.value(tensor[1:3]) is None
    assert float(shadows.value(tensor[0])) == 16384  # type: ignore[arg-type]
    shadows.learn(tensor[2], torch.tensor(7.0))
    assert float(shadows.value(tensor)[2]) == 7  # type: ignore[index]
    for part in (tensor[:3], tensor[4:], tensor[3:4]):
        shadows.forget(part)
    assert shadows.of(tensor) is None


LENGTHS = st.integers(0, 12)
PARTS = st.tuples(LENGTHS, LENGTHS, st.sampled_from((1, 1, 2, 3))).map(lambda part: slice(min(part[:2]), max(part[:2]), part[2]))


@given(st.lists(st.tuples(PARTS, st.booleans()), max_size=20))
def test_parts_hold_what_was_last_written_there(writes: list[tuple[slice, bool]]) -> None:
    """What is known of any element is true; and of one that nothing unknown was written around, it is known."""
    shadows, tensor, expected, is_unknown = Shadows(), torch.empty(12, dtype=torch.int64), [0] * 12, [False] * 12
    shadows.fill(tensor, 0)

    for number, (part, is_known) in enumerate(writes, start=1):
        places = range(12)[part]
        if is_known:
            shadows.learn(tensor[part], torch.full(tensor[part].shape, number))
        else:
            shadows.forget(tensor[part])
        for place in places if is_known else range(places[0], places[-1] + 1) if places else ():
            expected[place] = number
            is_unknown[place] = not is_known or (is_unknown[place] and part.step > 1 and len(places) > 1)

    for place in range(12):
        known = shadows.value(tensor[place])
        assert known is None or int(known) == expected[place]
        assert (known is None) == (is_unknown[place] or shadows.of(tensor) is None)


def test_a_column_is_known_beside_those_that_are_not() -> None:
    """Boxes and scores are nan; the class is the last of six columns."""
    shadows, table = Shadows(), torch.empty(5, 6)
    values = torch.full((5, 6), torch.nan)
    values[:, 5] = torch.arange(5)

    shadows.learn_part(table, values, "assumed")

    assert shadows.value(table) is None
    assert shadows.value(table[:, :5]) is None
    assert shadows.known_part(table[:, 4]) is None
    known, part = shadows.value(table[:, 5]), shadows.known_part(table)
    assert known is not None
    assert known.tolist() == [0, 1, 2, 3, 4]
    assert part is not None
    assert torch.equal(part.isnan(), values.isnan())
    assert shadows.assumption_of([table]) == "assumed"


def test_what_is_written_into_a_column_that_was_not_known_is_known() -> None:
    """The whole is known when every column is."""
    shadows, table = Shadows(), torch.empty(5, 2)
    shadows.learn_part(table, torch.tensor([[1.0, torch.nan]]).expand(5, 2), None)

    shadows.learn(table[:, 1], torch.zeros(5))

    known = shadows.value(table)
    assert known is not None
    assert torch.equal(known, torch.tensor([[1.0, 0.0]]).expand(5, 2))

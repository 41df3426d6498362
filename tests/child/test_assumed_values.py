"""What stands in for what a model computes: which of several choices are made, and what is drawn at random."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memplan.child.assumed_values import A_VOCABULARY, FEW_DRAWN, Draws, choices_in, chosen, is_for_ordinary_numbers
from memplan.traces.read_basis import DRAWN, ONE_DRAW


@given(experts=st.integers(2, 16), top=st.integers(1, 4), tokens=st.integers(1, 40))
def test_each_of_the_experts_gets_an_equal_share_or_the_last_get_all(experts: int, top: int, tokens: int) -> None:
    """The shares of a top-k differ by no more than one, and a token goes to different experts."""
    scores = torch.zeros(tokens, experts)
    top = min(top, experts)
    places = scores.topk(top).indices

    balanced, uneven = (chosen("topk", places, (scores, top), variant) for variant in ("all", "none"))

    shares = torch.bincount(balanced.flatten(), minlength=experts)
    assert shares.max() - shares.min() <= 1
    assert all(len(set(row)) == top for row in balanced.tolist())
    assert uneven.tolist() == [list(range(experts - top, experts))] * tokens


def test_the_places_of_a_choice_along_another_dimension_have_their_shape() -> None:
    """Scores of choices x tokens."""
    scores = torch.zeros(4, 6)
    places = scores.topk(2, dim=0).indices

    found = chosen("topk", places, (scores, 2, 0), "all")

    assert found.shape == (2, 6)
    assert torch.bincount(found.flatten()).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("scores", "places", "dim"),
    [
        (torch.zeros(1, 49), torch.zeros(1, 49).argmax(1), (1,)),
        (torch.zeros(49), torch.zeros(49).argmax(), ()),
        (torch.zeros(7, 7), torch.zeros(7, 7).argmax(), ()),
        (torch.zeros(1, 49), torch.zeros(1, 49).argmax(1, keepdim=True), (1, True)),
        (torch.tensor(0.0), torch.tensor(0.0).argmax(), ()),
    ],
    ids=["of a row", "of a vector", "of a matrix", "kept", "of a number"],
)
def test_a_single_place_is_the_first_or_the_last(scores: torch.Tensor, places: torch.Tensor, dim: tuple[int, ...]) -> None:
    """One that says how long something is decides as much as many do."""
    found = [chosen("argmax", places, (scores, *dim), variant) for variant in ("all", "none")]

    assert [(each.shape, each.item()) for each in found] == [(places.shape, 0), (places.shape, scores.numel() - 1)]


def test_of_several_places_the_first_is_chosen_last() -> None:
    """A period is a length by the place of a frequency, of which the first is none."""
    scores = torch.zeros(49)

    assert chosen("topk", scores.topk(5).indices, (scores, 5), "all").tolist() == [1, 2, 3, 4, 5]


def test_a_token_of_a_vocabulary_is_none_that_ends_a_text() -> None:
    """Neither the first nor the last, which often mean that."""
    scores = torch.zeros(3, A_VOCABULARY)

    found = [chosen("argmax", scores.argmax(-1), (scores, -1), variant).tolist() for variant in ("all", "none")]

    assert found == [[333, 334, 335], [666, 666, 666]]


@pytest.mark.parametrize(
    ("name", "result", "is_place"),
    [
        ("topk", torch.ones(4, 3).topk(2), True),
        ("max", torch.ones(4, 3).max(), False),
        ("max", torch.ones(4, 3).max(1), True),
        ("argmax", torch.ones(4, 3).argmax(1), True),
        ("topk", torch.ones(0, 3).topk(2), False),
        ("add", torch.ones(3), False),
    ],
)
def test_the_largest_value_is_no_place(name: str, result: object, is_place: bool) -> None:
    """Of `max` without a dimension; with one, the second of what it returns."""
    assert (choices_in(name, result) is not None) == is_place


@pytest.mark.parametrize(
    ("name", "arguments", "ends"),
    [
        ("randint", (3, 9, [1]), (3, 8)),
        ("randint", (5, [1]), (0, 4)),
        ("bernoulli_", (torch.zeros(1), 0.5), (0, 1)),
        ("rand", ([1],), (0, 1)),
    ],
)
def test_a_few_draws_are_put_to_the_ends_of_their_range(name: str, arguments: tuple[object, ...], ends: tuple[int, int]) -> None:
    """Seven times the highest, then the lowest; drawn again, the other way round. Of floats the highest is just below the end."""
    first, again = Draws(is_again=False), Draws(is_again=True)

    found = []
    for draws in (first, again):
        for _ in range(8):
            drawn = torch.zeros(1)
            assert draws.settle(name, arguments, drawn).startswith(DRAWN)
            found.append(round(float(drawn), 6))

    low, high = ends
    assert found == [*[high] * 7, low, *[low] * 7, high]


def test_of_many_draws_and_of_those_without_ends_one_draw_stands() -> None:
    """Their sum is known well enough, or nothing is known of them."""
    assert Draws(is_again=False).settle("rand", ([9],), torch.zeros(FEW_DRAWN + 1)) == ONE_DRAW
    assert Draws(is_again=False).settle("randn", ([1],), torch.zeros(1)) == ONE_DRAW


def test_comparisons_by_which_pytorch_finds_infinite_numbers_find_none() -> None:
    """`x != x`, `x == inf` and their kind."""
    values = torch.tensor([1.0, -2.0])
    same, other = values.view(2), values.clone()

    found = [is_for_ordinary_numbers(*asked) for asked in (("ne", (values, same)), ("eq", (values, same)), ("eq", (values, float("inf"))))]

    assert found == [False, True, False]
    assert is_for_ordinary_numbers("eq", (values, other)) is None
    assert is_for_ordinary_numbers("add", (values, 1.0)) is None

"""What is added and taken away again is as if it had never been."""

from __future__ import annotations

import pytest
import torch

from memplan.child.cancelled_sums import MOST_KEPT, CancelledSums
from memplan.child.shadows import Shadows


class Sums:
    """Sums of tensors, of which some are known."""

    def __init__(self, *known: torch.Tensor, assumption: str | None = None) -> None:
        self.shadows = Shadows()
        for tensor in known:
            self.shadows.learn(tensor, tensor, assumption)
        self.sums = CancelledSums(self.shadows)
        self.assumption: str | None = None

    def add(self, left: torch.Tensor, right: torch.Tensor, sign: int = 1) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sum, or difference, and what is known of it."""
        made = left + sign * right
        found = self.sums.left_by(sign, left, right, made)
        if found is None:
            return made, None
        self.shadows.learn(made, found.value, found.assumption)
        self.assumption = found.assumption
        return made, found.value


@pytest.fixture
def hard() -> torch.Tensor:
    return torch.tensor([0.0, 1.0, 0.0])


@pytest.fixture
def soft() -> torch.Tensor:
    return torch.tensor([0.2, 0.5, 0.3])


def test_a_straight_through_estimate_is_the_hard_one(hard: torch.Tensor, soft: torch.Tensor) -> None:
    """`hard + soft - soft.detach()`, whose last is a view of the one before it."""
    sums = Sums(hard)

    total, unknown = sums.add(hard, soft)
    _, found = sums.add(total, soft.detach(), -1)

    assert unknown is None
    assert found is not None
    assert torch.equal(found, hard)


def test_the_order_of_the_terms_does_not_matter(hard: torch.Tensor, soft: torch.Tensor) -> None:
    """`hard - soft.detach() + soft`, `soft + (hard - soft)`, and `hard + (soft - soft.detach())`, whose difference is nothing at all."""
    sums = Sums(hard)

    for total, _ in (sums.add(hard, soft.detach(), -1), sums.add(hard, soft, -1)):
        for left, right in ((total, soft), (soft, total)):
            found = sums.add(left, right)[1]
            assert found is not None
            assert torch.equal(found, hard)
    nothing = sums.add(soft, soft.detach(), -1)[1]
    assert nothing is not None
    assert not nothing.any()


def test_what_is_left_stands_on_what_it_stood_on_before(hard: torch.Tensor, soft: torch.Tensor) -> None:
    """A choice of the model is one still; what is known for sure stays so."""
    for assumption in ("everything passes", None):
        sums = Sums(hard, assumption=assumption)
        total, _ = sums.add(hard, soft)
        sums.add(total, soft, -1)

        assert sums.assumption == assumption


def test_what_is_taken_from_something_else_stays_unknown(hard: torch.Tensor, soft: torch.Tensor) -> None:
    """Another tensor, another part of the same, and one that is added twice."""
    sums = Sums(hard)
    total, _ = sums.add(hard, soft)

    assert sums.add(total, soft.clone(), -1)[1] is None
    assert sums.add(total, soft)[1] is None
    assert sums.add(soft[:2], soft[1:], -1)[1] is None


def test_a_sum_is_not_waited_for_without_end(hard: torch.Tensor, soft: torch.Tensor) -> None:
    """Others come, and it is forgotten."""
    sums = Sums(hard)
    total, _ = sums.add(hard, soft)
    others = [sums.add(hard, torch.zeros(3)) for _ in range(MOST_KEPT)]

    assert len(others) == MOST_KEPT
    assert sums.add(total, soft, -1)[1] is None

"""Objects of a process, and which of them are looked at."""

from __future__ import annotations

import torch
from torch import nn

from memplan.child.live_objects import may_matter
from tests.child.values_steps import Labels


def test_plain_tensors_of_the_host_do_not_matter() -> None:
    """A dataset may be 100,000 of them. What is trained there does, and what is of a class of its own, whose parts may be elsewhere."""
    trained = torch.zeros(1, requires_grad=True)

    assert not may_matter(torch.zeros(1))
    assert may_matter(trained)
    assert may_matter(trained * 2)
    assert may_matter(nn.Parameter(torch.zeros(1), requires_grad=False))
    assert may_matter(torch.zeros(1).as_subclass(Labels))

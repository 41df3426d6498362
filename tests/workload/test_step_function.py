"""Which argument of a step function is the device."""

from __future__ import annotations

import pytest

from memplan.workload.step_function import is_device


@pytest.mark.parametrize(
    ("name", "default", "annotation"),
    [("device", None, ""), ("device", "cuda", "str"), ("dev", None, "torch.device"), ("where", None, "str | None"), ("gpu", None, "Any")],
)
def test_the_first_argument_is_the_device(name: str, default: object, annotation: str) -> None:
    """Whatever it is called: a text, or nothing, can be one."""
    assert is_device(name, default=default, annotation=annotation)


@pytest.mark.parametrize(
    ("name", "default", "annotation"),
    [
        ("batch_size", None, ""),
        ("width", 64, ""),
        ("rate", None, "float"),
        ("is_wide", True, ""),
        ("accum_steps", None, ""),
        ("seq", None, "int"),
    ],
)
def test_a_number_and_a_batch_are_no_device(name: str, default: object, annotation: str) -> None:
    """The function chooses the device itself then."""
    assert not is_device(name, default=default, annotation=annotation)

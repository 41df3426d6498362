"""CUDA's own numbering, asked of the simulated GPU's driver."""

from __future__ import annotations

import os

from memplan.hardware.cuda_order import cuda_uuids, digits_of
from tests.hardware.nvml_driver import Driver, no_driver
from tests.standin.conftest import torch_build
from tests.standin.machine import machine, uuid_of

__all__ = ["torch_build"]


def test_cuda_counts_the_fastest_card_first(torch_build, driver: Driver):
    """A T4 in the first slot and an A100 in the second: CUDA's device 0 is the A100, unless it is told to count along the bus."""
    environment = os.environ | machine(torch_build, driver, "t4", "a100-80")

    by_speed, by_bus = cuda_uuids(environment), cuda_uuids(environment | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})

    assert by_speed == (digits_of(uuid_of(1)), digits_of(uuid_of(0)))
    assert by_bus == by_speed[::-1]


def test_only_visible_cards_are_counted(torch_build, driver: Driver):
    """By number, which is CUDA's, and by the beginning of a UUID."""
    environment = os.environ | machine(torch_build, driver, "t4", "a100-80")

    assert cuda_uuids(environment | {"CUDA_VISIBLE_DEVICES": "1"}) == (digits_of(uuid_of(0)),)
    assert cuda_uuids(environment | {"CUDA_VISIBLE_DEVICES": uuid_of(1)}) == (digits_of(uuid_of(1)),)


def test_a_driver_that_does_not_answer_is_none(torch_build, driver: Driver, tmp_path):
    """No GPU to see, and no driver at all."""
    environment = os.environ | machine(torch_build, driver, "t4", "a100-80")

    assert cuda_uuids(environment | {"CUDA_VISIBLE_DEVICES": ""}) is None
    assert cuda_uuids(os.environ | no_driver(tmp_path).environment()) is None

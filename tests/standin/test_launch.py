"""The environment of a rehearsal."""

from __future__ import annotations

from pathlib import Path

from memplan.hardware.spec import GpuSpec
from memplan.standin.launch import environment_for


def test_the_device_comes_first_and_what_was_there_stays(a100: GpuSpec) -> None:
    """LD_PRELOAD and LD_LIBRARY_PATH are put in front of the user's own."""
    environment = environment_for(a100, Path("/device"), context_bytes=5, inherited={"LD_PRELOAD": "mine.so", "HOME": "/home"})

    assert environment["LD_PRELOAD"] == "/device/libstandin.so:/device/libnvrtc.so:mine.so"
    assert environment["LD_LIBRARY_PATH"] == "/device"
    assert environment["HOME"] == "/home"
    assert environment["MEMPLAN_CARD"] == "8 0 108 85095874560 5 NVIDIA A100-SXM4-80GB"


def test_a_card_of_unknown_kind_is_taken_for_an_a100() -> None:
    """A size alone says nothing of capability and multiprocessors."""
    environment = environment_for(GpuSpec(name="a card", total_memory_bytes=7, origin="test"), Path("/device"), inherited={})

    assert environment["MEMPLAN_CARD"] == "8 0 108 7 0 a card"

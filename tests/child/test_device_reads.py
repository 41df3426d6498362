"""Values that a program reads from the device: the boundary between C and Python, at which an exception would be lost."""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from types import FrameType
from typing import Any

import pytest

from memplan.child import device_reads

Read = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)


@pytest.mark.parametrize("at", ["call", "read"], ids=["before its first line", "in the midst of it"])
def test_a_ctrl_c_in_what_c_calls_comes_again_in_the_program(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Python drops an exception that leaves a function which C called; the program would go on."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back behind the test
    pressed: list[str] = []

    def read(to: int, size: int) -> None: ...

    def sleep() -> None:
        for _ in range(1000):  # no signal came that would end the sleep
            time.sleep(0.01)

    def press(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == at and not pressed:
            pressed.append(at)
            signal.raise_signal(signal.SIGINT)

    called_by_c = Read(device_reads._called_by_c(read))
    sys.setprofile(press)
    try:
        called_by_c(None, 0)
        sys.setprofile(None)
        with pytest.raises(KeyboardInterrupt):
            sleep()
    finally:
        sys.setprofile(None)

    assert pressed == [at]

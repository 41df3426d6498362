"""Which of the calls on the stack are the program's own."""

from __future__ import annotations

import sys
from types import FrameType

from torch.utils._pytree import tree_map

from memplan.child.program_frames import frames_from, reads_itself


def test_what_pytorch_reads_for_a_line_is_not_what_the_line_shows() -> None:
    """A read within a function of PyTorch's is that function's affair, whatever the program does with what it returns."""
    place = sys._getframe()
    frames: list[FrameType] = []
    tree_map(lambda _: frames.extend(frames_from(sys._getframe())), [0])
    of_pytorch = frames[1:]

    assert "_pytree" in of_pytorch[0].f_code.co_filename
    assert not reads_itself(of_pytorch, place)
    assert reads_itself(of_pytorch[of_pytorch.index(place) :], place)

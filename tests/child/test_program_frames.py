"""Which of the calls on the stack are the program's own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.utils._pytree import tree_map

from memplan.child.program_frames import frames_from, program_frame, reads_itself


def test_what_pytorch_reads_for_a_line_is_not_what_the_line_shows() -> None:
    """A read within a function of PyTorch's is that function's affair, whatever the program does with what it returns."""
    place = sys._getframe()
    frames: list[FrameType] = []
    tree_map(lambda _: frames.extend(frames_from(sys._getframe())), [0])
    of_pytorch = frames[1:]

    assert "_pytree" in of_pytorch[0].f_code.co_filename
    assert not reads_itself(of_pytorch, place)
    assert reads_itself(of_pytorch[of_pytorch.index(place) :], place)


def test_what_inductor_wrote_is_not_the_programs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that called a compiled function is told, and no file of a cache that ends with the rehearsal."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    generated: dict[str, Any] = {}
    exec(compile("def call(read):\n    read()", tmp_path / "us" / "cust5h.py", "exec"), generated)
    frames: list[FrameType] = []

    generated["call"](lambda: frames.extend(frames_from(sys._getframe().f_back)))

    assert Path(frames[0].f_code.co_filename).name == "cust5h.py"
    assert program_frame(frames) is sys._getframe()

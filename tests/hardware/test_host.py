"""What the host has left for programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from memplan.hardware.host import available_bytes, has_room_for_another
from memplan.units import GIB, MIB


@pytest.mark.parametrize(
    ("limit", "taken"), [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")]
)
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, limit: str, taken: str) -> None:
    """In both versions of cgroups."""
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text(f"{96 * MIB}\n")
    (tmp_path / taken).write_text(f"{64 * MIB}\n")

    assert available_bytes(tmp_path) == 32 * MIB


def test_a_container_without_a_limit_has_what_the_host_has(tmp_path: Path) -> None:
    """Linux says "max" then."""
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{64 * MIB}\n")

    assert available_bytes(tmp_path) == pytest.approx(psutil.virtual_memory().available, abs=GIB)


def test_a_second_process_needs_a_processor_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of Python has room beside it; on one processor, after its end, or where memory is short, there is none."""
    enough = GIB
    monkeypatch.setattr("memplan.hardware.host.available_bytes", lambda: enough)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: processors)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        processors = {0, 1}
        on_two = has_room_for_another(process.pid)
        enough = 2 * psutil.Process(process.pid).memory_info().rss
        in_little_memory = has_room_for_another(process.pid)
        enough, processors = GIB, {0}
        on_one = has_room_for_another(process.pid)
        processors = {0, 1}
        process.communicate()

    assert (on_two, in_little_memory, on_one) == (True, False, False)
    assert not has_room_for_another(process.pid)

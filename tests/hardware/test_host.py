"""What the host has left for programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from memplan.hardware.host import available_bytes, bytes_of_children, has_room_for_another, shared_memory_bytes
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


def test_what_processes_have_to_themselves_is_counted_while_they_run() -> None:
    """A process with 64 MiB of its own; none when it has ended."""
    before = bytes_of_children()
    program = "x = bytes(range(256)) * (64 * 2**12); print(len(x), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = bytes_of_children()
        child.communicate(b"\n")

    assert during - before >= 64 * 2**20
    assert bytes_of_children() - before < 64 * 2**20


def test_a_system_without_shared_memory_says_so(tmp_path: Path) -> None:
    """Where there is a folder, what is free in it; else None."""
    assert shared_memory_bytes(tmp_path / "shm") is None
    assert (shared_memory_bytes(tmp_path) or 0) > 0

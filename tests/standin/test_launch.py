"""The environment of a rehearsal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memplan.hardware.gpu import GpuSpec
from memplan.standin.launch import caches_in, command_for, environment_for, on_gpus


def test_the_device_comes_first_and_what_was_there_stays(a100: GpuSpec) -> None:
    """LD_PRELOAD and LD_LIBRARY_PATH are put in front of the user's own."""
    environment = environment_for([a100], Path("/device"), context_bytes=5, inherited={"LD_PRELOAD": "mine.so", "HOME": "/home"})

    assert environment["LD_PRELOAD"] == "/device/libstandin.so:/device/libnvrtc.so:mine.so"
    assert environment["LD_LIBRARY_PATH"] == "/device"
    assert environment["HOME"] == "/home"
    assert environment["MEMPLAN_CARD"] == "8 0 108 2048 85095874560 5 NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_threads_that_wait_leave_the_processor_to_others(a100: GpuSpec, given: dict[str, str], expected: str) -> None:
    """Unless the user says otherwise: two programs whose threads spin take as long at once as one after the other."""
    assert environment_for([a100], Path("/device"), inherited=given)["OMP_WAIT_POLICY"] == expected


def test_a_library_in_a_folder_with_a_blank_is_preloaded_by_its_name(a100: GpuSpec) -> None:
    """LD_PRELOAD is split at blanks; the name is searched in LD_LIBRARY_PATH, which is not."""
    environment = environment_for([a100], Path("/my device"), inherited={"LD_LIBRARY_PATH": "/mine"})

    assert environment["LD_PRELOAD"] == "libstandin.so:libnvrtc.so"
    assert environment["LD_LIBRARY_PATH"] == "/my device:/mine"


def test_unlimited_memory_has_the_workspaces_of_the_smallest_gpu_of_its_kind(a100: GpuSpec) -> None:
    """Also where a values pass has more of it, so that it asks for the same: an A30 has 24 GiB."""
    whole = a100.endless()
    more = whole.model_copy(update={"total_memory_bytes": 8 * whole.total_memory_bytes})

    own, usual, ample = (on_gpus([gpu], context_bytes=0)["MEMPLAN_MOST_WORKSPACE"] for gpu in (a100, whole, more))

    assert own == ""
    assert 23 << 30 < int(usual) < 24 << 30
    assert ample == usual


def test_a_card_of_unknown_kind_is_taken_for_an_a100() -> None:
    """A size alone says nothing of capability and multiprocessors."""
    environment = environment_for([GpuSpec(name="a GPU", total_memory_bytes=7, origin="test")], Path("/device"), inherited={})

    assert environment["MEMPLAN_CARD"] == "8 0 108 2048 7 0 a GPU"


def test_tritons_cache_moves_only_where_the_home_cannot_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that is not there; a user who has chosen a place for it keeps that."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert caches_in(tmp_path, inherited={}) == {}

    monkeypatch.setenv("HOME", str(tmp_path / "nonexistent"))
    assert caches_in(tmp_path, inherited={}) == {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    assert caches_in(tmp_path, inherited={"TRITON_CACHE_DIR": "/scratch"}) == {}
    assert caches_in(tmp_path, inherited={"TRITON_HOME": "/scratch"}) == {}


def test_a_program_begins_without_blocked_signals() -> None:
    """Whoever starts it may be waiting for some, and a blocked signal is inherited (signal(7)): it could not be ended by one."""
    asks = "import signal; print(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        run = subprocess.run(command_for([sys.executable, "-c", asks]), capture_output=True, text=True, check=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    assert run.stdout == "0\n"

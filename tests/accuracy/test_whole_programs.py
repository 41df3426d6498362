"""
Users' programs from beginning to end, rehearsed, beside what was recorded of them on an H100 and on an H200.

NVIDIA H100 80GB HBM3 (2026-11-26) and NVIDIA H200 (2026-11-27), driver 580.159.04, PyTorch 2.11.0+cu130. With that PyTorch, what is said
to be equal is equal to the byte; with another one, which itself allocates a little otherwise, a few programs that differ by little are
within 1.5%.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from memplan.hardware.torch_install import TorchBuild
from tests.accuracy.on_card import RECORDINGS
from tests.accuracy.whole_on_card import EQUAL, PROGRAMS, WholeProgram, rehearse_program
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

CARDS = ("nvidia-h200", "nvidia-h100-80gb-hbm3")
RECORDED: dict[str, dict[str, Any]] = {
    row["program"]: row
    for card in CARDS  # what the H100 ran too is of the H100
    for row in map(json.loads, (RECORDINGS / f"whole-programs-{card}.jsonl").read_text(encoding="utf-8").splitlines())
}
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")
ELSEWHERE = (
    "gan.py", "graph_edges.py", "hf_causal.py out 8", "language_model.py 8 1", "masked_language_model.py", "segmentation_unet.py",
    "speech_ctc.py", "token_mask.py",
)  # fmt: skip
"""Those of which another PyTorch makes the same but for a MiB or two."""


def rehearsed(program: WholeProgram) -> dict[str, Any]:
    """Return what a rehearsal says; skip where a package that it needs is not installed."""
    if not program.is_here:
        pytest.skip("a package that it needs is not installed")
    return rehearse_program(program, RECORDED[program.name]["gpu"])


def errors(program: WholeProgram, found: dict[str, Any]) -> list[float]:
    """Return by how much of them the peaks allocated and reserved are above those recorded."""
    return [found[peak] / RECORDED[program.name][peak] - 1 for peak in PEAKS]


def test_each_program_was_recorded() -> None:
    """And three of five of them came out to the byte."""
    names = {program.name for program in PROGRAMS}

    assert names == RECORDED.keys()
    assert names >= EQUAL
    assert len(EQUAL) >= 0.6 * len(names)


@pytest.mark.heavy
@pytest.mark.parametrize("program", [each for each in PROGRAMS if each.name in EQUAL], ids=lambda program: program.name)
def test_the_peaks_are_those_of_the_gpu(torch_build: TorchBuild, program: WholeProgram) -> None:
    """With the PyTorch that was recorded: allocated and reserved, to the byte."""
    if RECORDED[program.name]["torch"] != torch_build.version:
        pytest.skip(f"recorded with PyTorch {RECORDED[program.name]['torch']}, this is {torch_build.version}")

    assert errors(program, rehearsed(program)) == [0, 0]


@pytest.mark.heavy
@pytest.mark.parametrize("name", ELSEWHERE)
def test_another_pytorch_takes_about_what_the_gpu_took(torch_build: TorchBuild, name: str) -> None:
    """Programs whose labels, masks, lengths and edges decide what they allocate."""
    program = next(each for each in PROGRAMS if each.name == name)

    found = rehearsed(program)

    assert found["verdict"] == "fits"
    assert errors(program, found) == pytest.approx([0, 0], abs=0.015)

"""
The tables of docs/guides.md are what memplan's commands say of the templates; `python -m tests.test_guides` writes them anew.

Every row takes minutes where nothing is cached: of each table the tests make some rows.

What the guides said is in the page's text, but for the rule of thumb of the first one, which is `--method guide`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from tests.test_docs import REPOSITORY, printed_with, skip_without, without_method

PAGE = REPOSITORY / "docs" / "guides.md"
TABLE = re.compile(r"<!-- table (?P<name>\w+) -->\n(?P<rows>.*?)<!-- end of table -->\n", re.DOTALL)

FIGURE = re.compile(r"\d+\.\d\d(?= GiB)")

GPUS = {8: "rtx4060", 12: "rtx3060", 16: "t4", 24: "rtx4090", 32: "rtx5090", 40: "a100-40", 48: "l40s", 80: "a100-80"}
"""A GPU of each size that the first guide has a row for."""

CLIP = ("--config-path", "templates/guides/clip-classifier.yaml")
FINE_TUNING = ("--config-path", "templates/guides/fine-tuning.yaml")


def answer(*arguments: str) -> dict[str, Any]:
    """Return what a command of memplan answers in JSON; a plan that does not fit is an answer too."""
    command = [sys.executable, "-m", "memplan", *arguments, "--format", "json"]
    done = subprocess.run(command, cwd=REPOSITORY, env=without_method(), capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def gib(num_bytes: int) -> str:
    """Return bytes as people read them."""
    return f"{num_bytes / 2**30:.2f} GiB"


def name_of(told: dict[str, Any]) -> str:
    """Return the name of the GPU that an answer is for, and what programs can use of it."""
    return f"{told['gpu']['name'].removeprefix('NVIDIA ')}, {gib(told['gpu']['total_memory_bytes'])}"


def taken(*arguments: str) -> str:
    """Return what the values that are pinned take, and whether that fits."""
    told = answer("check", *arguments)
    most = max(stage["device_used"]["expected_bytes"] for stage in told["stages"])
    return f"{gib(most)}, {'fits' if told['fits'] else 'does not fit'}"


def batch(planned: dict[str, Any]) -> str:
    """Return micro-batch × accumulation."""
    return f"{planned['micro_batch_size']} × {planned['gradient_accumulation_steps']}"


def planned(told: dict[str, Any]) -> str:
    """Return the batch of a plan, with what the stage takes that takes most; or how much it is short."""
    if not told["fits"]:
        return f"none: {gib(told['missing_bytes'])} short"
    most = max(told["stages"], key=used_by)
    return f"{batch(most['planned'])}: {gib(used_by(most))}"


def used_by(stage: dict[str, Any]) -> int:
    """Return the bytes of the GPU that a stage of a plan, or of a comparison, takes."""
    used: int = stage["device_used_bytes"] if "device_used_bytes" in stage else stage["estimate"]["device_used"]["expected_bytes"]
    return used


def text_table(sizes: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """The contrastive text encoder, with 24 negatives, for GPUs of *sizes*."""
    yield "GPU, for programs", "the guide's batch", "what it takes", "memplan", "memplan, after `.train()`"
    gpus = [GPUS[size] for size in sizes]
    compared = [
        answer("compare", "--gpus", ",".join(gpus), "--config-path", "built-in", *pins)["gpus"]
        for pins in ((), ("--pin", "is_in_eval_mode=false"))
    ]
    for size, gpu, told, in_training in zip(sizes, gpus, *compared, strict=True):
        of_guide = answer("--gpu-memory", f"{size}GiB", "--method", "guide", "--config-path", "built-in")["stages"][0]["planned"]
        takes = taken("--gpu", gpu, "--config-path", "built-in", "--pin", f"micro_batch_size={of_guide['micro_batch_size']}")
        yield name_of(told), batch(of_guide), takes, planned(told), planned(in_training)


def pose_table(sizes: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Pose estimation: the settings for 256 images in an optimizer step, for two sizes of images, on GPUs of *sizes*."""
    yield "GPU, for programs", "images of 224", "images of 256"
    gpus = [GPUS[size] for size in sizes]
    options = ("--gpus", ",".join(gpus), "--target-effective-batch", "256", "templates/guides/pose.py:build")
    of_size = [answer("compare", "--pin", f"size={size}", *options)["gpus"] for size in (224, 256)]
    for small, large in zip(*of_size, strict=True):
        yield name_of(small), planned(small), planned(large)


def clip_table(sizes: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """The CLIP-like classifier on GPUs of *sizes*: the ends of what the guide says."""
    yield "GPU, for programs", "batch 16 takes", "batch 128 takes", "memplan, for 128"
    for gpu in (GPUS[size] for size in sizes):
        told = answer("--gpu", gpu, *CLIP)
        yield name_of(told), *(taken("--gpu", gpu, *CLIP, "--pin", f"micro_batch_size={size}") for size in (16, 128)), planned(told)


def tune_table(lengths: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """The fine-tuning on a T4, by the length of a batch's longest text."""
    yield "longest text", "32 × 2 takes", "memplan, for 64"
    for length in lengths:
        of_length = ("--gpu", "t4", *FINE_TUNING, "--pin", f"sequence_length={length}")
        yield f"{length} tokens", taken(*of_length, "--pin", "micro_batch_size=32"), planned(answer(*of_length))


class Table(NamedTuple):
    """A table of the page."""

    of: Callable[[Sequence[int]], Iterator[tuple[str, ...]]]
    rows: tuple[int, ...]
    """The sizes of the GPUs, or the lengths of the texts."""
    tested: tuple[int, ...]
    """Those that the tests make anew."""


TABLES = {
    "text": Table(text_table, tuple(GPUS), (24,)),
    "pose": Table(pose_table, (8, 12, 16, 24), (16,)),
    "clip": Table(clip_table, (8, 12), (8,)),
    "tune": Table(tune_table, (128, 256, 384, 512), (128, 512)),
}


def table(name: str, values: Sequence[int]) -> str:
    """Return a table of the page, or some rows of it."""
    head, *rows = TABLES[name].of(values)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ("---",) * len(head), *rows))


def rows_of(text: str, rows: Sequence[int]) -> str:
    """Return the head of a table's text, and those of its rows."""
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:2], *(lines[2 + row] for row in rows)])


def shown() -> dict[str, str]:
    """The tables that stand in the page."""
    return {match["name"]: match["rows"] for match in TABLE.finditer(PAGE.read_text(encoding="utf-8"))}


@pytest.mark.heavy
@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_guides_are_what_memplan_says(name: str) -> None:
    """After a change: `python -m tests.test_guides`."""
    skip_without(printed_with())
    rows, tested = TABLES[name].rows, TABLES[name].tested
    now, written = table(name, tested), rows_of(shown()[name], [rows.index(row) for row in tested])

    assert FIGURE.sub("", now) == FIGURE.sub("", written)
    # Where a container forbids fixed addresses the order of some frees varies, and with it fragmentation.
    assert [float(size) for size in FIGURE.findall(now)] == pytest.approx([float(size) for size in FIGURE.findall(written)], rel=0.02)


def test_every_guide_has_its_table() -> None:
    """And a template that is there."""
    text = PAGE.read_text(encoding="utf-8")

    assert list(shown()) == list(TABLES)
    assert all((REPOSITORY / path).is_file() for path in re.findall(r"templates/[\w/-]+\.(?:yaml|py)", text))


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    text = TABLE.sub(
        lambda match: f"<!-- table {match['name']} -->\n{table(match['name'], TABLES[match['name']].rows)}<!-- end of table -->\n", text
    )
    PAGE.write_text(text, encoding="utf-8")

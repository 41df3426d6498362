"""`.memplan/plan.yaml`: what is remembered of a plan."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from memplan.edits.files import Files
from memplan.errors import ConfigError
from memplan.programs.plan_file import PLAN_FILE, PlanSettings, as_yaml, merge, read_plan_file, write_plan_file
from tests.conftest import content

SETTINGS = PlanSettings(
    command=("python", "train.py", "--batch-size", "{micro_batch_size}", "a b", "it's", ""),
    fields=("gradient_accumulation_steps=conf/a.yaml:x.y",),
    short=("WANDB_MODE=offline", "conf/a.yaml:x.val=0"),
    stages=("conf/*_stage.yaml", "conf/last.yaml"),
    num_gpus=8,
    gpu="a100-80",
    gpu_memory="24",
    target_effective_batch_size=256,
    target_tolerance=0.05,
    margin=0.1,
    pins={"sequence_length": "512", "rate": "1e-4", "flag": "true"},
    grow_negatives=True,
)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """All of it, with each key explained; a file that says so already is left alone, whatever else is in it."""
    assert write_plan_file(tmp_path, SETTINGS) == tmp_path / PLAN_FILE
    text = (tmp_path / PLAN_FILE).read_text()
    assert read_plan_file(tmp_path) == SETTINGS
    assert text.count("\n# ") == len(YAML(typ="safe").load(text)) + 1
    assert sorted(content(tmp_path)) == [".memplan/.gitignore", ".memplan/plan.yaml"]

    (tmp_path / PLAN_FILE).write_text("# mine\n" + text)
    assert write_plan_file(tmp_path, SETTINGS) is None
    assert write_plan_file(tmp_path, PlanSettings(gpu="t4")) is not None
    assert read_plan_file(tmp_path) == PlanSettings(gpu="t4")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1), st.dictionaries(st.text("abc_", min_size=1), st.text()))
@example([".5"], {"a": ".0", "b": ".nan", "_": "._1"})
def test_any_text_comes_back(words: list[str], pins: dict[str, str]) -> None:
    """Read by another parser, whatever is in a command or a value."""
    data = YAML(typ="safe").load(as_yaml(PlanSettings(command=tuple(words), pins=pins)))

    assert PlanSettings.model_validate(data) == PlanSettings(command=tuple(words), pins=pins)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("gpu: t4\ncomand: train.py\n", 2, "`comand`: no such field"),
        ("version: 2\n", 1, "`version`: input should be 1"),
        ("gpu: t4\ngpu: t4\n", 2, "`gpu` is set here and in line 1"),
        ("gpu: t4\n\nnum_gpus: many\n", 3, "`num_gpus`: input should be a valid integer"),
        ("command: 'train.py \"'\n", 1, "`command`: no closing quotation"),
        ("fields:\n  - micro_batch_size=a.yaml:b\n  - micro_batch=a.yaml:c\n", 3, "`fields`: 'micro_batch=a.yaml:c' names no variable"),
        ("short: [x]\n", 1, "`short`: 'x' does not say what makes a rehearsal short"),
        ("margin: 2\n", 1, "`margin`: input should be less than 1"),
        ("gpu: nocard\n", 1, "`gpu`: unknown GPU: 'nocard'"),
        ("gpu_memory: big\n", 1, "`gpu_memory`: "),
        ("command: a.py\nfunction: a.py:build\n", 1, "command and function exclude each other"),
        ("- t4\n", None, "has no keys and values"),
        ("gpu: [\n", 2, ""),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, line: int | None, said: str) -> None:
    (tmp_path / ".memplan").mkdir()
    (tmp_path / PLAN_FILE).write_text(text)

    with pytest.raises(ConfigError) as caught:
        read_plan_file(tmp_path)

    assert (caught.value.file, caught.value.line) == (tmp_path / PLAN_FILE, line)
    assert said in caught.value.message


def test_what_is_typed_goes_before_what_is_remembered() -> None:
    """By variable where there are several; another GPU replaces the whole GPU."""
    typed = PlanSettings(
        fields=("gradient_accumulation_steps=STEPS", "micro_batch_size=B"),
        short=("WANDB_MODE=disabled",),
        gpu="t4",
        pins={"rate": "2"},
        margin=0.2,
    )
    merged, remembered = merge(typed, SETTINGS, with_gpu=True)

    assert merged == SETTINGS.model_copy(
        update={
            "fields": typed.fields,
            "short": ("conf/a.yaml:x.val=0", "WANDB_MODE=disabled"),
            "gpu": "t4",
            "gpu_memory": None,
            "pins": {**SETTINGS.pins, "rate": "2"},
            "margin": 0.2,
        }
    )
    assert remembered == (
        "command",
        "short",
        "stages",
        "num_gpus",
        "target_effective_batch_size",
        "target_tolerance",
        "pins",
        "grow_negatives",
    )
    assert merge(PlanSettings(), SETTINGS, with_gpu=False).settings == SETTINGS.model_copy(update={"gpu": None, "gpu_memory": None})


class _Stops(Files):
    """A disk that is full after some calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def step(self, what: str, path: Path) -> None:
        self.calls -= 1
        if self.calls < 0 and what != "remove":
            raise OSError(28, os.strerror(28))


@pytest.mark.parametrize("calls", range(4))
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, calls: int) -> None:
    """Whole, and nothing beside it: before the folder is made, the new file begun, its end written, it is put in its place."""
    write_plan_file(tmp_path, SETTINGS)
    before = content(tmp_path)

    with pytest.raises(ConfigError, match="No space left on device"):
        write_plan_file(tmp_path, PlanSettings(gpu="t4"), files=_Stops(calls))

    assert content(tmp_path) == before

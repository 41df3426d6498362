"""What a program prepares is there for the next rehearsal of a plan, and the user's own cache stays as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memplan.execution.rehearse_script import rehearse_script
from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.programs.prepared_data import PreparedData, users_cache
from tests.conftest import content


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_DATASETS_CACHE": "/data", "HF_HOME": "/hub"}, "/data"),
        ({"HF_HOME": "/hub", "XDG_CACHE_HOME": "/caches"}, "/hub/datasets"),
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/huggingface/datasets"),
        ({}, "~/.cache/huggingface/datasets"),
    ],
)
def test_the_users_cache_is_where_datasets_looks_for_it(environment: dict[str, str], expected: str) -> None:
    """By the same variables, in the same order (`datasets/config.py` of 4.4)."""
    assert users_cache(environment) == Path(expected).expanduser()


PREPARING = """
import os, sys, torch
from pathlib import Path
cache = Path(os.environ["HF_DATASETS_CACHE"], "json")
known, made = cache / "known.arrow", cache / "made.arrow"
num_megabytes = 1 if made.exists() else 2
assert known.read_text() == "of the user's"
with open(cache / "partial", "w") as file:
    file.write("prepared")
os.replace(cache / "partial", made)
known.with_suffix(".lock").write_text("")
if len(sys.argv) > 1:
    known.unlink()
torch.ones(num_megabytes * 2**18, device="cuda")
"""


@pytest.mark.heavy
def test_what_is_prepared_is_found_by_the_next_rehearsal(torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache is read, and neither written nor told of as the plan's."""
    users = tmp_path / "cache" / "json"
    users.mkdir(parents=True)
    (users / "known.arrow").write_text("of the user's")
    (users / "known.lock").write_text("locked")
    before = content(tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(PREPARING)
    prepared = PreparedData(tmp_path / "plan", os.environ)
    words = [str(tmp_path / "train.py")]

    first, second = (rehearse_script([*words, *more], gpu=find_gpu("t4"), prepared=prepared) for more in ([], ["removes"]))

    assert [rehearsal.exit_code for rehearsal in (first, second)] == [0, 0]
    assert [rehearsal.peak_allocated_bytes for rehearsal in (first, second)] == [2 * 2**20, 2**20]
    assert content(tmp_path / "cache") == before
    assert str(users / "known.arrow") in first.read_files
    assert not any(file.startswith(str(prepared.folder)) for file in (*first.read_files, *second.read_files))


def test_there_need_not_be_a_cache_of_the_users(tmp_path: Path) -> None:
    """Then the plan's is empty."""
    prepared = PreparedData(tmp_path / "plan", {"HF_DATASETS_CACHE": str(tmp_path / "nothing")})

    assert list(Path(prepared.variables()["HF_DATASETS_CACHE"]).iterdir()) == []
    assert prepared.users_file(str(tmp_path / "plan" / "made.arrow")) is None
    assert prepared.users_file("/other") == "/other"

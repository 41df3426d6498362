"""Which format a file has: by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.edits.config_file import SUFFIXES, load_config_file, parse_config_file

TEXTS = {
    "c.yaml": "size: 8\n",
    "c.yml": "size: 8 # why\n",
    "c.json": '{"size": 8}',
    "c.toml": "size = 8 # why\n",
    "c.py": "size = 8 # why\n",
    "c.sh": "size=8 # why\n",
    "c.bash": "python train.py --size 8 # why\n",
    "config": "size: 8\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_is_read_and_changed_as_what_its_name_says(tmp_path: Path, name: str) -> None:
    """One without a suffix that says it is YAML."""
    (tmp_path / name).write_text(TEXTS[name])

    file = load_config_file(tmp_path / name)

    assert file.to_python() == {"size": 8}
    assert file.keys() == {"size"}
    assert file.kind_of(("size",)) == "scalar"
    assert file.line_of(("size",)) == 1
    assert file.replace(("size",), 99).decode() == TEXTS[name].replace("8", "99")
    assert parse_config_file(tmp_path / name, file.replace(("size",), 99)).get(("size",)) == (99, 1)


def test_every_suffix_is_tried_here() -> None:
    """So that a format that is added has its row above."""
    assert {Path(name).suffix for name in TEXTS} == {*SUFFIXES, ""}

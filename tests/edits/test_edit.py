"""An edit names its place as people write it, and its value as YAML and JSON both do."""

from pathlib import Path

import pytest

from memplan.edits.edit import Edit, as_text


def test_an_edit_names_its_place_with_dots():
    """What a person reads is `training.batch_size`."""
    assert Edit(Path("c.yaml"), ("training", "batch_size"), 8).dotted == "training.batch_size"


@pytest.mark.parametrize(("value", "text"), [(8, "8"), (-1, "-1"), (True, "true"), (False, "false"), ("bf16", "bf16")])
def test_a_value_is_written_as_yaml_and_json_both_read_it(value: int | str | bool, text: str):
    """Python's True is nobody else's."""
    assert as_text(value) == text

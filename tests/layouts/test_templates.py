"""The templates, and what is made from them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from memplan.edits.yaml_file import YamlFile
from memplan.layouts.schema import layout_from
from memplan.layouts.templates import (
    COMPILED,
    LAYOUT_SCHEMA,
    SCHEMA,
    compiled_text,
    layout_schema_text,
    schema_text,
    template_data,
    template_files,
    templates_folder,
)

FOLDER = templates_folder()


def test_the_compiled_templates_are_those_that_stand_there() -> None:
    """After a change: `make templates`."""
    assert (FOLDER / COMPILED).read_text() == compiled_text(FOLDER)


def test_the_schema_is_that_of_the_models() -> None:
    """After a change: `make templates`."""
    assert (FOLDER / SCHEMA).read_text() == schema_text()


def test_the_schema_of_layouts_is_that_of_the_models() -> None:
    """After a change: `make templates`."""
    assert (FOLDER / LAYOUT_SCHEMA).read_text() == layout_schema_text()


@pytest.mark.parametrize("path", list(template_files(FOLDER, "layout.yaml")), ids=lambda path: path.parent.name)
def test_every_layout_is_valid_by_the_schema(path: Path) -> None:
    """Switches and numbers may stand without quotes, which the schema of a text does not know."""
    layout = layout_from(template_data(path), path)

    jsonschema.validate(layout.model_dump(mode="json", exclude_unset=True), json.loads(layout_schema_text()))


def test_a_template_that_was_edited_is_parsed(tmp_path: Path) -> None:
    """The compiled content counts only for the very same bytes."""
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "workload.yaml"
    path.write_text("name: first\n")
    (tmp_path / COMPILED).write_text(compiled_text(tmp_path))
    assert template_data(path) == {"name": "first"}

    path.write_text("name: second\n")

    assert template_data(path) == {"name": "second"}


@pytest.mark.parametrize("path", list(template_files(FOLDER, "workload.yaml")), ids=lambda path: path.parent.name)
def test_every_starter_workload_is_valid_by_the_schema(path: Path) -> None:
    """An editor that knows the schema accepts it."""
    jsonschema.validate(YamlFile.load(path).to_python(), json.loads(schema_text()))


@pytest.mark.parametrize("path", list(template_files(FOLDER, "layout.yaml")), ids=lambda path: path.parent.name)
def test_every_layout_names_fields_that_exist(path: Path) -> None:
    """A field that no workload has would be read and never planned; a tree's stands in its starter."""
    layout = layout_from(template_data(path), path)
    if layout.workload is None:
        return
    starter = template_data(path.parent / layout.workload)

    for entry in layout.fields:
        value = starter
        *parents, field = entry.field.split(".")
        for name in parents:
            value = value.get(name, {})
        assert field in value or entry.field.startswith("parallelism."), entry.field


def test_every_field_of_the_schema_has_its_sentence() -> None:
    """The sentence under a field is its documentation."""
    schema = json.loads(schema_text())

    for name, definition in (*schema["$defs"].items(), ("Workload", schema)):
        for field, described in definition.get("properties", {}).items():
            assert described.get("description", "").endswith("."), f"{name}.{field}"


def test_the_schema_refuses_what_the_models_refuse() -> None:
    """Unknown keys and numbers below one."""
    schema = json.loads(schema_text())
    data = YamlFile.load(FOLDER / "hydra-contrastive" / "workload.yaml").to_python()

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data | {"traning": {}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data | {"training": {"micro_batch_size": 0}}, schema)

"""`memplan undo` as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.conftest import Run, content


def test_a_dry_run_says_what_would_be_put_back(run_memplan: Run, tree: Path) -> None:
    """And writes nothing."""
    run_memplan("--gpu", "rtx4090", "--apply", "--config-path", tree)
    before = content(tree)

    result = run_memplan("undo", "--dry-run", "--config-path", tree.parent)

    assert result.returncode == 0
    assert result.stdout.count("would put back") == 3
    assert content(tree) == before


def test_json_names_the_files(run_memplan: Run, tree: Path) -> None:
    """For a program."""
    run_memplan("--gpu", "rtx4090", "--apply", "--config-path", tree)

    answer = json.loads(run_memplan("undo", "--format", "json", "--config-path", tree / "config.yaml").stdout)

    assert (answer["schema_version"], answer["was_interrupted"], answer["dry_run"]) == (1, False, False)
    assert [Path(path).name for path in answer["restored"]] == ["config.yaml", "02_stage.yaml", "03_stage.yaml"]


def test_each_undo_goes_one_apply_further_back(run_memplan: Run, tree: Path) -> None:
    """Two applies, two undos, and then nothing is left to undo."""
    original = content(tree)
    run_memplan("--gpu", "rtx4090", "--apply", "--config-path", tree)
    first = content(tree)
    run_memplan("--gpu", "h200", "--apply", "--config-path", tree)

    run_memplan("undo", "--config-path", tree)
    assert content(tree)["config.yaml"] == first["config.yaml"]
    run_memplan("undo", "--config-path", tree)
    assert content(tree)["config.yaml"] == original["config.yaml"]
    assert run_memplan("undo", "--config-path", tree).returncode == 2


def test_a_file_that_changed_since_is_not_overwritten(run_memplan: Run, tree: Path) -> None:
    """Its author's work wins; nothing else is put back either."""
    run_memplan("--gpu", "rtx4090", "--apply", "--config-path", tree)
    (tree / "config.yaml").write_bytes((tree / "config.yaml").read_bytes() + b"# mine\n")
    before = content(tree)

    result = run_memplan("undo", "--config-path", tree)

    assert result.returncode == 2
    assert "config.yaml: has changed since memplan wrote it" in result.stderr
    assert content(tree) == before


def test_undo_works_where_the_configuration_cannot_be_read_any_more(run_memplan: Run, tree: Path) -> None:
    """A stage that was deleted keeps a plan from being made, not the others from being put back."""
    run_memplan("--gpu", "rtx4090", "--apply", "--config-path", tree)
    (tree / "text_curriculum" / "01_stage.yaml").unlink()

    assert run_memplan("undo", "--config-path", tree).returncode == 0


def test_an_interrupted_apply_is_said_and_put_back(run_memplan: Run, tree: Path) -> None:
    """As a kill leaves it: some files new, the journal unfinished. An apply is refused until undo ran."""
    original = content(tree)
    run_memplan("--gpu", "rtx4090", "--apply", "--config-path", tree)
    journal = next((tree / ".memplan").glob("apply-*.json"))
    journal.write_text(journal.read_text().replace('"applied"', '"applying"'))
    (tree / "config.yaml").write_bytes(original["config.yaml"])

    refused = run_memplan("--gpu", "h200", "--apply", "--config-path", tree)
    undone = run_memplan("undo", "--config-path", tree)

    assert refused.returncode == 2
    assert "an earlier apply was interrupted" in refused.stderr
    assert "The last apply was interrupted." in undone.stderr
    assert undone.stdout.count("put back") == 2
    assert {name: data for name, data in content(tree).items() if name in original} == original


def test_a_copy_of_a_tree_undoes_itself(run_memplan: Run, tree: Path, tmp_path: Path) -> None:
    """The journal goes with the folder: neither a copy nor a folder that was moved reaches back to where it came from."""
    original = content(tree)
    run_memplan("--gpu", "rtx4090", "--apply", "--config-path", tree)
    written = content(tree)
    copy = Path(shutil.copytree(tree.parent, tmp_path / "copy")) / "conf"

    undone = run_memplan("undo", "--config-path", copy)

    assert undone.returncode == 0
    assert {name: data for name, data in content(copy).items() if name in original} == original
    assert content(tree) == written

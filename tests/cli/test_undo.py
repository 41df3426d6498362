"""`memplan undo` as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import Run, content

APPLY = ["--gpu", "rtx4090", "--grow-negatives", "--apply"]
"""Changes config.yaml and each of the four stages."""


def test_a_dry_run_says_what_would_be_put_back(run_memplan: Run, tree: Path) -> None:
    """And writes nothing."""
    run_memplan(*APPLY, "--config-path", tree)
    before = content(tree)

    result = run_memplan("undo", "--dry-run", "--config-path", tree.parent)

    assert result.returncode == 0
    assert result.stdout.count("would put back") == 5
    assert content(tree) == before


def test_json_names_the_files(run_memplan: Run, tree: Path) -> None:
    """For a program."""
    run_memplan(*APPLY, "--config-path", tree)

    answer = json.loads(run_memplan("undo", "--format", "json", "--config-path", tree / "config.yaml").stdout)

    assert (answer["schema_version"], answer["was_interrupted"], answer["dry_run"]) == (1, False, False)
    assert [Path(path).name for path in answer["restored"]] == [
        "config.yaml", "default.yaml", "01_stage.yaml", "02_stage.yaml", "03_stage.yaml",
    ]  # fmt: skip


def test_a_folder_stands_for_the_configuration_in_it(run_memplan: Run, tree: Path) -> None:
    """`memplan undo conf` is `memplan undo --config-path conf`."""
    before = content(tree)
    run_memplan("--gpu", "RTX 4090", "--apply", "--config-path", tree)

    undone = run_memplan("undo", tree)

    assert undone.returncode == 0, undone.stderr
    assert {name: data for name, data in content(tree).items() if name in before} == before


def test_a_file_is_found_where_this_folder_has_a_plan_of_its_own(run_memplan: Run, tree: Path) -> None:
    """What memplan remembers here has no journal: that of the file's own folder counts."""
    before = content(tree)
    run_memplan("--gpu", "RTX 4090", "--apply", "--config-path", tree)
    (tree.parent / ".memplan").mkdir()

    undone = run_memplan("undo", str(tree / "config.yaml"), cwd=tree.parent)

    assert undone.returncode == 0, undone.stderr
    assert content(tree)["config.yaml"] == before["config.yaml"]


@pytest.mark.heavy
def test_each_undo_goes_one_apply_further_back(run_memplan: Run, tree: Path) -> None:
    """Two applies, two undos, and then nothing is left to undo."""
    original = content(tree)
    run_memplan(*APPLY, "--config-path", tree)
    first = content(tree)
    run_memplan("--gpu", "h200", "--apply", "--config-path", tree)

    run_memplan("undo", "--config-path", tree)
    assert content(tree)["config.yaml"] == first["config.yaml"]
    run_memplan("undo", "--config-path", tree)
    assert content(tree)["config.yaml"] == original["config.yaml"]
    assert run_memplan("undo", "--config-path", tree).returncode == 2


def test_a_file_that_changed_since_is_not_overwritten(run_memplan: Run, tree: Path) -> None:
    """Its author's work wins; nothing else is put back either."""
    run_memplan(*APPLY, "--config-path", tree)
    (tree / "config.yaml").write_bytes((tree / "config.yaml").read_bytes() + b"# mine\n")
    before = content(tree)

    result = run_memplan("undo", "--config-path", tree)

    assert result.returncode == 2
    assert "config.yaml: has changed since memplan wrote it" in result.stderr
    assert content(tree) == before


def test_undo_works_where_the_configuration_cannot_be_read_any_more(run_memplan: Run, tree: Path) -> None:
    """A file that is no YAML any more keeps a plan from being made, not the others from being put back."""
    run_memplan(*APPLY, "--config-path", tree)
    (tree / "config.yaml").write_bytes((tree / "config.yaml.backup").read_bytes())
    (tree / "text_curriculum" / "chain_default.yaml").write_text("stages: [\n")

    assert run_memplan("undo", "--config-path", tree).returncode == 0


@pytest.mark.heavy
def test_an_interrupted_apply_is_said_and_put_back(run_memplan: Run, tree: Path) -> None:
    """As a kill leaves it: some files new, the journal unfinished. An apply is refused until undo ran."""
    original = content(tree)
    run_memplan(*APPLY, "--config-path", tree)
    journal = next((tree / ".memplan").glob("apply-*.json"))
    journal.write_text(journal.read_text().replace('"applied"', '"applying"'))
    (tree / "config.yaml").write_bytes(original["config.yaml"])

    refused = run_memplan("--gpu", "h200", "--apply", "--config-path", tree)
    undone = run_memplan("undo", "--config-path", tree)

    assert refused.returncode == 2
    assert "an earlier apply was interrupted" in refused.stderr
    assert "The last apply was interrupted." in undone.stderr
    assert undone.stdout.count("put back") == 4
    assert {name: data for name, data in content(tree).items() if name in original} == original


@pytest.mark.heavy
@pytest.mark.parametrize("arguments", [["gpus"], ["--gpu", "t4", "--config-path", "conf"], ["compare", "t4"], ["--help"]])
def test_an_interrupted_apply_is_named_by_the_next_command_whichever_it_is(run_memplan: Run, tree: Path, arguments: list[str]) -> None:
    """On standard error, in one line; the command does its work."""
    run_memplan(*APPLY, "--config-path", tree)
    journal = next((tree / ".memplan").glob("apply-*.json"))
    journal.write_text(journal.read_text().replace('"applied"', '"applying"'))

    result = run_memplan(*arguments, cwd=tree.parent)

    assert result.returncode == 0
    assert result.stderr.startswith("Warning: an apply was interrupted in conf; `memplan undo` puts every file back\n")


@pytest.mark.heavy
def test_one_file_can_be_put_back_where_another_was_edited_since(run_memplan: Run, tree: Path) -> None:
    """The work of its author stays; the rest of the apply can be undone later, when that file is as memplan left it."""
    original = content(tree)
    run_memplan(*APPLY, "--config-path", tree)
    written = (tree / "config.yaml").read_bytes()
    (tree / "config.yaml").write_bytes(written + b"# mine\n")
    stage = tree / "text_curriculum" / "01_stage.yaml"

    refused = run_memplan("undo", cwd=tree.parent)
    one = run_memplan("undo", "conf/text_curriculum/01_stage.yaml", cwd=tree.parent)
    stage_after = stage.read_bytes()
    (tree / "config.yaml").write_bytes(written)
    rest = run_memplan("undo", cwd=tree.parent)

    assert refused.returncode == 2
    assert "`memplan undo FILE …` puts back only the files that are named" in refused.stderr
    assert (one.returncode, one.stdout) == (0, "put back conf/text_curriculum/01_stage.yaml\n")
    assert stage_after == original["text_curriculum/01_stage.yaml"]
    assert (rest.returncode, rest.stdout.count("put back")) == (0, 4)
    assert {name: data for name, data in content(tree).items() if name in original} == original
    assert run_memplan("undo", cwd=tree.parent).returncode == 2


def test_a_file_that_no_apply_wrote_is_told_apart(run_memplan: Run, tree: Path) -> None:
    """With those that it could be."""
    run_memplan(*APPLY, "--config-path", tree)

    result = run_memplan("undo", "conf/other.yaml", cwd=tree.parent)

    assert result.returncode == 2
    assert "other.yaml is not a file of the last apply" in result.stderr
    assert "01_stage.yaml" in result.stderr


def test_a_copy_of_a_tree_undoes_itself(run_memplan: Run, tree: Path, tmp_path: Path) -> None:
    """The journal goes with the folder: neither a copy nor a folder that was moved reaches back to where it came from."""
    original = content(tree)
    run_memplan(*APPLY, "--config-path", tree)
    written = content(tree)
    copy = Path(shutil.copytree(tree.parent, tmp_path / "copy")) / "conf"

    undone = run_memplan("undo", "--config-path", copy)

    assert undone.returncode == 0
    assert {name: data for name, data in content(copy).items() if name in original} == original
    assert content(tree) == written

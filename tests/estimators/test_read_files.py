"""What a program read, as it is now."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.estimators.read_files import ReadFiles


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A program, its configuration, its data."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "__pycache__").mkdir()
    for name, content in (("train.py", "import lib"), ("lib.py", ""), ("conf.yaml", "a: 1"), ("data/x.bin", "xx"), ("notes.txt", "")):
        (folder / name).write_text(content)
    return folder


def read_by(project: Path) -> ReadFiles:
    files = ReadFiles(None)
    names = ("train.py", "__pycache__/lib.cpython-311.pyc", "conf.yaml", "data", "data/x.bin", "later.yaml", "")
    files.learn((str(project / name) for name in names), since_ns=time.time_ns())
    return files


def test_a_file_beside_a_package_is_none_of_a_program_run_as_a_module(project: Path) -> None:
    """`python -m package` looks through the working folder, in which no module need lie."""
    (project / "package").mkdir()
    for name in ("package/__init__.py", "package/__main__.py"):
        (project / name).write_text("")

    def digests() -> list[str]:
        files = ReadFiles(None)
        files.learn(
            (str(project / name) for name in ("", "package", "package/__init__.py", "package/__main__.py")), since_ns=time.time_ns()
        )
        return files.digests({})

    before = digests()
    (project / "notes-of-today.txt").write_text("")
    assert digests() == before

    (project / "package.py").write_text("")
    assert digests() != before


def test_a_file_beside_the_project_is_none_of_the_program(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs put the folder above their own into Python's path, which is looked through then for modules."""
    monkeypatch.chdir(project)
    files = ReadFiles(None)
    files.learn([str(project.parent), str(project / "train.py")], since_ns=time.time_ns())

    before = files.digests({})
    (project.parent / "notes-of-today.txt").write_text("")
    assert files.digests({}) == before

    (project.parent / "lib.py").write_text("")
    assert files.digests({}) != before


def _touch(path: Path) -> None:
    os.utime(path, (1, 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda project: (project / "train.py").write_text("import lib  # again"),
        lambda project: (project / "lib.py").write_text("x = 1"),
        lambda project: (project / "conf.yaml").write_text("a: 2"),
        lambda project: (project / "data/x.bin").write_text("xy"),
        lambda project: _touch(project / "data/x.bin"),
        lambda project: (project / "data/y.bin").write_text(""),
        lambda project: (project / "data/x.bin").unlink(),
        lambda project: (project / "later.yaml").write_text(""),
        lambda project: (project / "torch.py").write_text(""),
    ],
)
def test_what_may_change_a_run_changes_the_digest(project: Path, change: Callable[[Path], object]) -> None:
    """A source that was found compiled too; data by size and time; what was not there; a module that hides another."""
    before = read_by(project).digests({})
    change(project)

    assert read_by(project).digests({}) != before


def _make(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("")


@pytest.mark.parametrize(
    "change",
    [
        lambda project: (project / "notes.txt").write_text("nobody reads this"),
        lambda project: _touch(project / "conf.yaml"),
        lambda project: (project / "conf.yaml.backup").write_text(""),
        lambda project: (project / "report.html").write_text(""),
        lambda project: (project / ".memplan").mkdir(),
        lambda project: _make(project / "outputs" / "model.ckpt"),
    ],
)
def test_what_changes_no_run_changes_nothing(project: Path, change: Callable[[Path], object]) -> None:
    """What nobody reads, a text with the same content, what memplan itself leaves behind."""
    before = read_by(project).digests({})
    change(project)

    assert read_by(project).digests({}) == before


def test_contents_may_stand_for_files(project: Path) -> None:
    """A configuration whose planned values were written counts as before."""
    files, conf = read_by(project), str(project / "conf.yaml")
    before = files.digests({conf: b"a: 1"})
    Path(conf).write_text("a: 64")

    assert files.digests({conf: b"a: 1"}) == before
    assert files.digests({conf: b"a: 2"}) != before


def test_what_was_changed_during_a_run_is_known(project: Path) -> None:
    """Nobody knows which of both it read."""
    files, begin = read_by(project), time.time_ns() + 1_000_000_000

    assert not files.changed_since(begin)
    os.utime(project / "train.py", ns=(begin + 1, begin + 1))
    assert files.changed_since(begin)


def test_it_is_found_again(project: Path, tmp_path: Path) -> None:
    """In its file, refused sizes too; a file of something else is as none."""
    kept = tmp_path / "cache" / "one.json"
    first = ReadFiles(kept)
    first.learn([str(project / "train.py")], since_ns=time.time_ns())
    now = first.digests({})
    first.refuse("family", 3, "odd", "take an even one", now=now[-1])
    first.keep()

    again = ReadFiles(kept)
    assert (again.are_known, again.digests({})) == (True, now)
    assert again.refusal("family", 3, now) == ("odd", "take an even one")
    assert again.refusal("family", 4, now) is None
    kept.write_text("[]")
    assert not ReadFiles(kept).are_known


def test_a_temporary_file_that_the_program_made_does_not_count(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that a package writes and imports has another name in each run; what was there before, or is in a project's folder, counts."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, made, of_project = tmp_path / "before.py", tmp_path / "made_x3b9.py", project / "written.py"
    before.write_text("")
    os.utime(before, (1, 1))
    begin = time.time_ns() - 10**9
    made.write_text("")
    of_project.write_text("")

    def digest_with(*paths: Path) -> list[str]:
        files = ReadFiles(None)
        files.learn(map(str, paths), since_ns=begin)
        return files.digests({})[-1:]

    assert digest_with(made) == digest_with()
    assert len({tuple(digests) for digests in (digest_with(), digest_with(before), digest_with(of_project))}) == 3


@pytest.mark.parametrize("path", ["/proc", "/proc/meminfo", "/sys/devices", "/dev/urandom"])
def test_what_the_kernel_tells_does_not_count(path: str) -> None:
    """The processes that there are, as a program's logger may list them, are others each time."""
    files = ReadFiles(None)

    files.learn([path], since_ns=time.time_ns())

    assert files.digests({}) == ReadFiles(None).digests({})


def test_what_a_later_run_reads_besides_leaves_the_earlier_ones_known(project: Path) -> None:
    """A larger batch reads more samples; when one of those changes, the larger run alone is to be made again."""
    files = ReadFiles(None)
    for size, names in ((2, ["train.py", "conf.yaml"]), (4, ["train.py", "data/x.bin"])):
        files.learn((str(project / name) for name in names), since_ns=time.time_ns())
        files.saw("family", size, f"run of {size}", now=files.digests({})[-1])
    assert files.runs("family", files.digests({})).keys() == {2, 4}

    (project / "data/x.bin").write_text("other samples")
    assert files.runs("family", files.digests({})).keys() == {2}
    (project / "conf.yaml").write_text("a: 2")
    assert not files.runs("family", files.digests({}))


def test_what_a_program_was_seen_to_take_is_known_until_it_changes(project: Path, tmp_path: Path) -> None:
    """In the next command too; one size may be by chance that of something else, two are not."""
    kept = tmp_path / "kept.json"
    files = ReadFiles(kept)
    files.learn([str(project / "train.py")], since_ns=time.time_ns())
    files.note_took("family", 8, now=files.digests({})[-1])
    files.keep()

    again = ReadFiles(kept)
    now = again.digests({})
    assert [again.took("family", size, now) for size in (8, 32)] == [True, False]
    again.note_took("family", 16, now=now[-1])
    assert again.took("family", 32, now)
    assert not again.took("another", 8, now)

    (project / "train.py").write_text("import another")
    assert not again.took("family", 8, again.digests({}))

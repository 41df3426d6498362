"""A set of edits over several files is written wholly or not at all, and can be taken back."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import count
from pathlib import Path

import pytest

from memplan.edits.apply import Undone, apply, plan_undo, prepare, undo
from memplan.edits.backups import Journal, journal_path, read_journals, write_journal
from memplan.edits.edit import Edit, EditValue
from memplan.edits.files import Files, sha256
from memplan.errors import ConfigError, EditRefusedError, UsageError
from tests.conftest import content
from tests.edits.conftest import NEW, OLD, edits_in, moment, write_old
from tests.edits.faults import Steps, answer_or_error, at, backups, configs, fails, from_, leftovers
from tests.edits.test_files import LOCKER, supports_attributes

both_roads = pytest.mark.parametrize("in_place", [False, True], ids=["renamed", "in place"])


def applied(folder: Path, *, files: Files | None = None, now: datetime | None = None) -> Journal | None:
    """Apply the three files' edits."""
    return apply(prepare(edits_in(folder)), root=folder, now=now or moment(), files=files)


def set_batch(folder: Path, value: EditValue, *, minutes: int = 0) -> Journal | None:
    """Apply one edit of a.yaml."""
    return apply(prepare([Edit(folder / "a.yaml", ("batch",), value)]), root=folder, now=moment(minutes))


def second_names(folder: Path) -> Path:
    """Give every file a second name, so that it is written in place; return where."""
    others = folder.with_name("second-names")
    for name in OLD:
        path = others / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(folder / name)
    return others


# What prepare says


def test_several_files_are_prepared_in_memory(folder: Path):
    """One change for each file, with every edit of it; nothing is written."""
    before = content(folder)

    changes = prepare(edits_in(folder))

    assert {str(change.path.relative_to(folder)): change.after for change in changes} == NEW
    assert {str(change.path.relative_to(folder)): change.before for change in changes} == OLD
    assert [len(change.edits) for change in changes] == [1, 2, 1]
    assert content(folder) == before


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("batch: 4", 4),
        ("batch: '4'", 4),
        ("batch: 1_000", 1000),
        ("batch: bf16", "bf16"),
        ("batch: True", True),
        ("batch: false", False),
        ("batch: 'true'", True),
        ("batch: ${other}\nother: 4", 4),
        ("other: &x 4\nbatch: *x", 4),
    ],
)
def test_what_is_right_already_is_no_change(tmp_path: Path, text: str, value: EditValue):
    """However it is spelled, and wherever it comes from."""
    (tmp_path / "a.yaml").write_text(text)

    assert prepare([Edit(tmp_path / "a.yaml", ("batch",), value)]) == []


@pytest.mark.parametrize(("text", "value"), [("batch: 4.5", 4), ("batch: 1", True), ("batch:", "None"), ("batch: true", "True")])
def test_what_only_looks_right_in_python_is_not(tmp_path: Path, text: str, value: EditValue):
    """An empty value is not the word None: it is changed, or refused."""
    (tmp_path / "a.yaml").write_text(text)

    changes = answer_or_error(lambda: prepare([Edit(tmp_path / "a.yaml", ("batch",), value)]))

    assert isinstance(changes, EditRefusedError) or [change.before for change in changes] == [text.encode()]


def test_only_edits_that_change_something_are_listed(folder: Path):
    """A report shows what will be different."""
    right, wrong = Edit(folder / "a.yaml", ("lr",), "0.0002"), Edit(folder / "a.yaml", ("batch",), 16)

    assert [change.edits for change in prepare([right, wrong])] == [(wrong,)]


def test_one_refusal_refuses_all(folder: Path):
    """The first edit that needs guessing stops everything, and its file is named as the user knows it."""
    before = content(folder)

    with pytest.raises(EditRefusedError, match=r"a\.yaml: has no key `none`"):
        prepare([*edits_in(folder), Edit(folder / "a.yaml", ("none",), 8)])

    assert content(folder) == before


@pytest.mark.parametrize("text", ["batch: [4]\n", "batch: {a: 1}\n", "batch: ${none}\n", "batch: 1\nbatch: 2\n", "batch: |\n  4\n"])
def test_what_cannot_be_read_as_a_value_is_refused(tmp_path: Path, text: str):
    """An edit of it is refused, and not answered as if the file were broken."""
    (tmp_path / "a.yaml").write_text(text)

    with pytest.raises(EditRefusedError):
        prepare([Edit(tmp_path / "a.yaml", ("batch",), 8)])


def test_two_names_of_one_file_make_one_change(folder: Path):
    """A link and its target are the same file."""
    (folder / "link.yaml").symlink_to("a.yaml")

    changes = prepare([Edit(folder / "link.yaml", ("batch",), 16), Edit(folder / "a.yaml", ("lr",), 1)])

    assert [(change.path.name, change.target.name) for change in changes] == [("link.yaml", "a.yaml")]
    assert changes[0].after == b"# one\r\nbatch: 16  # fits\r\nlr: 1\r\n"


def test_a_link_in_a_circle_is_an_error(tmp_path: Path):
    """It leads to no file."""
    (tmp_path / "a.yaml").symlink_to("b.yaml")
    (tmp_path / "b.yaml").symlink_to("a.yaml")

    with pytest.raises(ConfigError, match=r"a\.yaml"):
        prepare([Edit(tmp_path / "a.yaml", ("batch",), 8)])


# What apply does


def test_all_files_are_written_and_backed_up(folder: Path):
    """The new files, an original beside each, and a journal that knows both."""
    journal = applied(folder)

    assert configs(folder) == NEW
    assert backups(folder) == {f"{name}.backup": data for name, data in OLD.items()}
    assert leftovers(folder) == []
    assert journal is not None
    assert read_journals(folder) == [(journal_path(folder, moment()), journal)]
    assert journal.state == "applied"
    assert {str(file.path.relative_to(folder)): (file.sha256_before, file.sha256_after) for file in journal.files} == {
        name: (sha256(OLD[name]), sha256(NEW[name])) for name in OLD
    }


def test_nothing_to_change_leaves_no_trace(folder: Path):
    """No backup, no journal, no folder of memplan's own."""
    before = content(folder)

    assert apply(prepare([Edit(folder / "a.yaml", ("batch",), 4)]), root=folder, now=moment()) is None
    assert content(folder) == before
    assert not (folder / ".memplan").exists()


def test_a_file_that_is_right_is_not_touched(folder: Path):
    """Of three files only those that change are written and backed up."""
    edits = [*edits_in(folder)[:1], Edit(folder / "sub" / "b.yaml", ("training", "batch"), 4)]
    stamp = (folder / "sub" / "b.yaml").stat().st_mtime_ns

    apply(prepare(edits), root=folder, now=moment())

    assert list(backups(folder)) == ["a.yaml.backup"]
    assert (folder / "sub" / "b.yaml").stat().st_mtime_ns == stamp


@both_roads
def test_permissions_and_attributes_stay_and_the_time_is_new(folder: Path, in_place: bool):
    """Tools look at the time to know that there is something to read."""
    path = folder / "a.yaml"
    path.chmod(0o640)
    attributes = supports_attributes(path)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    if in_place:
        second_names(folder)

    applied(folder)

    assert path.stat().st_mode & 0o7777 == 0o640
    assert path.stat().st_mtime > 1_500_000_000
    if attributes:
        assert os.getxattr(path, "user.memplan") == b"kept"


@pytest.mark.parametrize("absolute", [False, True])
def test_a_symbolic_link_stays_and_its_target_changes(folder: Path, tmp_path: Path, absolute: bool):
    """The original is kept beside the target, where the file really is."""
    target = tmp_path / "elsewhere" / "real.yaml"
    target.parent.mkdir()
    shutil.move(folder / "a.yaml", target)
    (folder / "a.yaml").symlink_to(target if absolute else Path("../elsewhere/real.yaml"))

    applied(folder)

    assert (folder / "a.yaml").is_symlink()
    assert configs(target.parent) == {"real.yaml": NEW["a.yaml"]}
    assert backups(target.parent) == {"real.yaml.backup": OLD["a.yaml"]}
    undo(folder)
    assert (folder / "a.yaml").is_symlink()
    assert target.read_bytes() == OLD["a.yaml"]


def test_all_names_of_a_file_show_the_new_content(folder: Path):
    """A file with hard links is written in place, and undone in place."""
    others = second_names(folder)

    journal = applied(folder)

    assert configs(others) == configs(folder) == NEW
    assert journal is not None
    assert all(file.in_place for file in journal.files)
    undo(folder)
    assert configs(others) == configs(folder) == OLD


def test_the_journal_may_lie_in_another_folder_than_the_files(folder: Path, tmp_path: Path):
    """The root is where a user says that the configuration is."""
    root = tmp_path / "root"
    root.mkdir()

    apply(prepare(edits_in(folder)), root=root, now=moment())

    assert not (folder / ".memplan").exists()
    assert len(undo(root).restored) == 3
    assert configs(folder) == OLD


def test_relative_paths_are_those_of_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """An undo from elsewhere finds the files all the same."""
    monkeypatch.chdir(folder)
    apply(prepare([Edit(Path("a.yaml"), ("batch",), 16)]), root=Path(), now=moment())
    monkeypatch.chdir(folder.parent)

    undo(Path("conf"))

    assert configs(folder) == OLD


# What stops an apply before it writes


def assert_nothing_happened(folder: Path) -> None:
    assert configs(folder) == OLD
    assert backups(folder) == {}
    assert read_journals(folder) == []
    assert leftovers(folder) == []


def test_a_file_that_changed_since_it_was_read_is_not_written(folder: Path):
    """Another program's work is not overwritten, and the other files are not written either."""
    changes = prepare(edits_in(folder))
    (folder / "sub" / "b.yaml").write_bytes(b"somebody: else\n")

    with pytest.raises(ConfigError, match=r"b\.yaml: has changed since memplan read it"):
        apply(changes, root=folder, now=moment())

    assert configs(folder) == OLD | {"sub/b.yaml": b"somebody: else\n"}
    assert backups(folder) == {}


def test_a_file_that_is_gone_is_not_written(folder: Path):
    """Nor are the others."""
    changes = prepare(edits_in(folder))
    (folder / "sub" / "b.yaml").unlink()

    with pytest.raises(ConfigError, match=r"b\.yaml") as caught:
        apply(changes, root=folder, now=moment())

    assert "permission" not in str(caught.value)
    assert configs(folder) == {name: data for name, data in OLD.items() if name != "sub/b.yaml"}
    assert backups(folder) == {}


def test_a_file_that_goes_while_memplan_waits_is_not_written(folder: Path):
    """It was there when the apply began."""
    changes = prepare(edits_in(folder))
    files = Steps(lambda number, _what, _path: (folder / "sub" / "b.yaml").unlink() if number == 0 else None)

    with pytest.raises(ConfigError, match=r"b\.yaml: cannot be read any more"):
        apply(changes, root=folder, now=moment(), files=files)

    assert backups(folder) == {}


def test_a_file_that_another_process_has_locked_is_not_written(folder: Path):
    """As soon as the other is done, the same apply works."""
    command = [sys.executable, "-S", "-E", "-c", LOCKER, str(folder / "sub" / "c.json"), "LOCK_EX"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        with pytest.raises(ConfigError, match=r"c\.json: is locked by another program"):
            applied(folder)
        assert_nothing_happened(folder)
        other.communicate()

    applied(folder)
    assert configs(folder) == NEW


def test_another_memplan_in_the_folder_is_waited_for_by_the_user(folder: Path):
    """The lock is on the root, for apply and undo alike."""
    applied(folder)
    command = [sys.executable, "-S", "-E", "-c", LOCKER, str(folder / ".memplan" / "lock"), "LOCK_EX"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        with pytest.raises(ConfigError, match="another memplan is at work here"):
            set_batch(folder, 99, minutes=1)
        with pytest.raises(ConfigError, match="another memplan is at work here"):
            undo(folder)
        other.communicate()

    assert configs(folder) == NEW


@pytest.mark.parametrize("state", ["applying", "undoing"])
def test_nothing_is_applied_while_a_journal_is_open(folder: Path, state: str):
    """The user undoes first."""
    journal = applied(folder)
    assert journal is not None
    write_journal(Files(), journal_path(folder, moment()), journal.model_copy(update={"state": state}))

    with pytest.raises(ConfigError, match="an earlier apply was interrupted here") as caught:
        set_batch(folder, 99, minutes=1)

    assert "memplan undo" in (caught.value.hint or "")
    assert configs(folder) == NEW


def test_nothing_is_applied_over_a_damaged_journal(folder: Path):
    """Nor undone: nobody knows what it said."""
    applied(folder)
    journal_path(folder, moment()).write_bytes(b"{")

    with pytest.raises(ConfigError, match="damaged journal"):
        set_batch(folder, 99, minutes=1)
    with pytest.raises(ConfigError, match="damaged journal"):
        undo(folder)
    assert configs(folder) == NEW


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from memplan.errors import MemplanError
from memplan.edits.apply import apply, prepare, undo
from tests.edits.conftest import edits_in, moment
folder = Path(sys.argv[1])
changes = prepare(edits_in(folder))
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    apply(changes, root=folder, now=moment())
    if "undo" in sys.argv:
        undo(folder)
    print("done")
except MemplanError as error:
    print(type(error).__name__, error.message, error.hint)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder with the three files that every user may reach, unlike pytest's own."""
    parent = Path(tempfile.mkdtemp(prefix="memplan-test-"))
    parent.chmod(0o755)
    yield write_old(parent / "conf")
    subprocess.run(["chmod", "-R", "u+w", parent], check=True)
    shutil.rmtree(parent)


def apply_unprivileged(folder: Path, *arguments: str) -> str:
    """Apply as a user without privileges, in a process of its own; return what that user reads."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(folder), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def give_to_nobody(*paths: Path) -> None:
    """Make the unprivileged user the owner, where this is not that user anyway."""
    if os.geteuid() == 0:
        for path in paths:
            os.chown(path, 65534, 65534)


def test_a_folder_without_write_permission_is_named(open_folder: Path):
    """No backup could be kept there, so nothing is written."""
    folders = [open_folder, open_folder / "sub"]
    give_to_nobody(*folders, *(open_folder / name for name in OLD))
    (open_folder / "sub").chmod(0o555)

    said = apply_unprivileged(open_folder)

    assert (
        said
        == f"ConfigError {open_folder}/sub: cannot be written: permission denied nothing was changed; ask its owner for write permission"
    )
    assert_nothing_happened(open_folder)


def test_a_file_without_write_permission_is_named(open_folder: Path):
    """Its author meant that; a rename could get around it."""
    give_to_nobody(open_folder, open_folder / "sub", *(open_folder / name for name in OLD))
    (open_folder / "sub" / "c.json").chmod(0o444)

    said = apply_unprivileged(open_folder)

    assert said.startswith(f"ConfigError {open_folder}/sub/c.json: cannot be written: permission denied")
    assert_nothing_happened(open_folder)


def test_a_root_without_write_permission_is_named(open_folder: Path):
    """The journal has no place there."""
    give_to_nobody(open_folder / "sub", *(open_folder / name for name in OLD))
    open_folder.chmod(0o555)

    said = apply_unprivileged(open_folder)

    assert "cannot be written" in said
    assert_nothing_happened(open_folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of two users")
def test_a_file_of_another_owner_is_written_in_place(open_folder: Path):
    """A shared folder: everybody may write its files, and they stay their owner's."""
    for path in (open_folder, open_folder / "sub"):
        path.chmod(0o777)
    for name in OLD:
        (open_folder / name).chmod(0o666)

    said = apply_unprivileged(open_folder)

    assert said == "done"
    assert configs(open_folder) == NEW
    assert {(open_folder / name).stat().st_uid for name in NEW} == {0}
    assert backups(open_folder) == {f"{name}.backup": data for name, data in OLD.items()}


def test_an_unprivileged_user_can_apply_and_undo(open_folder: Path):
    """The usual case."""
    give_to_nobody(open_folder, open_folder / "sub", *(open_folder / name for name in OLD))

    said = apply_unprivileged(open_folder, "undo")

    assert said == "done"
    assert configs(open_folder) == OLD
    assert backups(open_folder) == {f"{name}.backup": data for name, data in OLD.items()}


# What goes wrong in the middle


def each_step(parent: Path, *, in_place: bool, act: Callable[[Path, Steps], object], code: int, stays: bool = False) -> Iterator[Path]:
    """Let every step of *act* fail once, each in a folder of its own (or that and all after it); yield the folders after the error."""
    for number in count():
        folder = write_old(parent / str(number) / "conf")
        if in_place:
            second_names(folder)
        disk = fails(code, when=from_(number) if stays else at(number), names_file=number % 2 == 0)
        error = answer_or_error(lambda folder=folder, disk=disk: act(folder, disk))
        if isinstance(error, ConfigError):
            assert os.strerror(code) in str(error)
            yield folder
        if number >= len(disk.taken):
            assert number > 20
            return


@both_roads
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_every_file_as_it_was(fast_disk: Path, in_place: bool, code: int):
    """Whichever step of an apply fails, the files are old, nothing lies about, and the next apply works."""
    for folder in each_step(fast_disk, in_place=in_place, code=code, act=lambda folder, disk: applied(folder, files=disk)):
        assert configs(folder) == OLD
        assert list(folder.rglob(".*.memplan-new")) == []
        assert applied(folder, now=moment(1))
        assert configs(folder) == NEW


def test_a_failed_write_leaves_no_half_made_copies(fast_disk: Path):
    """Beside the user's files stand backups and nothing else."""
    for folder in each_step(fast_disk, in_place=False, code=errno.ENOSPC, act=lambda folder, disk: applied(folder, files=disk)):
        applied(folder, now=moment(1))

        assert [name for name in leftovers(folder) if not name.startswith(".memplan/")] == []


@both_roads
def test_a_disk_that_stays_broken_is_undone_when_it_works_again(fast_disk: Path, in_place: bool):
    """Not even putting back works: then the journal is open, and undo does it later."""
    broken = each_step(fast_disk, in_place=in_place, code=errno.ENOSPC, act=lambda folder, disk: applied(folder, files=disk), stays=True)
    for folder in broken:
        if any(journal.state != "undone" for _, journal in read_journals(folder)):
            undo(folder)

        assert configs(folder) == OLD
        assert list(folder.rglob(".*.memplan-new")) == []


@both_roads
def test_an_undo_that_failed_can_be_repeated(fast_disk: Path, in_place: bool):
    """Whichever step failed, the next undo finishes."""

    num_failed = 0
    for number in count():
        folder = write_old(fast_disk / str(number) / "conf")
        if in_place:
            second_names(folder)
        disk = fails(errno.ENOSPC, when=at(number))
        applied(folder)
        error = answer_or_error(lambda folder=folder, disk=disk: undo(folder, files=disk))
        if isinstance(error, ConfigError):
            num_failed += 1
            assert "No space left" in str(error)
            undo(folder)
        assert configs(folder) == OLD
        assert list(folder.rglob(".*.memplan-new")) == []
        if number >= len(disk.taken):
            break

    assert num_failed > 10


def test_an_error_names_the_file_of_the_user(folder: Path):
    """A message about a temporary file would help nobody."""
    with pytest.raises(ConfigError) as caught:
        applied(folder, files=fails(errno.ENOSPC, when=at(second_write(folder)), names_file=False))

    assert "sub/b.yaml: cannot be written: No space left" in str(caught.value)
    assert caught.value.hint == "every file is as it was before"


def test_an_error_while_putting_back_names_the_file_of_the_user(folder: Path):
    """The disk stays broken: the user learns which file is not as it was, and that undo will do it."""
    with pytest.raises(ConfigError, match=r"^[^\n]*/a\.yaml: cannot be put back: No space left") as caught:
        applied(folder, files=fails(errno.ENOSPC, when=from_(second_write(folder)), names_file=False))

    assert "memplan undo" in (caught.value.hint or "")


def second_write(folder: Path) -> int:
    """Return the number of the step that begins the second file's new content."""
    copy, disk = write_old(folder.with_name("steps")), Steps()
    applied(copy, files=disk)
    return disk.taken.index(("create", ".b.yaml.memplan-new"))


def another_program_writes(path: Path, *, when: str) -> Steps:
    """Return a disk where *path* is written by somebody else, once, just before the file called *when* gets its new content."""
    done: list[Path] = []

    def before(_number: int, what: str, written: Path) -> None:
        if not done and what in ("move", "write in place") and written.name == when:
            path.write_bytes(b"somebody: else\n")
            done.append(path)

    return Steps(before)


@both_roads
def test_a_file_that_changes_in_the_middle_puts_the_others_back(folder: Path, in_place: bool):
    """The other program's work stays; what memplan had written is taken back."""
    if in_place:
        second_names(folder)

    with pytest.raises(ConfigError, match=r"b\.yaml: has changed since memplan read it"):
        applied(folder, files=another_program_writes(folder / "sub" / "b.yaml", when="a.yaml"))

    assert configs(folder) == OLD | {"sub/b.yaml": b"somebody: else\n"}
    assert leftovers(folder) == []


@both_roads
def test_a_file_that_does_not_hold_what_was_written_puts_the_others_back(folder: Path, in_place: bool):
    """Every file is read again at the end, and what somebody else wrote meanwhile stays."""
    if in_place:
        second_names(folder)

    with pytest.raises(ConfigError, match=r"a\.yaml: does not hold what was written"):
        applied(folder, files=another_program_writes(folder / "a.yaml", when="c.json"))

    assert configs(folder) == OLD | {"a.yaml": b"somebody: else\n"}
    with pytest.raises(UsageError, match="nothing to undo"):
        undo(folder)


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EPERM, errno.EXDEV])
def test_a_name_that_cannot_be_moved_over_is_written_in_place(folder: Path, code: int):
    """A file mounted into a container is such a name; the backup is there before it is touched, and undo takes the same road."""

    def is_mounted(_number: int, what: str, path: Path) -> bool:
        return what == "move" and path == folder / "sub" / "b.yaml"

    inode = (folder / "sub" / "b.yaml").stat().st_ino

    journal = applied(folder, files=fails(code, when=is_mounted))

    assert configs(folder) == NEW
    assert leftovers(folder) == []
    assert journal is not None
    assert [file.path.name for file in journal.files if file.in_place] == ["b.yaml"]
    assert (folder / "sub" / "b.yaml").stat().st_ino == inode
    undo(folder, files=fails(code, when=is_mounted))
    assert configs(folder) == OLD
    assert leftovers(folder) == []


@pytest.fixture
def mounted(folder: Path) -> Iterator[Path]:
    """The folder, with sub/b.yaml mounted from elsewhere as containers do it; returns where it really is."""
    source, target = folder.with_name("mounted.yaml"), folder / "sub" / "b.yaml"
    source.write_bytes(OLD["sub/b.yaml"])
    try:
        done = subprocess.run(["mount", "--bind", source, target], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here")
    if done.returncode != 0:
        pytest.skip(f"this machine does not let us mount: {done.stderr.strip()}")
    yield source
    subprocess.run(["umount", target], check=True)


def test_a_mounted_file_is_written_in_place(folder: Path, mounted: Path):
    """The system's own EBUSY."""
    applied(folder)

    assert configs(folder) == NEW
    assert mounted.read_bytes() == NEW["sub/b.yaml"]
    undo(folder)
    assert configs(folder) == OLD
    assert mounted.read_bytes() == OLD["sub/b.yaml"]
    assert leftovers(folder) == []


# Backups over time, and undo


def test_the_first_original_is_kept_for_good(folder: Path):
    """Later ones carry the time of their apply."""
    for minutes, value in enumerate([16, 32, 64]):
        set_batch(folder, value, minutes=minutes)

    assert {name: data.split()[3] for name, data in backups(folder).items()} == {
        "a.yaml.backup": b"4",
        "a.yaml.backup.20240506T070909.123456Z": b"16",
        "a.yaml.backup.20240506T071009.123456Z": b"32",
    }


def test_an_original_that_is_backed_up_is_not_copied_again(folder: Path):
    """Apply, undo, apply: one backup."""
    for minutes in range(3):
        set_batch(folder, 16, minutes=minutes)
        undo(folder)

    assert backups(folder) == {"a.yaml.backup": OLD["a.yaml"]}


def test_undo_puts_every_file_back(folder: Path):
    """Byte for byte, and it says which; the backups stay."""
    applied(folder)

    undone = undo(folder)

    assert configs(folder) == OLD
    assert [str(path.relative_to(folder)) for path in undone.restored] == list(OLD)
    assert not undone.was_interrupted
    assert backups(folder) == {f"{name}.backup": data for name, data in OLD.items()}
    assert [journal.state for _, journal in read_journals(folder)] == ["undone"]


def test_a_second_undo_goes_one_further_back(folder: Path):
    """Until there is nothing left; a new apply starts again from there."""
    set_batch(folder, 16)
    set_batch(folder, 32, minutes=1)
    values = []
    for _ in range(2):
        undo(folder)
        values.append((folder / "a.yaml").read_bytes().split()[3])

    assert values == [b"16", b"4"]
    with pytest.raises(UsageError, match="nothing to undo"):
        undo(folder)
    set_batch(folder, 64, minutes=2)
    undo(folder)
    assert configs(folder) == OLD


def test_where_nothing_was_applied_there_is_nothing_to_undo(folder: Path):
    """And looking for it leaves no trace."""
    with pytest.raises(UsageError, match=f"{folder}: nothing to undo"):
        undo(folder)

    assert not (folder / ".memplan").exists()


def assert_undo_refuses(folder: Path, words: str) -> EditRefusedError:
    """Undo refuses with *words*, in earnest and when asked what it would do, and touches nothing."""
    before = content(folder)
    with pytest.raises(EditRefusedError, match=words):
        plan_undo(folder)
    with pytest.raises(EditRefusedError, match=words) as caught:
        undo(folder)
    assert content(folder) == before
    return caught.value


@both_roads
def test_undo_refuses_when_a_file_has_changed_since(folder: Path, in_place: bool):
    """The user's later work is worth more; the original is named."""
    if in_place:
        second_names(folder)
    applied(folder)
    (folder / "sub" / "b.yaml").write_bytes(NEW["sub/b.yaml"] + b"\n# mine\n")

    error = assert_undo_refuses(folder, r"b\.yaml: has changed since memplan wrote it")

    assert error.hint is not None
    assert str(folder / "sub" / "b.yaml.backup") in error.hint


def test_undo_refuses_when_a_backup_is_damaged(folder: Path):
    """A wrong original is no original."""
    applied(folder)
    (folder / "sub" / "c.json.backup").write_bytes(b"{}")

    assert_undo_refuses(folder, r"c\.json\.backup: is not the backup that was made")


@pytest.mark.parametrize("name", ["a.yaml", "sub/c.json.backup"])
def test_undo_refuses_when_a_file_or_backup_is_gone(folder: Path, name: str):
    """It is named."""
    applied(folder)
    (folder / name).unlink()

    assert_undo_refuses(folder, rf"{Path(name).name}: cannot be read: No such file")


def test_undo_leaves_alone_what_is_original_already(folder: Path):
    """A user who put one file back by hand undoes the rest."""
    applied(folder)
    shutil.copy(folder / "a.yaml.backup", folder / "a.yaml")

    undone = undo(folder)

    assert [path.name for path in undone.restored] == ["b.yaml", "c.json"]
    assert configs(folder) == OLD


def test_a_planned_undo_writes_nothing(folder: Path):
    """It says what would be put back."""
    applied(folder)
    before = content(folder)

    path, journal, to_restore = plan_undo(folder)

    assert (path, journal.state) == (journal_path(folder, moment()), "applied")
    assert [file.path.name for file in to_restore] == ["a.yaml", "b.yaml", "c.json"]
    assert content(folder) == before


def interrupted(folder: Path, *, in_place: bool) -> None:
    """Leave the folder as an apply that was killed in the middle of its second file would."""

    class Killed(BaseException):
        """Passes every `except` of an apply, like a kill."""

    def before(_number: int, what: str, path: Path) -> None:
        if what == "write the rest of" and path.name in ("b.yaml", ".b.yaml.memplan-new"):
            raise Killed

    if in_place:
        second_names(folder)
    with pytest.raises(Killed):
        applied(folder, files=Steps(before))


@both_roads
def test_undo_says_that_an_apply_was_interrupted(folder: Path, in_place: bool):
    """What was half done is put back too, and temporary files go."""
    interrupted(folder, in_place=in_place)
    torn = configs(folder)["sub/b.yaml"] not in (OLD["sub/b.yaml"], NEW["sub/b.yaml"])

    undone = undo(folder)

    assert torn == in_place
    assert isinstance(undone, Undone)
    assert undone.was_interrupted
    assert [path.name for path in undone.restored] == (["a.yaml", "b.yaml"] if in_place else ["a.yaml"])
    assert configs(folder) == OLD
    assert leftovers(folder) == []


def test_undo_of_an_interrupted_apply_respects_other_changes(folder: Path):
    """What is neither old nor new was somebody else's work."""
    interrupted(folder, in_place=False)
    (folder / "sub" / "c.json").write_bytes(b"{}\n")

    assert_undo_refuses(folder, r"c\.json: has changed since memplan wrote it")


def test_special_bits_are_kept(folder: Path):
    """A file's mode is more than nine bits."""
    (folder / "a.yaml").chmod(0o2750)

    applied(folder)

    assert stat.S_IMODE((folder / "a.yaml").stat().st_mode) == 0o2750

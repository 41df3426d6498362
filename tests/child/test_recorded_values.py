from pathlib import Path

from memplan.child.recorded_values import RecordedValues, ValueWriter


def written(path: Path, reads: dict[str, list[bytes]]) -> None:
    """Write the *reads* of one process, by their places, to the file at *path*."""
    writer = ValueWriter()
    for place, contents in reads.items():
        for content in contents:
            writer.add(place, len(content), content, None, None)
    writer.write(path)


def turns_of(path: Path, place: str, *, size: int) -> list[bytes]:
    """Return what each turn of *place* reads from the file at *path*."""
    values, found = RecordedValues(path), []
    while (turn := values.next(place, size)) is not None:
        found.append(turn[0])
    return found


def test_a_launcher_that_ends_last_leaves_the_values_of_what_it_started(tmp_path):
    """A launcher that initialises CUDA and reads nothing writes its values when it ends: behind the program that it started."""
    written(tmp_path / "values", {"train.py:7": [b"\x05", b"\x06"]})
    written(tmp_path / "values", {})

    assert turns_of(tmp_path / "values", "train.py:7", size=1) == [b"\x05", b"\x06"]


def test_each_process_reads_its_own_values_where_several_have_some(tmp_path):
    """Bytes of one process stand behind those of another, and each place still has its own."""
    written(tmp_path / "values", {"train.py:7": [b"\x05", b"\x06"]})
    written(tmp_path / "values", {"launch.py:3": [b"\x01\x02"]})

    assert turns_of(tmp_path / "values", "train.py:7", size=1) == [b"\x05", b"\x06"]
    assert turns_of(tmp_path / "values", "launch.py:3", size=2) == [b"\x01\x02"]


def test_at_a_place_that_two_processes_read_the_one_that_read_more_is_kept(tmp_path):
    """The process that trains reads a shared line in each step, a launcher once."""
    written(tmp_path / "values", {"shared.py:1": [b"\x05", b"\x06"]})
    written(tmp_path / "values", {"shared.py:1": [b"\x01"]})

    assert turns_of(tmp_path / "values", "shared.py:1", size=1) == [b"\x05", b"\x06"]

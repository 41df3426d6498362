"""The cache on disk: whole or not there, read only where it is of the same, and never taken where it is damaged."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from memplan.data import DeviceCachedDataset, disk_cache
from memplan.errors import ConfigError, UsageError

ROOT = Path(__file__).parents[2]


class Counted:
    """A dataset that counts how often it is read."""

    def __init__(self, num_samples: int = 20, shape: tuple[int, ...] = (2, 3)) -> None:
        self.num_samples, self.shape, self.num_reads = num_samples, shape, 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        return {"image": torch.full(self.shape, float(index)), "label": index, "name": f"näme {index}", "raw": bytes([index])}

    def __reduce__(self) -> Any:  # what it is made of: the count is not
        return Counted, (self.num_samples, self.shape)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the cache is."""
    return tmp_path / "train.safetensors"


def cached(dataset: Any, path: Path, **options: Any) -> DeviceCachedDataset:
    """The dataset on the CPU, with a cache."""
    return DeviceCachedDataset(dataset, "cpu", cache_file=path, progress=False, **options)


def everything(dataset: DeviceCachedDataset) -> list[Any]:
    """Every sample, as numbers and texts."""
    return [{name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in sample.items()} for sample in dataset]


def listing(path: Path) -> list[str]:
    """What is beside the cache, itself included; what processes wait at is empty."""
    return sorted(each.name for each in path.parent.iterdir() if each.stat().st_size)


def test_the_second_time_only_the_first_sample_is_read(path: Path) -> None:
    """Everything else is of the file, texts and bytes included."""
    first = cached(Counted(), path)
    again = Counted()
    second = cached(again, path)

    assert everything(second) == everything(first)
    assert everything(first)[7] == {"image": [[7.0] * 3] * 2, "label": 7, "name": "näme 7", "raw": b"\x07"}
    assert again.num_reads == 1
    assert listing(path) == [path.name]


def test_the_file_is_safetensors(path: Path) -> None:
    """Its library reads it: every value of all samples is a tensor."""
    cached(Counted(5), path, dtype=torch.bfloat16)

    tensors = load_file(path)

    assert tensors["sample['label']"].tolist() == list(range(5))
    assert (tensors["sample['image']"].dtype, tensors["sample['image']"].shape) == (torch.bfloat16, (5, 2, 3))


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bool, torch.int16, torch.float64, torch.bfloat16, torch.uint8]), min_size=4),
    num_samples=st.integers(1, 5),
)
def test_what_was_written_is_read(
    shapes: list[list[int]], dtypes: list[torch.dtype], num_samples: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of any shapes and types, empty ones included: each stands where its type may."""
    samples = [
        [torch.full(shape, index % 2, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=False)] for index in range(num_samples)
    ]
    path = tmp_path_factory.mktemp("cache") / "cache.safetensors"
    cached(samples, path)

    for read, sample in zip(cached(samples, path), samples, strict=True):
        assert all(map(torch.equal, read, sample))


CHANGES: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "type": (Counted, {"dtype": torch.float16}, r"values of other names, shapes or types \(.*torch.float32.*, and not .*torch.float16"),
    "shape": (lambda: Counted(shape=(3, 3)), {"fingerprint": "same"}, r"values of other names, shapes or types .*\[3, 3\]"),
    "length": (lambda: Counted(21), {"fingerprint": "same"}, r"another number of samples \(20, and not 21\)"),
    "state": (lambda: Counted(21), {}, "another dataset or transform"),
    "transform": (Counted, {"transform": dict}, "another dataset or transform"),
    "fingerprint": (Counted, {"fingerprint": "other"}, "another dataset or transform"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_of_something_else_is_an_error_that_says_what_differs(change: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And is replaced where that is allowed."""
    make, options, error = CHANGES[change]
    given = "same" if options.get("fingerprint") == "same" else None
    cached(Counted(), path, fingerprint=given)
    before = path.read_bytes()

    with pytest.raises(ConfigError, match=f"train.safetensors: the cache of the dataset was made with {error}") as caught:
        cached(make(), path, **options)
    assert "\n" not in caught.value.message
    assert path.read_bytes() == before

    with caplog.at_level(logging.WARNING, "memplan"):
        cached(make(), path, **options, rebuild=True)
    assert caplog.text.count("it is filled again") == 1
    again = make()
    cached(again, path, **options)
    assert again.num_reads == 1


def test_a_cache_of_another_version_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else it has in common."""
    monkeypatch.setattr(disk_cache, "FORMAT_VERSION", disk_cache.FORMAT_VERSION + 1)
    cached(Counted(), path)
    monkeypatch.undo()

    with pytest.raises(ConfigError, match=r"another version of memplan's format \(2, and not 1\)"):
        cached(Counted(), path)


@pytest.mark.parametrize("content", [save({"weights": torch.zeros(3)}), b"name,age\n" * 100, b"\0" * 10_000, b"7"])
def test_a_file_that_is_no_cache_is_not_replaced(content: bytes, path: Path) -> None:
    """It is somebody's, even where a cache might be rebuilt."""
    path.write_bytes(content)
    before = path.read_bytes()

    with pytest.raises(ConfigError, match="this file is not a cache of a dataset"):
        cached(Counted(), path, rebuild=True)
    assert path.read_bytes() == before


def damages(content: bytes) -> dict[str, bytes]:
    """Ways in which a file goes wrong."""
    image, details = content.index(b"\x00\x00\x80\x3f"), content.rindex(b"skipped")
    return {
        "cut": content[:-10],
        "empty": b"",
        "no values": content[:100],
        "one bit of a sample": content[:image] + b"\x01" + content[image + 1 :],
        "one bit of the texts": content[:details] + b"S" + content[details + 1 :],
    }


@pytest.mark.parametrize("damage", ["cut", "empty", "no values", "one bit of a sample", "one bit of the texts"])
def test_a_damaged_file_is_one_clear_line(damage: str, path: Path) -> None:
    """And no sample of it is taken; it is filled again where that is allowed."""
    whole = everything(cached(Counted(), path))
    path.write_bytes(damages(path.read_bytes())[damage])

    with pytest.raises(ConfigError, match=r"train.safetensors: the cache of the dataset is damaged \(") as caught:
        cached(Counted(), path)
    assert "\n" not in caught.value.message
    assert everything(cached(Counted(), path, rebuild=True)) == whole


def test_a_dataset_whose_first_sample_has_changed_is_noticed(path: Path) -> None:
    """What its class does not tell: a file was written anew."""

    class FromFile(Counted):
        value = 0

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(FromFile.value)

    cached(FromFile(), path, fingerprint="v1")
    FromFile.value = 1

    with pytest.raises(ConfigError, match="the first sample of the dataset is not the one in its cache"):
        cached(FromFile(), path, fingerprint="v1")


def test_a_dataset_that_is_random_is_warned_of_and_kept(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One version of each sample; the cache holds although the first sample is another each time."""

    class Noise(Counted):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(4)

    with caplog.at_level(logging.WARNING, "memplan"):
        first = cached(Noise(), path, fingerprint="v1")

    assert "sample 0 differs each time it is read" in caplog.text
    assert torch.equal(cached(Noise(), path, fingerprint="v1")[3], first[3])


def test_samples_that_were_skipped_stay_so_and_are_not_hidden(path: Path) -> None:
    """From the file they are named too; who does not want any skipped gets an error."""

    class Broken(Counted):
        def __getitem__(self, index: int) -> Any:
            if index in (0, 7):
                raise ValueError("no such image")
            return index

    first = cached(Broken(), path, on_error="skip", fingerprint="b")
    second = cached(Broken(), path, on_error="skip", fingerprint="b")

    assert second.skipped == first.skipped == {0: "ValueError: no such image", 7: "ValueError: no such image"}
    assert [int(sample) for sample in second] == [index for index in range(20) if index not in (0, 7)]
    fixed = list(range(20))
    with pytest.raises(ConfigError, match="lacks samples that were skipped: sample 0: ValueError: no such image"):
        cached(fixed, path, fingerprint="b")


def test_a_fill_that_fails_leaves_nothing(path: Path) -> None:
    """No file, and no part of one."""

    class Broken(Counted):
        def __getitem__(self, index: int) -> Any:
            if index == 17:
                raise ValueError("no such image")
            return index

    with pytest.raises(UsageError, match="sample 17: ValueError: no such image"):
        cached(Broken(), path, fingerprint="b")
    assert listing(path) == []


def start(how: str, path: Path) -> subprocess.Popen[str]:
    """Start a program of fill.py."""
    command = [sys.executable, "-m", "tests.data.fill", how, str(path)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)


def run(how: str, path: Path) -> tuple[int, str]:
    """How a program of fill.py ends, and what it prints."""
    with start(how, path) as process:
        said, _ = process.communicate()
    return process.returncode, said


@pytest.mark.heavy
def test_a_fill_that_is_killed_leaves_nothing_and_the_next_one_fills(path: Path) -> None:
    """Killed after two of three chunks were written."""
    assert run("killed", path) == (-signal.SIGKILL, "")
    assert listing(path) == []

    # 1100 samples, the last of which is the 1099th, and the first of which was read twice.
    assert run("whole", path) == (0, "1100 1099 1101\n")
    assert listing(path) == [path.name]


@pytest.mark.heavy
def test_of_processes_that_begin_together_one_fills(path: Path) -> None:
    """The ranks of a training: the other waits, and reads the file."""
    with start("whole", path) as one, start("whole", path) as other:
        said = {one.communicate()[0], other.communicate()[0]}

    assert said == {"1100 1099 1101\n", "1100 1099 1\n"}


def test_a_disk_that_is_full_is_told_before_the_samples_are_read(path: Path) -> None:
    """By the system's own limit for files, with what it needs and what is free."""
    code, said = run("limited", path)

    assert code == 2
    assert said.startswith(f"{path}: the cache of the dataset could not be written (File too large): it takes 137.5 MiB, and ")
    assert said.count("\n") == 1
    assert listing(path) == []


@pytest.mark.heavy
def test_a_small_disk_is_told_with_what_is_free(tmp_path: Path) -> None:
    """A disk of 1 MiB, for this process alone; only root may make one."""
    disk, program = tmp_path / "disk", f"{sys.executable} -m tests.data.fill whole {tmp_path / 'disk' / 'c.safetensors'}"
    disk.mkdir()
    script = f"mount -t tmpfs -o size=1m none {disk} || exit 99; {program}; code=$?; ls {disk}; exit $code"
    try:
        command = ["unshare", "--mount", "sh", "-c", script]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"no disk can be made here: {done.stderr.strip()}")

    told = "the cache of the dataset could not be written (No space left on device): it takes 137.5 MiB, and 1.0 MiB are free"
    assert (done.returncode, done.stdout) == (2, f"{disk / 'c.safetensors'}: {told}\n")


def test_where_files_need_a_name_a_killed_fill_is_removed_by_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without O_TMPFILE."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    (path.parent / f".{path.name}.abc.partial").write_bytes(b"half")
    cached(Counted(), path)
    assert listing(path) == [path.name]

    with pytest.raises(UsageError):
        cached([1, 2, "three"], path.with_name("other"))
    assert listing(path) == [path.name]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Before anything is filled."""
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(ConfigError, match="the cache of the dataset cannot be written"):
        cached(Counted(), tmp_path / "file" / "cache.safetensors")


def test_a_type_that_the_format_lacks_is_an_error(path: Path) -> None:
    """Before anything is filled."""
    with pytest.raises(UsageError, match=r"sample is torch.complex128, which safetensors does not have"):
        cached([1j, 2j], path)

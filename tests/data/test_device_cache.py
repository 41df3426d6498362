"""Samples on the device: what is kept, what is refused before anything is read, and how a sample that fails is told."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import memplan
from memplan.data import DeviceCachedDataset, SampleError
from memplan.errors import DoesNotFitError, UsageError


class Failing(Dataset[torch.Tensor]):
    """Raises at some samples, and has others of another shape."""

    def __init__(self, raising: Sequence[int] = (), odd: Sequence[int] = ()) -> None:
        self._raising, self._odd = raising, odd

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self._raising:
            raise OSError(f"image {index} is truncated")
        return torch.full((3, 5) if index in self._odd else (3, 4), float(index))


def cached(dataset: Any, **options: Any) -> DeviceCachedDataset:
    """The dataset on the CPU."""
    return DeviceCachedDataset(dataset, "cpu", progress=False, **options)


def test_a_sample_is_what_the_dataset_returns_and_takes_the_bytes_that_it_says() -> None:
    """Types kept; the storage is that of all samples, to the byte."""
    dataset = TensorDataset(torch.arange(60.0).reshape(10, 2, 3), torch.arange(10), torch.ones(10, dtype=torch.bool))

    found = cached(dataset)

    assert (len(found), found.sample_bytes, found.device_bytes) == (10, 6 * 4 + 8 + 1, 330)
    for mine, own in zip(found, dataset, strict=True):
        assert all(map(torch.equal, mine, own))
        assert [each.dtype for each in mine] == [torch.float32, torch.int64, torch.bool]
    assert torch.equal(found[-1][0], dataset[9][0])
    with pytest.raises(IndexError, match="sample 10 of 10"):
        found[10]


def test_a_batch_is_chosen_by_numbers_in_any_form() -> None:
    """A tensor or a list; texts go with it."""
    found = cached([(np.float32(number), f"text {number}") for number in range(5)])

    for indices in ([3, 1], torch.tensor([3, 1])):
        values, texts = found.batch(indices)
        assert (values.tolist(), values.dtype, texts) == ([3.0, 1.0], torch.float32, ["text 3", "text 1"])


def test_chunks_cover_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a last one that is smaller."""
    monkeypatch.setattr("memplan.analysis.dataset_memory.CHUNK_BYTES", 7 * 8)

    assert [int(sample) for sample in cached(list(range(30)))] == list(range(30))


def test_a_transform_is_applied_before_a_sample_is_kept() -> None:
    """What it returns has the shape and type."""
    found = cached(list(range(4)), transform=lambda number: {"square": torch.tensor([number**2], dtype=torch.int16)})

    assert found[3]["square"].tolist() == [9]
    assert found.sample_bytes == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_raises_is_an_error_that_names_it(num_workers: int) -> None:
    """With the reason; in this process also with the exception itself."""
    with pytest.raises(SampleError, match=r"^sample 17: OSError: image 17 is truncated") as caught:
        cached(Failing(raising=[17, 20]), num_workers=num_workers)

    assert (caught.value.index, caught.value.exit_code) == (17, 2)
    assert num_workers or isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_fail_are_skipped_by_name_and_never_zeros(num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """Where that is asked for: those that raise, the first among them, and those of another shape."""
    with caplog.at_level(logging.WARNING, "memplan"):
        found = cached(Failing(raising=[0, 17], odd=[20]), on_error="skip", num_workers=num_workers)

    assert found.skipped == {
        0: "OSError: image 0 is truncated",
        17: "OSError: image 17 is truncated",
        20: "sample has shape (3, 5), and not (3, 4)",
    }
    assert [int(sample[0, 0]) for sample in found] == [number for number in range(30) if number not in (0, 17, 20)]
    assert "3 samples were skipped: sample 0: OSError: image 0 is truncated; sample 17" in caplog.text


def test_samples_of_different_shapes_are_an_error_with_both() -> None:
    """And the index of the one that differs from the first."""
    with pytest.raises(SampleError, match=r"^sample 20: sample has shape \(3, 5\), and not \(3, 4\)") as caught:
        cached(Failing(odd=[20]))

    assert "pad or resize" in (caught.value.hint or "")


def test_a_dataset_of_which_nothing_can_be_kept_is_an_error() -> None:
    """Also where samples may be skipped."""
    with pytest.raises(SampleError, match=r"none of 30 samples could be kept; the first: sample 0: OSError: image 0"):
        cached(Failing(raising=range(30)), on_error="skip")


class Once(Failing):
    """Can be read once, and then runs out of something."""

    error: type[Exception] = OSError

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_reads += 1
        if self.num_reads > 1:
            raise self.error("no more")
        return torch.zeros(3)


class OutOfMemory(Once):
    """Of memory."""

    error = MemoryError


def test_a_dataset_that_breaks_is_not_an_empty_one() -> None:
    """And memory that runs out is no fault of a sample."""
    with pytest.raises(SampleError, match="none of 30 samples could be kept; the first: sample 0: OSError: no more"):
        cached(Once(), on_error="skip")
    with pytest.raises(MemoryError):
        cached(OutOfMemory(), on_error="skip")


class Endless(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "error"),
    [
        ([], {}, "the dataset is empty: it has 0 samples"),
        (Endless(), {}, "the dataset has no length: Endless"),
        ([1], {"on_error": "ignore"}, "on_error='ignore' is not valid"),
        ([1], {"dtype": torch.int8}, "dtype=torch.int8 is no floating-point type"),
        ([1], {"margin": 1.0}, r"margin=1.0 is not valid"),
        ([1], {"others": -1}, "others=-1 is not valid"),
        ([1], {"others": 1.5}, "others=1.5 is not valid"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(dataset: Any, options: dict[str, Any], error: str) -> None:
    """Before anything is read."""
    with pytest.raises(UsageError, match=error) as caught:
        cached(dataset, **options)

    assert "\n" not in caught.value.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cpu_takes_its_place_unless_one_is_asked_for() -> None:
    """Nothing falls back unseen."""
    assert DeviceCachedDataset([1, 2], progress=False).device == torch.device("cpu")
    with pytest.raises(UsageError, match="device='cuda', and PyTorch sees no GPU here"):
        DeviceCachedDataset([1, 2], "cuda")
    with pytest.raises(UsageError, match="the free memory of the device meta is not known"):
        DeviceCachedDataset([1, 2], "meta")


class Images(Dataset[torch.Tensor]):
    """A hundred million images, of which one can be read."""

    num_reads = 0

    def __len__(self) -> int:
        return 100_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        Images.num_reads += 1
        return torch.zeros(3, 224, 224)


def test_what_does_not_fit_is_refused_before_it_is_read() -> None:
    """With what it takes, what is left, and how many would fit."""
    with pytest.raises(DoesNotFitError, match=r"100,000,000 samples of 588\.0 KiB take 56076\.05 GiB, and .* GiB are left of") as caught:
        cached(Images())

    assert Images.num_reads == 1
    assert "samples fit: keep some" in (caught.value.hint or "")


def test_where_no_sample_fits_nothing_of_keeping_some_is_said() -> None:
    """The training has all of it."""
    with pytest.raises(DoesNotFitError, match=r" 0 B are left of") as caught:
        cached(Images(), others=2**60)

    assert caught.value.hint == "no sample fits: let the training take less, or say what it takes with `others`"


def test_what_the_training_takes_is_taken_off(tmp_path: Path) -> None:
    """In bytes. A plan is of a GPU, and says nothing of the host."""
    with pytest.raises(DoesNotFitError, match=r"the training takes 1048576.00 GiB at its peak \(given\), and 5% stay free"):
        cached([1, 2, 3], others=2**50)
    plan = memplan.plan("built-in", gpu="t4", method="analytic")
    with pytest.raises(UsageError, match="a plan is of a GPU"):
        cached([1, 2, 3], others=plan)


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        """Return that it is."""
        return True


@pytest.mark.parametrize(("stream", "progress", "shows"), [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)])
def test_a_terminal_shows_a_progress_bar(stream: type[io.StringIO], progress: bool, shows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples; a file and a pipe show nothing."""
    monkeypatch.setattr("sys.stderr", said := stream())
    DeviceCachedDataset(list(range(30)), "cpu", progress=progress)

    assert ("30/30" in said.getvalue() and "filling" in said.getvalue()) == shows
    assert shows or not said.getvalue()


def test_the_random_numbers_of_the_program_are_not_touched() -> None:
    """Also not where other processes read."""
    torch.manual_seed(0)
    cached(list(range(5)), num_workers=1)

    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(0)))

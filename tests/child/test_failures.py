"""A failure: what is told of it, and whether the program itself chose to end."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from memplan.child.failures import MistakeError, answered_by, failure_of, is_chosen, is_of_one_sample


def raised_by(text: str) -> BaseException:
    """Return what *text* raises, without this function's own frame below it."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        exec(compile(text, "program.py", "exec"), {"torch": torch})
    return caught.value


@pytest.mark.parametrize("text", ["raise ValueError('diverged')", "assert 1 > 2, 'diverged'", "def check():\n    raise OSError\ncheck()"])
def test_a_program_ends_itself_by_raise_and_assert(text: str) -> None:
    """Whatever the type of the exception."""
    assert is_chosen(raised_by(text))


@pytest.mark.parametrize(
    "text",
    [
        "[][0]",
        "torch.ones(2, 3) @ torch.ones(2, 3)",
        "torch.nn.functional.dropout(torch.ones(2), p=7)",
        "try:\n    [][0]\nexcept IndexError as error:\n    raise ValueError('no row') from error",
        "try:\n    [][0]\nexcept IndexError:\n    raise ValueError('no row')",
        "try:\n    [][0]\nfinally:\n    pass",
    ],
)
def test_what_python_or_pytorch_raises_is_not_the_programs_choice(text: str) -> None:
    """Nor is an answer to such an error: PyTorch's own functions raise for shapes that nobody chose."""
    assert not is_chosen(raised_by(text))


def test_a_failure_is_told_with_its_type_and_place() -> None:
    """An out-of-memory and a mistake speak for themselves."""
    error = raised_by("x = 1\nraise ValueError('diverged')")

    assert failure_of(error) == {
        "kind": "error",
        "message": "ValueError: diverged",
        "place": "program.py:2",
        "is_chosen": True,
        "is_of_one_sample": False,
    }
    assert failure_of(MistakeError("no such function"))["message"] == "no such function"
    assert failure_of(torch.OutOfMemoryError("out"))["kind"] == "out_of_memory"


def test_an_assertion_without_words_is_told_by_its_line(tmp_path: Path) -> None:
    """What did not hold is in it."""
    file = tmp_path / "queue.py"
    file.write_text("size = 65\nassert 64 % size == 0\n")

    with pytest.raises(AssertionError) as raised:
        runpy.run_path(str(file))

    assert failure_of(raised.value)["message"] == "AssertionError: assert 64 % size == 0"


def test_what_pythons_library_raises_is_told_where_it_was_called() -> None:
    """Its own line says nothing of the program."""
    error = raised_by("import random\nrandom.sample([1, 2], 3)")

    assert failure_of(error)["place"] == "program.py:2"


@pytest.mark.parametrize(
    "answer", ["raise SystemError('gave up')", "raise SystemError('gave up') from None", "raise SystemError from error"]
)
def test_what_is_raised_in_answer_to_a_full_gpu_is_told_as_that(answer: str) -> None:
    """Programs log the error and leave by one of their own (typer's Exit, a worker's)."""
    failure = failure_of(
        answered_by(raised_by(f"try:\n    raise torch.OutOfMemoryError('full')\nexcept Exception as error:\n    {answer}"))
    )

    assert (failure["kind"], failure["message"], failure["place"]) == ("out_of_memory", "full", "program.py:2")


def test_cudnn_finds_no_engine_where_the_gpu_is_full() -> None:
    """PyTorch tries one after the other, and says this at last; where nothing ran out before, none serves the layer."""
    error = raised_by("raise RuntimeError('GET was unable to find an engine to execute this computation')")

    assert failure_of(error, has_run_out=True)["kind"] == "out_of_memory"
    assert failure_of(error)["kind"] == "error"


class Readings(Dataset[int]):
    """Four samples; the third is damaged."""

    def __len__(self) -> int:
        """Return how many there are."""
        return 4

    def __getitem__(self, index: int) -> int:
        """Return the sample."""
        if index == 2:
            raise ValueError("a damaged sample")
        return index


def refuse(samples: list[int]) -> list[int]:
    """A collate function that takes no batch of so many."""
    raise ValueError(f"a batch of {len(samples)}")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("collate", "is_of_sample"), [(None, True), (refuse, False)])
def test_what_a_dataset_raises_for_one_sample_has_nothing_to_do_with_the_batch(
    num_workers: int, *, collate: Callable[[list[int]], list[int]] | None, is_of_sample: bool
) -> None:
    """A collate function sees the whole batch. A worker sends its error as text."""
    loader = DataLoader(Readings(), batch_size=2, num_workers=num_workers, collate_fn=collate)

    with pytest.raises(ValueError) as raised:  # noqa: PT011
        list(loader)

    assert is_of_one_sample(raised.value) == is_of_sample


def test_an_iterable_dataset_is_asked_for_one_sample_after_another() -> None:
    """By another line of PyTorch's."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise ValueError("a damaged sample")

    with pytest.raises(ValueError, match="damaged") as raised:
        list(DataLoader(Stream(), batch_size=2))

    assert is_of_one_sample(raised.value)


@pytest.mark.parametrize("error", [OSError("too many open files"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_what_the_host_lacks_may_have_to_do_with_the_batch(error: Exception) -> None:
    """Files that are open, memory."""

    class Lacking(Readings):
        def __getitem__(self, index: int) -> int:
            raise error

    with pytest.raises(type(error)) as raised:
        list(DataLoader(Lacking(), batch_size=2))

    assert not is_of_one_sample(raised.value)

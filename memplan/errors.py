"""Every error a user can meet.

    MemplanError              what happened, a hint what to do, an exit code
    ├── DoesNotFitError   1   the plan needs more memory than the GPU has
    ├── UsageError        2   an option or a name that makes no sense
    │   ├── NotRehearsedError  2  a workload whose step cannot be built or run, so that only formulas can tell of it
    │   │   └── SizeRefusedError   2  a program that does not run with one size, for another reason than memory
    │   ├── WorldSizeError     2  a number of GPUs that a training cannot be divided over
    │   ├── SampleError        2  a sample of a dataset that could not be read, or not be kept with the others
    │   ├── NotEstimatedError  2  a workload that there are no formulas for, so that only a rehearsal can tell of it
    │   └── ConfigError   2   something is wrong in a file: it names file, line and value
    │       ├── NotDescribedError  2  a configuration that memplan's own model is not true for; its program can be planned
    │       └── EditRefusedError  2   a value that could not be changed without guessing; nothing was written
    └── MissingError      3   the machine lacks something: a GPU, a driver, a CUDA build of PyTorch
        ├── NoKernelsError    3  a GPU on which the installed PyTorch does not run
        └── NothingSeenError  3  a program that was run and of which nothing was seen

The text that a person sees is made from these in one place, `cli/app.py`.
"""

from __future__ import annotations

import os
from pathlib import Path


class MemplanError(Exception):
    """
    An error that is the user's to solve.

    *message* says what happened, with the numbers; *hint* says what to do next.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return the message and the hint: who calls memplan from Python sees both."""
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class DoesNotFitError(MemplanError):
    """What was asked for needs more memory than the GPU has."""

    exit_code = 1


class UsageError(MemplanError):
    """An option, a name or a number that makes no sense."""


class NotRehearsedError(UsageError):
    """A workload that no step could be built for, or whose step fails for another reason than memory."""


class SizeRefusedError(NotRehearsedError):
    """
    A program that fails with one size of its batch, for another reason than memory; it may run with others.

    *is_limit*: larger ones would end alike: it takes no more samples, or the host has no memory for them. *num_samples*: as many as its
    batches had, perhaps all that there are. *largest*: the largest size that makes a difference, where that is sure.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, is_limit: bool = False, num_samples: int | None = None, largest: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.is_limit = is_limit
        self.num_samples = num_samples
        self.largest = largest


class WorldSizeError(UsageError):
    """A number of GPUs that a training cannot be divided over; it may be over others."""


class SampleError(UsageError):
    """A sample of a dataset that could not be read, or that has not the values, shapes and types of the others; *index* is its index."""

    def __init__(self, message: str, *, index: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.index = index


class NotEstimatedError(UsageError):
    """A workload that there are no formulas for."""


class ConfigError(UsageError):
    """Something is wrong in a configuration file; the message starts with where."""

    def __init__(self, problem: str, *, file: Path | None = None, line: int | None = None, hint: str | None = None) -> None:
        where = "" if file is None else f"{file}:{line}: " if line is not None else f"{file}: "
        super().__init__(where + problem, hint=hint)
        self.problem = problem
        self.file = file
        self.line = line


class NotDescribedError(ConfigError):
    """A configuration that memplan's own model is not true for, or whose model nobody here knows: only its program can be planned."""


class EditRefusedError(ConfigError):
    """A value that cannot be changed without guessing what its author meant. Nothing was written."""


def reason_of(error: OSError) -> str:
    """Return why the system refused, in its own words ("No space left on device"); never "None", whoever raised *error*."""
    if error.strerror:
        return error.strerror
    if error.errno is not None:  # OSError(EIO, None)
        return os.strerror(error.errno)
    return str(error) or type(error).__name__  # a library's own, as ctypes' for a library that is not there, has a text alone


def is_out_of_memory(error: BaseException) -> bool:
    """
    Say whether *error* is for want of a GPU's memory: the allocator's, or that of CUDA and its libraries, which PyTorch raises as others.

    By name and words, so that whoever asks needs no PyTorch.
    """
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


_OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class MissingError(MemplanError):
    """The machine lacks what the command needs."""

    exit_code = 3


class NoKernelsError(MissingError):
    """A GPU that the installed PyTorch has no kernels for: programs fail there, whatever memory they take."""


class NothingSeenError(MissingError):
    """A program was rehearsed, and ended without a report of its memory: there is no figure, and no verdict."""

    def __init__(self, message: str, *, program_exit_code: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.program_exit_code = program_exit_code
        """The program's own; minus the signal's number where one ended it."""

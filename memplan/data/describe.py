"""
What the samples of a dataset are: the process behind `memplan dataset FILE.py:make_dataset`, the one place where that code is run.

    python -c "from memplan.data.describe import main; main()" FILE.py:make_dataset NUM_READ RESULT

It reads NUM_READ samples, spread over the dataset, and writes shapes and types, or what is wrong, as JSON into the file RESULT.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from memplan.data.samples import SampleStructure
from memplan.errors import MemplanError, UsageError


def main() -> None:
    """Describe the dataset that the command line names."""
    source, num_read, result = sys.argv[1:]
    try:
        answer = described(dataset_of(source), int(num_read))
    except MemplanError as error:
        answer = {"error": error.message, "hint": error.hint}
    Path(result).write_text(json.dumps(answer), encoding="utf-8")


def dataset_of(source: str) -> Any:
    """Return the dataset that *source*, "FILE.py:name" or "module:name", names: an object, or what a class or function without arguments
    makes.
    """
    place, _, name = source.rpartition(":")
    sys.path.insert(0, str(Path(place).resolve().parent) if place.endswith(".py") else "")
    names = runpy.run_path(place, run_name=Path(place).stem) if place.endswith(".py") else vars(importlib.import_module(place))
    if name not in names:
        raise UsageError(f"{place} has no {name}", hint="name a dataset, or a class or function that makes one without arguments")
    found = names[name]
    is_dataset = hasattr(found, "__getitem__") and hasattr(found, "__len__") and not isinstance(found, type)
    return found if is_dataset else found()


def described(dataset: Any, num_read: int) -> dict[str, Any]:
    """Return the number of samples, and their values. Raises UsageError where samples differ, or cannot be read or kept."""
    try:
        num_samples = len(dataset)
    except TypeError as error:
        raise UsageError(f"the dataset has no length: {type(dataset).__name__}", hint="name a map-style dataset") from error
    if num_samples == 0:
        raise UsageError("the dataset is empty: it has 0 samples", hint="check its path, its split, and its filters")
    structure: SampleStructure | None = None
    for index in sorted({number * (num_samples - 1) // max(1, num_read - 1) for number in range(num_read)}):
        try:
            sample = dataset[index]
            structure = structure or SampleStructure(sample)
            structure.values_of(sample)
        except UsageError as error:
            raise UsageError(f"sample {index}: {error.message}", hint=error.hint) from error
        except Exception as error:  # whatever the user's code raises
            raise UsageError(f"sample {index}: {type(error).__name__}: {error}", hint="read it in Python: `dataset[index]`") from error
    assert structure is not None
    values = [{"name": part.name, "shape": part.shape, "dtype": str(part.dtype).removeprefix("torch.")} for part in structure.parts]
    return {"num_samples": num_samples, "values": values, "host_values": structure.host_names}

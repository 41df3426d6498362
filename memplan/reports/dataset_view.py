"""What the report of a dataset's memory shows, as plain text in plain structures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memplan.analysis.dataset_memory import DatasetMemory, DatasetOnGpu, SampleValue
from memplan.units import format_bytes


class DatasetView(NamedTuple):
    """A headline, facts, and a table with a row for each GPU."""

    headline: str
    facts: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def view_dataset(memory: DatasetMemory, *, beside: str) -> DatasetView:
    """Return the report of *memory*; *beside* says what the training is."""
    columns = ("GPU", "for programs", "training", "left for samples", "samples that fit")
    share = ("of dataset",) if memory.num_samples else ()
    rows = tuple((*_row(gpu), *([_share(gpu, memory.num_samples)] if memory.num_samples else [])) for gpu in memory.gpus)
    return DatasetView(_headline(memory), tuple(_facts(memory, beside)), (*columns, *share), rows)


def _headline(memory: DatasetMemory) -> str:
    is_one = memory.num_samples in (None, 1)
    whole = "a sample" if is_one else f"{memory.num_samples:,} samples"
    takes, does_fit = ("takes", "fits") if is_one else ("take", "fit")
    size = format_bytes(memory.dataset_bytes or memory.sample_bytes)
    if len(memory.gpus) > 1:
        count = sum(gpu.fits for gpu in memory.gpus)
        return (
            f"{whole} of {size} {does_fit} on {count} of {len(memory.gpus)} GPUs" if count else f"{whole} of {size}: none of the GPUs fits"
        )
    (gpu,) = memory.gpus
    if gpu.fits:
        return f"Fits on {gpu.gpu.name}: {whole} {takes} {size} of {format_bytes(gpu.left_bytes)}"
    return f"Does not fit on {gpu.gpu.name}: {whole} {takes} {size}, and {format_bytes(gpu.left_bytes)} are left"


def _facts(memory: DatasetMemory, beside: str) -> Iterator[tuple[str, str]]:
    yield "sample", f"{memory.sample_bytes:,} B ({format_bytes(memory.sample_bytes)}): {', '.join(map(_described, memory.values))}"
    if memory.host_values:
        yield "on the host", ", ".join(f"sample{name}" for name in memory.host_values)
    if memory.dataset_bytes is not None:
        yield "dataset", f"{format_bytes(memory.dataset_bytes)} on the GPU, and as much in a cache on disk"
    yield "filling", f"{format_bytes(memory.filling_bytes)} of host memory, beside what reading a sample takes"
    yield "beside", f"{beside}; {memory.margin:.0%} of each GPU stay free"
    for gpu in memory.gpus:
        if gpu.gpu.others_used_bytes:
            yield "in use", f"{format_bytes(gpu.gpu.others_used_bytes)} of {gpu.gpu.name} by other processes"


def _described(value: SampleValue) -> str:
    shape = "×".join(map(str, value.shape)) or "a number in"
    return f"{value.name} {shape} {value.dtype}".strip()


def _row(gpu: DatasetOnGpu) -> tuple[str, ...]:
    name, size = gpu.gpu.name.removeprefix("NVIDIA "), format_bytes(gpu.gpu.total_memory_bytes)
    if not gpu.training_fits:
        return name, size, "does not fit", "", ""
    return name, size, format_bytes(gpu.training_bytes), format_bytes(gpu.left_bytes), f"{gpu.num_samples_that_fit:,}"


def _share(gpu: DatasetOnGpu, num_samples: int | None) -> str:
    if not num_samples or not gpu.training_fits:
        return ""
    return "all" if gpu.fits else f"{int(1000 * gpu.num_samples_that_fit / num_samples) / 10:.1f}%"  # down: 99.99% is not all

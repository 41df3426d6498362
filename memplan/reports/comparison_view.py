"""What the table of several GPUs shows, as plain text in plain structures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memplan.analysis.comparison import ComparedGpu
from memplan.units import format_bytes


class ComparisonView(NamedTuple):
    """A table with a row for each GPU."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def view_comparison(gpus: Sequence[ComparedGpu]) -> ComparisonView:
    """Return the table of *gpus*. Values that are not the same in all stages are listed in their order, "24, 8"."""
    is_contrastive = any(stage.planned.n_negatives is not None for gpu in gpus for stage in gpu.stages)
    columns = (
        "GPU",
        "for programs",
        "micro-batch",
        "accumulation",
        "effective",
        *(["n_negatives"] if is_contrastive else []),
        "memory",
        "% of GPU",
    )
    return ComparisonView(columns, tuple(tuple(_compared_row(gpu, is_contrastive=is_contrastive)) for gpu in gpus))


def _compared_row(card: ComparedGpu, *, is_contrastive: bool) -> Iterator[str]:
    yield card.gpu.name.removeprefix("NVIDIA ")
    yield format_bytes(card.gpu.total_memory_bytes)
    planned = card.stages[0].planned
    if card.fits:
        yield from map(str, (planned.micro_batch_size, planned.gradient_accumulation_steps, planned.effective_batch_size))
        if is_contrastive:
            yield ", ".join(dict.fromkeys(str(stage.planned.n_negatives) for stage in card.stages))
    else:
        yield from ("none fits", "", "", *([""] if is_contrastive else []))
    yield format_bytes(card.device_used_bytes) if card.fits else f"{format_bytes(card.missing_bytes)} short"
    yield f"{card.device_used_bytes / card.gpu.total_memory_bytes:.0%}"

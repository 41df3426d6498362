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
    has_several = any(gpu.num_gpus > 1 for gpu in gpus)
    is_contrastive = any(stage.planned.n_negatives is not None for gpu in gpus for stage in gpu.stages)
    columns = (
        *(["GPUs"] if has_several else []),
        "GPU",
        "for programs",
        "micro-batch",
        "accumulation",
        "effective",
        *(["n_negatives"] if is_contrastive else []),
        "memory",
        "% of GPU",
    )
    return ComparisonView(columns, tuple(tuple(_row(gpu, has_several, is_contrastive)) for gpu in gpus))


def smallest_machine(gpus: Sequence[ComparedGpu]) -> str:
    """Return which of *gpus*, as many as each trains on, has least memory in all and suffices."""
    fitting = [gpu for gpu in gpus if gpu.fits]
    if not fitting:
        return "none of these machines suffices"
    least = min(fitting, key=lambda gpu: (gpu.machine_bytes, gpu.num_gpus))
    return f"smallest machine that suffices: {least.num_gpus} × {least.gpu.name.removeprefix('NVIDIA ')}"


def _row(card: ComparedGpu, has_several: bool, is_contrastive: bool) -> Iterator[str]:
    if has_several:
        yield str(card.num_gpus)
    yield card.gpu.name.removeprefix("NVIDIA ")
    yield format_bytes(card.gpu.total_memory_bytes)
    if card.problem is not None:
        yield from ("not planned", "", "", *([""] if is_contrastive else []), card.problem, "")
        return
    planned = card.stages[0].planned
    if card.fits:
        yield from map(str, (planned.micro_batch_size, planned.gradient_accumulation_steps, planned.effective_batch_size))
        if is_contrastive:
            yield ", ".join(dict.fromkeys(str(stage.planned.n_negatives) for stage in card.stages))
    else:
        yield from ("none fits", "", "", *([""] if is_contrastive else []))
    yield format_bytes(card.device_used_bytes) if card.fits else f"{format_bytes(card.missing_bytes)} short"
    yield f"{card.device_used_bytes / card.gpu.total_memory_bytes:.0%}"

"""What a curve shows, as plain text in plain structures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memplan.analysis.curves import Curve, CurvePoint
from memplan.units import format_bytes

CURVE_WORDS = {
    "micro_batch_size": "micro-batch", "n_negatives": "negatives", "n_positives": "positives", "sequence_length": "sequence length"
}  # fmt: skip
"""What is varied, in words."""


class CurveRow(NamedTuple):
    """A value of a curve."""

    label: str
    share: float
    """Of the GPU."""
    size: str
    fits: bool
    remark: str


class CurveView(NamedTuple):
    """A curve, as bars."""

    title: str
    budget_share: float
    rows: tuple[CurveRow, ...]


def view_curve(curve: Curve) -> CurveView:
    """Return *curve* as rows, one for each value."""
    variable = CURVE_WORDS[curve.variable]
    return CurveView(
        title=f"upper bound of the memory of {curve.stage} by {variable}, on the scale of the GPU (│ is the budget)",
        budget_share=curve.budget_bytes / curve.gpu_bytes,
        rows=tuple(
            CurveRow(
                label=f"{variable} {point.value}",
                share=point.high_bytes / curve.gpu_bytes,
                size=format_bytes(point.high_bytes),
                fits=point.fits,
                remark=", ".join(_curve_remarks(curve, point)),
            )
            for point in curve.points
        ),
    )


def _curve_remarks(curve: Curve, point: CurvePoint) -> Iterator[str]:
    if point.value == curve.planned:
        yield "planned" if point.fits else "the smallest that was tried"
    if not point.fits:
        yield "over the budget"
    if point.method == "worked out":
        yield "interpolated"

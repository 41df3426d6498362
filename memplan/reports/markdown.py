"""Tables for Markdown: a README, an issue, a wiki."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a head; the first column stands left, the others right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)

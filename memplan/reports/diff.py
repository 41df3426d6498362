"""What an apply changes, as a unified diff that a person can read and `patch` can take."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from memplan.edits.apply import FileChange


def diff_lines(changes: Sequence[FileChange]) -> Iterator[str]:
    """Yield the lines of a unified diff of *changes*; a missing last newline is marked as diff does."""
    for change in changes:
        before, after = (data.decode("utf-8").splitlines(keepends=True) for data in (change.before, change.after))
        for line in difflib.unified_diff(before, after, str(change.path), str(change.path)):
            yield line.rstrip("\r\n")
            if not line.endswith(("\n", "\r")):
                yield "\\ No newline at end of file"

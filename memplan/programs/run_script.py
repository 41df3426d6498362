"""Which script a command runs: `python train.py …`, `torchrun --nproc-per-node 4 train.py …`, `python -m trainer …`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class RunScript(NamedTuple):
    """A script, and what the command gives it."""

    path: Path
    words: Sequence[str]
    """Those behind it."""


def run_script(words: Sequence[str]) -> RunScript | None:
    """Return the script of this machine's that the command *words* runs, by its path or as a module; None where it names none."""
    for number, word in enumerate(words):
        if word == "-m" and number + 1 < len(words):
            module = Path(*words[number + 1].split("."))
            for path in (module.with_suffix(".py"), module / "__main__.py"):
                if os.path.isfile(path):
                    return RunScript(path, words[number + 2 :])
        elif word.endswith(".py") and os.path.isfile(word):
            return RunScript(Path(word), words[number + 1 :])
    return None

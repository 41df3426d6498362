"""Checkpoints beside a configuration: a training that is resumed from one counts steps in batches of the size that it was begun with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from memplan.layouts.reader import Reading

PATTERNS = ("checkpoint-*", "epoch_*", "step-*", "*.ckpt", "*/*.ckpt", "*/*/*.ckpt")
"""What trainers call them: transformers' Trainer, torchtune, LitGPT, and Lightning, also in folders of versions."""


def checkpoint_beside(reading: Reading) -> Path | None:
    """Return a checkpoint of the training that was read, None where there is none."""
    return next((found for folder in _folders(reading) for pattern in PATTERNS for found in sorted(folder.glob(pattern))), None)


def _folders(reading: Reading) -> Iterator[Path]:
    """Yield where the checkpoints may be: the folder that the files name, from the working folder, that of the files or the one above."""
    main = reading.file_of(None)
    for key in reading.layout.checkpoints:
        named = reading.text_at(key)
        for place in (Path(), main.parent, main.resolve().parent.parent) if named else ():
            if os.path.isdir(place / named):
                yield place / named

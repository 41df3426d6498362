"""The pictures of the site, drawn by a real browser where there is one."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from docs.screenshots import WIDTH, find_browser
from memplan.errors import MissingError
from tests.test_docs import REPOSITORY, printed_with, skip_without

PICTURES = REPOSITORY / "docs" / "images"


def pixels_of(path: Path) -> tuple[int, int, bytes]:
    """Return the width, the height and the filtered rows of a PNG of 8-bit colours."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    data, place = b"", 8
    while place < len(content):
        length, kind = struct.unpack(">I4s", content[place : place + 8])
        data += content[place + 8 : place + 8 + length] if kind == b"IDAT" else b""
        place += 12 + length
    return width, height, zlib.decompress(data)


@pytest.mark.heavy
def test_a_browser_draws_the_report_and_the_monitor(tmp_path: Path) -> None:
    """Of the size that the site shows, and not blank."""
    skip_without(printed_with())
    try:
        find_browser()
    except MissingError as error:
        pytest.skip(error.message)

    subprocess.run([sys.executable, "-m", "docs.screenshots", str(tmp_path)], cwd=REPOSITORY, check=True)

    for name in ("report.png", "monitor.png"):
        drawn, shown = pixels_of(tmp_path / name), pixels_of(PICTURES / name)
        assert drawn[:2] == shown[:2]
        assert drawn[0] == WIDTH
        assert len(set(drawn[2])) > 100  # lines, words and colours


def test_the_pictures_are_small() -> None:
    """They are part of the repository."""
    assert all(path.stat().st_size < 200_000 for path in PICTURES.iterdir())

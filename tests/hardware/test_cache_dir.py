"""Where memplan keeps what it may need again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memplan.hardware.cache_dir import default_cache


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """XDG_CACHE_HOME, else ~/.cache: the XDG Base Directory Specification 0.8."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "memplan"

    for ignored in ("", "relative/cache"):  # as the XDG Base Directory Specification says
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache() == Path.home() / ".cache" / "memplan"

    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "memplan"


NAMELESS = "import pwd\ndef none(number): raise KeyError(number)\npwd.getpwuid = none\n"
"""This user has no entry in the list of users."""

ASKED = """
import os
from memplan.hardware.cache_dir import default_cache
folder = default_cache()
assert default_cache() == folder
(folder / "kept").touch()
if os.fork() == 0:
    raise SystemExit
os.wait()
assert (folder / "kept").exists()
print(folder)
"""


@pytest.mark.parametrize("home", [None, "relative/home"])
def test_without_a_home_it_is_this_processs(tmp_path: Path, home: str | None) -> None:
    """Neither HOME nor an entry in the list of users: a folder of its own, the same each time; a fork leaves it, its end removes it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment |= {"TMPDIR": str(tmp_path)} | ({} if home is None else {"HOME": home})

    done = subprocess.run([sys.executable, "-c", NAMELESS + ASKED], env=environment, capture_output=True, text=True, check=True)

    assert Path(done.stdout.strip()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []

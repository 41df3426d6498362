"""Who has set a variable of the environment: an installed package, or the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from memplan.child.set_variables import note_setters, set_by_packages
note_setters()
note_setters()  # the hook and a warm process both do
import packaged
os.environ.update(OF_PROGRAM="2", OF_BOTH="2")
print(*sorted(set_by_packages()))
"""


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "src"])
def test_what_a_package_sets_last_is_its_own(tmp_path: Path, folder: str) -> None:
    """By whatever method of a mapping. What the program sets afterwards is the program's; so is what a module of its own sets."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "packaged.py").write_text(
        "import os\nos.environ.setdefault('BY_DEFAULT', '1')\nos.environ['BY_ITEM'] = os.environ['OF_BOTH'] = '1'\n"
        "os.environ.update(BY_UPDATE='1')\nos.environ |= {'BY_OR': '1'}\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / folder), str(Path(__file__).parents[2])])}

    said = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True).stdout

    assert said.split() == ([] if folder == "src" else ["BY_DEFAULT", "BY_ITEM", "BY_OR", "BY_UPDATE"])

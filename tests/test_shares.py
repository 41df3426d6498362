"""The heavy suite in shares."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from tests.shares import Share, share_from

TESTS = "import pytest\n@pytest.mark.parametrize('number', range(40))\ndef test_a(number):\n    pass\n"


def test_every_test_is_in_one_share() -> None:
    """And none of the shares is much smaller than another."""
    tests = [f"tests/test_{number % 7}.py::test_it[{number}]" for number in range(600)]
    shares = [[test for test in tests if Share(number, 3).has(test)] for number in (1, 2, 3)]

    assert sorted(chain.from_iterable(shares)) == sorted(tests)
    assert min(map(len, shares)) > 160


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0"])
def test_what_is_no_share_is_refused(text: str) -> None:
    """In words."""
    with pytest.raises(ValueError, match="is no share"):
        share_from(text)


@pytest.mark.heavy
def test_pytest_runs_a_share(tmp_path: Path) -> None:
    """And no test of another."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_addoption, pytest_collection_modifyitems\n")
    (tmp_path / "test_them.py").write_text(TESTS)

    def collected(*options: str) -> set[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            "/dev/null",
            "--rootdir",
            str(tmp_path),
        ]
        run = subprocess.run([*command, *options, str(tmp_path)], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
        return {line for line in run.stdout.splitlines() if "::" in line}

    whole, half = collected(), collected("--share", "1/2")

    assert len(whole) == 40
    assert {test for test in whole if Share(1, 2).has(test)} == half
    assert 0 < len(half) < 40

"""The documentation as a site: `make docs` builds it; what it must hold is here, where no build is needed."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.test_docs import REPOSITORY

DOCS = REPOSITORY / "docs"


def test_every_page_is_in_the_lists_of_the_first_page() -> None:
    """They are the navigation."""
    listed = re.findall(r"^- \[[^\]]+\]\(([\w-]+\.(?:md|rst))\)", (DOCS / "index.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert sorted([*listed, "index.md"]) == sorted(path.name for path in DOCS.iterdir() if path.suffix in (".md", ".rst"))


@pytest.mark.parametrize("package", ["memplan", "memplan.data", "memplan.debug"])
def test_the_reference_names_everything_that_is_offered(package: str) -> None:
    """A name that is added to `__all__` is added to reference.rst; one that is gone fails the build."""
    documented = set(re.findall(r"^\.\. auto\w+:: (\S+)$", (DOCS / "reference.rst").read_text(encoding="utf-8"), re.MULTILINE))

    offered = {f"{package}.{name}" for name in importlib.import_module(package).__all__ if not name.startswith("__")}

    assert offered <= documented, offered - documented

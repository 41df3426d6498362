"""
How Sphinx makes the site from these files, which GitHub shows as they are: `make docs`.

The navigation is the lists of index.md: a page that is linked there, under its heading, is in the navigation, and one that is not fails the
build. So no page needs a directive that GitHub would show as code.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

import memplan

project = "memplan"
release = memplan.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py", "screenshots.py"]

html_theme = "furo"
html_title = f"memplan {release}"
html_copy_source = False
html_show_sphinx = False

# Links to headings, by the names that GitHub gives them; one that leads nowhere is a warning, and so an error.
myst_heading_anchors = 4

# A console block is highlighted as a shell's; what a command prints need not look like one.
suppress_warnings = ["misc.highlighting_failure"]

# Docstrings are written with the backticks of Markdown.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

HEADING_OR_PAGE = re.compile(r"^## (?P<heading>.+)$|^- \[(?P<title>[^\]]+)\]\((?P<page>[\w-]+)\.(?:md|rst)\)", re.MULTILINE)


def navigation(text: str) -> str:
    """Return the directives for the lists of *text*, one for each heading."""
    directives = []
    for found in HEADING_OR_PAGE.finditer(text):
        if found["heading"]:
            directives.append([found["heading"]])
        else:
            directives[-1].append(f"{found['title']} <{found['page']}>")
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n" + "\n".join(pages) + "\n```\n" for heading, *pages in directives if pages
    )


def add_navigation(_app: Sphinx, name: str, source: list[str]) -> None:
    """Put the navigation below the first page."""
    if name == "index":
        source[0] += navigation(source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)


assert Path(memplan.__file__).parents[1] == Path(__file__).parents[1], f"the site of this folder, and the memplan of {memplan.__file__}"

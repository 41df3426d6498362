"""What holds for Python, TOML and shell files alike: nothing that somebody damaged ends in a traceback, and an edit changes one value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.edits.flat_file import FlatFile
from memplan.edits.python_file import PythonFile
from memplan.edits.shell_file import ShellFile
from memplan.edits.toml_file import TomlFile
from memplan.errors import ConfigError
from tests.edits import test_python_file, test_shell_file, test_toml_file
from tests.edits.faults import answer_or_error
from tests.edits.test_python_file import key

FORMATS: dict[str, tuple[type[FlatFile], str]] = {
    "conf.py": (PythonFile, test_python_file.SOURCE),
    "conf.toml": (TomlFile, test_toml_file.SOURCE),
    "start.sh": (ShellFile, test_shell_file.SOURCE),
}
cuts = st.tuples(st.integers(0, 1000), st.integers(0, 12), st.text(" \t\n=[]{}()\"'#.,:;$`<\\a1é\ufeff", max_size=4))


@pytest.mark.parametrize("name", FORMATS)
@settings(
    deadline=None,
    max_examples=3 * int(os.environ.get("MEMPLAN_EXAMPLES", "100")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(mutations=st.lists(cuts, min_size=1, max_size=4), data=st.data())
def test_any_damaged_file_is_read_or_refused(name: str, mutations: list[tuple[int, int, str]], data: st.DataObject) -> None:
    """Whatever is asked of it; an edit that is accepted changes no byte beside its value."""
    format_of_file, text = FORMATS[name]
    for place, length, instead in mutations:
        text = text[:place] + instead + text[place + length :]
    file = answer_or_error(lambda: format_of_file.parse(Path(name), text.encode()))
    if isinstance(file, ConfigError):
        assert str(file).startswith(name)
        return
    asked = key(data.draw(st.sampled_from(sorted({*file.keys(), "nothing"}))))
    chosen = [value for value in file.content.values if ".".join(value.key) == ".".join(asked)]

    for question in (lambda: file.get(asked), lambda: file.length_of(asked), lambda: file.line_of(asked), file.to_python):
        found = answer_or_error(question)
        assert not isinstance(found, ConfigError) or str(found).startswith(name)
    after = answer_or_error(lambda: file.replace(asked, 4242))

    if not isinstance(after, ConfigError):
        edited = after.decode().removeprefix("\ufeff")
        assert edited.startswith(file.text[: chosen[0].start])
        assert edited.endswith(file.text[chosen[0].end :])
        written = edited[chosen[0].start : len(edited) - len(file.text) + chosen[0].end]
        assert written.strip("\"'") == "4242"

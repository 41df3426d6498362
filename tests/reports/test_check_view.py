"""What continuous integration reads of a check."""

from pathlib import Path
from xml.etree import ElementTree as ET

from memplan.edits.edit import Location
from memplan.reports.check_view import Finding, as_junit, workflow_command


def test_a_workflow_command_is_one_line_whatever_is_in_it() -> None:
    """As actions/toolkit escapes them (packages/core/src/command.ts): % and line ends everywhere, : and , in properties too."""
    command = workflow_command("error", "50%, a: b\r\nc", Location(Path("a,b:c%.yaml"), 3))

    assert command == "::error file=a%2Cb%3Ac%25.yaml,line=3::50%25, a: b%0D%0Ac"
    assert workflow_command("notice", "fits") == "::notice::fits"


def test_xml_parses_whatever_is_in_a_name() -> None:
    """Markup is escaped; what no XML may have is shown as a question mark."""
    finding = Finding('<a> & "b"\x1b\udcff', False, "]]> \x00", Location(Path("a&b")))
    suite = ET.fromstring(as_junit([finding], error="<"))

    assert [case.get("name") for case in suite] == ['<a> & "b"??', "check"]
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["2", "1", "1"]
    assert [child.get("message") for case in suite for child in case] == ["]]> ?", "<"]

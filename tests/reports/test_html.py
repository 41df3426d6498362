"""The plan as a page."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from memplan.analysis.curves import curves_of
from memplan.analysis.make_plan import make_plan
from memplan.estimators.analytic.estimate import AnalyticEstimator
from memplan.hardware.gpu import GpuSpec
from memplan.planner.plan import Plan
from memplan.reports.html import plan_as_html
from memplan.traces.timeline import Sample, Timeline
from memplan.traces.trace import CATEGORIES, Mark
from memplan.units import GIB
from memplan.workload.workload import Workload

VOID = {"meta", "rect", "line", "br", "circle"}


class Page(HTMLParser):
    """Follows the tags of a page: each that opens has to close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def a_step() -> Timeline:
    samples = tuple(Sample(event, tuple((number + 1) * event for number in range(len(CATEGORIES))), 2 * GIB) for event in range(1, 50))
    return Timeline(2, samples, (Mark(1, 2, "forward"), Mark(20, 2, "backward"), Mark(40, 2, "optimizer")))


def page_of(plan: Plan, name: str = "the tree conf") -> str:
    return plan_as_html(
        plan, source=name, notes=["a note"], curves=curves_of(plan, AnalyticEstimator()), timeline=a_step(), stage="01_stage"
    )


def test_a_page_is_whole_and_needs_nothing_else(built_in: Workload, a100: GpuSpec) -> None:
    """Every tag closes; no script, no address of anything."""
    text = page_of(make_plan(built_in, a100, AnalyticEstimator()))
    page = Page()
    page.feed(text)

    assert page.open == []
    assert page.addresses == []
    assert "<script" not in text
    assert "http" not in re.sub(r"<title>.*?</title>", "", text)
    assert "prefers-color-scheme: dark" in text


def test_a_page_has_what_the_terminal_has_and_the_drawings(built_in: Workload, a100: GpuSpec) -> None:
    plan = make_plan(built_in, a100, AnalyticEstimator())
    page = Page()
    page.feed(page_of(plan))
    text = " ".join(page.text)

    assert "Fits on NVIDIA A100-SXM4-80GB" in text
    assert all(reason in text for reason in plan.reasons)
    assert "a note" in text
    assert "Memory over time, step 2 of 01_stage" in text
    assert "memory by micro-batch, upper bound" in text
    assert "memory by negatives" in text
    assert all(category.replace("_", " ") in text for category in CATEGORIES)
    assert "forward" in page.text
    assert "optimizer" in page.text


def test_points_lie_where_their_figures_say(built_in: Workload, a100: GpuSpec) -> None:
    """More memory is higher up; what is over the budget lies above its line."""
    text = page_of(make_plan(built_in, a100, AnalyticEstimator()))
    figure = text[text.index("memory by micro-batch, upper bound") :]
    marks = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="\d" fill="var\((--\w+)\)">', figure[: figure.index("</figure>")])
    budget = re.findall(r'<line class="limit"[^>]* y1="([\d.]+)"', figure)[1]

    heights = [float(y) for _, y, _ in marks]
    assert heights == sorted(heights, reverse=True)
    assert all((float(y) > float(budget)) == (colour == "--good") for _, y, colour in marks)


def test_names_from_files_are_text_and_no_tags(built_in: Workload, a100: GpuSpec) -> None:
    """Of a configuration of somebody else."""
    plan = make_plan(built_in, a100, AnalyticEstimator())
    text = page_of(plan, name='<img src="x" onerror="alert(1)">')

    assert "<img" not in text
    assert "&lt;img" in text

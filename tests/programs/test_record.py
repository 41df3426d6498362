"""The recorder's own arithmetic; `tests/estimators/test_rehearsed.py` runs it for real."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "memplan" / "programs" / "record.py"


@pytest.fixture(scope="module")
def arithmetic() -> dict[str, Any]:
    """The functions of record.py that need no torch: the module itself may be run, not imported."""
    wanted = {"allocations_by_address", "allocation_of", "blocks_at_peak"}
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    names: dict[str, Any] = {"Any": Any}
    exec("from __future__ import annotations\nimport bisect", names)
    exec(compile(tree, str(SOURCE), "exec", flags=__import__("__future__").annotations.compiler_flag), names)
    return names


def alloc(address: int, size: int) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size}


def free(address: int) -> dict[str, Any]:
    return {"action": "free_completed", "addr": address, "size": 0}


TRACE = [alloc(1, 10), alloc(2, 20), free(1), alloc(1, 25), alloc(3, 5), free(2), free(3), alloc(4, 15)]


def test_the_blocks_at_the_peak_are_those_of_the_highest_moment(arithmetic: dict[str, Any]) -> None:
    """10 + 20, then 25 + 20 + 5 = 50, then 25 + 15: the middle one."""
    assert arithmetic["blocks_at_peak"](TRACE) == {2: (2, 20), 1: (3, 25), 3: (4, 5)}


def test_a_peak_at_the_end_counts(arithmetic: dict[str, Any]) -> None:
    """Nothing is freed behind it."""
    assert arithmetic["blocks_at_peak"]([alloc(1, 10), alloc(2, 1)]) == {1: (1, 10), 2: (2, 1)}


def test_an_address_that_is_used_again_is_another_allocation(arithmetic: dict[str, Any]) -> None:
    """Which one lay there is told by how many allocations there had been."""
    numbers = arithmetic["allocations_by_address"](TRACE)

    assert numbers == {1: [1, 3], 2: [2], 3: [4], 4: [5]}
    assert [arithmetic["allocation_of"](numbers, 1, count) for count in (0, 1, 2, 3, 9)] == [None, 1, 1, 3, 3]
    assert arithmetic["allocation_of"](numbers, 99, 3) is None

"""torch.compile off and on again: what ran is told by a backend whose results are off by a thousand."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memplan import debug
from memplan.debug import no_compile
from memplan.errors import UsageError

ONE = torch.ones(())
num_compiled = 0


def off_by_a_thousand(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    """A backend that counts graphs, and adds a thousand to what they return."""
    global num_compiled  # noqa: PLW0603
    num_compiled += 1
    return lambda *inputs: tuple(each + 1000 if isinstance(each, Tensor) else each for each in graph(*inputs))


def compiled(function: Any, **options: Any) -> Any:
    """The function, compiled by it."""
    return torch.compile(function, backend=off_by_a_thousand, **options)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Each test begins with no compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def double(x: Tensor) -> Tensor:
    """A function."""
    return 2 * x


class Scaled(nn.Module):
    """A module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Scale *x*."""
        return x * self.scale


def with_a_break(x: Tensor) -> Tensor:
    """Two graphs with a break between them."""
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def test_a_function_compiled_before_runs_as_it_was_written_and_is_not_compiled_again() -> None:
    """The recipes that only look as if they did leave it compiled."""
    function = compiled(double)
    assert function(ONE) == 1002
    before = num_compiled

    with no_compile():
        assert function(ONE) == 2

    assert function(ONE) == 1002
    assert num_compiled == before


def test_a_function_compiled_inside_is_not_until_it_is_left() -> None:
    """Compiled lazily, at its first call afterwards."""
    with no_compile():
        function = compiled(double)
        assert function(ONE) == 2
    assert function(ONE) == 1002


@pytest.mark.parametrize("in_place", [False, True])
def test_modules(in_place: bool) -> None:
    """By torch.compile and by Module.compile, whole and as a part of another."""
    layer: Any = Scaled()
    if in_place:
        layer.compile(backend=off_by_a_thousand)
    else:
        layer = compiled(layer)
    model, x = nn.Sequential(layer, nn.ReLU()), torch.ones(1)
    assert model(x) == 1001

    with no_compile():
        assert model(x) == 1
        model(x).backward()
    assert model(x) == 1001


@pytest.mark.parametrize("options", [{}, {"dynamic": True}])
def test_graph_breaks_and_functions_that_call_compiled_ones(options: dict[str, Any]) -> None:
    """Nothing of it runs compiled, from the first frame to the last."""
    inner = compiled(double, fullgraph=True)
    function = compiled(lambda x: inner(with_a_break(x)), **options)

    with no_compile():
        assert function(ONE) == 8
    assert function(ONE) > 1000
    with no_compile():
        assert function(ONE) == 8


def test_it_may_be_used_in_a_function_that_is_compiled() -> None:
    """As a block and as a decorator; what comes after it is compiled again."""

    @no_compile()
    def eager(x: Tensor) -> Tensor:
        assert not torch.compiler.is_compiling()
        return compiled(double)(x) + 1

    def block(x: Tensor) -> Tensor:
        with no_compile():
            return compiled(double)(x)

    assert compiled(lambda x: eager(x) * 2)(ONE) == 1006
    assert compiled(block)(ONE) == 2
    assert compiled(double)(ONE) == 1002


def test_a_decorated_function_keeps_its_name_and_may_call_itself() -> None:
    """And leaves everything as it was when it raises."""
    function = compiled(double)

    @no_compile()
    def power(x: Tensor, exponent: int) -> Tensor:
        """Two to the power."""
        return x if exponent == 0 else function(power(x, exponent - 1))

    assert (power(ONE, 5), power.__name__, power.__doc__) == (32, "power", "Two to the power.")
    with pytest.raises(TypeError):
        power(ONE)
    assert function(ONE) == 1002


def test_nested_blocks_end_with_the_outermost() -> None:
    """Also where one object is used twice."""
    function, block = compiled(double), no_compile()
    with block:
        with block, no_compile():
            assert function(ONE) == 2
        assert function(ONE) == 2
    assert function(ONE) == 1002


def test_the_stance_that_was_set_before_comes_back() -> None:
    """PyTorch's own setting."""
    function = compiled(double)
    with torch.compiler.set_stance("fail_on_recompile"):
        with no_compile():
            assert function(ONE) == 2
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            function(ONE)


def test_it_holds_for_other_threads() -> None:
    """A training may run in one."""
    function, found = compiled(double), []
    with no_compile():
        thread = threading.Thread(target=lambda: found.append(function(ONE)))
        thread.start()
        thread.join()

    assert found == [2]


def test_a_generator_function_is_refused() -> None:
    """Its body would run when the block has ended."""
    with pytest.raises(UsageError, match="is a generator or coroutine function"):

        @no_compile()
        def batches() -> Iterator[int]:
            yield 1


PROGRAM = """
import sys
import torch
{first}

def backend(graph, inputs):
    print("compiled")
    return graph

print(torch.compile(lambda x: 2 * x, backend=backend)(torch.ones(())).item(), *sys.argv)
"""


def said(folder: Path, *arguments: str, first: str = "", **environment: str) -> list[str]:
    """What the program prints."""
    (folder / "train.py").write_text(PROGRAM.format(first=first))
    whole = {name: value for name, value in os.environ.items() if name != "MEMPLAN_NO_COMPILE"}
    whole |= {"PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=whole, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.heavy
def test_a_whole_program_runs_without(tmp_path: Path) -> None:
    """Unmodified, as a file and as a module; or by a variable, once memplan.debug is imported."""
    first = "import memplan.debug"
    assert said(tmp_path, "train.py", first=first) == ["compiled", "2.0 train.py"]
    assert said(tmp_path, "train.py", first=first, MEMPLAN_NO_COMPILE="1") == ["2.0 train.py"]
    assert said(tmp_path, "-m", "memplan.debug", "train.py", "--lr", "1") == ["2.0 train.py --lr 1"]
    assert said(tmp_path, "-m", "memplan.debug", "-m", "train", "--lr", "1") == [f"2.0 {tmp_path / 'train.py'} --lr 1"]


def test_a_program_that_is_not_there_is_one_clear_line() -> None:
    """As `python` says it."""
    with pytest.raises(SystemExit, match=r"^none.py does not exist$"):
        debug._run_program(["none.py"])

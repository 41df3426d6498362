"""Programs that are compiled: by Inductor, which folds constants and chooses by time, and by Triton, which tries configurations."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH = 4096, 1024
ODD = 8193
"""Rows of 16,386 bytes in bf16, which tensor cores read only slowly."""

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def build(device: str, program: str = "padding", rows: int = ODD) -> Callable[[], None]:
    """Return the step of that name."""
    programs = (padding, constants, timing, tuned, dropout, later_triton, asks, whole, flex, updates)
    return {found.__name__: found for found in programs}[program](device, rows)


def padding(device: str, rows: int) -> Callable[[], None]:
    """A product with *rows* rows of weights, and what it takes twice."""
    weights = torch.randn(rows, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    run = torch.compile(lambda x: torch.nn.functional.linear(x, weights).float().logsumexp(-1).sum())

    def step() -> None:
        run(torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)).backward()
        weights.grad = None

    return step


def constants(device: str, rows: int) -> Callable[[], None]:
    """A mask is filled with a number that Inductor folds, and so is a sum of constants: one that is read as 1 or 0 would be dropped."""

    @torch.compile
    def run(x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((), 3.0, device=x.device) - torch.ones((), device=x.device) * 2.5
        return torch.where(x > 0, x * scale, torch.full((), -100, device=x.device, dtype=torch.int64)).square().mean()

    def step() -> None:
        run(torch.randn(rows, WIDTH, device=device, requires_grad=True)).backward()

    return step


def dropout(device: str, rows: int) -> Callable[[], None]:
    """A compiled embedding with dropout behind it, whose forward keeps a mask."""
    model = nn.Sequential(nn.Embedding(64, rows), nn.Dropout(0.5), nn.Linear(rows, 8)).to(device)
    compiled = torch.compile(model)

    def step() -> None:
        indices = torch.zeros(64, dtype=torch.int64, device=device)
        compiled(indices).sum().backward()
        model.zero_grad()

    return step


def timing(device: str, rows: int) -> Callable[[], None]:
    """A program that times itself: twice the work takes twice as long, in every step the same."""
    weights = torch.randn(rows, WIDTH, device=device)
    first: list[float] = []

    def milliseconds(times: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            torch.mm(weights, weights.t())
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def step() -> None:
        once, twice = milliseconds(1), milliseconds(2)
        assert math.isclose(twice, 2 * once, rel_tol=0.01)
        first.append(once)
        assert math.isclose(once, first[0], rel_tol=1e-6)  # the clock is a sum, and rounds

    return step


def tuned(device: str, rows: int) -> Callable[[], None]:
    """A kernel of the program's own with twelve configurations."""
    kernel = _kernel()

    def step() -> None:
        x = torch.randn(rows, WIDTH, device=device)
        out = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
        tried = [config for config, times in kernel.configs_timings.items() if math.isfinite(min(times))]
        print(f"{len(tried)} of {len(kernel.configs)} were tried", file=sys.stderr)
        assert len(tried) == (1 if rows == ODD else len(kernel.configs))

    if rows != ODD:  # where scratch memory comes from a configuration may decide
        triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, device=device, dtype=torch.int8))
    return step


def later_triton(device: str, rows: int) -> Callable[[], None]:
    """The installed compiler, which passes LLVM's optimizer an option by name, as that of Triton 3.8 does (`disable_slp_vectorizer`)."""
    from triton.backends.nvidia import compiler

    optimize = compiler.llvm.optimize_module
    compiler.llvm.optimize_module = lambda *arguments: optimize(*arguments, disable_slp_vectorizer=True)
    return constants(device, rows)


def flex(device: str, rows: int) -> Callable[[], None]:
    """Attention whose kernel Inductor lays out by trying; raises an error where it tries another layout after one that works."""
    from torch._inductor.select_algorithm import TritonTemplateCaller
    from torch.nn.attention.flex_attention import flex_attention

    attention = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")
    weight = torch.nn.Parameter(torch.randn(64, 64, device=device, dtype=torch.bfloat16))
    benchmark, worked = TritonTemplateCaller.benchmark, []

    def noted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        found = benchmark(self, *arguments, **keywords)
        worked.append(self.name.rpartition("_")[0])
        return found

    TritonTemplateCaller.benchmark = noted

    def step() -> None:
        x = torch.randn(2, 4, 256, 64, device=device, dtype=torch.bfloat16) @ weight
        attention(x, x, x).sum().backward()
        weight.grad = None
        assert len(set(worked)) == len(worked) > 0 or torch._dynamo.config.disable, worked

    return step


def asks(device: str, rows: int) -> Callable[[], None]:
    """A compiled function that reads how many rows are chosen: Dynamo sees it and what comes behind the read, and nothing else."""

    @torch.compile(backend="eager")
    def run(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return x[chosen].sum()

    def step() -> None:
        run(torch.randn(rows, 8, device=device), (torch.arange(rows) < 5).to(device))
        _check_followed()

    return step


def whole(device: str, rows: int) -> Callable[[], None]:
    """A compiled step with its backward and its optimizer."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def run(x: torch.Tensor) -> None:
        checkpoint(model, x, use_reentrant=False).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        run(torch.randn(rows, 8, device=device))
        _check_followed()

    return step


def updates(device: str, rows: int) -> Callable[[], None]:
    """A step whose optimizer alone is compiled."""
    model = nn.Linear(512, 512, bias=False).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    update = torch.compile(optimizer.step, backend="aot_eager")

    def step() -> None:
        model(torch.randn(rows, 512, device=device)).sum().backward()
        update()
        optimizer.zero_grad()

    return step


def _check_followed() -> None:
    """Raise an error where Dynamo saw anything of memplan's recorder."""
    import torch._dynamo.convert_frame as converted

    seen = {code.co_filename for reference in converted.output_codes.seen if (code := reference()) is not None}
    assert seen or torch._dynamo.config.disable  # as a pass that seeks values has it
    assert not [name for name in seen if "/memplan/child/" in name and name != __file__], seen


def _kernel() -> Any:
    @triton.autotune(
        [triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 512, 1024) for warps in (1, 2, 4, 8)], key=["count"]
    )
    @triton.jit
    def double(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < count) * 2, mask=at < count)

    return double

"""
CUDA graphs in the values pass: what a program captures runs as it is, and a replay does nothing.

Nothing is compiled there, and what a compiled function does while a graph is captured its eager form may not: flex_attention copies
numbers from the host. Reads are not allowed in a graph, so that none is missed.
"""

from __future__ import annotations

from typing import Any

import torch


def capture_nothing() -> None:
    """Have graphs neither captured nor replayed."""
    graph: Any = torch.cuda.CUDAGraph
    for name in ("capture_begin", "capture_end", "instantiate", "replay"):
        setattr(graph, name, _nothing)
    graph.pool = _new_pool


def _nothing(_graph: Any, *_arguments: Any, **_keywords: Any) -> None:
    """Do nothing."""


def _new_pool(_graph: Any) -> Any:
    return torch.cuda.graph_pool_handle()

"""
Caches of compilers that a program names itself: each is replaced by an empty one of the rehearsal's own.

With what an earlier run has left there a compiled program takes another peak than on its first start, and a kernel without machine code
is not for a real GPU to find. MEMPLAN_CACHES says where the own ones are, by the variable that names each (`standin/launch.py`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"

INDUCTOR_MODULES = ("torch._inductor.runtime.cache_dir_utils", "torch._inductor.runtime.runtime_utils", "torch._inductor.codecache")
"""Where versions of PyTorch have the function that says where Inductor's cache is; others import it from there."""


def make_inductor_cold(module: Any) -> None:
    """Have Inductor ask for its folder only when it is one of ours."""
    if hasattr(module, "cache_dir"):
        module.cache_dir = _cold(INDUCTOR, module.cache_dir)


def make_triton_cold(module: Any) -> None:
    """Have Triton's manager of files look where its folder is only when it is one of ours."""
    manager: Any = getattr(module, "FileCacheManager", None)
    if manager is not None:
        manager.__init__ = _cold(TRITON, manager.__init__)


def _cold(variable: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        _name_own(variable)
        return function(*arguments, **keywords)

    return call


def _name_own(variable: str) -> None:
    """Have *variable* name a folder of ours: for each other folder, one that stays the same."""
    own: Path | None = Path(folder) if (folder := json.loads(os.environ.get("MEMPLAN_CACHES", "{}")).get(variable)) else None
    given = os.environ.get(variable, "")
    if own is None or own in (Path(given), *Path(given).parents):
        return
    if given:
        own /= hashlib.sha256(given.encode()).hexdigest()[:16]
    own.mkdir(parents=True, exist_ok=True)
    os.environ[variable] = str(own)

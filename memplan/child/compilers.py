"""
What Inductor and Triton ask of a device that computes nothing, and what they do only so that kernels run.

- **Constants.** Inductor folds constants, and reads each from the device: they are computed on the host, as in a values pass.
- **Times.** Inductor benchmarks, and chooses: to pad the matrices of a product, one of several kernels, whether to fuse. The device answers
  by what its work would take (`standin/csrc/clock.c`); each choice that may decide an allocation is noted, and in a second run of the
  program the times are the other way round, so that the slower one is chosen.
- **Machine code.** A kernel never runs, so it is compiled only as far as something is told of it: shared and scratch memory, and its
  name. No library is linked to it, and the compiler's own files are not read to name it in a cache that nobody else has. Of the
  configurations that Triton's autotuner would try, and of the layouts of flex attention, the first that works is tried, with all that this
  allocates. Where a configuration may decide an allocation (the program has set an allocator for scratch memory, or a hook of its own), all
  are tried.
- **Caches.** Those that the program names itself are as empty as the rehearsal's own (`cold_caches.py`).

Names that a version of Triton or PyTorch does not have are left alone: then there is more to compile, and the memory is the same.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from memplan.child.after_import import change_when_imported
from memplan.child.cold_caches import INDUCTOR_MODULES, make_inductor_cold, make_triton_cold
from memplan.child.device_reads import Reads, is_simulated
from memplan.child.host_values import HostValues
from memplan.child.program_frames import frames_from, place_in
from memplan.child.recorded_values import ValueWriter

_KERNEL = re.compile(r'define ptx_kernel [^@]*@"?([\w$.]+)|!\{[^{}]*@"?([\w$.]+)"?, !"kernel"')
"""A kernel's name in LLVM's text: by its calling convention, or before that by an annotation."""

_LAYS_OUT = ("triton_heuristics.py", "coordinate_descent_tuner.py", "autotuner.py")
"""Files in which a kernel's blocks and warps are chosen, which no tensor depends on."""

_MEASURES = ("benchmarking.py", "utils.py", "testing.py")
"""Files that measure for others."""


class Compilers:
    """Answers what compilers ask in this process, and spares them what serves nobody."""

    def __init__(self, reads: Reads) -> None:
        self.are_times_inverse = False
        """What takes longer is said to take less."""
        self.on_first_choice: Callable[[], None] = lambda: None
        """Called where the program is the first time one that chooses by time."""
        self._reads = reads
        self._choices: dict[tuple[str, str], None] = {}

    def attach(self) -> None:
        """Begin, with each of the modules as soon as it is there; on a real device, where kernels run, nothing is changed."""
        if not is_simulated():
            return
        torch.cuda.Event.elapsed_time = self._noting_choice(torch.cuda.Event.elapsed_time)  # type: ignore[method-assign,assignment]
        change_when_imported(dict.fromkeys(INDUCTOR_MODULES, make_inductor_cold) | {"triton.runtime.cache": make_triton_cold})
        change_when_imported({
            "torch._inductor.config": _compile_here,
            "torch._inductor.select_algorithm": _try_one_layout,
            "torch._inductor.fx_passes.joint_graph": self._know_constants,
            "triton.compiler.compiler": _name_by_version,  # where older versions have it
            "triton.runtime.cache": _name_by_version,
            "triton.runtime.autotuner": _try_one_configuration,
            "triton.backends.nvidia.compiler": _make_no_machine_code,
        })  # fmt: skip

    def chosen_by_time(self) -> list[tuple[str, str]]:
        """Return what was chosen by time: by which file of the compiler, and at which line of the program."""
        return list(self._choices)

    # times

    def _noting_choice(self, elapsed_time: Callable[[Any, Any], float]) -> Callable[[Any, Any], float]:
        @functools.wraps(elapsed_time)
        def noting(start: Any, end: Any) -> float:
            milliseconds = elapsed_time(start, end)
            chooses = _choosing(frames_from(sys._getframe()))
            if chooses is None:
                return milliseconds
            if not self._choices:
                self.on_first_choice()
            self._choices[chooses.f_code.co_filename.rsplit("/torch/", 1)[-1], place_in(chooses) or "PyTorch"] = None
            return 1 / milliseconds if self.are_times_inverse else milliseconds

        return noting

    # constants

    def _know_constants(self, module: Any) -> None:
        folder = getattr(module, "UniformValueConstantFolder", None)
        if folder is None:
            return
        run = folder.run

        @functools.wraps(run)
        def with_values(*arguments: Any, **keywords: Any) -> Any:
            with self._host_values():
                return run(*arguments, **keywords)

        folder.run = with_values

    @contextmanager
    def _host_values(self) -> Any:
        """Compute on the host as well what is computed, and tell nobody what is read of it."""
        reads = self._reads
        before = reads.known, reads.on_answer, reads.is_counting
        reads.is_counting = False
        try:
            with HostValues(reads, ValueWriter(), "all"):
                yield
        finally:
            reads.known, reads.on_answer, reads.is_counting = before


def _choosing(frames: Iterable[FrameType]) -> FrameType | None:
    """Return the frame of Inductor that chooses by a time that is read in *frames*; None where no allocation depends on it."""
    found = None
    for frame in frames:
        file = frame.f_code.co_filename
        name = file.rsplit("/", 1)[-1]
        if name in _LAYS_OUT:
            return None
        if "/torch/_inductor/" in file and name not in _MEASURES:
            found = found or frame
    return found


def _compile_here(module: Any) -> None:
    """Have Inductor compile kernels in this process: without machine code that is less work than to start others that import PyTorch."""
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ and hasattr(module, "compile_threads"):
        module.compile_threads = 1


def _name_by_version(module: Any) -> None:
    """Have Triton's files named by its version in caches that only this run has, and not by the content of half a gigabyte."""
    if hasattr(module, "triton_key"):
        module.triton_key = functools.lru_cache(lambda: f"{sys.modules['triton'].__version__}-memplan")


def _try_one_configuration(module: Any) -> None:
    """Have Triton's autotuner try its configurations until one works. Which that is on a GPU, nobody knows."""
    autotuner: Any = getattr(module, "Autotuner", None)
    if not all(hasattr(autotuner, name) for name in ("_bench", "prune_configs")):
        return
    bench, prune = autotuner._bench, autotuner.prune_configs

    @functools.wraps(prune)
    def prune_first(self: Any, *arguments: Any, **keywords: Any) -> Any:
        self._memplan_worst = None  # a round begins: nothing has worked yet
        return prune(self, *arguments, **keywords)

    @functools.wraps(bench)
    def bench_until_one_works(self: Any, *arguments: Any, config: Any, **keywords: Any) -> Any:
        if self._memplan_worst is not None and getattr(config, "pre_hook", None) is None and not _has_allocator():
            return self._memplan_worst
        found = bench(self, *arguments, config=config, **keywords)
        times = found if isinstance(found, (list, tuple)) else [found]
        if math.isfinite(times[0]):
            self._memplan_worst = [math.inf] * len(times) if times is found else math.inf
        return found

    autotuner._memplan_worst = None
    autotuner.prune_configs, autotuner._bench = prune_first, bench_until_one_works


def _try_one_layout(module: Any) -> None:
    """Have Inductor's autotuner try the layouts of one kernel until one works, as flex attention has dozens: no tensor depends on them."""
    cache: Any = getattr(module, "AlgorithmSelectorCache", None)
    if not all(hasattr(cache, name) for name in ("benchmark_choice", "benchmark_choices", "make_precompile_fn")):
        return
    bench_all, bench, prepare = cache.benchmark_choices, cache.benchmark_choice, cache.make_precompile_fn
    tried: dict[Any, bool] = {}  # those of the round, and whether one has worked

    def bench_choices(choices: Any, *arguments: Any, **keywords: Any) -> Any:
        tried.update(dict.fromkeys(choices if _is_one_kernel(choices) else (), False))
        try:
            return bench_all(choices, *arguments, **keywords)
        finally:
            tried.clear()

    def bench_until_one_works(choice: Any, *arguments: Any, **keywords: Any) -> Any:
        if any(tried.values()):
            return math.inf
        found = bench(choice, *arguments, **keywords)
        if choice in tried:
            tried[choice] = math.isfinite(found)
        return found

    @functools.wraps(prepare)
    def compile_when_tried(self: Any, choices: Any, *arguments: Any, **keywords: Any) -> Any:
        return dict if _is_one_kernel(choices) else prepare(self, choices, *arguments, **keywords)

    cache.benchmark_choices, cache.benchmark_choice = map(staticmethod, (bench_choices, bench_until_one_works))
    cache.make_precompile_fn = compile_when_tried


def _is_one_kernel(choices: Any) -> bool:
    """Say whether *choices* are one template of Triton in several layouts, without memory of its own."""
    names = {getattr(choice, "name", "").rpartition("_")[0] for choice in choices}
    return len(names) == 1 and all(
        type(one).__name__ == "TritonTemplateCaller" and not getattr(one, "workspace_arg", None) for one in choices
    )


def _has_allocator() -> bool:
    """Say whether the program has said where kernels get scratch memory: how much, their configuration decides."""
    allocator: Any = getattr(sys.modules.get("triton.runtime._allocation"), "_allocator", None)
    allocator = allocator.get() if hasattr(allocator, "get") else allocator  # a ContextVar from 3.4 on
    return allocator is not None and type(allocator).__name__ != "NullAllocator"


def _make_no_machine_code(module: Any) -> None:
    """Stop the compiler of NVIDIA's kernels in front of LLVM's optimizer, and have its caches know: a kernel without code is for no GPU."""
    backend: Any = getattr(module, "CUDABackend", None)
    if not all(hasattr(backend, name) for name in ("make_llir", "make_ptx", "make_cubin", "hash")):
        return
    make_ptx, make_hash = backend.make_ptx, backend.hash
    if hasattr(getattr(module, "llvm", None), "optimize_module"):
        module.llvm = _WithoutCode(module.llvm)

    def name_alone(*arguments: Any) -> Any:
        source, metadata = arguments[-4:-2]  # those of a static method, or behind the backend
        names = {first or second for first, second in _KERNEL.findall(str(source))}
        if len(names) != 1:
            return make_ptx(*arguments)
        metadata["name"] = names.pop()
        return f"// {metadata['name']}: not compiled in a rehearsal"

    def no_code(*arguments: Any) -> bytes:
        del arguments
        return b"not compiled in a rehearsal"

    is_static = isinstance(vars(backend)["make_ptx"], staticmethod)
    backend.make_ptx = staticmethod(name_alone) if is_static else name_alone
    backend.make_cubin = staticmethod(no_code) if is_static else no_code
    backend.hash = functools.wraps(make_hash)(lambda self: f"{make_hash(self)}-memplan")


class _WithoutCode:
    """Triton's binding of LLVM, which adds no code of libraries and optimizes none."""

    def __init__(self, llvm: Any) -> None:
        self._llvm = llvm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llvm, name)

    def optimize_module(self, *arguments: Any, **keywords: Any) -> None:
        """Leave the module as it is."""

    def link_extern_libs(self, *arguments: Any, **keywords: Any) -> None:
        """Leave the module without the functions of CUDA's libdevice: nothing is asked of them."""

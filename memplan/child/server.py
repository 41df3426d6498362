"""
The process that rehearses: imports PyTorch and the user's program once, and runs each request in a fork of itself.

    python -c "from memplan.child.server import main; main(REQUESTS, ANSWERS)"

REQUESTS and ANSWERS are file descriptors; a request is a line of JSON: source, function, values, texts, steps, most_steps, answers,
environment, values_file, values_variant, times, numbers, result, until. Nothing of CUDA has begun when the fork is made, so that each
request sees what a process of its own would see. The answer is a line too, with how the fork ended; what was seen is in `result`. Where
`until` names a file, the fork waits for it at its end, so that whoever asked can see what the driver says of it. Run on the simulated GPU
or on a real one.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import pickle
import reprlib
import runpy
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memplan.child.failures import MistakeError, failure_of
from memplan.child.fewer_workers import use_fewer_workers
from memplan.child.held_back import hold_back
from memplan.child.held_memory import wait_for
from memplan.child.one_rank import World, world
from memplan.child.ordinary_answers import answer_with_numbers
from memplan.child.recorder import Recorder
from memplan.child.redraws import end_redraws
from memplan.child.repeated_step import SteadyStep
from memplan.child.skipped_loading import skipped
from memplan.child.skipped_weights import lacks_weights, skip_weights
from memplan.workload.step_function import is_device

Build = Callable[..., Callable[[], object]]

_GROWTH_FROM = 3
"""The step after which growth is asked about."""

_STEADY_FROM = 2
"""The step that those of a SteadyStep are like: the first makes the optimizer's state."""


def load_build(source: str, function: str) -> Build:
    """Return the function named *function* of a file (with its own folder to import from, as `python file` has it), of a module, or of a
    pickle that cloudpickle wrote.
    """
    if source.endswith(".pickle"):
        loaded: Build = pickle.loads(Path(source).read_bytes())
        return loaded
    if source.endswith(".py"):
        sys.path.insert(0, str(Path(source).resolve().parent))
        names = _names_of(Path(source))
    else:
        names = vars(importlib.import_module(source))
    if not callable(names.get(function)):
        found = ", ".join(name for name, value in names.items() if inspect.isfunction(value) and value.__module__ == names.get("__name__"))
        raise MistakeError(f"{source} has no function {function!r}" + (f"; it has {found}" if found else ""))
    build: Build = names[function]
    return build


def _names_of(file: Path) -> dict[str, Any]:
    """Return what *file* defines, kept as the module of its name: by that a process that it starts finds what it is sent."""
    name = file.stem if file.stem not in sys.modules else "__memplan__"
    names: dict[str, Any] = runpy.run_path(str(file), run_name=name)
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)
    return names


def run(build: Build, request: dict[str, Any], recorder: Recorder) -> dict[str, Any] | None:
    """Run the steps that *request* asks for; return why they ended early, where they did."""
    try:
        values = request["values"] | {name: value_from(build, name, text) for name, text in request["texts"].items()}
        recorder.values = values_of(build, values)
        _check_values(build, values, request["function"])
        step = build(*_device_of(build), **values)
        if not callable(step):
            raise MistakeError(f"{request['function']} returned {reprlib.repr(step)}, and not a function that runs one step")
        number, again = 0, None
        while number < _steps_to_run(request, recorder):
            number += 1
            recorder.begin_step(number)
            (again or step)()
            recorder.end_step()
            if number == _STEADY_FROM and isinstance(step, SteadyStep) and not (request["values_file"] or request["until"]):
                again = recorder.repeated_step()
    except Exception as error:
        return _told(error, recorder)
    if request["checks_tensor_types"]:
        check_tensor_types(step, recorder)
    return None


def _device_of(build: Build) -> tuple[str, ...]:
    """Return what *build* is called with before its values: the device, where its first parameter is one."""
    first = next(iter(inspect.signature(build).parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return ()
    default = None if first.default is first.empty else first.default
    annotation = "" if first.annotation is first.empty else inspect.formatannotation(first.annotation)
    return ("cuda",) if is_device(first.name, default=default, annotation=annotation.strip("'\"")) else ()


def check_tensor_types(step: Callable[[], object], recorder: Recorder) -> None:
    """Run one step more to see the types of tensors. It may fail where the step does not: it keeps arguments alive."""
    try:
        with recorder.record_types() as types:
            step()
    except Exception:
        types.seen.clear()


def values_of(build: Build, given: dict[str, Any]) -> dict[str, Any]:
    """Return what *build* is called with, its own defaults included, as far as it is plain."""
    defaults = {name: found.default for name, found in inspect.signature(build).parameters.items() if found.default is not found.empty}
    return {name: value for name, value in (defaults | given).items() if isinstance(value, (bool, int, float, str, type(None)))}


_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def value_from(build: Build, name: str, text: str) -> Any:
    """
    Return what *text*, typed for parameter *name* of *build*, means: a value of the type of its default, or of its annotation.

    A parameter with neither takes a Python literal, or the text. Raises MistakeError for a text that is no value of that type.
    """
    parameter = inspect.signature(build).parameters.get(name)
    default = None if parameter is None or parameter.default is parameter.empty else parameter.default
    kind = type(default) if default is not None else _TYPES.get(parameter.annotation) if parameter is not None else None
    if kind is bool and text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if kind is str:
        return text
    literal = _literal(text)
    if kind is float and type(literal) is int:
        return float(literal)
    if kind in (bool, int, float) and literal is not None and type(literal) is not kind:
        raise MistakeError(f"{name}={text} is not {_NAMES[kind]}, as its default {default!r} is")
    return literal


_TYPES = {kind: kind for kind in (bool, int, float, str)} | {"bool": bool, "int": int, "float": float, "str": str}
_NAMES = {bool: "true or false", int: "a whole number", float: "a number"}


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _check_values(build: Build, values: dict[str, Any], function: str) -> None:
    try:
        inspect.signature(build).bind(*(device := _device_of(build)), **values)
    except TypeError as error:
        takes = ", ".join(list(inspect.signature(build).parameters)[len(device) :]) or f"nothing{' but the device' if device else ''}"
        raise MistakeError(f"{function}: {error}; it takes {takes}") from error


def _told(error: Exception, recorder: Recorder) -> dict[str, Any]:
    """Return what is told of *error*; that of the program is printed as Python would, for the last words."""
    recorder.note_failure(error)
    failure = failure_of(error, has_run_out=recorder.out_of_memory is not None)
    if failure["kind"] == "error":
        traceback.print_exc()
    return failure | {"lacks_weights": lacks_weights(error)}


def _steps_to_run(request: dict[str, Any], recorder: Recorder) -> int:
    """
    Return the steps asked for; more when the memory of the third is still above the second's, allocated or reserved, until it has settled,
    or when steps are of several sizes.

    One that differs may be the last of a beginning (DistributedDataParallel makes its buckets anew in the second): one more is run to see.
    """
    few, most, number = max(_GROWTH_FROM, request["steps"]), int(request["most_steps"]), len(recorder.steps)
    if number < few:
        return int(request["steps"])
    before, last = recorder.steps[few - 2 : few]
    if any(last[peak] > before[peak] for peak in ("peak_allocated_bytes", "peak_reserved_bytes")):
        return number if number >= few + 2 and recorder.has_settled() else most
    if number > few + 1:
        return most
    if not recorder.varies():
        return number
    return most if number > few else min(most, few + 1)


def num_threads_now() -> int:
    """Return how many threads this process has."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def let_gpus_be_counted() -> None:
    """
    Let a program ask for the number of GPUs when it is loaded, as many do (`torch.cuda.is_available()`).

    PyTorch refuses CUDA in forks from then on (`poison_fork` in torch/csrc/cuda/Module.cpp of 2.13): it may have begun. The simulated
    GPU is one, and need not be asked before a request says which.
    """
    if hasattr(ctypes.CDLL(None), "memplan_on_read"):
        torch._C._cuda_getDeviceCount = lambda: 1


def train_with(ranks: World, recorder: Recorder) -> None:
    """Have this process be the rank of *ranks* that is rehearsed."""
    from memplan.child.absent_ranks import be_one_rank  # noqa: PLC0415  (a PyTorch without it has no such classes)
    from memplan.child.collectives import hand_objects_on  # noqa: PLC0415

    torch._C._cuda_getDeviceCount = lambda: ranks.num_gpus
    hand_objects_on(recorder.reads.answering)
    be_one_rank(ranks)


def fork() -> int:
    """Do as `os.fork` does, which warns of numpy's threads; they know of forks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def can_fork() -> bool:
    """Say whether a fork of this process may use CUDA."""
    child = fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(child, 0)[1] == 0


def serve(build: Build | None, failure: dict[str, Any] | None, request: dict[str, Any], recorder: Recorder) -> None:
    """Run *request* in this process, write its result, and leave without waiting for threads that may hang."""
    os.environ.update(request["environment"])
    ranks = world()
    if ranks is not None:
        train_with(ranks, recorder)
    recorder.reads.answers.update(request["answers"])
    recorder.use_values(request["values_file"], request["values_variant"])
    recorder.compilers.are_times_inverse = request["times"] == "inverse"
    answer_with_numbers(request["numbers"])
    if not request["until"]:  # on a GPU of this machine the program draws and loads as it does
        end_redraws()
        use_fewer_workers()
    if build is not None:
        failure = run(build, request, recorder)
    written = Path(request["result"])
    lacking = failure is not None and failure.pop("lacks_weights", False)
    result = recorder.result(failure) | {"pid": os.getpid(), "skipped_weights": skipped, "lacks_weights": lacking}
    partial = written.with_suffix(".partial")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(written)
    wait_for(request["until"])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the program may have closed them
            stream.flush()
    os._exit(0)


def main(requests: int, answers: int) -> None:
    """Serve requests until there are no more."""
    let_gpus_be_counted()
    import torch._dynamo  # noqa: PLC0415  (the first optimizer would, in every fork anew; that of 2.3 counts GPUs)

    hold_back()
    skip_weights()
    recorder = Recorder()
    build: Build | None = None
    failure: dict[str, Any] | None = None
    loaded = False
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as replies:
        for line in lines:
            request = json.loads(line)
            if not loaded:
                gc.freeze()  # what PyTorch has made so far need not be looked through, not for garbage either
                gc.enable()
                recorder.attach()
                num_threads = num_threads_now()
                try:
                    build = load_build(request["source"], request["function"])
                except Exception as error:
                    failure = _told(error, recorder)
                loaded = True
                has_threads = num_threads_now() > num_threads
                if has_threads or torch.cuda.is_initialized() or not can_fork():
                    serve(build, failure, request, recorder)  # neither CUDA nor OpenMP's threads outlive a fork
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            child = fork()
            if child == 0:
                ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: end when the server does
                serve(build, failure, request, recorder)
            _, status = os.waitpid(child, 0)
            replies.write(json.dumps({"status": os.waitstatus_to_exitcode(status)}) + "\n")
            replies.flush()

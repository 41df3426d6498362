"""
Run a training step on the CUDA device at hand and write down what its memory did.

    python -m memplan.programs.record REQUEST.json RESULT.json

It is run in a process of its own, on the stand-in device or on a real card, and imports nothing of memplan. REQUEST says which file or
module and which function (`build(device, **values)` returns a function that runs one step), the values and the number of steps. RESULT is
written also when a step fails: the peaks of every step, retries, where memory ran out, and what lay on the device at the peak, by
category.
"""

from __future__ import annotations

import bisect
import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

MOST_EVENTS = 10_000_000


class Recorder:
    """Follows the caching allocator through the steps of a program."""

    def __init__(self) -> None:
        torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_EVENTS)
        self.first = num_allocations()
        self.steps: list[dict[str, int]] = []
        self.gradients: set[tuple[int, int]] = set()
        """Address and number of the allocation of every gradient."""
        self.hooked: set[int] = set()

    def watch_gradients(self) -> None:
        """Note where the gradient of each parameter lies whenever one is accumulated."""
        for parameter in objects_of(torch.nn.Parameter):
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self.hooked:
                self.hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def _note_gradient(self, parameter: Any) -> None:
        if parameter.grad is not None and parameter.grad.is_cuda:
            self.gradients.add((parameter.grad.data_ptr(), num_allocations() - self.first))

    def end_step(self) -> None:
        """Note the peaks so far."""
        torch.cuda.synchronize()
        self.steps.append({
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
        })  # fmt: skip

    def result(self) -> dict[str, Any]:
        """Return what was seen."""
        stats = torch.cuda.memory_stats()
        properties = torch.cuda.get_device_properties(0)
        return {
            "card": properties.name,
            "torch": torch.__version__,
            "steps": self.steps,
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "num_alloc_retries": stats["num_alloc_retries"],
            "num_ooms": stats["num_ooms"],
            "categories_at_peak": self._categories_at_peak(),
        }

    def _categories_at_peak(self) -> dict[str, int]:
        """Return the bytes asked for at the moment when most were alive, by what they were for."""
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        numbers = allocations_by_address(trace)
        lasting = {address: found[-1] for address, found in numbers.items()}
        modules, optimizers = objects_of(torch.nn.Module), objects_of(torch.optim.Optimizer)
        weights = addresses(tensor for module in modules for tensor in (*module.parameters(False), *module.buffers(False)))
        states = addresses(tensor for optimizer in optimizers for state in optimizer.state.values() for tensor in state.values())
        gradients = {(address, allocation_of(numbers, address, count)) for address, count in self.gradients}
        found = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations"), 0)
        for address, (number, size) in blocks_at_peak(trace).items():
            stays = number == lasting[address]  # the block is still that of the tensor that lies there now
            if stays and address in weights:
                found["parameters"] += size
            elif stays and address in states:
                found["optimizer_state"] += size
            elif (address, number) in gradients:
                found["gradients"] += size
            else:
                found["activations"] += size
        return found


def objects_of(kind: type) -> list[Any]:
    """Return every object of *kind* that this process holds."""
    return [candidate for candidate in gc.get_objects() if isinstance(candidate, kind)]


def addresses(tensors: Iterable[Any]) -> set[int]:
    """Return where those of *tensors* that lie on the device begin."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda}


def num_allocations() -> int:
    """Return how many allocations there have been."""
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))  # nothing before the first


def allocations_by_address(trace: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the numbers of all allocations at each address, in order; the first of the trace is 1."""
    numbers: dict[int, list[int]] = {}
    allocations = (event["addr"] for event in trace if event["action"] == "alloc")
    for number, address in enumerate(allocations, start=1):
        numbers.setdefault(address, []).append(number)
    return numbers


def allocation_of(numbers: dict[int, list[int]], address: int, count: int) -> int | None:
    """Return the number of the allocation that lay at *address* when there had been *count* of them."""
    found = numbers.get(address, [])
    place = bisect.bisect_right(found, count)
    return found[place - 1] if place else None


def blocks_at_peak(trace: list[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """Return what lived when most bytes did: address to number of the allocation and bytes asked for."""
    live: dict[int, tuple[int, int]] = {}
    best: dict[int, tuple[int, int]] = {}
    current = most = number = 0
    grew = False
    for event in [*trace, {"action": "end"}]:
        if event["action"] == "alloc":
            number += 1
            live[event["addr"]] = (number, event["size"])
            current += event["size"]
            grew = True
            continue
        if grew and current > most:  # a peak lies before the first free behind it
            most, best = current, dict(live)
        grew = False
        if event["action"] == "free_completed" and event["addr"] in live:
            current -= live.pop(event["addr"])[1]
    return best


def load_build(target: str, function: str) -> Callable[..., Callable[[], object]]:
    """Return the function named *function* of a file (with its own folder to import from, as `python file` has it) or a module."""
    if target.endswith(".py"):
        sys.path.insert(0, str(Path(target).resolve().parent))
        names: dict[str, Any] = runpy.run_path(target, run_name="__memplan__")
    else:
        names = vars(importlib.import_module(target))
    if not callable(names.get(function)):
        raise SystemExit(f"{target} has no function {function!r}")
    build: Callable[..., Callable[[], object]] = names[function]
    return build


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run the steps that *request* asks for; return what was seen, and why it ended early where it did."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # not served yet; the next kernel in PyTorch's order is taken
    recorder = Recorder()
    phase, failure = "build", None
    try:
        step = load_build(request["target"], request["function"])("cuda", **request["values"])
        for number in range(1, request["steps"] + 1):
            phase = f"step {number}"
            recorder.watch_gradients()
            step()
            recorder.end_step()
    except torch.OutOfMemoryError as error:
        failure = {
            "kind": "out_of_memory",
            "message": str(error).splitlines()[0],
            "phase": phase,
            "place": place_of(error, request["target"]),
        }
    except Exception as error:
        traceback.print_exc()
        failure = {
            "kind": "error",
            "message": f"{type(error).__name__}: {error}",
            "phase": phase,
            "place": place_of(error, request["target"]),
        }
    return recorder.result() | {"failure": failure}


def place_of(error: BaseException, target: str) -> str | None:
    """Return the line of the user's file that the error came through last, else the last line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.endswith(Path(target).name)]
    found = own or list(frames)
    return f"{found[-1].filename}:{found[-1].lineno}" if found else None


def main(request: str, result: str) -> None:
    """Read the request, run it, write the result, and leave without waiting for threads that may hang."""
    answer = run(json.loads(Path(request).read_text(encoding="utf-8")))
    Path(result).write_text(json.dumps(answer), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

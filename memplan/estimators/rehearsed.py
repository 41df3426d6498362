"""
The rehearsal: the real PyTorch and the user's real step, on a card that is not there.

A process of its own runs the step with the stand-in device in front of CUDA (`standin/`); this one builds the device where it is missing,
starts the process, and reads what it wrote. The user's code is never loaded here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memplan.errors import MissingError, UsageError
from memplan.estimators.analytic import CONTEXT_BYTES, CONTEXT_HIGH_BYTES, CONTEXT_LOW_BYTES
from memplan.hardware.spec import GpuSpec
from memplan.memory.breakdown import MemoryBreakdown
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.memory.rehearsal import OutOfMemory, Rehearsal, StepPeaks
from memplan.standin.build import build, find_torch
from memplan.standin.launch import environment_for, fix_addresses

DEFAULT_STEPS = 3
"""After three steps 69 of 73 programs had reached their peak of ten."""

DEFAULT_TIMEOUT_SECONDS = 600
LAST_WORDS = 20
"""Lines of a failed program's error output that are shown."""

RECORDER = Path(__file__).parents[1] / "programs" / "record.py"


def rehearse(
    target: str,
    *,
    gpu: GpuSpec,
    values: Mapping[str, Any] | None = None,
    steps: int = DEFAULT_STEPS,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    context_bytes: int = CONTEXT_BYTES,
) -> Rehearsal:
    """
    Return what *steps* steps of *target* ("FILE.py:function" or "module:function") do to the memory of *gpu*.

    The function is called as ``build("cuda", **values)`` and returns a function that runs one step. Raises UsageError when the program
    fails for another reason than memory, MissingError when this machine cannot rehearse.
    """
    name, _, function = target.rpartition(":")
    if not name or not function:
        raise UsageError(
            f"{target!r} does not say FILE.py:build", hint="name the file and the function: `memplan rehearse train_step.py:build`"
        )
    if name.endswith(".py") and not Path(name).is_file():
        raise UsageError(f"{name} does not exist", hint="check the path of the file")
    libraries = build(find_torch())
    request = {"target": name, "function": function, "values": dict(values or {}), "steps": steps}
    with tempfile.TemporaryDirectory(prefix="memplan-rehearsal-") as folder:
        not_served = Path(folder) / "not-served"
        environment = environment_for(gpu, libraries, context_bytes=context_bytes) | {"MEMPLAN_NOT_SERVED": str(not_served)}
        answer = _run(request, Path(folder), environment, timeout_seconds)
        names = sorted(set(not_served.read_text().split("\n")) - {""}) if not_served.exists() else []
    return _rehearsal(answer, context_bytes, tuple(names))


def _run(request: Mapping[str, Any], folder: Path, environment: dict[str, str], timeout_seconds: float) -> dict[str, Any]:
    """Run the recorder in a process of its own; return what it wrote. Of its output only the last words of a failure are shown."""
    asked, answered, said = folder / "request.json", folder / "result.json", folder / "output"
    asked.write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, str(RECORDER), str(asked), str(answered)]
    with said.open("wb") as output:
        try:
            done = subprocess.run(
                command,
                env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), environment.get("PYTHONPATH", "")]))},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_seconds,
                check=False,
                preexec_fn=fix_addresses,
            )
        except subprocess.TimeoutExpired as error:
            raise UsageError(
                f"the program did not end within {timeout_seconds:g} seconds; its last words:\n{_last_words(said)}",
                hint="give it longer with `--timeout`",
            ) from error
    if not answered.exists():
        raise UsageError(f"the program ended with exit code {done.returncode}; its last words:\n{_last_words(said)}")
    answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    failure = answer["failure"]
    if failure is not None and failure["kind"] == "error":
        where = f" at {failure['place']}" if failure["place"] else ""
        raise UsageError(f"the program failed in its {failure['phase']}{where}: {failure['message']}; its last words:\n{_last_words(said)}")
    return answer


def _last_words(path: Path) -> str:
    """Return the end of what the program said, however much that was."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LAST_WORDS:])


def _rehearsal(answer: Mapping[str, Any], context_bytes: int, not_served: tuple[str, ...]) -> Rehearsal:
    failure = answer["failure"]
    steps = tuple(StepPeaks.model_validate(step) for step in answer["steps"])
    if not_served:
        raise MissingError(f"the stand-in device does not serve {', '.join(not_served)}", hint="without them no number would be true")
    return Rehearsal(
        card=answer["card"],
        torch=answer["torch"],
        fits=failure is None,
        out_of_memory=None if failure is None else OutOfMemory(message=failure["message"], phase=failure["phase"], place=failure["place"]),
        num_alloc_retries=answer["num_alloc_retries"],
        estimate=_estimate(answer, context_bytes),
        steps=steps,
        grows=len(steps) > 2 and steps[-1].peak_allocated_bytes > steps[-2].peak_allocated_bytes,
    )


def _estimate(answer: Mapping[str, Any], context_bytes: int) -> MemoryEstimate:
    """Allocated and reserved are exact; the context is what varies from machine to machine."""
    found, allocated, reserved = answer["categories_at_peak"], answer["peak_allocated_bytes"], answer["peak_reserved_bytes"]
    kept = sum(found[name] for name in ("parameters", "gradients", "optimizer_state"))
    breakdown = MemoryBreakdown(
        parameters_bytes=found["parameters"],
        gradients_bytes=found["gradients"],
        optimizer_state_bytes=found["optimizer_state"],
        activations_bytes=allocated - kept,
        allocator_slack_bytes=reserved - allocated,
        cuda_context_bytes=context_bytes,
    )
    return MemoryEstimate(
        method="rehearsed",
        breakdown=breakdown,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_used=MemoryRange(
            low_bytes=reserved + min(context_bytes, CONTEXT_LOW_BYTES),
            expected_bytes=reserved + context_bytes,
            high_bytes=reserved + max(context_bytes, CONTEXT_HIGH_BYTES),
        ),
        peak_phase="the steps rehearsed",
    )

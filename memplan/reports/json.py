"""Reports for programs: JSON on standard output, bytes as integers, with a schema version."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from memplan.analysis.checking import Check
from memplan.analysis.comparison import ComparedGpu
from memplan.analysis.dataset_memory import DatasetMemory
from memplan.analysis.doctor_checks import Diagnosed
from memplan.analysis.loader_settings import Host, LoaderAdvice
from memplan.analysis.would_fit import WouldFit
from memplan.edits.drift import Drifted
from memplan.errors import NothingSeenError
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.gpu import GpuSpec
from memplan.planner.plan import Plan


def plan_as_json(plan: Plan, extra: Mapping[str, Any]) -> str:
    """Return *plan* and what the command adds to it as one JSON object."""
    return json.dumps(plan.model_dump(mode="json") | dict(extra), indent=2)


def rehearsal_as_json(rehearsal: Rehearsal, would_fit: WouldFit | None, notes: Sequence[str]) -> str:
    """Return *rehearsal*, what would fit instead, and what the command noticed as one JSON object."""
    more = {"would_fit": would_fit and would_fit.model_dump(mode="json"), "notes": list(notes)}
    return json.dumps(rehearsal.model_dump(mode="json") | more, indent=2)


def nothing_seen_as_json(error: NothingSeenError, gpu: GpuSpec) -> str:
    """Return why a rehearsal on *gpu* has no figures as one JSON object; `fits` is null: there is no verdict."""
    told = {"schema_version": 2, "fits": None, "gpu_name": gpu.name, "error": error.message, "exit_code": error.program_exit_code}
    return json.dumps(told, indent=2)


def comparison_as_json(gpus: Sequence[ComparedGpu], *, method: str, source: str) -> str:
    """Return the settings for each of *gpus* as one JSON object."""
    answer = {"schema_version": 1, "source": source, "method": method, "gpus": [gpu.model_dump(mode="json") for gpu in gpus]}
    return json.dumps(answer, indent=2)


def check_as_json(check: Check | None, drifted: Drifted | None, *, source: str | None, notes: Sequence[str]) -> str:
    """Return what was checked as one JSON object; `fits` and `drift` are null where that was not asked."""
    found = {"fits": None} if check is None else check.model_dump(mode="json")
    drift = None if drifted is None else [each.model_dump(mode="json") for each in drifted.drifts]
    return json.dumps({"schema_version": 1, "source": source, **found, "drift": drift, "notes": list(notes)}, indent=2)


def dataset_as_json(memory: DatasetMemory, *, source: str, beside: str, notes: Sequence[str]) -> str:
    """Return what a dataset takes, read from *source*, beside a training, as one JSON object."""
    told = {"source": source, "beside": beside, "fits": memory.fits, "notes": list(notes)}
    return json.dumps(memory.model_dump(mode="json") | told, indent=2)


def diagnosis_as_json(
    findings: Sequence[Diagnosed], gpu: GpuSpec, *, source: str, num_steps: int | None, diff: str | None, notes: Sequence[str]
) -> str:
    """Return the *findings* of *source* on *gpu* as one JSON object; `diff` is null where nothing was to be written."""
    told = {"schema_version": 1, "source": source, "gpu_name": gpu.name, "num_steps": num_steps}
    found = [finding.model_dump(mode="json") for finding in findings]
    return json.dumps({**told, "findings": found, "diff": diff, "notes": list(notes)}, indent=2)


def loader_as_json(advice: LoaderAdvice, host: Host, *, diff: str | None, notes: Sequence[str]) -> str:
    """Return the settings of a DataLoader on *host* as one JSON object; `diff` is null where nothing was to be written."""
    told = {"schema_version": 1, "host": host.model_dump(mode="json"), **advice.model_dump(mode="json")}
    return json.dumps(told | {"diff": diff, "notes": list(notes)}, indent=2)

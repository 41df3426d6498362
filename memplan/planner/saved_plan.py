"""A plan as JSON in a file, to be compared with what a training shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from memplan.errors import ConfigError, reason_of


class SavedPlan(NamedTuple):
    """What a training can be held to: the plan's heaviest stage."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    """What the process takes of the GPU."""
    others_used_bytes: int
    """What others held of it when the plan was made."""


def read_saved_plan(path: Path) -> SavedPlan:
    """Return the plan in the file at *path*. Raises ConfigError for a file that is not there, or is no plan."""
    hint = 'make one with `plan.save("plan.json")`'
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        stage = max(plan["stages"], key=lambda each: int(each["estimate"]["device_used"]["expected_bytes"]))
        planned, estimate = stage["planned"], stage["estimate"]
        return SavedPlan(
            micro_batch_size=int(planned["micro_batch_size"]),
            gradient_accumulation_steps=int(planned["gradient_accumulation_steps"]),
            peak_allocated_bytes=int(estimate["peak_allocated_bytes"]),
            peak_reserved_bytes=int(estimate["peak_reserved_bytes"]),
            device_used_bytes=int(estimate["device_used"]["expected_bytes"]),
            others_used_bytes=int(plan["gpu"]["others_used_bytes"]),
        )
    except OSError as error:
        raise ConfigError(reason_of(error), file=path, hint=hint) from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError("not a memplan plan", file=path, hint=hint) from error

"""Reports for programs: JSON on standard output, bytes as integers, with a schema version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from memplan.planner.plan import Plan


def plan_as_json(plan: Plan, extra: Mapping[str, Any]) -> str:
    """Return *plan* and what the command adds to it as one JSON object."""
    return json.dumps(plan.model_dump(mode="json") | dict(extra), indent=2)

"""What every description shares: frozen, closed to unknown keys, each field's sentence its documentation."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Description(BaseModel):
    """A value that describes one thing. Ask for a changed copy; nothing is edited in place."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

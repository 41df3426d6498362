"""From a plan to edits: the values that a workload has and the files do not have yet, by the layout's table."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from memplan.edits.edit import Edit, EditValue
from memplan.errors import EditRefusedError
from memplan.layouts.reader import ACCUMULATION, TARGET, Reading
from memplan.layouts.schema import FieldEntry, StageFiles, spelled
from memplan.workload.workload import Workload

NOT_IN_FILES = ("stages", "training.target_effective_batch_size", "model.encoder.is_in_eval_mode", "model.is_in_eval_mode")
"""What a plan may change and no configuration holds: the stages have files of their own, the target is what a plan aims at, and whether the
encoder is in eval mode is decided by the trainer's code."""


def edits_for(reading: Reading, after: Workload) -> list[Edit]:
    """
    Return the edits that turn the tree that was read into one that describes *after*, for the fields that the layout has.

    Raises EditRefusedError for a value that the framework has no spelling for.
    """
    before, wanted = reading.workload.model_dump(), after.model_dump()
    edits = []
    for entry in reading.entries:
        old, new = _value_at(before, entry.field), _value_at(wanted, entry.field)
        if entry.field == ".".join(TARGET):  # the files hold the global batch, from which accumulation is worked out
            old, new = reading.workload.effective_batch_size, after.effective_batch_size
        if old != new:
            edits.append(Edit(reading.file_of(entry.file), entry.path, _spelled(reading, entry, new)))
    if reading.layout.stages is not None:
        edits += _stage_edits(reading, reading.layout.stages, after)
    return edits


def planned_edits(reading: Reading, *, but: Collection[str]) -> Iterator[Edit]:
    """
    Yield an edit of each value that a plan decides, *but* those pinned, where it stands in the files: to see whether it can be changed.

    A key that is not there need not be: the plan may leave the framework's default as it is.
    """
    for entry in reading.entries:
        name = entry.field.removeprefix("training.")
        present = reading.spellings.get(entry.key)
        if (
            name in ("micro_batch_size", "gradient_accumulation_steps")
            and name not in but
            and present is not None
            and entry.key in reading.present
        ):
            yield Edit(reading.file_of(entry.file), entry.path, int(present) + 1)


def _stage_edits(reading: Reading, stages: StageFiles, after: Workload) -> Iterator[Edit]:
    for old, new in zip(reading.workload.stages, after.stages, strict=True):
        wanted = new.model_dump()
        for field, key in stages.fields.items():
            if wanted[field] != old.model_dump()[field]:
                yield Edit(reading.stage_files[new.name], tuple(key.split(".")), wanted[field])


def _value_at(data: dict[str, Any], field: str) -> Any:
    value: Any = data
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _spelled(reading: Reading, entry: FieldEntry, value: Any) -> EditValue:
    """Return *value* as the framework spells it, in the family of spellings that the file's present value belongs to where that has one."""
    if not entry.values:
        plain: EditValue = value
        return plain
    present = reading.spellings.get(entry.key)
    families = sorted(entry.values, key=lambda family: present not in family)
    spellings = [spelling for family in families for spelling, meaning in family.items() if meaning == spelled(value)]
    accepted = [spelling for spelling in spellings if not entry.allowed or spelling in entry.allowed]
    if not accepted:
        file = reading.file_of(entry.file)
        known = ", ".join(entry.allowed) or ", ".join(spelling for family in entry.values for spelling in family)
        raise EditRefusedError(
            f"`{entry.key}` cannot say {value!r}: it takes {known}", file=file, hint="leave the pin out, or pin another value"
        )
    return accepted[0] == "true" if accepted[0] in ("true", "false") else accepted[0]


def unwritable(reading: Reading, after: Workload) -> list[str]:
    """Return the fields in which *after* differs from the tree and for which the layout has no key: an apply would lose them."""
    written = {entry.field for entry in reading.entries}
    if ".".join(TARGET) in written:
        written.add(".".join(ACCUMULATION))
    before, wanted = _leaves(reading.workload.model_dump()), _leaves(after.model_dump())
    changed = [field for field in wanted if before.get(field) != wanted[field] and field not in written]
    return [field for field in changed if field not in NOT_IN_FILES]


def _leaves(data: Any, path: str = "") -> dict[str, Any]:
    """Return every value of nested dicts by its dotted path; sequences are values."""
    if not isinstance(data, dict):
        return {path: data}
    return {leaf: value for name, part in data.items() for leaf, value in _leaves(part, f"{path}.{name}" if path else name).items()}

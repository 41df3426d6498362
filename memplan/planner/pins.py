"""Pinned values: what the user has decided, which no plan overrides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from pydantic import ValidationError

from memplan.description import Description
from memplan.errors import UsageError, WorldSizeError
from memplan.programs.user_program import UserProgram
from memplan.workload.model import ContrastiveEncoderModel, TransformerModel
from memplan.workload.optimizer import Optimizer
from memplan.workload.parallelism import MODEL_PARALLEL_SIZES, NOT_DIVIDED, Parallelism
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.training import Batching, Training
from memplan.workload.workload import Workload

_OF_GPUS = ("devices", "nodes", *MODEL_PARALLEL_SIZES)
"""What can be said of the GPUs that a program of the user's trains on: what each of them keeps, its own code decides."""

_STAGE_FIELDS = ("n_positives", "n_negatives", "max_n_negatives")


@dataclass(frozen=True)
class Pins:
    """The fields that the user pinned, by name; a stage's as "STAGE.n_negatives"."""

    values: Mapping[str, str] = field(default_factory=dict)

    def pins(self, name: str, stage: str | None = None) -> bool:
        """Say whether *name* is pinned, for that stage or for all."""
        return name in self.values or f"{stage}.{name}" in self.values


def read_pins(assignments: Iterable[str]) -> Pins:
    """
    Return the pins that "FIELD=VALUE" texts say.

    Raises UsageError for a text of another form, or a field that is pinned twice.
    """
    values: dict[str, str] = {}
    for text in assignments:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise UsageError(f"{text!r} is not a pin: expected FIELD=VALUE", hint="write it as `micro_batch_size=32`")
        if name in values:
            raise UsageError(f"the pin {name} is given twice: {values[name]} and {value}", hint="keep one of them")
        values[name] = value
    return Pins(values)


@overload
def pin(program: Workload, pins: Pins) -> Workload: ...
@overload
def pin(program: Program, pins: Pins) -> Program: ...
def pin(program: Program, pins: Pins) -> Program:
    """
    Return *program* with the pinned values in place.

    Raises UsageError for a field that cannot be pinned, or a value that makes no sense there.
    """
    if isinstance(program, Workload):
        return _pin_workload(program, pins)
    together = {name: text for name, text in pins.values.items() if name in _OF_GPUS}  # one may make sense with another only
    for name, text in pins.values.items():
        program = _pin_variable(program, name, text, together)
    return program


def _pin_variable(program: Program, name: str, text: str, together: Mapping[str, str]) -> Program:
    """Return the user's own *program* with one value pinned."""
    assert isinstance(program, UserProgram)
    stage_name, _, field = name.rpartition(".")
    try:
        if program.stages and _is_of_stages(program, field):
            return _pin_stage(program, stage_name, field, text)
        if name in _OF_GPUS:
            program = program.model_copy(update={"parallelism": _changed(program.parallelism, together)})
            return program.pinned(name, text) if name in program.variables else program
        if name in ("target_effective_batch_size", "allocator_settings") or name in Batching.model_fields.keys() & program.variables:
            return program.with_training(**{name: text})
    except ValidationError as error:
        raise _no_such_value(name, text, error) from error
    return program.pinned(name, text)


def _is_of_stages(program: UserProgram, field: str) -> bool:
    """Say whether *field* is one of those that the stages of *program* have for themselves."""
    return ("n_negatives" if field == "max_n_negatives" else field) in program.stage_variables


def _pin_workload(workload: Workload, pins: Pins) -> Workload:
    together = {name: text for name, text in pins.values.items() if name in Parallelism.model_fields}
    for name, text in pins.values.items():
        workload = _pin_one(workload, name, text, together)
    try:
        return Workload.model_validate(workload.model_dump())  # together they may make no sense
    except ValidationError as error:
        raise UsageError(str(error.errors()[0]["msg"]).removeprefix("Value error, "), hint="change the pins") from error


def _pin_one(workload: Workload, name: str, text: str, together: Mapping[str, str]) -> Workload:
    try:
        if name in Training.model_fields:
            return workload.with_training(**{name: text})
        if name in Parallelism.model_fields:
            return workload.model_copy(update={"parallelism": _changed(workload.parallelism, together)})
        if name == "optimizer":
            return workload.model_copy(update={"optimizer": Optimizer.model_validate(workload.optimizer.model_dump() | {"name": text})})
        if name == "is_in_eval_mode":
            return _pin_mode(workload, text)
        stage_name, _, stage_field = name.rpartition(".")
        if stage_field in _STAGE_FIELDS:
            return _pin_stage(workload, stage_name, stage_field, text)
    except ValidationError as error:
        raise _no_such_value(name, text, error) from error
    known = [*Training.model_fields, *Parallelism.model_fields, "optimizer", "is_in_eval_mode", *_STAGE_FIELDS]
    raise UsageError(f"the pin {name}={text}: no such field", hint=f"fields are {', '.join(known)}, and STAGE.n_negatives for one stage")


def _no_such_value(name: str, text: str, error: ValidationError) -> UsageError:
    if error.errors()[0]["type"] == NOT_DIVIDED:
        return WorldSizeError(error.errors()[0]["msg"], hint="pin another one, or plan for another number of GPUs")
    return UsageError(f"the pin {name}={text}: {error.errors()[0]['msg']}", hint="give a value that the field can have")


def _pin_mode(workload: Workload, text: str) -> Workload:
    """Put the encoder into eval or training mode: what a trainer does in its code, and no configuration says."""
    model = workload.model
    if isinstance(model, ContrastiveEncoderModel):
        return workload.model_copy(update={"model": _changed(model, {"encoder": _changed(model.encoder, {"is_in_eval_mode": text})})})
    if isinstance(model, TransformerModel):
        return workload.model_copy(update={"model": _changed(model, {"is_in_eval_mode": text})})
    raise UsageError(f"the pin is_in_eval_mode={text}: a model by counts has no mode", hint="leave it out")


P = TypeVar("P", bound=Program)


def _pin_stage(program: P, stage_name: str, stage_field: str, text: str) -> P:
    names = [stage.name for stage in program.stages]
    if not names or (stage_name and stage_name not in names):
        where = f"no stage {stage_name!r}" if stage_name else "no stages"
        name = f"{stage_name}.{stage_field}" if stage_name else stage_field
        hint = f"its stages are {', '.join(names)}" if names else None
        kind = "workload" if isinstance(program, Workload) else "program"
        raise UsageError(f"the pin {name}={text}: the {kind} has {where}", hint=hint)
    stages = tuple(_pinned_stage(stage, stage_field, text) if stage_name in ("", stage.name) else stage for stage in program.stages)
    return program.model_copy(update={"stages": stages})


def _pinned_stage(stage: Stage, stage_field: str, text: str) -> Stage:
    changes: dict[str, Any] = {stage_field: text}
    if stage_field == "n_negatives":
        changes["max_n_negatives"] = None  # the pin is above any limit
    return _changed(stage, changes)


D = TypeVar("D", bound=Description)


def _changed(value: D, changes: Mapping[str, Any]) -> D:
    return type(value).model_validate(value.model_dump() | dict(changes))

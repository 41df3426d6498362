"""What a folder trains from, as settings of a plan: for `memplan init`."""

from __future__ import annotations

from pathlib import Path

from memplan.errors import ConfigError, NotDescribedError
from memplan.layouts.registry import Located, describe_layouts, locate
from memplan.programs.hydra_program import commands_for, composed_by_hydra, hydra_app
from memplan.programs.plan_file import PlanSettings


def found_in(folder: Path, typed: PlanSettings) -> PlanSettings:
    """
    Return *typed* with what *folder* trains from, where it does not say that itself.

    A configuration that memplan has a model of is planned as one; of another, the command that trains from it is. Raises ConfigError where
    there is neither.
    """
    if typed.program:
        return typed
    place = folder if typed.config is None else Path(typed.config)
    located = locate(place)
    if located is None:
        commands = commands_for(place)
        if commands:
            app = hydra_app(commands[0])
            fields = () if app is None or typed.fields else composed_by_hydra(app).fields()
            return typed.model_copy(update={"command": tuple(commands[0]), "config": None, "fields": (*typed.fields, *fields)})
        if typed.config is not None:
            return typed
        hint = f'looked for {describe_layouts()}; name a configuration, `source="conf"`, or give the command that trains'
        raise ConfigError("has nothing that memplan recognises as a training", file=folder.absolute(), hint=hint)
    if not located.has_batch or located.command is None or _is_described(located):
        return typed.model_copy(update={"config": str(located.main if located.is_recipe else located.root)})
    found = {
        "command": tuple(located.command),
        "config": None,
        "fields": (*typed.fields, *located.fields()),
        "short": (*typed.short, *located.short()),
    }
    return typed.model_copy(update=found)


def _is_described(located: Located) -> bool:
    """Say whether memplan has a model of *located* that is true for it."""
    if not located.can_be_described or not located.is_recipe:
        return located.can_be_described
    try:
        located.read()
    except NotDescribedError:
        return False
    return True

"""
A function as a program: `FILE.py:build`, whose arguments are its variables.

Nothing of the user's is run to find them: the arguments and their defaults are read from the source. Which one is the batch, and which the
accumulation, their names say, or the user.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from memplan.errors import UsageError, reason_of
from memplan.programs.typed_places import read_place
from memplan.programs.user_program import PLANNED, UserProgram, did_you_mean
from memplan.workload.step_function import ACCUMULATION_NAMES, BATCH_NAMES, is_device
from memplan.workload.training import MOST_STEPS


class FunctionProgram(UserProgram):
    """A function that is called with the device, where it takes one, and its arguments, and returns one training step."""

    kind: Literal["function"] = "function"
    """Which kind of program."""

    source: str
    """FILE.py:function, or module:function."""

    arguments: dict[str, str]
    """By variable, the argument that has it: `micro_batch_size: batch`."""

    @property
    def variables(self) -> frozenset[str]:
        """Return the names of all variables that it has."""
        return frozenset(self.arguments)

    @property
    def arguments_with_values(self) -> dict[str, str]:
        """Return the arguments that have values, as they are typed."""
        given = {name for name in self.arguments if name in PLANNED or name in self.values}
        return {self.arguments[name]: self.text_of(name) for name in self.arguments if name in given}

    @property
    def typed(self) -> str:
        """Return the call, as it is written."""
        return f"{self.source.rpartition(':')[2]}({', '.join(f'{name}={value}' for name, value in self.arguments_with_values.items())})"


def function_program(source: str, fields: Iterable[str] = ()) -> FunctionProgram:
    """
    Return the program of *source*, "FILE.py:function" or "module:function", its variables by its arguments.

    *fields* say which argument is which variable, "micro_batch_size=items", where its name does not. Raises UsageError for a function or an
    argument that is not there, or where no argument is the batch.
    """
    place, _, function = source.rpartition(":")
    if not place or not function:
        raise UsageError(
            f"{source!r} does not say FILE.py:build",
            hint=f'a configuration is named by `source="{source}"`, and a program by its command: `-- python train.py`',
        )
    file = _file_of(place)
    names = dict(_variables_of(_definition_of(file, function).args))
    variable_of = dict(_named_by(fields, function, list(names)))
    for variable, usual in (("micro_batch_size", BATCH_NAMES), ("gradient_accumulation_steps", ACCUMULATION_NAMES)):
        found = next((name for name in usual if name in names and name not in variable_of), None)
        if found is not None and variable not in variable_of.values():
            variable_of[found] = variable
    if "micro_batch_size" not in variable_of.values():
        raise UsageError(
            f"no argument of {function} is the batch: it has {_listed(list(names))}",
            hint='call it batch_size, or say which it is: `fields=["micro_batch_size=ARGUMENT"]`',
        )
    arguments = {variable_of.get(name, name): name for name in names}
    present = {variable: names[arguments[variable]] for variable in arguments.keys() & set(PLANNED)}
    known = {variable: value for variable, value in present.items() if isinstance(value, int) and 1 <= value <= MOST_STEPS}
    without_value = tuple(sorted(arguments.keys() & set(PLANNED) - known.keys()))
    program = FunctionProgram(name=source, source=source, arguments=arguments, is_present_known=False, without_value=without_value)
    return program.with_training(**known)


def _named_by(fields: Iterable[str], function: str, arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each argument that *fields* name, and which variable it is. Raises UsageError for one that *function* does not have."""
    for field in fields:
        written = read_place(field)  # an argument is a name alone, as a variable of the environment is
        if not written.is_of_environment or written.key not in arguments:
            near = did_you_mean(written.key, frozenset(arguments))
            raise UsageError(
                f"{field!r} names no argument of {function}{near}",
                hint=f"its arguments are {_listed(arguments)}: write it as VARIABLE=ARGUMENT",
            )
        if written.variable == "effective_batch_size":
            raise UsageError(
                f"{field!r}: no argument of a function is the product of others", hint="name the micro-batch and the accumulation"
            )
        yield written.key, written.variable


def _listed(arguments: Sequence[str]) -> str:
    return ", ".join(arguments) or "none"


def _file_of(place: str) -> Path:
    """Return the file that *place*, a path or the name of a module, names; nothing is imported. Raises UsageError where there is none."""
    if place.endswith(".py"):
        file = Path(place)
        if not os.path.isfile(file):
            raise UsageError(f"{place} does not exist", hint="check the path of the file")
        return file
    parts = place.split(".")
    for folder in [Path.cwd(), *(Path(path) for path in sys.path if path)]:
        for file in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if os.path.isfile(file):
                return file
    raise UsageError(f"there is no module {place} here", hint="name its file: `train_step.py:build`")


def place_of_function(source: str) -> tuple[Path, int]:
    """Return the file and the line of the function that *source* names. Raises UsageError where it is not there."""
    place, _, function = source.rpartition(":")
    file = _file_of(place)
    return file, _definition_of(file, function).lineno


def _definition_of(file: Path, function: str) -> ast.FunctionDef:
    try:
        tree = ast.parse(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: {reason_of(error)}", hint="check the path of the file") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{file} is not Python: {error}", hint="see what `python` says to it") from error
    functions = {node.name: node for node in reversed(list(ast.walk(tree))) if isinstance(node, ast.FunctionDef)}
    if function not in functions:
        near = did_you_mean(function, frozenset(functions))
        own = ", ".join(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"))
        hint = f"it defines {own}: `{file}:NAME`" if own else "name the file in which it is defined"
        raise UsageError(f"{file} defines no function {function}{near}", hint=hint)
    return functions[function]


def _variables_of(arguments: ast.arguments) -> Iterator[tuple[str, object]]:
    """Yield the arguments but the device, with their defaults (None where there is none that is a constant)."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for number, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        value, annotation = _constant(default), ast.unparse(argument.annotation) if argument.annotation else ""
        if number or not is_device(argument.arg, default=value, annotation=annotation):
            yield argument.arg, value
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument.arg, _constant(default)


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None

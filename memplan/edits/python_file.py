"""
A Python file that a program is configured by: values that its source writes out are read, or one is changed; nothing is run.

A key is the name as the source has it, behind the functions and classes that it stands in:

    batch_size = 64                                             batch_size
    config.train.batch_size = 64                                config.train.batch_size
    train_dataloader = dict(batch_size=64)                      train_dataloader.batch_size
    args = TrainingArguments(per_device_train_batch_size=64)    args.per_device_train_batch_size
    class Config: batch_size: int = 64                          Config.batch_size
    def main(batch_size=64): ...                                main.batch_size
    def config(): return dict(batch_size=64)                    config.return.batch_size
    fit(model, batch_size=64)                                   fit.batch_size
"""

from __future__ import annotations

import ast
import functools
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from memplan.edits.edit import EditValue, KeyPath, Scalar, as_text
from memplan.edits.flat_file import LONGEST_TOLD, Container, Content, FlatFile, PlacedValue
from memplan.edits.text import decode, read_whole
from memplan.errors import ConfigError

_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}
_LARGEST = 2**64
_MOST_SHIFTED = 64
"""An exponent beyond this makes no size of anything."""

_NUMBER_OR_NAME = re.compile(r"True|False|None|[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


class PythonFile(FlatFile):
    """A parsed Python file and its text, unchanged."""

    @classmethod
    def read(cls, path: Path, text: str) -> Content:
        """Return the values that *text* writes out. Raises ConfigError where it is not Python."""
        reader = _Reader(text)
        try:
            reader.statements(_parse(path, text).body, ())
            return reader.content()
        except RecursionError as error:
            raise ConfigError("is nested too deeply to be a configuration", file=path, hint="is it the right file?") from error

    def written(self, value: EditValue, present: PlacedValue) -> str:
        """Return *value* as Python writes it; text with the quotes that stand there. Raises EditRefusedError where that is not sure."""
        text = _as_python(value)
        is_text = isinstance(present.value, str)
        if not is_text and (not isinstance(value, str) or _NUMBER_OR_NAME.fullmatch(text)):
            return text
        return self.quoted(text, present)

    def is_as_before(self, edited: FlatFile, changed: PlacedValue, literal: str) -> bool:
        """Say whether the syntax tree of *edited* is this file's, but for *literal* in the place of *changed*."""
        replaced = (
            f"{self.text[: changed.start]}({literal}){self.text[changed.end :]}"  # in brackets it is one value whatever stands around it
        )
        return ast.dump(_parse(self.path, replaced)) == ast.dump(_parse(self.path, edited.text))


def syntax_tree(path: Path) -> ast.Module:
    """Return the syntax tree of the file *path*. Raises ConfigError where it cannot be read, or is not Python."""
    return _parse(path, decode(path, read_whole(path)))


def _parse(path: Path, text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in somebody else's text
            return ast.parse(text)
    except SyntaxError as error:
        problem = f"is not valid Python: {error.msg}"
        raise ConfigError(problem, file=path, line=error.lineno, hint="repair the file first") from error
    except (ValueError, MemoryError) as error:  # a null byte; brackets that are nested too deeply for the parser
        raise ConfigError("is not valid Python", file=path, hint="is it the right file?") from error


def _as_python(value: EditValue) -> str:
    return {"true": "True", "false": "False"}.get(as_text(value), as_text(value)) if isinstance(value, bool) else as_text(value)


class _Binding(NamedTuple):
    """A value that the source gives a name, or that stands below one."""

    key: KeyPath
    node: ast.expr
    scope: KeyPath
    is_argument: bool
    replaced_by: str
    """What comes behind it in the same braces, and may set it anew: `**others`."""


class _Reader:
    """From a syntax tree to values that know their place."""

    def __init__(self, text: str) -> None:
        self._lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", text)  # Python ends a line there and nowhere else
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._found: list[_Binding] = []
        self._computed: list[tuple[KeyPath, ast.AST]] = []
        """Names that are given a value in another way than by an assignment."""
        self._containers: dict[KeyPath, Container] = {}
        self._bound: dict[KeyPath, list[int]] = {}
        """The lines in which each name gets a value of its own, parameters among them."""
        self._classes: set[KeyPath] = set()
        self._global: set[KeyPath] = set()
        """Names of a function that are the file's."""

    def content(self) -> Content:
        """Return what was found, names of other values resolved."""
        keys = {each.key for each in self._found}
        values = [self._value(each, keys) for each in self._found]
        for key, node in self._computed:
            if isinstance(node, ast.Import | ast.ImportFrom) and key not in keys:
                continue  # a module or what one has: no setting
            problem = f"is changed by `{_told(node)}`"
            values.append(PlacedValue(key, node.lineno, *self._span(node), problem=problem))  # type: ignore[attr-defined]  # of a statement
        return Content(tuple(sorted(values, key=lambda value: value.start)), self._containers)

    def statements(self, body: Iterable[ast.stmt], scope: KeyPath) -> None:
        """Read *body*, which stands in the functions and classes *scope*."""
        for statement in body:
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: KeyPath) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (*scope, node.name)
            self._parameters(node.args, inner)
            self._global |= {(*inner, name) for each in ast.walk(node) if isinstance(each, ast.Global) for name in each.names}
            self.statements(node.body, inner)
        elif isinstance(node, ast.ClassDef):
            self._classes.add((*scope, node.name))
            self.statements(node.body, (*scope, node.name))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assigned(target, node.value, scope)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assigned(node.target, node.value, scope)
        elif isinstance(node, ast.AugAssign):
            self._set_otherwise(node.target, node, scope)
        elif isinstance(node, ast.Return):
            if isinstance(node.value, ast.Call | ast.Dict | ast.List | ast.Tuple):
                self._put((*scope, "return"), node.value, scope)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = (alias.asname or alias.name).partition(".")[0]
                self._computed.append(((*scope, name), node))
                if scope:
                    self._bound.setdefault((*scope, name), []).append(node.lineno)
        else:
            self._parts(node, scope)

    def _parts(self, node: ast.AST, scope: KeyPath) -> None:
        """Read the statements, names and calls inside *node*: branches, loops, contexts."""
        if isinstance(node, ast.For | ast.AsyncFor | ast.NamedExpr):
            self._set_otherwise(node.target, node, scope)
        if isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._set_otherwise(node.optional_vars, node.optional_vars, scope)
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.stmt):
                self._statement(part, scope)
            elif isinstance(part, ast.Call):
                self._called(part, scope)
            elif not isinstance(part, ast.expr) or isinstance(part, ast.Await | ast.NamedExpr):
                self._parts(part, scope)

    def _set_otherwise(self, target: ast.expr, node: ast.AST, scope: KeyPath) -> None:
        """Take in that *target* gets a value that is not written out: by a loop, a context, a calculation with what it was."""
        for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            key = _named(each)
            if key is not None:
                self._bind(key, each, scope)
                self._computed.append((self._in_scope(key, scope), node))

    def _parameters(self, arguments: ast.arguments, scope: KeyPath) -> None:
        """Read a function's parameters and their default values."""
        positional = [*arguments.posonlyargs, *arguments.args]
        others = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
        for argument in (*positional, *arguments.kwonlyargs, *others):
            self._bound.setdefault((*scope, argument.arg), []).append(argument.lineno)
        defaults = arguments.defaults
        for argument, default in zip(positional[len(positional) - len(defaults) :], defaults, strict=True):
            self._put((*scope, argument.arg), default, scope[:-1], is_argument=True)
        for argument, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if given is not None:
                self._put((*scope, argument.arg), given, scope[:-1], is_argument=True)

    def _assigned(self, target: ast.expr, value: ast.expr, scope: KeyPath) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                for one, its_value in zip(target.elts, value.elts, strict=True):
                    self._assigned(one, its_value, scope)
            else:
                self._set_otherwise(target, value, scope)
            return
        key = _named(target)
        if key is not None:
            self._bind(key, target, scope)
            self._put(self._in_scope(key, scope), value, scope)

    def _bind(self, key: KeyPath, node: ast.expr, scope: KeyPath) -> None:
        self._bound.setdefault(self._in_scope(key, scope), []).append(node.lineno)

    def _in_scope(self, key: KeyPath, scope: KeyPath) -> KeyPath:
        """Return *key* behind the functions and classes *scope*, or alone where its name is the file's."""
        return key if (*scope, key[0]) in self._global else (*scope, *key)

    def _called(self, node: ast.Call, scope: KeyPath) -> None:
        """Read the arguments of a call whose result has no name: its own name stands for it."""
        name = _named(node.func, through_calls=True)
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):  # Trainer(...).train(...)
            self._called(node.func.value, scope)
        if name is not None and len(name) > 1 and name[-1] == "update":  # config.update(batch_size=64)
            for inner, argument in _arguments(node):
                if not inner or not inner[0].isdigit():
                    self._put(self._in_scope((*name[:-1], *inner), scope), argument, scope)
        elif name is not None:
            self._put((*scope, *name), node, scope, is_argument=True)

    def _put(self, key: KeyPath, node: ast.expr, scope: KeyPath, *, is_argument: bool = False, replaced_by: str = "") -> None:
        """Take in that *node* stands at *key*, inside *scope*."""
        put = functools.partial(self._put, scope=scope, is_argument=is_argument)
        if isinstance(node, ast.Call):
            self._contain(key, "mapping", node)
            for name, argument in _arguments(node):
                put((*key, *name), argument, replaced_by=replaced_by)
        elif isinstance(node, ast.Dict):
            self._contain(key, "mapping", node)
            last = max((place for place, name_node in enumerate(node.keys) if name_node is None), default=-1)
            for place, (name_node, value) in enumerate(zip(node.keys, node.values, strict=True)):
                if isinstance(name_node, ast.Constant) and isinstance(name_node.value, str | int):
                    put((*key, str(name_node.value)), value, replaced_by=replaced_by if place > last else f"**{_told(node.values[last])}")
        elif isinstance(node, ast.List | ast.Tuple):
            self._contain(key, "sequence", node)
            for place, element in enumerate(node.elts):
                put((*key, str(place)), element, replaced_by=replaced_by)
        elif key:
            self._found.append(_Binding(key, node, scope, is_argument, replaced_by))

    def _contain(self, key: KeyPath, kind: str, node: ast.expr) -> None:
        if key:
            self._containers.setdefault(key, Container(kind, node.lineno))

    def _value(self, found: _Binding, keys: set[KeyPath]) -> PlacedValue:
        place = found.key, found.node.lineno, *self._span(found.node)
        above = (found.key[:length] for length in range(1, len(found.key)))
        line = found.node.lineno
        again = next((key for key in above if len(bound := self._bound.get(key, ())) > 1 and max(bound) > line), None)
        if again is not None:
            lines = ", ".join(map(str, self._bound[again]))
            return PlacedValue(*place, problem=f"is part of `{'.'.join(again)}`, which is set several times (lines {lines})")
        if found.replaced_by:
            return PlacedValue(*place, problem=f"may be replaced by `{found.replaced_by}` behind it")
        value, is_written_out = _literal(found.node)
        if is_written_out:
            return PlacedValue(*place, value=value, is_argument=found.is_argument)
        named = _named(found.node)
        source = None if named is None else self._source(named, found, keys)
        problem = "" if source is not None else f"is computed: `{_told(found.node)}`"
        return PlacedValue(*place, problem=problem, source=source, is_argument=found.is_argument)

    def _source(self, name: KeyPath, found: _Binding, keys: set[KeyPath]) -> KeyPath | None:
        """Return the key that *name* means where *found* stands, as Python looks names up; None where its value is not written out."""
        for length in range(len(found.scope), -1, -1):
            scope = found.scope[:length]
            if scope in self._classes and length < len(found.scope):  # a class's names are not those of its methods
                continue
            key = (*scope, *name)
            if key in keys and key != found.key:
                return key
            if any((*scope, *name[:part]) in self._bound for part in range(1, len(name) + 1)) and key != found.key:
                return None
        return None

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start, end = cast("ast.expr", node), cast("ast.expr", node)
        assert end.end_lineno is not None
        assert end.end_col_offset is not None
        return self._place(start.lineno, start.col_offset), self._place(end.end_lineno, end.end_col_offset)

    def _place(self, line: int, column_bytes: int) -> int:
        text = self._lines[line - 1]
        column = column_bytes if text.isascii() else len(text.encode()[:column_bytes].decode())
        return self._starts[line - 1] + column


def _arguments(call: ast.Call) -> Iterator[tuple[KeyPath, ast.expr]]:
    """Yield the arguments of *call* by their names, or their places; what a single one holds, `edict({...})`, as the call's own."""
    is_wrapped = len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.Dict | ast.Call)
    for place, argument in enumerate(call.args):
        if not isinstance(argument, ast.Starred):
            yield (() if is_wrapped else (str(place),)), argument
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield (keyword.arg,), keyword.value


def _named(node: ast.expr, *, through_calls: bool = False) -> KeyPath | None:
    """Return the key that `config.train["batch_size"]` names; None for what has no name, as what a call returns."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Call) and through_calls:  # Trainer(...).train
        return _named(node.func, through_calls=True)
    if isinstance(node, ast.Attribute):
        above = _named(node.value, through_calls=through_calls)
        return None if above is None else (*above, node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str | int):
        above = _named(node.value, through_calls=through_calls)
        return None if above is None else (*above, str(node.slice.value))
    return None


def _literal(node: ast.expr) -> tuple[Scalar, bool]:
    """Return the value that *node* writes out, numbers calculated with one another; and whether it does."""
    if isinstance(node, ast.Constant):
        is_single = node.value is None or isinstance(node.value, bool | int | float | str)
        if isinstance(node.value, int) and node.value > _LARGEST:
            return None, False
        return (node.value, True) if is_single else (None, False)  # type: ignore[return-value]  # checked in the line above
    number = _number(node)
    return number, number is not None


def _number(node: ast.expr) -> int | float | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        operand = _number(node.operand)
        return None if operand is None else -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _number(node.left), _number(node.right)
        return None if left is None or right is None else _calculated(node.op, left, right)
    return None


def _calculated(operation: ast.operator, left: float, right: float) -> int | float | None:
    """Return what the two numbers make; None for a result that is no size of anything."""
    if max(abs(left), abs(right)) > _LARGEST or (isinstance(operation, ast.LShift | ast.Pow) and not 0 <= right <= _MOST_SHIFTED):
        return None
    try:
        found = _OPERATIONS[type(operation)](left, right)
    except (ArithmeticError, TypeError):
        return None
    return found if isinstance(found, int | float) and abs(found) <= _LARGEST else None


def _told(node: ast.AST) -> str:
    """Return the source of *node* in one short line."""
    try:
        text = " ".join(ast.unparse(node).split())
    except ValueError:  # a number of thousands of digits
        return "…"
    return text if len(text) <= LONGEST_TOLD else f"{text[:LONGEST_TOLD]}…"

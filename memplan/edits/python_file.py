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
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from memplan.edits.edit import EditValue, KeyPath, Scalar, as_text
from memplan.edits.flat_file import Container, Content, FlatFile, PlacedValue
from memplan.errors import ConfigError, EditRefusedError

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
_PLAIN_TEXT = re.compile(r"""(?P<quote>["'])[^"'\\\n]*(?P=quote)""")
_UNWRITABLE = re.compile(r"""["'\\\x00-\x1f]""")
_LONGEST_TOLD = 60


class PythonFile(FlatFile):
    """A parsed Python file and its text, unchanged."""

    @classmethod
    def read(cls, path: Path, text: str) -> Content:
        """Return the values that *text* writes out. Raises ConfigError where it is not Python."""
        reader = _Reader(text)
        try:
            reader.statements(_parse(path, text).body, ())
        except RecursionError as error:
            raise ConfigError("is nested too deeply to be a configuration", file=path, hint="is it the right file?") from error
        return reader.content()

    def written(self, value: EditValue, present: PlacedValue) -> str:
        """Return *value* as Python writes it; text with the quotes that stand there. Raises EditRefusedError where that is not sure."""
        text = _as_python(value)
        is_text = isinstance(present.value, str)
        if not is_text and (not isinstance(value, str) or _NUMBER_OR_NAME.fullmatch(text)):
            return text
        stands = self.text[present.start : present.end]
        if _UNWRITABLE.search(text) or (is_text and not _PLAIN_TEXT.fullmatch(stands)):
            hint = "write it as plain text in one pair of quotes"
            raise EditRefusedError(f"`{'.'.join(present.key)}` is {stands}", file=self.path, line=present.line, hint=hint)
        quote = stands[0] if is_text else '"'
        return f"{quote}{text}{quote}"

    def is_as_before(self, edited: FlatFile, changed: PlacedValue, literal: str) -> bool:
        """Say whether the syntax tree of *edited* is this file's, but for *literal* in the place of *changed*."""
        replaced = (
            f"{self.text[: changed.start]}({literal}){self.text[changed.end :]}"  # in brackets it is one value whatever stands around it
        )
        return ast.dump(_parse(self.path, replaced)) == ast.dump(_parse(self.path, edited.text))


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


class _Reader:
    """From a syntax tree to values that know their place."""

    def __init__(self, text: str) -> None:
        self._lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", text)  # Python ends a line there and nowhere else
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._found: list[tuple[KeyPath, ast.expr, KeyPath]] = []
        self._augmented: list[tuple[KeyPath, ast.AugAssign]] = []
        self._containers: dict[KeyPath, Container] = {}

    def content(self) -> Content:
        """Return what was found, names of other values resolved."""
        keys = {key for key, _, _ in self._found}
        values = [self._value(key, node, scope, keys) for key, node, scope in self._found]
        for key, node in self._augmented:
            problem = f"is changed by `{_told(node)}`"
            values.append(PlacedValue(key, node.lineno, *self._span(node.target), problem=problem))
        return Content(tuple(sorted(values, key=lambda value: value.start)), self._containers)

    def statements(self, body: Iterable[ast.stmt], scope: KeyPath) -> None:
        """Read *body*, which stands in the functions and classes *scope*."""
        for statement in body:
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: KeyPath) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._defaults(node.args, (*scope, node.name))
            self.statements(node.body, (*scope, node.name))
        elif isinstance(node, ast.ClassDef):
            self.statements(node.body, (*scope, node.name))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assigned(target, node.value, scope)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assigned(node.target, node.value, scope)
        elif isinstance(node, ast.AugAssign):
            key = _named(node.target)
            if key is not None:
                self._augmented.append(((*scope, *key), node))
        elif isinstance(node, ast.Return):
            if isinstance(node.value, ast.Call | ast.Dict | ast.List | ast.Tuple):
                self._put((*scope, "return"), node.value, scope)
        else:
            self._parts(node, scope)

    def _parts(self, node: ast.AST, scope: KeyPath) -> None:
        """Read the statements and calls inside *node*: branches, loops, contexts."""
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.stmt):
                self._statement(part, scope)
            elif isinstance(part, ast.Call):
                self._called(part, scope)
            elif not isinstance(part, ast.expr) or isinstance(part, ast.Await):
                self._parts(part, scope)

    def _defaults(self, arguments: ast.arguments, scope: KeyPath) -> None:
        """Read the default values of a function's parameters."""
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults = arguments.defaults
        for argument, default in zip(positional[len(positional) - len(defaults) :], defaults, strict=True):
            self._put((*scope, argument.arg), default, scope[:-1])
        for argument, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if given is not None:
                self._put((*scope, argument.arg), given, scope[:-1])

    def _assigned(self, target: ast.expr, value: ast.expr, scope: KeyPath) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                for one, its_value in zip(target.elts, value.elts, strict=True):
                    self._assigned(one, its_value, scope)
            return
        key = _named(target)
        if key is not None:
            self._put((*scope, *key), value, scope)

    def _called(self, node: ast.Call, scope: KeyPath) -> None:
        """Read the arguments of a call whose result has no name: its own name stands for it."""
        name = _named(node.func)
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):  # Trainer(...).train(...)
            self._called(node.func.value, scope)
        if name is not None:
            self._put((*scope, *name), node, scope)

    def _put(self, key: KeyPath, node: ast.expr, scope: KeyPath) -> None:
        """Take in that *node* stands at *key*, inside *scope*."""
        if isinstance(node, ast.Call):
            self._contain(key, "mapping", node)
            for name, argument in _arguments(node):
                self._put((*key, *name), argument, scope)
        elif isinstance(node, ast.Dict):
            self._contain(key, "mapping", node)
            for name_node, value in zip(node.keys, node.values, strict=True):
                if isinstance(name_node, ast.Constant) and isinstance(name_node.value, str | int):
                    self._put((*key, str(name_node.value)), value, scope)
        elif isinstance(node, ast.List | ast.Tuple):
            self._contain(key, "sequence", node)
            for place, element in enumerate(node.elts):
                self._put((*key, str(place)), element, scope)
        elif key:
            self._found.append((key, node, scope))

    def _contain(self, key: KeyPath, kind: str, node: ast.expr) -> None:
        if key:
            self._containers.setdefault(key, Container(kind, node.lineno))

    def _value(self, key: KeyPath, node: ast.expr, scope: KeyPath, keys: set[KeyPath]) -> PlacedValue:
        span = self._span(node)
        value, is_written_out = _literal(node)
        if is_written_out:
            return PlacedValue(key, node.lineno, *span, value=value)
        named = _named(node)
        source = None if named is None else next((one for one in _seen_from(scope, named) if one in keys and one != key), None)
        problem = "" if source is not None else f"is computed: `{_told(node)}`"
        return PlacedValue(key, node.lineno, *span, problem=problem, source=source)

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)

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


def _named(node: ast.expr) -> KeyPath | None:
    """Return the key that `config.train["batch_size"]` names; None for what has no name."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Call):  # Trainer(...).train
        return _named(node.func)
    if isinstance(node, ast.Attribute):
        above = _named(node.value)
        return None if above is None else (*above, node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str | int):
        above = _named(node.value)
        return None if above is None else (*above, str(node.slice.value))
    return None


def _seen_from(scope: KeyPath, name: KeyPath) -> Iterator[KeyPath]:
    """Yield the keys that *name* may mean in *scope*, the nearest first."""
    for length in range(len(scope), -1, -1):
        yield (*scope[:length], *name)


def _literal(node: ast.expr) -> tuple[Scalar, bool]:
    """Return the value that *node* writes out, numbers calculated with one another; and whether it does."""
    if isinstance(node, ast.Constant):
        is_single = node.value is None or isinstance(node.value, bool | int | float | str)
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
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST_TOLD else f"{text[:_LONGEST_TOLD]}…"

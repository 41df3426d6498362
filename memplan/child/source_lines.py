"""
What the source says of a line that reads a number from the device: the statement that it is in, and what becomes of the number.

A number that is only printed or logged (how many answers are right) decides no size. A float that is made whole, on the same line or where
the name is used that it was given, may be one.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterator, Sequence
from dis import opname
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

_Function = ast.FunctionDef | ast.AsyncFunctionDef

_SHOWS = frozenset({
    "print", "str", "repr", "format", "write", "debug", "info", "warning", "error", "log", "log_dict", "log_metrics", "tqdm_write",
    "add_scalar", "set_postfix", "set_postfix_str", "set_description", "set_description_str",
})  # fmt: skip
"""Functions, by the last part of their names, that show a number."""

_ARE_MATHEMATICS = frozenset({"math", "np", "numpy", "torch"})
"""Modules whose `log` is no log."""

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)

_TEXTS = (ast.JoinedStr, ast.FormattedValue)
"""F-strings, in which Python 3.11 formats a value at the place of the whole text, and later ones at that of the value."""

_WHOLE = frozenset({"int", "range", "ceil", "floor", "trunc"})
"""Functions that make a whole number; `round` does where it is given nothing else."""


class _Parsed(NamedTuple):
    tree: ast.Module
    parents: dict[ast.AST, ast.AST]
    statements: tuple[range, ...]
    """The lines of each statement; of one with a body, those in front of that."""


Tell = TypeVar("Tell", bound=Callable[..., Any])

MOST_PLACES = 4096
"""Instructions of a program whose answers are kept at a time."""


def _once_for_each_place(tell: Tell) -> Tell:
    """Have *tell*, which looks through the source, be asked once for each instruction or chain of calls: a loop reads at the same."""
    known: dict[tuple[object, ...], Any] = {}

    @functools.wraps(tell)
    def told(where: FrameType | Sequence[FrameType], **choices: object) -> Any:
        frames = [where] if isinstance(where, FrameType) else where
        place = (*((frame.f_code, frame.f_code.co_filename, frame.f_lasti) for frame in frames), *choices.items())
        if place not in known:
            if len(known) >= MOST_PLACES:
                known.clear()
            known[place] = tell(where, **choices)
        return known[place]

    return cast("Tell", told)


def line_of(frame: FrameType) -> str:
    """Return the line that *frame* is at, with a mark when what follows raises."""
    return line_at(frame.f_code.co_filename, frame.f_lineno)


def line_at(filename: str, number: int) -> str:
    """Return line *number* of a file, with a mark when what follows raises."""
    lines = [linecache.getline(filename, number + offset).rstrip("\n") for offset in (0, 1)]
    return lines[0].strip() + _mark(lines[1])


@_once_for_each_place
def statement_of(frame: FrameType) -> range:
    """Return the lines of the statement that *frame* is in: an expression may have several."""
    line = frame.f_lineno
    around = [lines for lines in _parsed(frame.f_code.co_filename).statements if line in lines]
    return min(around, key=len, default=range(line, line + 1))


def statement_text(frame: FrameType) -> str:
    """Return the statement that *frame* is in, on one line, with a mark when what follows raises."""
    lines = statement_of(frame)
    text = " ".join(linecache.getline(frame.f_code.co_filename, line).strip() for line in lines)
    return text + _mark(linecache.getline(frame.f_code.co_filename, lines.stop))


def _mark(following: str) -> str:
    return " # RAISES" if following.strip().startswith("raise") else ""


@_once_for_each_place
def is_made_whole(frame: FrameType, *, at_once: bool = False) -> bool:
    """Say whether the float that *frame* reads may become a whole number that is not only shown; *at_once*: in the same statement."""
    parsed = _parsed(frame.f_code.co_filename)
    lines = statement_of(frame)
    around = _around(parsed, frame)
    given: set[str] = set()
    for node in ast.walk(around):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.lineno in lines:
            given |= _targets(node)
    while not at_once and (more := given | {name for node in ast.walk(around) for name in _given_by(node, given)}) != given:
        given = more
    calls = [node for node in ast.walk(around) if isinstance(node, ast.Call) and _makes_whole(node)]
    return any((_reads_within(call, lines) or (not at_once and _has(call, given))) and not _is_shown(call, parsed) for call in calls)


@_once_for_each_place
def is_only_told(frame: FrameType) -> bool:
    """Say whether the number that *frame* reads ends in what is printed or logged, and in nothing else; False where that is not sure."""
    parsed = _parsed(frame.f_code.co_filename)
    node = _executed(parsed, frame)
    if isinstance(node, _TEXTS):
        return True
    return node is not None and _ends_well(node, parsed, _around(parsed, frame), set()) and not is_made_whole(frame)


class AskedMask(NamedTuple):
    """What a line asks of a mask: whether all of its elements are set, or are one."""

    name: str
    """Of the variable that has it."""
    is_for_ones: bool


@_once_for_each_place
def mask_asked_for(frame: FrameType) -> AskedMask | None:
    """
    Return what *frame* asks of a mask, by `mask.all()` or `torch.all(mask == 1)`; None where it is something else, or not sure.

    It is read by the call that runs, `bool(…)` or `….item()`, or by a condition, right behind the call that gave it. Where a condition has
    several parts, Python before 3.12 may place one of them at another: only the call before it says which is read.
    """
    parsed, code, back = _parsed(frame.f_code.co_filename), frame.f_code.co_code, 0
    while opname[code[frame.f_lasti - 2 * back]] == "CACHE":  # which some instructions have behind them
        back += 1
    if "CALL" not in opname[code[frame.f_lasti - 2 * back]]:
        return _asked_by(_executed(parsed, frame, back=back + 1))
    reader = _executed(parsed, frame)
    if not isinstance(reader, ast.Call):
        return None
    if _name(reader) == "bool" and len(reader.args) == 1:
        return _asked_by(reader.args[0])
    return _asked_by(reader.func.value) if _name(reader) == "item" and isinstance(reader.func, ast.Attribute) else None


def _asked_by(call: ast.AST | None) -> AskedMask | None:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "all" or call.keywords:
        return None
    of_module = _owner(call) == "torch"
    if len(call.args) != of_module:
        return None
    asked = call.args[0] if of_module else call.func.value
    is_for_ones = isinstance(asked, ast.Compare) and ast.unparse(asked).endswith(" == 1") and len(asked.ops) == 1
    mask = asked.left if isinstance(asked, ast.Compare) and is_for_ones else asked
    return AskedMask(mask.id, is_for_ones) if isinstance(mask, ast.Name) else None


@_once_for_each_place
def decides_branch(frames: Sequence[FrameType]) -> bool:
    """
    Say whether the float that the program reads at the innermost of *frames* is compared, there or where it is returned to, and something
    else than saving or telling hangs on it.
    """
    given: set[str] = set()
    for frame in frames:
        parsed = _parsed(frame.f_code.co_filename)
        around, lines = _around(parsed, frame), statement_of(frame)
        given = {name for node in _statements(around) if node.lineno in lines for name in _targets_of(node)}
        while (more := given | {name for node in ast.walk(around) for name in (*_given_by(node, given), *_appended(node, given))}) != given:
            given = more
        tests = (node for node in ast.walk(around) if isinstance(node, (ast.If, ast.While, ast.IfExp)))
        if any(_is_compared(node.test, lines, given) and not _is_harmless(node) for node in tests):
            return True
        returns = [node.value for node in ast.walk(around) if isinstance(node, ast.Return) and node.value is not None]
        if not any(_has(value, given) or value.lineno in lines for value in returns):
            return False
    return False


@_once_for_each_place
def is_loop(frame: FrameType) -> bool:
    """Say whether the statement that *frame* is in is the condition of a `while`."""
    parsed, lines = _parsed(frame.f_code.co_filename), statement_of(frame)
    return any(isinstance(node, ast.While) and node.lineno in lines for node in ast.walk(_around(parsed, frame)))


@_once_for_each_place
def is_harmless_test(frame: FrameType) -> bool:
    """
    Say whether *frame* reads a yes or no in the condition of an `if` on which nothing hangs but what is kept on disk, or told.

    What is given a name there may be a size.
    """
    parsed, lines = _parsed(frame.f_code.co_filename), statement_of(frame)
    tests = [node for node in ast.walk(_around(parsed, frame)) if isinstance(node, ast.If) and node.test.lineno in lines]
    gives = any(isinstance(inner, (ast.Assign, ast.AugAssign, ast.AnnAssign)) for node in tests for inner in ast.walk(node))
    return bool(tests) and not gives and all(map(_is_harmless, tests))


def _statements(around: ast.AST) -> Iterator[Any]:
    return (node for node in ast.walk(around) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.Expr)))


def _targets_of(node: Any) -> set[str]:
    """Return the names that get what a statement reads: those that it assigns to, or the list that it appends to."""
    return _appended(node.value, set(), is_read=True) if isinstance(node, ast.Expr) else _targets(node)


def _appended(node: ast.AST, given: set[str], *, is_read: bool = False) -> set[str]:
    """Return the name of the list that *node* appends one of *given* to."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in ("append", "update", "add"):
        return set()
    return {ast.unparse(node.func.value)} if is_read or any(_has(argument, given) for argument in node.args) else set()


def _is_compared(test: ast.AST, lines: range, given: set[str]) -> bool:
    compared = (node for node in ast.walk(test) if isinstance(node, ast.Compare))
    return any(_has(node, given) or (node.lineno in lines and _reads(node)) for node in compared)


def _reads(node: ast.AST) -> bool:
    return any(isinstance(call, ast.Call) and _name(call) in _READS for call in ast.walk(node))


_READS = ("item", "float", "tolist", "cpu", "to", "numpy")
"""What a number is read by in the midst of a comparison."""


_KEEPS = _SHOWS | {
    "save", "save_model", "save_pretrained", "save_checkpoint", "save_state", "dump", "state_dict", "deepcopy", "copy", "append", "join",
}  # fmt: skip
"""Functions that show a number, or keep what there is, which takes no memory of the GPU that lasts."""


def _is_harmless(node: ast.AST) -> bool:
    """Say whether nothing hangs on a branch but what is kept on disk, told, or given a name."""
    if isinstance(node, ast.IfExp):
        return all(
            not isinstance(inner, ast.Call) and not _is_size(inner) for branch in (node.body, node.orelse) for inner in ast.walk(branch)
        )
    if isinstance(node, ast.While):
        return False
    statements = [*node.body, *node.orelse] if isinstance(node, ast.If) else []
    return all(_is_harmless_statement(statement) for statement in statements)


def _is_harmless_statement(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Raise, ast.Pass)):
        return True
    if isinstance(statement, ast.If):
        return _is_harmless(statement)
    if isinstance(statement, ast.With):
        return all(map(_is_harmless_statement, statement.body))
    if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    if any(isinstance(target, ast.Attribute) and not _is_own(target) for target in targets):
        return False
    if not isinstance(statement, ast.Expr) and statement.value is not None and any(map(_is_size, ast.walk(statement.value))):
        return False
    return all(_name(call) in _KEEPS for call in ast.walk(statement) if isinstance(call, ast.Call))


def _is_size(node: ast.AST) -> bool:
    """Say whether *node* is a whole number that may be a size; zero and one count, and say yes or no."""
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value > 1


def _is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id == "self"


def _ends_well(node: ast.AST, parsed: _Parsed, around: ast.AST, seen: set[str]) -> bool:
    parent = parsed.parents.get(node)
    if _is_shown(node, parsed) or isinstance(parent, ast.Expr):
        return True
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, _ARITHMETIC):
        return _ends_well(parent, parsed, around, seen)
    if isinstance(parent, ast.IfExp) and node is not parent.test:
        return _ends_well(parent, parsed, around, seen)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        return _name_ends_well(parent.targets[0], parsed, around, seen)
    if isinstance(parent, ast.AugAssign) and isinstance(parent.op, _ARITHMETIC):
        return _name_ends_well(parent.target, parsed, around, seen)
    return False


def _name_ends_well(target: ast.AST, parsed: _Parsed, around: ast.AST, seen: set[str]) -> bool:
    """Say so of every use of the name *target* in the function around it; what is no plain name may be used anywhere."""
    if not isinstance(target, ast.Name):
        return False
    if target.id in seen:
        return True
    seen.add(target.id)
    if any(isinstance(node, (ast.Global, ast.Nonlocal)) and target.id in node.names for node in ast.walk(around)):
        return False
    uses = [node for node in ast.walk(around) if isinstance(node, ast.Name) and node.id == target.id and isinstance(node.ctx, ast.Load)]
    return all(_ends_well(use, parsed, around, seen) for use in uses)


def _is_shown(node: ast.AST, parsed: _Parsed) -> bool:
    """Say whether *node* is an argument of something that prints or logs, a part of a text, or in a dict or a sum that is."""
    parent = parsed.parents.get(node)
    while isinstance(parent, (ast.keyword, ast.Dict, ast.FormattedValue, ast.BinOp, ast.Call)):
        if isinstance(parent, ast.FormattedValue):
            return True
        if isinstance(parent, ast.Call):
            name = _name(parent)
            if node is not parent.func and name in _SHOWS and _owner(parent) not in _ARE_MATHEMATICS:
                return True
            if node is parent.func or name not in ("round", "int"):
                return False
        node, parent = parent, parsed.parents.get(parent)
    return False


def _makes_whole(call: ast.Call) -> bool:
    name = _name(call)
    return name in _WHOLE or (name == "round" and len(call.args) == 1 and not call.keywords)


def _reads_within(call: ast.Call, lines: range) -> bool:
    """Say whether an item is read for *call*, which is on *lines*."""
    return call.lineno in lines and any(isinstance(node, ast.Call) and _name(node) == "item" for node in ast.walk(call))


def _name(call: ast.Call) -> str:
    """Return the last part of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""


def _owner(call: ast.Call) -> str:
    """Return the name of what the method is called of that *call* calls."""
    return call.func.value.id if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) else ""


def _given_by(node: ast.AST, given: set[str]) -> set[str]:
    """Return the names that *node* gives a value in which one of *given* has a part."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None and _has(node.value, given):
        return _targets(node)
    return set()


def _targets(node: Any) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    whole = [inner for target in targets for inner in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])]
    return {ast.unparse(target) for target in whole}


def _has(node: ast.AST, given: set[str]) -> bool:
    if not given:
        return False
    parts = (part for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)))
    return any(ast.unparse(part) in given for part in parts)


def _executed(parsed: _Parsed, frame: FrameType, *, back: int = 0) -> ast.AST | None:
    """
    Return the call or the f-string that *frame* is at; None where Python does not say it (before 3.11), or where it is neither.

    *back*: so many units of its code before.
    """
    if not hasattr(frame.f_code, "co_positions"):
        return None
    positions = list(frame.f_code.co_positions())
    line, end_line, column, end_column = positions[frame.f_lasti // 2 - back]
    at = (line, end_line, column, end_column)
    found = (node for node in ast.walk(_around(parsed, frame)) if isinstance(node, (ast.Call, *_TEXTS)))
    return next((node for node in found if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == at), None)


def _around(parsed: _Parsed, frame: FrameType) -> ast.AST:
    """Return the innermost function that the line of *frame* is in, or the whole file."""
    line = frame.f_lineno
    functions = [node for node in ast.walk(parsed.tree) if isinstance(node, _Function) and line in range(node.lineno, _last(node) + 1)]
    return max(functions, key=lambda node: node.lineno, default=parsed.tree)


def _last(node: Any) -> int:
    return int(node.end_lineno or node.lineno)


@functools.lru_cache(maxsize=64)
def _parsed(filename: str) -> _Parsed:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        tree = ast.Module(body=[], type_ignores=[])
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    return _Parsed(tree, parents, tuple(_headers(tree)))


def _headers(tree: ast.Module) -> Iterator[range]:
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else _last(node)
            yield range(node.lineno, max(last, node.lineno) + 1)

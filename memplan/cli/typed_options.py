"""From the Python that memplan's messages speak to what a person types at a prompt.

Below the command line a message names a value as the Python API has it, in backticks: `method="analytic"`, `pins={"n_negatives": 8}`,
`memplan.plan(gpu="t4")`. Here, and only here, each becomes the option or the command that says the same.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")

OPTIONS = {
    "source": "--config-path",
    "gpu": "--gpu",
    "gpu_memory": "--gpu-memory",
    "target_effective_batch_size": "--target-effective-batch",
    "target_tolerance": "--target-tolerance",
    "method": "--method",
    "margin": "--margin",
    "pins": "--pin",
    "grow_negatives": "--grow-negatives",
    "with_levers": "--levers",
    "values": "--set",
    "name": "--value",
    "start": "--start",
    "steps": "--steps",
    "answers": "--read",
    "timeout_seconds": "--timeout",
    "device": "--device",
    "allow_writes": "--allow-writes",
    "skip_weights": "--skip-weights",
    "num_gpus": "--num-gpus",
    "num_nodes": "--num-nodes",
    "launch_config": "--launch-config",
    "rank": "--rank",
    "fields": "--field",
    "short": "--short",
    "stages": "--stages",
}
"""The argument of memplan's functions, and the option."""

COMMANDS = {
    "plan": "memplan",
    "compare": "memplan compare",
    "find_batch": "memplan find-batch",
    "gpus": "memplan gpus",
    "rehearse": "memplan rehearse",
    "undo": "memplan undo",
}
"""The function, and the command."""

METHODS = {
    "plan.apply()": "memplan --apply",
    "plan.profile()": "memplan --auto --profile",
    'plan.save("plan.json")': "memplan --auto --format json > plan.json",
}
"""What is asked of a plan, and the command."""

_QUOTED = re.compile(r"`([^`\n]+)`")


def in_options(value: T) -> T:
    """Return *value*, a text or whatever holds texts, with the Python in backticks as options."""
    return _translated(value)  # type: ignore[no-any-return]


def _translated(value: Any) -> Any:
    if isinstance(value, str):
        return _QUOTED.sub(lambda match: f"`{_typed(match[1]) or match[1]}`", value)
    if isinstance(value, dict):
        return {name: _translated(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_translated(each) for each in value]
    if isinstance(value, tuple):
        parts = [_translated(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _typed(text: str) -> str | None:
    """Return what says the same as the Python *text* at a prompt; None for what is no call or argument of memplan's."""
    if text in METHODS:
        return METHODS[text]
    try:
        call = ast.parse(text if text.startswith("memplan.") else f"memplan.arguments({text})", mode="eval").body
    except SyntaxError:
        return None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return None
    name = call.func.attr
    if name not in (*COMMANDS, "arguments") or any(each.arg not in OPTIONS for each in call.keywords):
        return None
    try:
        words = [word for each in call.keywords for word in _words(each.arg or "", ast.literal_eval(each.value))]
        positional = [str(ast.literal_eval(each)) for each in call.args]
    except ValueError:
        return None
    if name == "arguments":
        return " ".join(words) if words and not positional else None
    if name == "plan":
        positional = [word for each in positional for word in ("--config-path", each)]
        if not {"gpu", "gpu_memory"} & {each.arg for each in call.keywords}:
            positional.insert(0, "--auto")
    return " ".join([COMMANDS[name], *map(_quoted, positional), *words])


def _words(name: str, value: Any) -> Iterator[str]:
    option = OPTIONS[name]
    if value is True:
        yield option
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from (option, _quoted(f"{key}={_plain(each)}"))
    elif isinstance(value, list):
        for each in value:
            yield from (option, _quoted(str(each)))
    elif name == "target_tolerance":
        yield from (option, f"{100 * value:.3g}%")
    else:
        yield from (option, _quoted(_plain(value)))


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(word: str) -> str:
    """Return *word* as a shell takes it for one; what stands for a name to be put in stays as it is."""
    return word if word.isascii() and re.fullmatch(r"[\w.,:/=%+-]+", word) else shlex.quote(word)

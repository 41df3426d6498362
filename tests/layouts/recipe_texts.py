"""Recipes of every framework that memplan has a table for, generated from the tables; and what people and editors do to such files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memplan.layouts.registry import layouts
from memplan.layouts.schema import ANYTHING, FieldEntry, Layout

NUMBERS = ("training.micro_batch_size", "training.gradient_accumulation_steps", "training.target_effective_batch_size")
MODELS = ("Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B", "BAAI/bge-small-en-v1.5", "nobody/knows")
COMMENTS = ("", "", "", "  # as in the paper", "\t# tab", " #", "   # é: [1, 2]")
ODD = (
    "", "~", "null", "[]", "{}", "[1, 2]", "{a: 1}", "-1", "0", "1e3", "0x10", "1_000", "08", ".5", ".inf", "nan", "true", "no", "auto",
    "'8'", '"8"', "8 8", "${oc.env:BATCH}", "${other.key}", "&anchor 8", "*anchor", "!!int '8'", "!!python/object:os.system 8",
    "2024-01-01", "|\n  8", ">-\n  many\n  words", "999999999999999999999999", "'", '"', "{", "]", ": 8", "- 8", "%8", "@8", "`8`",
    "\x07", "é" * 300, "?",
)  # fmt: skip
"""Values in the place of others."""

BYTES = (
    *(bytes([byte]) for byte in b"\x00\t\n\r {}[]:,#'\"&*!|>-?%@`\\\x7f\x85\xff"),
    b"\xef\xbb\xbf",
    b"\r\n",
    b"---\n",
    b"...\n",
    b"<<: *a\n",
)
"""What is put anywhere."""


def recipes(chosen: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield a name and the bytes of one recipe for every table of memplan's."""
    for layout, _ in layouts({}):
        suffix = chosen.choice(layout.detect.suffixes) if layout.detect.file is None else Path(layout.detect.file).suffix
        tree = _tree(layout, chosen)
        text = _as_json(tree, chosen) if suffix == ".json" else _as_yaml(tree, chosen)
        newline = chosen.choice(("\n", "\n", "\n", "\r\n"))
        mark = chosen.choice((b"", b"", b"", b"\xef\xbb\xbf"))
        yield f"{layout.name}{suffix}", mark + text.replace("\n", newline).encode()


def mutated(data: bytes, chosen: random.Random) -> bytes:
    """Return *data* with one to three things done to it, or none."""
    for _ in range(chosen.choice((0, 1, 1, 1, 2, 3))):
        data = chosen.choice(
            (_value_replaced, _value_replaced, _line_doubled, _line_lost, _lines_swapped, _indented, _byte_put, _cut, _joined)
        )(data, chosen)
    return data


def _tree(layout: Layout, chosen: random.Random) -> dict[str, Any]:
    """Return keys and values as the table names them."""
    tree: dict[str, Any] = {}
    for key, spellings in layout.detect.where.items():
        _put(tree, key, chosen.choice([spelling for spelling in spellings if spelling != ANYTHING] or ["x"]))
    for key in (*layout.detect.keys, *layout.detect.one_of[:1]):
        _put(tree, key, 8)
    for entry in layout.fields:
        if entry.field in NUMBERS or entry.key in layout.detect.keys or chosen.random() < 0.3:
            _put(tree, entry.key, _value(entry, chosen))
    if layout.model is not None:
        _put(tree, layout.model.key, chosen.choice(MODELS))
    for key in layout.stages.fields.values() if layout.stages is not None and not layout.stages.files else ():
        _put(tree, key, chosen.randint(0, 30))
    return tree


def _value(entry: FieldEntry, chosen: random.Random) -> Any:
    if entry.field in NUMBERS:
        return chosen.choice((1, 2, 4, 8, 32, 256))
    if entry.values:
        return {"true": True, "false": False}.get(*[chosen.choice(list(chosen.choice(entry.values)))] * 2)
    return entry.default if entry.default is not None else chosen.choice((16, 512, 2048))


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        tree = inner
    if not isinstance(tree.get(last), dict):
        tree[last] = value


def _as_json(tree: dict[str, Any], chosen: random.Random) -> str:
    return json.dumps(tree, indent=chosen.choice((None, 2, 4, "\t"))) + chosen.choice(("\n", ""))


def _as_yaml(tree: dict[str, Any], chosen: random.Random, indent: str = "") -> str:
    lines = []
    for key, value in tree.items():
        comment = chosen.choice(COMMENTS)
        if chosen.random() < 0.1:
            lines.append(f"{indent}# of {key}")
        if isinstance(value, dict):
            if value and chosen.random() < 0.15:
                lines.append(f"{indent}{key}: {json.dumps(value)}{comment}")
            else:
                lines += [f"{indent}{key}:{comment}", _as_yaml(value, chosen, indent + "  ").rstrip("\n")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value, chosen)}{comment}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any, chosen: random.Random) -> str:
    if isinstance(value, str):
        return chosen.choice((json.dumps(value), f"'{value}'"))
    return json.dumps(value)


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True) or [b""]


def _value_replaced(data: bytes, chosen: random.Random) -> bytes:
    lines = _lines(data)
    number = chosen.randrange(len(lines))
    head, colon, _ = lines[number].partition(b":")
    if colon:
        lines[number] = head + b": " + chosen.choice(ODD).encode() + b"\n"
    return b"".join(lines)


def _line_doubled(data: bytes, chosen: random.Random) -> bytes:
    lines = _lines(data)
    lines.insert(chosen.randrange(len(lines)), chosen.choice(lines))
    return b"".join(lines)


def _line_lost(data: bytes, chosen: random.Random) -> bytes:
    lines = _lines(data)
    del lines[chosen.randrange(len(lines))]
    return b"".join(lines)


def _lines_swapped(data: bytes, chosen: random.Random) -> bytes:
    lines = _lines(data)
    one, other = chosen.randrange(len(lines)), chosen.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _indented(data: bytes, chosen: random.Random) -> bytes:
    lines = _lines(data)
    number = chosen.randrange(len(lines))
    lines[number] = chosen.choice((b" ", b"  ", b"\t", b"- ")) + lines[number]
    return b"".join(lines)


def _byte_put(data: bytes, chosen: random.Random) -> bytes:
    place = chosen.randint(0, len(data))
    return data[:place] + chosen.choice(BYTES) + data[place + chosen.randint(0, 1) :]


def _cut(data: bytes, chosen: random.Random) -> bytes:
    return data[: chosen.randint(0, len(data))]


def _joined(data: bytes, chosen: random.Random) -> bytes:
    return data + chosen.choice((b"", b"\n", b"---\n")) + data

"""
Files of weights without weights: what they hold is told in full, and the weights themselves take no disk and no memory.

safetensors (0.8, `README.md`, "Format") begins with the length of a header, 8 bytes, and the header, JSON: each tensor's type, shape and
place in the bytes behind it. Those bytes are a hole in a sparse file here: they read as zeros, and are mapped, not read, until somebody
looks at them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ALIGNMENT = 8
_LENGTH_BYTES = 8

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

SHARD_BYTES = 5 * 10**9
"""What `save_pretrained` of transformers 4.57 and huggingface_hub 0.36 writes into one file at most, unless it is told otherwise."""

MOST_KEPT_BYTES = 65_536
"""Of a tensor that is no weight: what quantisation writes beside the weights is read by its values (bitsandbytes' `quant_state`)."""


class EmptyTensor(NamedTuple):
    """A tensor of a file of weights."""

    dtype: str
    """As safetensors calls it: "BF16"."""
    shape: tuple[int, ...]
    content: bytes | None = None
    """Its bytes, where they are not to be zeros."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it takes in a file."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    def of_type(self, dtype: str | None) -> EmptyTensor:
        """Return it as a tensor of *dtype*, where it is one of floats, and *dtype* is one."""
        return self if dtype is None or self.dtype not in FLOATS else self._replace(dtype=dtype, content=None)


def read_tensors(file: Path) -> dict[str, EmptyTensor]:
    """Return what the safetensors *file* says of its tensors, in its order, without reading weights. Raises ValueError for another file."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is no file of safetensors")
        header: dict[str, Any] = json.loads(opened.read(length))
        begin = _LENGTH_BYTES + length
        tensors = {}
        for name, told in header.items():
            if name == "__metadata__":
                continue
            content = None
            if told["dtype"] not in FLOATS and told["data_offsets"][1] - told["data_offsets"][0] <= MOST_KEPT_BYTES:
                opened.seek(begin + told["data_offsets"][0])
                content = opened.read(told["data_offsets"][1] - told["data_offsets"][0])
            tensors[name] = EmptyTensor(told["dtype"], tuple(told["shape"]), content)
    return tensors


def write_empty(file: Path, tensors: Mapping[str, EmptyTensor]) -> None:
    """Write a safetensors *file* of *tensors*, in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.num_bytes]}
        end += tensor.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for name, tensor in tensors.items():
            if tensor.content is not None:
                opened.seek(_LENGTH_BYTES + len(text) + header[name]["data_offsets"][0])
                opened.write(tensor.content)
        opened.truncate(_LENGTH_BYTES + len(text) + end)


def write_checkpoint(folder: Path, shards: Sequence[Mapping[str, EmptyTensor]], *, stem: str, variant: str | None) -> None:
    """Write the files of a checkpoint, whose names begin with *stem*: one, or several and their index."""
    middle = f".{variant}" if variant else ""
    if len(shards) == 1:
        write_empty(folder / f"{stem}{middle}.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}{middle}-{number:05d}-of-{len(shards):05d}.safetensors"
        write_empty(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    size = sum(tensor.num_bytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index{middle}.json").write_text(json.dumps(index), encoding="utf-8")


def in_shards(tensors: Mapping[str, EmptyTensor]) -> list[dict[str, EmptyTensor]]:
    """
    Return *tensors* as `save_pretrained` would write them: in files of 5 GB, each in the order of their types and names.

    One file of a large model could not be mapped either, where the host has less memory than that.
    """
    shards: list[dict[str, EmptyTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.num_bytes
    return [dict(sorted(shard.items(), key=lambda item: (-_BITS[item[1].dtype], item[0]))) for shard in shards]

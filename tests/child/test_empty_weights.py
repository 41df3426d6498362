"""Files of weights without weights: safetensors reads them as any other, and they take no disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.child.empty_weights import EmptyTensor, in_shards, read_tensors, write_checkpoint, write_empty

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


def test_a_file_of_eight_gigabytes_takes_no_disk(tmp_path: Path) -> None:
    """The weights are a hole in it."""
    file = tmp_path / "model.safetensors"
    write_empty(file, {"a": EmptyTensor("BF16", (8, 2**20, 512)), "b": EmptyTensor("I64", ())})

    status = file.stat()
    with safetensors_torch.safe_open(file, framework="pt") as opened:
        told = {name: (opened.get_slice(name).get_dtype(), opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        last = opened.get_slice("a")[7, -1]
        metadata = opened.metadata()

    assert status.st_size > 8 * 2**30
    assert status.st_blocks * 512 < 2**20
    assert told == {"a": ("BF16", [8, 2**20, 512]), "b": ("I64", [])}
    assert (last.dtype, last.count_nonzero().item(), metadata) == (torch.bfloat16, 0, {"format": "pt"})


def test_a_large_checkpoint_is_several_files_as_transformers_writes_them(tmp_path: Path) -> None:
    """Of 5 GB at most, in the order of the model; each in the order of types and names."""
    gigabyte = EmptyTensor("F16", (500, 1_000_000))
    shards = in_shards({f"layer.{number}": gigabyte for number in range(11, 0, -1)} | {"head": EmptyTensor("F32", (500, 1_000_000))})

    write_checkpoint(tmp_path, shards, stem="model", variant=None)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())

    assert [list(shard) for shard in shards] == [
        ["layer.10", "layer.11", "layer.7", "layer.8", "layer.9"],
        ["layer.2", "layer.3", "layer.4", "layer.5", "layer.6"],
        ["head", "layer.1"],
    ]
    assert index["weight_map"]["head"] == "model-00003-of-00003.safetensors"
    assert index["metadata"]["total_size"] == 13 * 10**9
    assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}


def test_what_is_copied_of_a_checkpoint_are_its_names_its_types_and_small_integers(tmp_path: Path) -> None:
    """What bitsandbytes writes beside its weights is read by its values; weights are zeros."""
    weights = {
        "w": torch.ones(300, 200, dtype=torch.float16),
        "state": torch.arange(10, dtype=torch.uint8),
        "codes": torch.ones(70_000, dtype=torch.uint8),
    }
    safetensors_torch.save_file(weights, tmp_path / "real.safetensors")

    tensors = read_tensors(tmp_path / "real.safetensors")
    write_empty(tmp_path / "empty.safetensors", tensors)
    found = safetensors_torch.load_file(tmp_path / "empty.safetensors")

    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()
    }
    assert list(tensors) == list(read_tensors(tmp_path / "empty.safetensors"))
    assert torch.equal(found["state"], weights["state"])
    assert (found["w"].count_nonzero(), found["codes"].count_nonzero()) == (0, 0)


def test_floats_take_another_type_and_integers_keep_theirs() -> None:
    """As a model is loaded in another type than it is stored in."""
    assert EmptyTensor("F32", (2,)).of_type("BF16").dtype == "BF16"
    assert EmptyTensor("I8", (2,)).of_type("BF16").dtype == "I8"
    assert EmptyTensor("F32", (2,)).of_type(None).dtype == "F32"


def test_another_file_is_refused(tmp_path: Path) -> None:
    """A pickle has no header of safetensors."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x80\x02}q\x00." * 20)

    with pytest.raises(ValueError, match="is no file of safetensors"):
        read_tensors(file)

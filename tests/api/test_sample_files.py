"""Samples as they are described: typed, and in files that safetensors and NumPy wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from memplan.analysis.dataset_memory import SampleValue
from memplan.api.sample_files import sample_value_from, sample_values_in
from memplan.errors import ConfigError, UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3x224x224:bf16", SampleValue(shape=(3, 224, 224), dtype="bfloat16")),
        ("3×224×224:torch.float32", SampleValue(shape=(3, 224, 224), dtype="float32")),
        ("ids=512:int64", SampleValue(name="ids", shape=(512,), dtype="int64")),
        ("label=scalar:long", SampleValue(name="label", shape=(), dtype="int64")),
    ],
)
def test_a_value_is_typed_as_shape_and_type(text: str, value: SampleValue) -> None:
    """With a name, if it has one."""
    assert sample_value_from(text) == value


@pytest.mark.parametrize("text", ["", "3x224x224", "3x:bf16", "-1x3:fp32", "3,224:fp32", "=3:fp32", ":fp32"])
def test_a_text_that_describes_nothing_is_an_error(text: str) -> None:
    """It shows how to write one."""
    with pytest.raises(UsageError, match="does not describe a value of a sample"):
        sample_value_from(text)


def test_an_unknown_type_is_named() -> None:
    """Quantized types are not kept."""
    with pytest.raises(UsageError, match="unknown type: 'int4'"):
        sample_value_from("3:int4")


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_safetensors_file_tells_shape_and_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of each of its types, with the bytes that PyTorch counts."""
    tensor = torch.empty(2, 3, dtype=dtype)
    save_file({"image": tensor}, tmp_path / "sample.safetensors", {"some": "metadata"})

    (value,) = sample_values_in(tmp_path / "sample.safetensors")

    assert (value.name, value.shape, f"torch.{value.dtype}") == ("image", (2, 3), str(dtype))
    assert value.sample_bytes == tensor.nbytes


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "|u1", "<i8", "?", "<c16", "<u2"])
def test_a_numpy_file_tells_shape_and_type(dtype: str, tmp_path: Path) -> None:
    """In either byte order."""
    array = np.zeros((2, 3), dtype)
    np.save(tmp_path / "sample.npy", array)

    (value,) = sample_values_in(tmp_path / "sample.npy")

    assert (value.shape, value.sample_bytes, value.dtype) == ((2, 3), array.nbytes, array.dtype.name)


@pytest.mark.parametrize("content", [b"", b"no header at all", b"\x93NUMPY\x01\x00\x04\x00{'a'", b'\x08\0\0\0\0\0\0\0{"a": 1}'])
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_a_file_of_another_kind_is_one_clear_line(content: bytes, suffix: str, tmp_path: Path) -> None:
    """It names the file."""
    path = tmp_path / f"sample{suffix}"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=f"sample{suffix}: not a sample in the format of {suffix} files"):
        sample_values_in(path)


def test_texts_are_no_sample_for_a_gpu(tmp_path: Path) -> None:
    """NumPy saves them too."""
    np.save(tmp_path / "sample.npy", np.array(["a"]))

    with pytest.raises(ConfigError, match="not a sample"):
        sample_values_in(tmp_path / "sample.npy")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With the system's reason."""
    with pytest.raises(ConfigError, match=r"none.npy: No such file or directory"):
        sample_values_in(tmp_path / "none.npy")

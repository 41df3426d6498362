"""PYTORCH_ALLOC_CONF is read as PyTorch reads it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.allocator.config import AllocatorSettings, read_settings
from memplan.errors import UsageError
from memplan.units import MIB

ASK_PYTORCH = """
import json, sys
import torch
verdicts = []
for text in json.load(sys.stdin):
    try:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")  # which lasts from one text to the next
        torch._C._accelerator_setAllocatorSettings(text)
        verdicts.append(True)
    except (ValueError, RuntimeError, IndexError):
        verdicts.append(False)
print(json.dumps(verdicts))
"""

TEXTS = [
    "", ",", "foo:1", "max_split_size_mb", "max_split_size_mb:", "max_split_size_mb:128", "max_split_size_mb:19", "max_split_size_mb:20",
    "max_split_size_mb=128", "max_split_size_mb,128", "max_split_size_mb:128,", "max_split_size_mb:128,,expandable_segments:True",
    "max_split_size_mb:-1", "max_split_size_mb:64MB", " max_split_size_mb : 64 ", "max_split_size_mb:64 expandable_segments:True",
    "max_split_size_mb:99999999999999999999999", "max_split_size_mb:[128]", "max_split_size_mb:128:5", "max_split_size_mb:128]",
    "expandable_segments:True", "expandable_segments:true", "expandable_segments:False,foo:True",
    "garbage_collection_threshold:0.5", "garbage_collection_threshold:1", "garbage_collection_threshold:0",
    "garbage_collection_threshold:nan", "garbage_collection_threshold:.5e0", "garbage_collection_threshold:x",
    "roundup_power2_divisions:4", "roundup_power2_divisions:3", "roundup_power2_divisions:0", "roundup_power2_divisions:[]",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "roundup_power2_divisions:[256:1,512:3]", "roundup_power2_divisions:[255:1]",
    "roundup_power2_divisions:[256:1", "roundup_power2_divisions:[256:1,]", "roundup_power2_divisions:[>:8]",
    "large_segment_size_mb", "large_segment_size_mb:10", "large_segment_size_mb:11", "large_segment_size_mb:[30",
    "large_segment_size_mb:40,max_split_size_mb:20", "max_split_size_mb:20,large_segment_size_mb:40",
    "max_split_size_mb:64,large_segment_size_mb:40", "max_non_split_rounding_mb:10", "max_non_split_rounding_mb:30",
    "per_process_memory_fraction:0.5", "per_process_memory_fraction:1.5", "per_process_memory_fraction:0",
    "throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom:1", "backend", "backend:native", "backend:foo",
    "pinned_num_register_threads:8", "pinned_num_register_threads:3", "pinned_num_register_threads:256",
    "pinned_reserve_segment_size_mb:0", "pinned_reserve_segment_size_mb:10", "pinned_use_background_threads:True",
    "pinned_use_background_threads:x", "pinned_max_round_threshold_mb:3", "pinned_max_cached_size_mb:3", "pinned_free_catch_all:True",
    "release_lock_on_cudamalloc:True", "graph_capture_record_stream_reuse:True",
]  # fmt: skip


def is_accepted(text: str) -> bool:
    try:
        read_settings(text)
    except UsageError:
        return False
    return True


def test_what_pytorch_accepts_is_accepted_and_nothing_else() -> None:
    """The real PyTorch (2.13) is asked about each of these texts: no GPU is needed for that."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        pytest.skip(f"PyTorch {torch.__version__} reads some settings otherwise")
    asked = subprocess.run([sys.executable, "-c", ASK_PYTORCH], input=json.dumps(TEXTS), capture_output=True, text=True, check=True)

    assert {text: is_accepted(text) for text in TEXTS} == dict(zip(TEXTS, json.loads(asked.stdout), strict=True))


def test_nothing_said_is_the_default() -> None:
    """20 MiB for a large segment, no limit to splitting, no rounding to powers of two."""
    assert read_settings("") == AllocatorSettings()


def test_sizes_are_mebibytes() -> None:
    settings = read_settings("max_split_size_mb:128,large_segment_size_mb:40,expandable_segments:True")

    assert (settings.max_split_bytes, settings.large_segment_bytes, settings.expandable_segments) == (128 * MIB, 40 * MIB, True)
    assert settings.max_non_split_rounding_bytes == 40 * MIB  # a large segment, unless it is said


def test_divisions_hold_from_their_size_to_the_next() -> None:
    """Sizes in MiB: below the first listed as the first; > is for all behind the last."""
    settings = read_settings("roundup_power2_divisions:[4:2,16:8,>:1]")

    assert settings.roundup_power2_divisions == (2, 2, 2, 0, 8, *[1] * 11)


@pytest.mark.parametrize("text", ["max_split_size_mb:1", "foo:1", "expandable_segments:yes"])
def test_a_refusal_names_the_variable_and_the_text(text: str) -> None:
    with pytest.raises(UsageError, match=f"PYTORCH_ALLOC_CONF={text}"):
        read_settings(text)


@given(
    st.lists(
        st.sampled_from([":", ",", "[", "]", ">", "4", "0.5", "True", "x", *(text.partition(":")[0] for text in TEXTS)]), max_size=12
    ).map("".join)
)
def test_any_text_is_read_or_refused(text: str) -> None:
    """No other error, and no endless loop."""
    is_accepted(text)

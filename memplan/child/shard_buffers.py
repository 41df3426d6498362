"""What sharding keeps outside parameters: FSDP's whole gradients between micro-batches, DeepSpeed's shards and buckets."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def classes_of_shards() -> tuple[list[type], list[type]]:
    """Return the classes of FSDP's parameters and of DeepSpeed's buckets, where this program has loaded them."""
    fsdp = _loaded("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam")
    zero = _loaded("deepspeed.runtime.zero.stage_1_and_2", "IPGBucket") + _loaded("deepspeed.runtime.zero.stage3", "IPGBucketZ3")
    return fsdp, zero


def _loaded(module: str, name: str) -> list[type]:
    found = getattr(sys.modules.get(module), name, None)
    return [found] if isinstance(found, type) else []


def whole_gradients(parameters: Iterable[Any]) -> list[Any]:
    """Return the gradients that FSDP's *parameters* have of earlier micro-batches, not reduced yet."""
    kept = (getattr(parameter, "unsharded_accumulated_grad", None) for parameter in parameters)
    return [gradient for gradient in kept if gradient is not None]


def bucket_buffers(buckets: Iterable[Any]) -> list[Any]:
    """Return the memory of DeepSpeed's *buckets*: one tensor, or several in turn."""
    kept = (getattr(bucket, "buffer", None) for bucket in buckets)
    return [buffer for each in kept if each is not None for buffer in (each if isinstance(each, list) else [each])]


def shards_of(parameters: Iterable[Any]) -> list[Any]:
    """Return the shards that DeepSpeed's third stage keeps of *parameters*, which are empty themselves but while they are gathered."""
    kept = (getattr(parameter, "ds_tensor", None) for parameter in parameters)
    return [shard for shard in kept if shard is not None]

"""What the caching allocator reserves over what is allocated, fitted to rehearsals.

The allocator keeps freed blocks and can use one again only for a tensor that fits into it. A head over a large vocabulary makes tensors of
the logits' size in two types, one twice as large as the other, and none fits where another was: under autocast up to half as much again
was reserved as was allocated. The gradient of a large embedding does the same on a smaller scale.

The constants were fitted to every second step of a grid, and checked on the others (`tests/accuracy/test_analytic.py`): 14 architectures,
with and without a head over the vocabulary, five precisions, with and without checkpointing, sequences of 64 to 1024, batches that fill
30% to 100% of five GPUs (PyTorch 2.13.0, transformers 4.57.6, recorded 2026-11-22).
Both halves have the same architectures; fitted to seven of them, a bound of this form covered 95% to 97% of the others' steps.
"""

from memplan.dtypes import ELEMENT_BYTES, is_mixed
from memplan.memory.estimate import MemoryRange
from memplan.workload.model import encoder_of
from memplan.workload.workload import Workload

HELD_OUT_COVERAGE = 0.98
"""At least this share of the steps that were held back reserve no more than the upper bound."""

PASSING_SHARE, MOST_PASSING_SHARE = 0.8, 1.5
"""Of what is gathered and reduced at a time: by rehearsals of FSDP and ZeRO on 8 GPUs (PyTorch 2.13.0, DeepSpeed 0.19.8, 2026-11-23)."""


def reserved_range(workload: Workload, *, allocated_bytes: int, largest_call_tokens: int, passing_bytes: int = 0) -> MemoryRange:
    """
    Return what the allocator reserves where *allocated_bytes* is the estimated peak of allocated memory.

    *largest_call_tokens* is the number of tokens in the largest call of the model, which decides the size of the logits. *passing_bytes* is
    what ranks that share a model gather and reduce at a time: it comes and goes on streams of its own, whose memory no other stream uses.
    """
    encoder = encoder_of(workload.model)
    if encoder is None:  # a model by counts: nothing is known of its tensors, and the bound is the share that covers most models
        return MemoryRange(
            low_bytes=allocated_bytes,
            expected_bytes=int(allocated_bytes * 1.06 + passing_bytes * PASSING_SHARE),
            high_bytes=int(allocated_bytes * 1.20 + passing_bytes * MOST_PASSING_SHARE),
        )
    element_bytes = ELEMENT_BYTES["float32"]
    logits_bytes = largest_call_tokens * encoder.vocab_size * element_bytes if encoder.predicts_tokens else 0
    embedding_bytes = encoder.vocab_size * encoder.hidden_size * element_bytes
    logits_share = 1.2 if is_mixed(workload.training.precision) else 0.6
    return MemoryRange(
        low_bytes=int(allocated_bytes * 0.90),
        expected_bytes=int(allocated_bytes * 1.02 + logits_bytes * 0.4 + embedding_bytes * 0.2 + passing_bytes * PASSING_SHARE),
        high_bytes=int(allocated_bytes * 1.12 + logits_bytes * logits_share + embedding_bytes * 0.5 + passing_bytes * MOST_PASSING_SHARE),
    )

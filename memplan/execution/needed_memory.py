"""
What a program needs that takes what is free.

Under `torch.backends.cudnn.benchmark` PyTorch tries, for each convolution, every kernel of cuDNN's for whose workspace there is room, so
that a GPU may be nearly full in the first step whatever the batch. On one with less memory the same program leaves the larger ones out.
Whether it fits is told by a run with unlimited memory, in which the kernels are tried that want the least workspace, or less than a
sixty-fourth of the smallest GPU of the kind (standin/csrc/backend.c): that is what a plan is made of too.
"""

from __future__ import annotations

from collections.abc import Callable

from memplan.errors import NothingSeenError, UsageError
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.gpu import GpuSpec


def with_needs(run: Callable[[GpuSpec], Rehearsal], gpu: GpuSpec, *, on_next_run: Callable[[str], None] | None = None) -> Rehearsal:
    """
    Return how *run* goes on *gpu*; where it takes what is free, and may so take more than there is, with what it needs.

    *on_next_run* is told of the second run. Raises as *run* does the first time.
    """
    found = run(gpu)
    # PyTorch takes another kernel where a workspace is not free any more.
    went_on = found.out_of_memory is None or found.out_of_memory.is_caught
    if not (found.takes_what_is_free and found.fits is False and went_on) or found.was_interrupted:
        return found
    if on_next_run is not None:
        on_next_run("unlimited memory and small workspaces of cuDNN, to find how much it needs")
    try:
        whole = run(gpu.endless())
    except (UsageError, NothingSeenError):
        return found
    if whole.was_interrupted:
        return found.model_copy(update={"was_interrupted": True})
    return found.model_copy(update={"needs": whole.device_used}) if whole.verdict == "fits" else found

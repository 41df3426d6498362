"""
What the stages of a pipeline agree on before they begin, where the other stages are not there.

From PyTorch 2.13 on each stage says whether it was told the shapes of what it gets and gives; unless all were, they find them by sending
each other descriptions. The votes go from GPU to GPU and are multiplied there. The absent stages say what those of this rank say.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def vote_as_this_rank(module: Any) -> None:
    """Have the stages in *module*, `torch.distributed.pipelining.stage`, agree on what this rank's own say."""
    stage = module.PipelineStage
    if not hasattr(stage, "_warmup_forward_vote"):
        return
    vote, result = stage._warmup_forward_vote, stage._warmup_backward_result
    votes: dict[int, int] = {}

    @functools.wraps(vote)
    def noted(self: Any, has_backward: bool, *arguments: Any, **keywords: Any) -> Any:
        votes[self.stage_index] = int(not module.InferenceMode.needs_dynamic(self._user_meta, has_backward))
        return vote(self, has_backward, *arguments, **keywords)

    @functools.wraps(result)
    def known(self: Any, *arguments: Any, **keywords: Any) -> Any:
        agreed = result(self, *arguments, **keywords)
        return agreed.copy_(torch.full(agreed.shape, min(votes.values()), dtype=agreed.dtype, device="cpu"))

    stage._warmup_forward_vote, stage._warmup_backward_result = noted, known

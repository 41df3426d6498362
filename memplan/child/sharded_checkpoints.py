"""
Checkpoints of sharded models, where the other ranks are not there.

With FullyShardedDataParallel, each rank has the optimizer's state of those parameters of which its shard of the flat parameter holds some,
and tells the others which. Copies of one rank would leave the other parameters out; that the ranks together have all of them is known.

With torch.distributed.checkpoint, each rank says which pieces of the tensors it can write, and one decides who writes which. Copies of one
rank would have its pieces only: this rank writes all of its own, and the others are taken to write theirs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import distributed

from memplan.child.one_rank import NeedsOtherRankError


def know_all_parameters(module: Any) -> None:
    """Have *module*, `torch.distributed.fsdp._optim_utils`, find the state of every parameter on some rank."""
    convert = module._convert_state_with_orig_params

    @functools.wraps(convert)
    def with_all(keys: list[Any], *arguments: Any, **keywords: Any) -> Any:
        infos = arguments[1] if len(arguments) > 1 else keywords["fqn_to_fsdp_param_info"]
        known = {name for key in keys for name in key.unflat_param_names}
        trained = {name for info in infos.values() for name, at in info.param_indices.items() if info.param_requires_grad[at]}
        absent = [module._OptimStateKey(unflat_param_names=(name,), is_fsdp_managed=True) for name in trained - known]
        return convert(sorted([*keys, *absent]), *arguments, **keywords)

    module._convert_state_with_orig_params = with_all


def write_own_pieces(module: Any) -> None:
    """Have *module*, `torch.distributed.checkpoint.default_planner`, leave to this rank what it has, and miss nothing of the others."""
    if not hasattr(module, "dedup_save_plans"):
        return
    validate = module._validate_global_plan

    def own_alone(plans: list[Any], *arguments: Any, **keywords: Any) -> list[Any]:
        del arguments, keywords
        own = distributed.get_rank() % len(plans)
        return [plan if rank == own else dataclasses.replace(plan, items=[]) for rank, plan in enumerate(plans)]

    @functools.wraps(validate)
    def valid(*arguments: Any, **keywords: Any) -> Any:
        return [] if isinstance(validate(*arguments, **keywords), list) else True  # a list of errors from PyTorch 2.13 on

    module.dedup_save_plans, module._validate_global_plan = own_alone, valid


def need_senders(module: Any) -> None:
    """Have *module*, `torch.distributed.optim.zero_redundancy_optimizer`, say that other ranks have the state that it gathers."""
    broadcast = module._broadcast_object

    @functools.wraps(broadcast)
    def sent(value: Any, src_rank: int, *arguments: Any, **keywords: Any) -> Any:
        if src_rank != distributed.get_rank():
            raise NeedsOtherRankError(f"the program gathers the optimizer's state, of which rank {src_rank} has another part")
        return broadcast(value, src_rank, *arguments, **keywords)

    module._broadcast_object = sent

"""
Checkpoints of FullyShardedDataParallel, where the other ranks are not there.

Each rank has the optimizer's state of those parameters of which its shard of the flat parameter holds some, and tells the others which.
Copies of one rank would leave the other parameters out; that the ranks together have all of them is known.
"""

from __future__ import annotations

import functools
from typing import Any


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

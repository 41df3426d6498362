"""
How the ranks of a workload train together: its model in DistributedDataParallel, sharded by `fully_shard`, or in DeepSpeed's engine, and
split where several work on one batch (`split.py`).

One of the ranks is run (`child/absent_ranks.py`), with the real code of PyTorch and DeepSpeed around the model. Blocks are sharded one by
one, and what is left with the root, as PyTorch's tutorials, torchtitan and Accelerate do.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memplan.child.models.counted import CountedPiece
from memplan.child.models.huggingface import FromTransformers
from memplan.child.models.optimizers import make_optimizer
from memplan.child.models.torchtune import FromTorchtune, TorchtuneBlock
from memplan.child.models.transformer import Block, TransformerWithHead
from memplan.child.one_rank import world
from memplan.workload.model import TorchtuneModel
from memplan.workload.optimizer import BITSANDBYTES, OPTIMIZER_PACKAGES
from memplan.workload.parallelism import ZERO_PACKAGE, ZERO_STAGES
from memplan.workload.workload import Workload

SHORT_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The types that a precision computes in, by its first part; fp32 computes in its own."""


def trainer_of(workload: Workload, device: str) -> Trainer:
    """Return what trains *workload* on *device*: alone, or with other ranks in the process group that is begun here."""
    parallelism = workload.parallelism
    if parallelism.num_gpus == 1:
        return Trainer(workload, device)
    torch.cuda.set_device(0)
    # On a real GPU nobody else is there, and DDP of one rank allocates as that of many.
    alone: dict[str, Any] = {} if world() else {"store": torch._C._distributed_c10d.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("nccl", **alone)
    torch.distributed.all_reduce(torch.zeros(1, device=device))  # as trainers reduce their losses, over all ranks
    if parallelism.num_copies == 1:
        return Trainer(workload, device)
    return _kind_of(workload)(workload, device)


def _kind_of(workload: Workload) -> type[Trainer]:
    """Return what trains *workload* on several GPUs."""
    strategy = workload.parallelism.strategy
    if strategy in ZERO_STAGES:
        return ZeroTrainer
    if strategy == "fsdp":
        return TorchtuneTrainer if isinstance(workload.model, TorchtuneModel) else FsdpTrainer
    return DdpTrainer


def short_type(workload: Workload) -> torch.dtype | None:
    """Return the type of two bytes that *workload* computes in; None for fp32."""
    return SHORT_TYPES.get(workload.training.precision.partition("-")[0])


class Trainer:
    """One rank that trains alone; others derive from it what they do otherwise."""

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload = workload
        self.device = device
        kind = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler  # the first is there from 2.3 on
        self._scaler: Any = kind(enabled=workload.training.precision == "fp16-mixed")
        self._optimizer: Any = None
        self._called: Any = None
        self._shards: list[tuple[Any, nn.Parameter]] = []

    def place(self, root: nn.Module) -> None:
        """Put *root*, made without memory, on the device: its part where several ranks split it."""
        self._split(root)
        move(root, self.device)

    def _split(self, root: nn.Module) -> None:
        """Leave of *root* what this rank has of its layers and their matrices, where ranks split those."""
        parallelism = self.workload.parallelism
        if not parallelism.split_by:
            return
        from memplan.child.models.split import cut, mesh_of, split_matrices  # noqa: PLC0415

        is_stage = parallelism.pipeline_parallel_size > 1
        if is_stage:
            cut(root, parallelism)
        if parallelism.tensor_parallel_size > 1:
            split_matrices(root, mesh_of(parallelism)["tensor"], is_stage=is_stage)

    def prepare(self, root: nn.Module, *, may_leave_parts_unused: bool = False) -> None:
        """
        Get ready to train *root*, of which a step may leave parts unused.

        The optimizer gets what this rank has of each parameter, where it is one of torch.optim or Lion. What those allocate is the same to
        the byte, and DTensor takes seconds to find out how foreach operators of hundreds of tensors are sharded (2.13). Others ask for the
        whole size of a parameter, or do what DTensor refuses.
        """
        del may_leave_parts_unused
        self._called = root
        trained = trained_of(root)
        if self.workload.optimizer.name not in (*OPTIMIZER_PACKAGES, *BITSANDBYTES):
            parts: list[Any] = [part for part in trained if hasattr(part, "to_local")]
            self._shards = [(whole, nn.Parameter(whole.to_local().detach())) for whole in parts]
            own = {id(whole): shard for whole, shard in self._shards}
            trained = [own.get(id(parameter), parameter) for parameter in trained]
        if self.workload.optimizer.steps_in_backward:
            for parameter in trained:
                self._step_in_backward(parameter, root)
            return
        self._optimizer = make_optimizer(self.workload.optimizer, trained, root)

    def _step_in_backward(self, parameter: nn.Parameter, root: nn.Module) -> None:
        """Have an optimizer of its own update *parameter* as soon as its gradient is whole."""
        optimizer = make_optimizer(self.workload.optimizer, [parameter], root)

        def update(_: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)

    def split_batch(self, inputs: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Return the context in which *inputs* are trained on: where ranks split a batch, each has its part."""
        if not self.workload.parallelism.split_by:
            return contextlib.nullcontext()
        from memplan.child.models.split import split_batch  # noqa: PLC0415

        return split_batch(inputs, self.workload.parallelism)

    @property
    def module(self) -> nn.Module:
        """Return what is called for a forward."""
        found: nn.Module = self._called
        return found

    def call(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Return what the model answers."""
        answer: Any = self._called(*arguments, **keywords)
        own: Tensor = answer.to_local() if hasattr(answer, "to_local") else answer
        return own

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context that forwards run in."""
        is_mixed = self.workload.training.precision.endswith("-mixed")
        return torch.autocast("cuda", dtype=short_type(self.workload)) if is_mixed else contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run the backward of *loss*."""
        self.scaled(loss).backward()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return *loss* as the gradients of fp16 need it."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def run(self, micro_batch: Callable[[], None]) -> None:
        """Run one step: all its micro-batches, and the optimizer."""
        num_micro_batches = self.workload.training.gradient_accumulation_steps
        for number in range(1, num_micro_batches + 1):
            with self._without_reducing() if number < num_micro_batches else contextlib.nullcontext():
                micro_batch()
        self.update()

    def _without_reducing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a micro-batch after which others follow before the optimizer's step."""
        return contextlib.nullcontext()

    def update(self) -> None:
        """Step the optimizer, and let go of the gradients."""
        for whole, shard in self._shards:
            gradient = whole.grad
            shard.grad = None if gradient is None else gradient.redistribute(placements=whole.placements).to_local()
            whole.grad = None
        if self._optimizer is None:  # what there was to update, the backward has
            return
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()


class DdpTrainer(Trainer):
    """Each rank has the whole model, and reduces gradients in buckets."""

    def prepare(self, root: nn.Module, *, may_leave_parts_unused: bool = False) -> None:
        """Put *root* into DistributedDataParallel as it is by default."""
        super().prepare(root)
        self._called = nn.parallel.DistributedDataParallel(root, device_ids=[0], find_unused_parameters=may_leave_parts_unused)

    def _without_reducing(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self._called.no_sync()
        return context


class FsdpTrainer(Trainer):
    """
    Each rank has a shard of every parameter, gradient and moment.

    With mixed precision the shards are fp32, and gathered and computed with in the short type; gradients are reduced in fp32. Autocast
    is on too, as Accelerate has it (1.15, `Accelerator.prepare_model`): its norms and losses are then fp32.
    """

    def place(self, root: nn.Module) -> None:
        """Shard *root* where it takes no memory, and then have the shards take theirs."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

        from memplan.child.models.split import mesh_of  # noqa: PLC0415

        parallelism = self.workload.parallelism
        self._split(root)
        is_mixed = self.workload.training.precision.endswith("-mixed")
        for trained in trained_of(root) if is_mixed else ():
            trained.data = trained.data.float()  # as Accelerate does (1.15, `fsdp2_prepare_model`), whatever type they were loaded in
        types: dict[str, Any] = {"param_dtype": short_type(self.workload), "reduce_dtype": torch.float32} if is_mixed else {}
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(**types)}
        if parallelism.shards < parallelism.num_gpus:  # else its own default, the group of all ranks
            dims = ("copies", "shards") if parallelism.shards < parallelism.num_copies else "shards"
            options["mesh"] = mesh_of(parallelism)[dims]
        for block in blocks_of(root):
            fully_shard(block, reshard_after_forward=parallelism.reshard_after_forward, **options)
        self._shard_rest(root, partial(fully_shard, **options))
        move(root, self.device)

    def _shard_rest(self, root: nn.Module, shard: Callable[..., Any]) -> None:
        """Shard what is in no block. Its own default keeps that from forward to backward, which follows at once."""
        shard(root)

    def _without_reducing(self) -> contextlib.AbstractContextManager[Any]:
        """As Accelerate does (1.15, `Accelerator.no_sync`): whole gradients are kept until the last micro-batch."""
        return self._without_sync()

    @contextlib.contextmanager
    def _without_sync(self) -> Iterator[None]:
        self._called.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._called.set_requires_gradient_sync(True)


class TorchtuneTrainer(FsdpTrainer):
    """FSDP2 as torchtune's recipes have it: gradients are reduced after every micro-batch, and the loss is no part of what is sharded."""

    def _shard_rest(self, root: nn.Module, shard: Callable[..., Any]) -> None:
        """Shard the decoder; up to 0.6 what is in no block is given up after its forward too (training/_distributed.py, `shard_model`)."""
        assert isinstance(root, FromTorchtune)
        is_given_up = self.workload.parallelism.reshard_after_forward and root.described.loss != "chunked_states"
        shard(root.inner, reshard_after_forward=is_given_up)

    def _without_reducing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class ZeroTrainer(Trainer):
    """
    DeepSpeed's ZeRO, with its own defaults for what a Workload does not say.

    It has no autocast: the model is in the short type, and its engine keeps fp32 copies of what it trains.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        super().__init__(workload, device)
        training = workload.training
        kind = training.precision.partition("-")[0]
        self._config = {
            "train_micro_batch_size_per_gpu": training.micro_batch_size,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "zero_optimization": {"stage": ZERO_STAGES[workload.parallelism.strategy]},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **({kind: {"enabled": True}} if kind in SHORT_TYPES else {}),
        }

    def place(self, root: nn.Module) -> None:
        """Put *root* on the device in the type that the engine gives it, in stage 3 parameter by parameter, each sharded at once."""
        dtype = short_type(self.workload)
        if dtype is not None:
            root.to(dtype)
        if self.workload.parallelism.strategy != "zero3":
            super().place(root)
            return
        sharding = importlib.import_module(ZERO_PACKAGE).zero.Init(config_dict_or_path=self._config, dtype=dtype)
        shards: dict[nn.Parameter, nn.Parameter] = {}
        for module in root.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter not in shards:
                    whole = torch.empty_like(parameter, device=self.device)
                    shards[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                    del whole
                    sharding._zero_init_param(shards[parameter])
                setattr(module, name, shards[parameter])
        super().place(root)

    def prepare(self, root: nn.Module, *, may_leave_parts_unused: bool = False) -> None:
        """Give *root* and its optimizer to DeepSpeed's engine."""
        deepspeed = importlib.import_module(ZERO_PACKAGE)
        super().prepare(root, may_leave_parts_unused=may_leave_parts_unused)
        self._called, *_ = deepspeed.initialize(
            model=root, model_parameters=trained_of(root), optimizer=self._optimizer, config=self._config
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Have the engine run the backward of *loss*, and step where that was the last micro-batch."""
        self._called.backward(loss)
        self._called.step()

    def update(self) -> None:
        """Do nothing: the engine has."""


def trained_of(root: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of *root* that are trained."""
    return [parameter for parameter in root.parameters() if parameter.requires_grad]


def blocks_of(root: nn.Module) -> list[nn.Module]:
    """
    Return the parts of *root* that are sharded one by one, the innermost first.

    Of a model of transformers those whose classes it names, as Accelerate takes them (1.15, `fsdp2_prepare_auto_wrap_policy`).
    """
    modules = list(root.modules())
    named = {name for module in modules if isinstance(module, FromTransformers) for name in module.inner._no_split_modules or ()}
    found = [module for module in modules if isinstance(module, (Block, CountedPiece, TorchtuneBlock)) or type(module).__name__ in named]
    return found[::-1]


def move(model: nn.Module, device: str) -> None:
    """Put *model*, made without memory, on *device* as `.to(device)` would: tensor by tensor, and what is shared once."""
    moved: dict[int, Tensor] = {}
    kind = torch.device(device).type

    def empty(tensor: Tensor) -> Tensor:
        if tensor.device.type == kind:  # shared by two modules, and moved with the first
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = torch.empty_like(tensor, device=device)
        return moved[id(tensor)]

    model._apply(empty)
    for part in model.modules():
        if isinstance(part, (TransformerWithHead, FromTransformers)):
            part.tie()

"""
Training steps of workloads: `build(device, workload=…)`, as every program that can be rehearsed.

A model that was read from a Hugging Face config.json is built by transformers where that is installed, without weights; every other kind is
a module of this room.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from memplan.child.models.contrastive import ContrastiveEncoder, Texts, cached_backward, loss_of
from memplan.child.models.counted import CountedModel
from memplan.child.models.fine_tuning import prepare_fine_tuning
from memplan.child.models.huggingface import FromTransformers
from memplan.child.models.optimizers import make_optimizer
from memplan.child.models.transformer import Adapted, Transformer, TransformerWithHead
from memplan.workload.model import ContrastiveEncoderModel, HuggingFaceModel, Model, ParametersModel, TransformerModel, encoder_of
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's default bucket_cap_mb."""

MicroBatch = Callable[[], None]
"""Forward and backward of one micro-batch."""


def build(device: str, workload: dict[str, Any]) -> Callable[[], None]:
    """Return a function that runs one step of *workload* (as JSON) in its first stage: all its micro-batches, and the optimizer."""
    described = Workload.model_validate(workload)
    return step_of(described, described.stages[0] if described.stages else None, device)


def step_of(workload: Workload, stage: Stage | None, device: str) -> Callable[[], None]:
    """Return the step of *workload* in *stage* on *device*."""
    precision = workload.training.precision
    model = make_model(workload, device)
    grad_scaler = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler  # the first is there from 2.3 on
    scaler = grad_scaler(enabled=precision == "fp16-mixed")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(workload.optimizer, trained)
    micro_batch = make_micro_batch(workload, stage, model, scaler, device)
    buckets = list(_buckets(trained)) if workload.parallelism.data_parallel_size > 1 else []

    def step() -> None:
        for _ in range(workload.training.gradient_accumulation_steps):
            micro_batch()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step.buckets = buckets  # type: ignore[attr-defined]  # they live as long as the step
    return step


def _buckets(parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    """Yield the buckets in which DistributedDataParallel reduces gradients: as much memory as the gradients, beside them."""
    size = 0
    for parameter in parameters:
        size += parameter.numel()
        if size * parameter.element_size() >= BUCKET_BYTES:
            yield _workspace(size, parameter)
            size = 0
    if size:
        yield _workspace(size, parameters[-1])


def _workspace(size: int, like: Tensor) -> Tensor:
    tensor = torch.empty(size, dtype=like.dtype, device=like.device)
    tensor.is_workspace = True  # type: ignore[attr-defined]  # for the recorder, which would take it for a batch
    return tensor


def make_model(workload: Workload, device: str) -> nn.Module:
    """Return the model of *workload* on *device*, in the precision and mode that it trains in."""
    model, training = workload.model, workload.training
    with torch.device("meta"), _default_type(_weights_type(workload)):
        made = _make(model)
        if isinstance(made, FromTransformers) and isinstance(model, HuggingFaceModel):
            prepare_fine_tuning(made.inner, model)
    _move(made, device)
    encoder = encoder_of(model)
    made.train()
    if encoder is not None and encoder.is_in_eval_mode:
        for part in made.channels if isinstance(made, ContrastiveEncoder) else [made]:
            part.eval()
        for adapted in made.modules():
            if isinstance(adapted, Adapted):
                adapted.dropout.train()  # put in after the model was left in eval mode, as PEFT puts them in
    _checkpoint(made, on=training.activation_checkpointing)
    return made


def _weights_type(workload: Workload) -> torch.dtype:
    """Return the type in which the weights of *workload* are loaded."""
    named = workload.model.weights_dtype if isinstance(workload.model, HuggingFaceModel) else None
    found: torch.dtype = getattr(torch, named) if named is not None else TYPES.get(workload.training.precision, torch.float32)
    return found


def _move(model: nn.Module, device: str) -> None:
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
    if isinstance(model, (TransformerWithHead, FromTransformers)):
        model.tie()


def _make(model: Model) -> nn.Module:
    if isinstance(model, ContrastiveEncoderModel):
        return ContrastiveEncoder(model)
    if isinstance(model, ParametersModel):
        return CountedModel(model)
    if isinstance(model, HuggingFaceModel) or _is_built_by_transformers(model):
        return FromTransformers(model)
    return TransformerWithHead(model)


def _is_built_by_transformers(model: TransformerModel) -> bool:
    return model.huggingface_config is not None and model.lora is None and find_spec("transformers") is not None


def _checkpoint(model: nn.Module, *, on: bool) -> None:
    if isinstance(model, FromTransformers):
        model.checkpoints(on)
    for module in model.modules():
        if isinstance(module, Transformer):
            module.checkpoints(on)


@contextlib.contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_micro_batch(workload: Workload, stage: Stage | None, model: nn.Module, scaler: Any, device: str) -> MicroBatch:
    """Return the forward and backward of one micro-batch of *workload* in *stage*."""
    batch, length = workload.training.micro_batch_size, workload.training.sequence_length
    if workload.contrastive is not None and stage is not None:
        return _contrastive(workload, stage, model, scaler, device)
    autocast = _autocast(workload)

    def micro_batch() -> None:
        if isinstance(model, CountedModel):
            with autocast():
                loss = model(batch)
        else:
            assert isinstance(model, (TransformerWithHead, FromTransformers))
            inputs = model.make_batch(batch, length, device)
            with autocast():
                loss = model(**inputs)
        scaler.scale(loss).backward()

    return micro_batch


def _autocast(workload: Workload) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    dtype = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(workload.training.precision)
    return (lambda: torch.autocast("cuda", dtype=dtype)) if dtype is not None else contextlib.nullcontext


def _contrastive(workload: Workload, stage: Stage, model: nn.Module, scaler: Any, device: str) -> MicroBatch:
    contrastive, training = workload.contrastive, workload.training
    assert contrastive is not None
    calls = contrastive.encode_calls(stage, micro_batch_size=training.micro_batch_size)
    num_channels = workload.model.num_channels if isinstance(workload.model, ContrastiveEncoderModel) else 1
    ranks = workload.parallelism.data_parallel_size
    autocast = _autocast(workload)

    def texts(items: int) -> Texts:
        ids = torch.randint(0, 1000, (items, num_channels, training.sequence_length), device=device)
        return ids, torch.ones_like(ids)

    def encode(group: Texts) -> Tensor:
        if isinstance(model, ContrastiveEncoder):
            return model(group)
        assert isinstance(model, (TransformerWithHead, FromTransformers))
        return model.encode(group[0][:, 0], group[1][:, 0]).mean(1)

    def loss(embeddings: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return loss_of(contrastive, embeddings, data_parallel_size=ranks)

    def micro_batch() -> None:
        anchors, positives, negatives = (texts(items) for items in calls)
        if contrastive.cached_loss_mini_batch_size is not None:
            with autocast():
                groups = (anchors, positives, negatives)
                cached_backward(encode, groups, lambda found: scaler.scale(loss(found)), contrastive.cached_loss_mini_batch_size)
            return
        with autocast():
            empty = torch.empty(0, device=device)
            value = loss((encode(anchors), encode(positives), encode(negatives) if calls[2] else empty))
        scaler.scale(value).backward()

    return micro_batch

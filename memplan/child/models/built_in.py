"""
Training steps of workloads: `build(device, workload=…)`, as every program that can be rehearsed.

A model that was read from a Hugging Face config.json is built by transformers where that is installed, without weights; every other kind is
a module of this room.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from memplan.child.models.contrastive import ContrastiveEncoder, Texts, cached_backward, loss_of
from memplan.child.models.counted import CountedModel
from memplan.child.models.fine_tuning import prepare_fine_tuning
from memplan.child.models.huggingface import FromTransformers
from memplan.child.models.preference import TextProbabilities, loss_of_pairs, reference_of
from memplan.child.models.together import SHORT_TYPES, Trainer, move, trainer_of
from memplan.child.models.torchtune import FromTorchtune
from memplan.child.models.transformer import Adapted, Transformer, TransformerWithHead
from memplan.child.repeated_step import SteadyStep
from memplan.workload.model import (
    ContrastiveEncoderModel,
    HuggingFaceModel,
    Model,
    ParametersModel,
    TorchtuneModel,
    TransformerModel,
    encoder_of,
)
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

MicroBatch = Callable[[], None]
"""Forward and backward of one micro-batch."""


def build(device: str, workload: dict[str, Any]) -> Callable[[], None]:
    """Return a function that runs one step of *workload* (as JSON) in its first stage: all its micro-batches, and the optimizer."""
    described = Workload.model_validate(workload)
    return step_of(described, described.stages[0] if described.stages else None, device)


def step_of(workload: Workload, stage: Stage | None, device: str) -> Callable[[], None]:
    """Return the step of *workload* in *stage* on *device*."""
    trainer = trainer_of(workload, device)
    root = make_model(workload, trainer.place)
    trainer.prepare(root, may_leave_parts_unused=isinstance(root, Encoding))
    if workload.parallelism.pipeline_parallel_size > 1:
        from memplan.child.models.pipeline import pipelined_step  # noqa: PLC0415  (PyTorch has it from 2.5 on)

        return pipelined_step(workload, root, trainer, device)
    micro_batch = make_micro_batch(workload, stage, root, trainer, device)
    run = partial(trainer.run, micro_batch)
    return SteadyStep(run) if workload.parallelism.num_gpus == 1 else run


class Encoding(nn.Module):
    """A model for one text at a time, as an encoder of the items of a contrastive batch: the mean of its states."""

    def __init__(self, model: TransformerWithHead | FromTransformers) -> None:
        super().__init__()
        self.model = model

    def forward(self, texts: Texts) -> Tensor:
        """Return the embeddings (items, width) of *texts*, which have one channel."""
        return self.model.encode(texts[0][:, 0], texts[1][:, 0]).mean(1)


def make_model(workload: Workload, place: Callable[[nn.Module], None]) -> nn.Module:
    """Return the model of *workload*, in the precision and mode that it trains in; *place* puts it, made without memory, on the device."""
    model, training = workload.model, workload.training
    with torch.device("meta"), _default_type(_weights_type(workload)):
        made = _make(model, is_split=bool(workload.parallelism.split_by))
        if isinstance(made, FromTransformers) and isinstance(model, HuggingFaceModel):
            prepare_fine_tuning(made.inner, model)
        elif isinstance(made, FromTorchtune):
            made.put_in_layers()
    root = _root_of(made, workload)
    place(root)
    encoder = encoder_of(model)
    root.train()
    if encoder is not None and encoder.is_in_eval_mode:
        for part in made.channels if isinstance(made, ContrastiveEncoder) else [made]:
            part.eval()
        for adapted in made.modules():
            if isinstance(adapted, Adapted):
                adapted.dropout.train()  # put in after the model was left in eval mode, as PEFT puts them in
    _checkpoint(made, on=training.activation_checkpointing)
    return root


def _root_of(made: nn.Module, workload: Workload) -> nn.Module:
    """Return what is called for a forward of *made*, the model of *workload*."""
    if isinstance(workload.model, HuggingFaceModel) and workload.model.preference is not None:
        assert isinstance(made, FromTransformers)
        return TextProbabilities(made, workload.model.preference)
    if workload.contrastive is not None and isinstance(made, (TransformerWithHead, FromTransformers)):
        return Encoding(made)
    return made


def _weights_type(workload: Workload) -> torch.dtype:
    """Return the type in which the weights of *workload* are loaded."""
    named = workload.model.weights_dtype if isinstance(workload.model, HuggingFaceModel) else None
    found: torch.dtype = getattr(torch, named) if named is not None else SHORT_TYPES.get(workload.training.precision, torch.float32)
    return found


def _make(model: Model, *, is_split: bool) -> nn.Module:
    """Return the module of *model*; one that GPUs split is memplan's own."""
    if isinstance(model, ContrastiveEncoderModel):
        return ContrastiveEncoder(model)
    if isinstance(model, ParametersModel):
        return CountedModel(model)
    if isinstance(model, TorchtuneModel):
        return FromTorchtune(model)
    if isinstance(model, HuggingFaceModel) or (_is_built_by_transformers(model) and not is_split):
        return FromTransformers(model)
    return TransformerWithHead(model)


def _is_built_by_transformers(model: TransformerModel) -> bool:
    return model.huggingface_config is not None and model.lora is None and find_spec("transformers") is not None


def _checkpoint(model: nn.Module, *, on: bool) -> None:
    if isinstance(model, (FromTransformers, FromTorchtune)):
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


def make_micro_batch(workload: Workload, stage: Stage | None, root: nn.Module, trainer: Trainer, device: str) -> MicroBatch:
    """Return the forward and backward of one micro-batch of *workload* in *stage*."""
    batch, length = workload.training.micro_batch_size, workload.training.sequence_length
    if workload.contrastive is not None and stage is not None:
        return _contrastive(workload, stage, trainer, device)
    if isinstance(root, TextProbabilities):
        return _of_pairs(workload, root, trainer, device)

    def micro_batch() -> None:
        if isinstance(root, CountedModel):
            with trainer.autocast():
                loss = trainer.call(batch)
        else:
            assert isinstance(root, (TransformerWithHead, FromTransformers, FromTorchtune))
            inputs = root.make_batch(batch, length, device)
            with trainer.split_batch(inputs):
                with trainer.autocast():
                    loss = trainer.call(**inputs)
                trainer.backward(loss)
            return
        trainer.backward(loss)

    return micro_batch


def _of_pairs(workload: Workload, root: TextProbabilities, trainer: Trainer, device: str) -> MicroBatch:
    batch, length = workload.training.micro_batch_size, workload.training.sequence_length
    copy = _copy_to_compare_with(workload, root, device)
    reference = reference_of(root, copy, trainer.autocast)

    def micro_batch() -> None:
        texts = root.make_batch(batch, length, device)
        with trainer.autocast():
            probabilities = trainer.call(**texts)
        trainer.backward(loss_of_pairs(root, probabilities, None if reference is None else reference(texts)))

    return micro_batch


def _copy_to_compare_with(workload: Workload, root: TextProbabilities, device: str) -> TextProbabilities | None:
    """Return the frozen copy of the model of *root* that its loss compares with, on the device; None where it is no copy."""
    model = workload.model
    if root.preference.reference != "copy":
        return None
    assert isinstance(model, HuggingFaceModel)
    dtype = root.preference.reference_dtype or model.weights_dtype
    described = model.model_copy(update={"weights_dtype": dtype, "adapters": None})
    copy = make_model(workload.model_copy(update={"model": described}), partial(move, device=device))
    assert isinstance(copy, TextProbabilities)
    return copy.requires_grad_(False).eval()


def _contrastive(workload: Workload, stage: Stage, trainer: Trainer, device: str) -> MicroBatch:
    contrastive, training = workload.contrastive, workload.training
    assert contrastive is not None
    calls = contrastive.encoded_texts(stage, micro_batch_size=training.micro_batch_size, sequence_length=training.sequence_length)
    num_channels = workload.model.num_channels if isinstance(workload.model, ContrastiveEncoderModel) else 1
    ranks = workload.parallelism.data_parallel_size

    def texts(count: int, length: int) -> Texts:
        ids = torch.randint(0, 1000, (count, num_channels, length), device=device)
        return ids, torch.ones_like(ids)

    def loss(embeddings: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return loss_of(contrastive, embeddings, data_parallel_size=ranks)

    def micro_batch() -> None:
        anchors, positives, negatives = (texts(*call) for call in calls)
        if contrastive.cached_loss_mini_batch_size is not None:
            with trainer.autocast():
                groups = (anchors, positives, negatives)
                cached_backward(trainer.call, groups, lambda found: trainer.scaled(loss(found)), contrastive.cached_loss_mini_batch_size)
            return
        with trainer.autocast():
            empty = torch.empty(0, device=device)
            value = loss((trainer.call(anchors), trainer.call(positives), trainer.call(negatives) if calls[2].number else empty))
        trainer.backward(value)

    return micro_batch

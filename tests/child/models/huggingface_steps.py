"""Steps of transformers' models: written as their users write them, as memplan builds them, and one that tells what its experts get."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from memplan.child.models import built_in
from memplan.child.models.huggingface import FromTransformers
from memplan.workload.model import HuggingFaceModel


def build(device: str, *, name: str, **values: Any) -> Callable[[], object]:
    """The step called *name*; one process that has imported transformers serves all of them."""
    builds: dict[str, Callable[..., Callable[[], object]]] = {"plain": plain, "routed": routed, "built_in": built_in.build}
    return builds[name](device, **values)


def plain(device: str, config: str, batch: int = 4, length: int = 64, checkpointing: bool = False) -> Callable[[], None]:
    """A model of *config*, made on the host and moved, as every tutorial has it."""
    settings = json.loads(config)
    (name,) = settings["architectures"]
    made = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    made.use_cache = False
    made.pad_token_id = 0
    model = getattr(transformers, name)(made).to(device).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters())

    def forward_and_backward() -> None:
        inputs = inputs_of(name, made, batch, length, device)
        model(**inputs).loss.backward()

    def step() -> None:
        forward_and_backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def inputs_of(name: str, config: transformers.PretrainedConfig, batch: int, length: int, device: str) -> dict[str, torch.Tensor]:
    if config.model_type in ("vit", "resnet"):
        side = getattr(config, "image_size", 224)
        pixels = torch.rand(batch, 3, side, side, device=device)
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long, device=device)}
    if config.model_type == "whisper":
        frames = 2 * config.max_source_positions
        features = torch.rand(batch, config.num_mel_bins, frames, device=device)
        return {"input_features": features, "labels": torch.randint(0, config.vocab_size, (batch, length), device=device)}
    ids = torch.randint(0, config.vocab_size, (batch, length), device=device)
    mask = torch.ones(ids.shape, dtype=torch.int64)
    mask[:, -1] = 0  # as in most batches, some text is shorter
    mask = mask.to(ids.device)
    if name.endswith("QuestionAnswering"):
        places = torch.zeros(batch, dtype=torch.long, device=device)
        return {"input_ids": ids, "attention_mask": mask, "start_positions": places, "end_positions": places.clone()}
    if name.endswith("SequenceClassification"):
        labels = torch.zeros(batch, dtype=torch.long, device=device)
    else:
        labels = torch.zeros_like(ids) if name.endswith("TokenClassification") else ids
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def routed(device: str, config: str, rows: str, checkpointing: bool = False) -> Callable[[], None]:
    """Writes, into the file *rows*, the rows that the experts of one step saw together and the tokens of that step."""
    model = FromTransformers(HuggingFaceModel(huggingface_config=config)).to(device).train()
    model.checkpoints(checkpointing)
    seen: list[int] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith(".experts"):
            module.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[0]))

    def step() -> None:
        seen.clear()
        model(**model.make_batch(4, 32, device)).backward()
        with Path(rows).open("w") as file:
            json.dump(seen, file)

    return step

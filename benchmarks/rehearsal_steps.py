"""Training steps that the benchmark rehearses: built from their configuration, without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def mlp(device: str) -> Callable[[], None]:
    """Three linear layers and AdamW."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(256, 1024, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def language_model(model: Any, *, batch: int, length: int, device: str, autocast: bool) -> Callable[[], None]:
    """Return one step of *model* with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        ids = torch.randint(0, 1000, (batch, length), device=device)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gpt2(device: str) -> Callable[[], None]:
    """GPT-2 under autocast."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device(device):
        model = GPT2LMHeadModel(GPT2Config())
    return language_model(model, batch=8, length=512, device=device, autocast=True)


def bert(device: str) -> Callable[[], None]:
    """BERT-base with its masked language model's head, in fp32."""
    from transformers import BertConfig, BertForMaskedLM

    with torch.device(device):
        model = BertForMaskedLM(BertConfig())
    return language_model(model, batch=16, length=512, device=device, autocast=False)


def llama(device: str) -> Callable[[], None]:
    """Llama 3.1 8B, all of it trained in bf16, with activation checkpointing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return language_model(model.train(), batch=1, length=4096, device=device, autocast=False)

"""Training steps whose peaks the estimates are held to, and the recorder of those peaks.

    python reference_steps.py OUT.jsonl [NAME ...]

runs every step of CASES (or those named) for three steps on the CUDA device at hand and appends one line of JSON a case:
name, program, values, GPU, torch, peak_allocated_bytes, peak_reserved_bytes. The device may be a real GPU or the simulated GPU
(`reference_peaks.jsonl` says which). transformers 4.57.6 supplies the models, built from their configuration without weights.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

AUTOCAST = {"fp16-mixed": "float16", "bf16-mixed": "bfloat16"}
PURE = {"fp16": "float16", "bf16": "bfloat16"}

GPT2: dict[str, Any] = {"model_type": "gpt2"}
GPT2_SMALL = GPT2 | {"n_layer": 6, "n_embd": 512, "n_head": 8, "vocab_size": 16000}
BERT: dict[str, Any] = {"model_type": "bert"}
LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096, "use_cache": False,
}  # fmt: skip
QWEN2 = LLAMA | {
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "hidden_size": 896,
    "num_attention_heads": 14,
}

CASES: dict[str, dict[str, Any]] = {
    "gpt2-small-fp32": {"config": GPT2_SMALL, "batch": 8, "seq": 512, "precision": "fp32"},
    "gpt2-small-bf16-mixed": {"config": GPT2_SMALL, "batch": 16, "seq": 256, "precision": "bf16-mixed"},
    "gpt2-small-pure-bf16": {"config": GPT2_SMALL, "batch": 8, "seq": 512, "precision": "bf16"},
    "gpt2-sgd": {"config": GPT2, "batch": 4, "seq": 512, "precision": "bf16-mixed", "optimizer": "SGD"},
    "gpt2-eager": {"config": GPT2, "batch": 4, "seq": 512, "precision": "bf16-mixed", "attention": "eager"},
    "gpt2-long-checkpoint": {"config": GPT2, "batch": 4, "seq": 1024, "precision": "bf16-mixed", "checkpoint": True},
    "gpt2-pure-bf16-checkpoint": {"config": GPT2, "batch": 8, "seq": 1024, "precision": "bf16", "checkpoint": True},
    "gpt2-fp16-small-batch": {"config": GPT2, "batch": 1, "seq": 128, "precision": "fp16-mixed"},
    "bert-fp32": {"config": BERT, "batch": 8, "seq": 256, "precision": "fp32"},
    "bert-fp16-mixed": {"config": BERT, "batch": 16, "seq": 256, "precision": "fp16-mixed"},
    "bert-bf16-mixed-checkpoint": {"config": BERT, "batch": 32, "seq": 256, "precision": "bf16-mixed", "checkpoint": True},
    "bert-eager": {"config": BERT, "batch": 8, "seq": 512, "precision": "bf16-mixed", "attention": "eager"},
    "llama-fp32": {"config": LLAMA, "batch": 2, "seq": 512, "precision": "fp32"},
    "llama-bf16-mixed": {"config": LLAMA, "batch": 4, "seq": 1024, "precision": "bf16-mixed"},
    "llama-pure-bf16": {"config": LLAMA, "batch": 4, "seq": 1024, "precision": "bf16"},
    "llama-pure-bf16-checkpoint": {"config": LLAMA, "batch": 4, "seq": 2048, "precision": "bf16", "checkpoint": True},
    "llama-bf16-mixed-checkpoint": {"config": LLAMA, "batch": 8, "seq": 1024, "precision": "bf16-mixed", "checkpoint": True},
    "llama-eager": {"config": LLAMA, "batch": 2, "seq": 1024, "precision": "bf16-mixed", "attention": "eager"},
    "qwen2-bf16-mixed": {"config": QWEN2, "batch": 4, "seq": 1024, "precision": "bf16-mixed"},
    "contrastive-eval": {"contrastive": True, "batch": 4, "n_negatives": 8, "seq": 128, "precision": "fp16-mixed", "eval_mode": True},
    "contrastive-eval-512": {"contrastive": True, "batch": 2, "n_negatives": 24, "seq": 512, "precision": "fp16-mixed", "eval_mode": True},
    "contrastive-checkpoint": {
        "contrastive": True, "batch": 6, "n_negatives": 12, "seq": 256, "precision": "bf16-mixed", "checkpoint": True,
    },
    "contrastive-train": {"contrastive": True, "batch": 3, "n_negatives": 4, "seq": 512, "precision": "fp16-mixed"},
    "contrastive-fp32": {"contrastive": True, "batch": 2, "n_negatives": 8, "seq": 256, "precision": "fp32"},
}  # fmt: skip


def build_step(case: dict[str, Any], device: str) -> Callable[[], None]:
    """Return a function of no arguments that runs one whole training step of *case*."""
    import torch

    precision = case["precision"]
    model, inputs, loss_of = (contrastive_parts if case.get("contrastive") else language_model_parts)(case, device)
    if precision in PURE:
        model = model.to(getattr(torch, PURE[precision]))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    update = getattr(torch.optim, case.get("optimizer", "AdamW"))(trainable, lr=1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16-mixed")
    dtype = AUTOCAST.get(precision)

    def step() -> None:
        batch = inputs()
        with torch.autocast("cuda", dtype=getattr(torch, dtype)) if dtype else contextlib.nullcontext():
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(update)
        scaler.update()
        update.zero_grad()

    return step


def language_model_parts(case: dict[str, Any], device: str) -> tuple[Any, Any, Any]:
    """Return a language model (causal or masked), its batch maker and its loss."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    settings = dict(case["config"])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, attn_implementation=case.get("attention", "sdpa"))
    config.use_cache = False
    model = (AutoModelForMaskedLM if config.model_type == "bert" else AutoModelForCausalLM).from_config(config).to(device).train()
    if case.get("checkpoint"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def inputs() -> dict[str, Any]:
        ids = torch.randint(0, 1000, (case["batch"], case["seq"]), device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    return model, inputs, lambda model, batch: model(**batch).loss


def contrastive_parts(case: dict[str, Any], device: str) -> tuple[Any, Any, Any]:
    """Return a four-channel text encoder with LoRA on every linear layer and four experts, its batch maker and its loss."""
    import torch
    from torch import nn
    from torch.nn import functional
    from transformers import BertConfig, BertModel

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear, rank: int = 8) -> None:
            super().__init__()
            self.base, self.dropout = base, nn.Dropout(0.1)
            self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0

    def encoder() -> Any:
        config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
        bert = BertModel(config, add_pooling_layer=False).requires_grad_(False)
        bert.train(not case.get("eval_mode", False))  # as from_pretrained leaves it: in eval mode
        for parent in list(bert.encoder.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapter(child))
        if case.get("checkpoint"):
            bert.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return bert

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.channels = nn.ModuleList(encoder() for _ in range(4))
            self.gate, self.project = nn.Linear(1536, 4), nn.Linear(1536, 384)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(1536, 1024), nn.GELU(), nn.Linear(1024, 1536)) for _ in range(4))

        def forward(self, ids: Any, mask: Any) -> Any:
            pooled = []
            for channel, bert in enumerate(self.channels):
                states = bert(input_ids=ids[:, channel], attention_mask=mask[:, channel]).last_hidden_state
                weights = mask[:, channel].unsqueeze(-1).expand(states.shape).float()
                pooled.append((states * weights).sum(1) / weights.sum(1).clamp(min=1e-9))
            joined = torch.cat(pooled, 1)
            shares = self.gate(joined).softmax(-1)
            mixed = sum(share * expert(joined) for share, expert in zip(shares.split(1, dim=-1), self.experts, strict=True))
            return functional.normalize(self.project(mixed), dim=-1)

    def texts(items: int) -> tuple[Any, Any]:
        mask = torch.ones(items, 4, case["seq"], dtype=torch.long)
        mask[..., -case["seq"] // 4 :] = 0
        return torch.randint(0, 30000, (items, 4, case["seq"]), device=device), mask.to(device)

    batch, n_negatives = case["batch"], case["n_negatives"]

    def loss_of(model: Any, groups: list[tuple[Any, Any]]) -> Any:
        anchors, positives, negatives = (model(*group) for group in groups)
        far = torch.einsum("bd,bnd->bn", anchors, negatives.view(batch, n_negatives, -1))
        logits = torch.cat([(anchors * positives).sum(-1, keepdim=True), far], 1) / 0.07
        return functional.cross_entropy(logits, torch.zeros(batch, dtype=torch.long, device=device))

    return Model().to(device), lambda: [texts(batch), texts(batch), texts(batch * n_negatives)], loss_of


def record(name: str) -> dict[str, Any]:
    """Run three steps of the case *name* on the device at hand; return what its allocator saw."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)  # the estimates know no cuDNN attention, and the prototype cannot run it
    step = build_step(CASES[name], "cuda")
    for _ in range(3):
        step()
        torch.cuda.synchronize()
    return {
        "name": name,
        "card": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def main(out: str, *names: str) -> None:
    """Record each case in a process of its own, so that none sees another's allocator."""
    if len(names) == 1:
        with Path(out).open("a") as file:
            file.write(json.dumps(record(names[0])) + "\n")
        return
    for name in names or CASES:
        subprocess.run([sys.executable, __file__, out, name], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

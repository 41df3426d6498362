"""The Trainer on causal language modelling: Llama from a configuration, bf16, activation checkpointing, `auto_find_batch_size`."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Blocks(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = torch.randint(0, 16_000, (512,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


batch_size = int(sys.argv[2])
config = LlamaConfig(
    vocab_size=16_000,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
    use_cache=False,
)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=batch_size,
    auto_find_batch_size="auto" in sys.argv,
    max_steps=5,
    bf16=True,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    optim="adamw_torch_fused",
    lr_scheduler_type="cosine",
    max_grad_norm=1.0,
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Blocks())
trainer.train()

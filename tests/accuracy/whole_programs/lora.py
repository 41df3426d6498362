"""LoRA of peft on a Llama from a configuration in bf16, with activation checkpointing."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=4
)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.05))
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=2e-4)
for step in range(4):
    tokens = torch.randint(0, 32_000, (8, 1024)).cuda()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())

"""Mixtral from a configuration of its own, in bfloat16, with the loss that balances its experts."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_local_experts=8,
    num_experts_per_tok=2,
    output_router_logits=True,
    max_position_embeddings=1024,
)
model = MixtralForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(4):
    tokens = torch.randint(0, 4096, (4, 512)).cuda()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())

"""A language model that learns from rewards: it writes, a function on the host judges what it wrote, and it is saved after each step."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=4096, n_positions=256, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0, pad_token_id=0)
model = GPT2LMHeadModel(config).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)


def reward(tokens):
    """Judge a text by how many different words it has."""
    return len(set(tokens)) / max(1, len(tokens))


for step in range(10):
    prompts = torch.randint(1, 4096, (8, 16)).to("cuda")
    model.eval()
    with torch.no_grad():
        texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=112, do_sample=True)
    model.train()
    written = texts[:, 16:]
    is_written = (written != config.pad_token_id).int()
    words = [row[mask.bool()].tolist() for row, mask in zip(written, is_written, strict=True)]
    rewards = torch.tensor([reward(row) for row in words], device="cuda")
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    logits = model(texts).logits[:, 15:-1]
    chances = logits.log_softmax(-1).gather(2, written[..., None]).squeeze(-1)
    loss = -(chances * advantages[:, None] * is_written).sum() / is_written.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: {loss.item():.4f}, {is_written.sum().item()} words, rewarded {rewards.mean().item():.3f}")
    model.save_pretrained(sys.argv[1])

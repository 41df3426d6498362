"""GPT-2 of transformers, its 124 million parameters, in a loop of one's own: bf16, accumulation, clipping, fused AdamW, an evaluation."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

batch, accumulation = int(sys.argv[1]), int(sys.argv[2])
model = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa")).cuda()
if "checkpoint" in sys.argv:
    model.gradient_checkpointing_enable()
if "compile" in sys.argv:
    model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
generator = torch.Generator().manual_seed(0)
for step in range(4):
    for _ in range(accumulation):
        tokens = torch.randint(0, 50257, (batch, 1024), generator=generator).pin_memory().cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss / accumulation
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item(), norm.item())
if "evaluate" in sys.argv:
    model.eval()
    with torch.no_grad():
        tokens = torch.randint(0, 50257, (batch, 1024), generator=generator).cuda()
        print(model(input_ids=tokens, labels=tokens).loss.item())

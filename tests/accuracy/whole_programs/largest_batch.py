"""Accelerate's find_executable_batch_size: halves the batch until a step runs."""

import torch
from accelerate.utils import find_executable_batch_size
from torch import nn


@find_executable_batch_size(starting_batch_size=4096)
def train(batch_size):
    print("trying", batch_size, flush=True)
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        x = torch.randn(batch_size, 256, 1024, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return batch_size


print("ran with", train())

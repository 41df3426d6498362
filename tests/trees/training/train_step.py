# train_step.py
import torch
from torch import nn


def build(device, batch=8, seq=512):
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        x = torch.randn(batch, seq, 768, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

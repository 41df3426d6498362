"""Distillation as in a plain loop: a student, a frozen teacher in half precision, an average in a dict, a checkpoint, an evaluation."""

import copy
import sys

import torch
from torch import nn

WIDTH, LAYERS = 512, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 8, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x):
        hidden = self.norms[0](x)
        x = x + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return x + self.feed(self.norms[1](x))


def main(path):
    student = nn.Sequential(*[Block() for _ in range(LAYERS)]).cuda()
    teacher = copy.deepcopy(student).eval().requires_grad_(False).half()
    average = {name: value.detach().clone() for name, value in student.state_dict().items()}
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for number in range(12):
        batch = torch.randn(8, 128, WIDTH).cuda()
        with torch.no_grad():
            wanted = teacher(batch.half()).float()
        loss = (student(batch) - wanted).square().mean() / 2
        loss.backward()
        if number % 2:
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for name, value in student.state_dict().items():
                average[name] = 0.99 * average[name] + 0.01 * value
            torch.save({"average": average, "step": number}, path)
            with torch.inference_mode():
                lengths = torch.tensor([3, 128, 60, 7, 9, 1, 50, 2]).cuda()
                mask = torch.arange(128, device="cuda") < lengths[:, None]
                print(number, student(batch)[mask].shape[0], loss.item())


main(sys.argv[1])

"""A switch transformer's layer: each token goes to one expert, an expert has room for so many, the rest is dropped; the router decides."""

import torch
from torch import nn

TOKENS, WIDTH, HIDDEN, EXPERTS = 4096, 512, 2048, 8


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(EXPERTS))

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, WIDTH)
        probability, chosen = self.router(x).softmax(-1).max(-1)
        room = int(1.25 * len(x) / EXPERTS)
        places = [(chosen == number).nonzero(as_tuple=True)[0] for number in range(EXPERTS)]
        counts = [len(place) for place in places]
        out = x.clone()
        for expert, place in zip(self.experts, places):
            if len(place) > room:
                place = place[torch.randperm(len(place), device=x.device)[:room]]
            out[place] = expert(x[place])
        return (out * probability.unsqueeze(1)).view(shape), counts


model = nn.ModuleList(Switch() for _ in range(2)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(5):
    x = torch.randn(8, TOKENS // 8, WIDTH, device="cuda")
    for layer in model:
        y, counts = layer(x)
        x = x + y
    loss = x.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, counts)

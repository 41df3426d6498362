"""Node classification on one graph: edge lists, added self loops, degrees, messages by index_add, masks for training and validation."""

import torch
import torch.nn.functional as F
from torch import nn

NODES, EDGES, FEATURES, HIDDEN, CLASSES = 4000, 40_000, 256, 512, 7


class Convolution(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.linear = nn.Linear(inner, outer)

    def forward(self, x, edges):
        x = self.linear(x)
        source, target = edges
        degree = torch.bincount(target, minlength=x.size(0)).clamp(min=1).to(x.dtype)
        weight = degree[source].rsqrt() * degree[target].rsqrt()
        return torch.zeros_like(x).index_add(0, target, x[source] * weight.unsqueeze(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Convolution(FEATURES, HIDDEN), Convolution(HIDDEN, CLASSES)

    def forward(self, x, edges):
        return self.second(F.dropout(self.first(x, edges).relu(), 0.5, self.training), edges)


generator = torch.Generator().manual_seed(0)
x = torch.randn(NODES, FEATURES, generator=generator).cuda()
y = torch.randint(0, CLASSES, (NODES,), generator=generator).cuda()
edges = torch.stack([torch.randint(0, NODES, (EDGES,), generator=generator), torch.randint(0, NODES, (EDGES,), generator=generator)]).cuda()
edges = edges[:, edges[0] != edges[1]]  # no loops …
edges = torch.cat([edges, torch.arange(NODES, device="cuda").repeat(2, 1)], 1)  # … but one for each
edges = torch.unique(edges, dim=1)
in_training = torch.zeros(NODES, dtype=torch.bool)
in_training[: NODES // 2] = True
in_training = in_training.cuda()
print(f"{edges.size(1)} edges")

model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(5):
    model.train()
    optimizer.zero_grad()
    out = model(x, edges)
    loss = F.cross_entropy(out[in_training], y[in_training])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        right = (model(x, edges).argmax(1) == y)[~in_training]
    print(f"{epoch}: {loss:.3f} {int(right.sum()) / int((~in_training).sum()):.3f}")

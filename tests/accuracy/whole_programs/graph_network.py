"""Layers of torch_geometric on one large graph: edges, loops, normalisation, attention, masks."""

import sys

import torch
import torch.nn.functional as F
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

NODES, EDGES = 100_000, 1_000_000
generator = torch.Generator().manual_seed(0)
x = torch.randn(NODES, 128, generator=generator).cuda()
y = torch.randint(0, 40, (NODES,), generator=generator).cuda()
edges = torch.randint(0, NODES, (2, EDGES), generator=generator).cuda()
chosen = torch.rand(NODES, generator=generator).cuda() < 0.3
kind = {"gcn": GCNConv, "sage": SAGEConv, "gat": GATConv}[sys.argv[1]]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = kind(128, 256), kind(256, 40)

    def forward(self, x, edges):
        return self.second(F.dropout(self.first(x, edges).relu(), training=self.training), edges)


model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(4):
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, edges)[chosen], y[chosen])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        print(epoch, loss.item(), (model(x, edges).argmax(1) == y)[~chosen].float().mean().item())

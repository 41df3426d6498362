"""GraphSAGE with neighbours sampled on the GPU: the frontier of each hop is a unique() of what was drawn, and sets every size."""

import torch
import torch.nn.functional as F
from torch import nn

NODES, FEATURES, HIDDEN, CLASSES, BATCH, FANOUT = 20_000, 128, 256, 10, 512, (10, 5)

generator = torch.Generator().manual_seed(0)
degrees = torch.randint(1, 30, (NODES,), generator=generator)
rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)]).cuda()
col = torch.randint(0, NODES, (int(degrees.sum()),), generator=generator).cuda()
features = torch.randn(NODES, FEATURES, generator=generator).cuda()
labels = torch.randint(0, CLASSES, (NODES,), generator=generator).cuda()


def sample(seeds, fanout):
    """Return the edges drawn for *seeds*, and the nodes that they reach, seeds first."""
    degree = rowptr[seeds + 1] - rowptr[seeds]
    taken = degree.clamp(max=fanout)
    target = torch.repeat_interleave(torch.arange(seeds.numel(), device=seeds.device), taken)
    offset = torch.arange(target.numel(), device=seeds.device) - torch.repeat_interleave(taken.cumsum(0) - taken, taken)
    neighbours = col[rowptr[seeds][target] + offset]
    nodes, inverse = torch.unique(torch.cat([seeds, neighbours]), return_inverse=True)
    order = torch.full_like(nodes, -1)
    order[inverse[: seeds.numel()]] = torch.arange(seeds.numel(), device=seeds.device)
    new = (order < 0).nonzero().squeeze(1)
    order[new] = torch.arange(seeds.numel(), nodes.numel(), device=seeds.device)
    reached = torch.empty_like(nodes)
    reached[order] = nodes
    return torch.stack([order[inverse[seeds.numel() :]], target]), reached


class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)])
        self.others = nn.ModuleList([nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)])

    def forward(self, x, hops):
        for number, (edges, size) in enumerate(hops):
            messages = torch.zeros(size, x.size(1), device=x.device).index_add(0, edges[1], x[edges[0]])
            x = self.own[number](x[:size]) + self.others[number](messages)
            x = x.relu() if number == 0 else x
        return x


model = Sage().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for seeds in torch.randperm(NODES, generator=generator).split(BATCH):
    seeds = seeds.cuda()
    nodes, hops = seeds, []
    for fanout in FANOUT:
        edges, reached = sample(nodes, fanout)
        hops.insert(0, (edges, nodes.numel()))
        nodes = reached
    loss = F.cross_entropy(model(features[nodes], hops), labels[seeds])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{nodes.numel()} nodes, loss {loss.item():.3f}")

"""DLRM-like: sparse ids in bags of their own lengths, sparse gradients for the tables, dense ones for the rest, ids seen once dropped."""

import torch
import torch.nn.functional as F
from torch import nn

TABLES, ROWS, WIDTH, BATCH = 4, 100_000, 64, 2048


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, WIDTH))
        self.top = nn.Sequential(nn.Linear(WIDTH + (TABLES + 1) * TABLES // 2, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, dense, ids, offsets):
        dense = self.bottom(dense)
        vectors = torch.stack([dense, *(table(i, o) for table, i, o in zip(self.tables, ids, offsets))], 1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = torch.triu_indices(TABLES + 1, TABLES + 1, offset=1, device=dense.device)
        return self.top(torch.cat([dense, products[:, rows, columns]], 1)).squeeze(1)


generator = torch.Generator().manual_seed(0)
model = Recommender().cuda()
of_tables = torch.optim.SparseAdam(list(model.tables.parameters()), lr=1e-3)
of_rest = torch.optim.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=1e-2)
for step in range(5):
    ids, offsets = [], []
    for _ in range(TABLES):
        lengths = torch.randint(1, 20, (BATCH,), generator=generator)
        ids.append(torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator).cuda())
        offsets.append((lengths.cumsum(0) - lengths).cuda())
    dense, clicks = torch.rand(BATCH, 13, generator=generator).cuda(), torch.randint(0, 2, (BATCH,), generator=generator).float().cuda()
    loss = F.binary_cross_entropy_with_logits(model(dense, ids, offsets), clicks)
    of_tables.zero_grad()
    of_rest.zero_grad()
    loss.backward()
    of_tables.step()
    of_rest.step()
    seen = torch.cat(ids).unique().numel()
    print(f"{step}: {loss.item():.4f}, {seen} ids seen")

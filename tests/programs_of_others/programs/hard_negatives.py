"""Metric learning: triplets of all positives with the semi-hard negatives of a batch, which the embeddings decide."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH, CLASSES, WIDTH = 128, 16, 128
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, WIDTH)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(5):
    labels = torch.arange(BATCH).remainder(CLASSES).cuda()
    embeddings = F.normalize(model(torch.randn(BATCH, 512).cuda()))
    distances = torch.cdist(embeddings, embeddings)
    same = labels[:, None] == labels[None]
    anchors, positives = torch.where(same & ~torch.eye(BATCH, dtype=torch.bool, device="cuda"))
    wanted = distances[anchors, positives]
    candidates = (distances[anchors] > wanted[:, None]) & (distances[anchors] < wanted[:, None] + 0.2) & ~same[anchors]
    rows, negatives = torch.where(candidates)
    if len(rows) == 0:
        print("no semi-hard negatives")
        loss = embeddings.sum() * 0
    else:
        loss = F.triplet_margin_loss(embeddings[anchors[rows]], embeddings[positives[rows]], embeddings[negatives], margin=0.2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step}: {len(rows)} triplets, {loss.item():.3f}")

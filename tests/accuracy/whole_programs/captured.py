"""A whole step captured as a CUDA graph and replayed, beside a step that is not."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
x, y = torch.randn(2048, 1024, device="cuda"), torch.randint(0, 10, (2048,), device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
for step in range(5):
    x.copy_(torch.randn(2048, 1024))
    graph.replay()
    print(step, loss.item())

"""Trains a network of timm or torchvision, as its name says, on images, clips or maps of classes; `benchmark`: cuDNN tries its kernels."""

import sys

import torch
import torchvision
from torch import nn
from torch.nn import functional

name, batch, dtype = sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])
layout = torch.channels_last if "channels_last" in sys.argv else torch.contiguous_format
torch.backends.cudnn.benchmark = "benchmark" in sys.argv
CLASSES = 21


class Sound(nn.Module):
    """Dilated convolutions over a sound of one channel, gated, with a sum of all of them at the end."""

    def __init__(self, width=128, depth=18):
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, dilation=2 ** (n % 9), padding=2 ** (n % 9)) for n in range(depth))
        self.mixes = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.last = nn.Conv1d(width, CLASSES, 1)

    def forward(self, sound):
        x, total = self.first(sound), 0
        for gate, mix in zip(self.gates, self.mixes):
            a, b = gate(x).chunk(2, 1)
            part = mix(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + part, total + part
        return self.last(total.relu())


if name == "sound":
    model, shape = Sound(), (1, 16_000)
elif hasattr(torchvision.models.segmentation, name):
    model, shape = getattr(torchvision.models.segmentation, name)(weights=None, weights_backbone=None, num_classes=CLASSES), (3, 320, 320)
elif hasattr(torchvision.models.video, name):
    model, shape = getattr(torchvision.models.video, name)(num_classes=CLASSES), (3, 16, 112, 112)
else:
    import timm

    model, shape = timm.create_model(name, num_classes=CLASSES), (3, 224, 224)
model = model.cuda().to(memory_format=layout)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
for step in range(4):
    inputs = torch.randn(batch, *shape).cuda()
    inputs = inputs.to(memory_format=layout) if inputs.dim() == 4 else inputs
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        out = model(inputs)
        out = out["out"] if isinstance(out, dict) else out
        targets = torch.randint(0, CLASSES, (batch, *out.shape[2:])).cuda()
        loss = functional.cross_entropy(out, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(step, loss.item())

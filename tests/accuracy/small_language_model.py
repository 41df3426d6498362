"""
A small language model as students write it, every part by hand, for comparison with memory snapshots that somebody published.

Written from the description of the published runs (four layers, width 512, 16 heads, feed-forward 1344, vocabulary 10,000, fp32, batch 10,
RMSNorm, rotary positions, SwiGLU, linear layers by einsum, an Adam of its own that replaces its tensors) and from their events' order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, HEADS, INNER, LAYERS, VOCABULARY = 512, 16, 1344, 4, 10_000


class Linear(nn.Module):
    """A matrix, applied by einsum."""

    def __init__(self, inputs: int, outputs: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RmsNorm(nn.Module):
    """Each token over its root mean square."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device=device))

    def forward(self, x: Tensor) -> Tensor:
        rms = torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x / rms * self.weight


class Rotary:
    """Positions as rotations; the tables stay on the host."""

    def __init__(self, longest: int) -> None:
        angles = torch.outer(torch.arange(longest).float(), 10_000.0 ** (-torch.arange(0, WIDTH // HEADS, 2).float() / (WIDTH // HEADS)))
        self.cosine, self.sine = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        cosine, sine = self.cosine[: x.shape[-2]].to(x.device), self.sine[: x.shape[-2]].to(x.device)
        first = x[..., ::2] * cosine - x[..., 1::2] * sine
        second = x[..., ::2] * sine + x[..., 1::2] * cosine
        return torch.stack((first, second), dim=-1).flatten(-2)


def softmax(x: Tensor) -> Tensor:
    """Return the shares along the last dimension."""
    largest = x.max(dim=-1, keepdim=True)[0]
    return torch.exp(x - largest) / torch.exp(x - largest).sum(dim=-1, keepdim=True)


class Attention(nn.Module):
    """Causal self-attention over all heads."""

    def __init__(self, rotary: Rotary, device: str) -> None:
        super().__init__()
        self.rotary = rotary
        self.query, self.key, self.value, self.output = (Linear(WIDTH, WIDTH, device) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
        query = self.rotary(query)
        key = self.rotary(key)
        gathered = self._gathered(query, key, value)
        return self.output(gathered.transpose(1, 2).reshape(x.shape))

    def _gathered(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[-2]
        shown = torch.ones(length, length, device=query.device).tril_()
        scores = torch.einsum("...qd,...kd->...qk", query, key)
        scores = scores / torch.sqrt(torch.tensor(query.shape[-1], device=query.device))
        scores.masked_fill_(~shown.bool(), float("-inf"))
        return torch.einsum("...qk,...kd->...qd", softmax(scores), value)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.gate, self.down, self.up = Linear(WIDTH, INNER, device), Linear(INNER, WIDTH, device), Linear(WIDTH, INNER, device)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind its norm."""

    def __init__(self, rotary: Rotary, device: str) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = RmsNorm(device), RmsNorm(device)
        self.attention, self.feed_forward = Attention(rotary, device), FeedForward(device)

    def forward(self, x: Tensor) -> Tensor:
        attended = x + self.attention(self.attention_norm(x))
        return attended + self.feed_forward(self.feed_forward_norm(attended))


class LanguageModel(nn.Module):
    """Logits for every token."""

    def __init__(self, longest: int, device: str) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(VOCABULARY, WIDTH, device=device))
        rotary = Rotary(longest)
        self.blocks = nn.ModuleList(Block(rotary, device) for _ in range(LAYERS))
        self.norm, self.head = RmsNorm(device), Linear(WIDTH, VOCABULARY, device)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens[ids]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of one label a row."""
    largest = logits.max(dim=-1, keepdim=True)[0]
    log_shares = logits - largest - torch.log(torch.exp(logits - largest).sum(dim=-1, keepdim=True))
    chosen = torch.zeros_like(log_shares).scatter_(1, labels[:, None], 1.0)
    return -(log_shares * chosen).sum() / logits.shape[0]


class Adam(torch.optim.Optimizer):
    """Adam with weight decay, whose moments exist from the start and are replaced in each step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.steps = 0
        self.first, self.second = [], []
        for parameter in parameters:
            self.first.append(torch.zeros_like(parameter.data))
            self.second.append(torch.zeros_like(parameter.data))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        rate = 1e-3 * (1 - 0.999**self.steps) ** 0.5 / (1 - 0.9**self.steps)
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            first = self.first[number]
            self.first[number] = 0.9 * first + 0.1 * parameter.grad
            second = self.second[number]
            self.second[number] = 0.999 * second + 0.001 * parameter.grad**2
            parameter.data = parameter.data - rate * (self.first[number] / (torch.sqrt(self.second[number]) + 1e-8))
            parameter.data = parameter.data - 1e-5 * parameter.data


def build(device: str, batch: int = 10, context: int = 100) -> Callable[[], None]:
    """Return one step: gradients of the step before go first, then forward, backward and the optimizer."""
    model = LanguageModel(context, device)
    optimizer = Adam(list(model.parameters()))
    ids = torch.randint(0, VOCABULARY, (batch, context)).to(device)
    labels = torch.randint(0, VOCABULARY, (batch,)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(ids)
        loss = cross_entropy(logits[:, -1], labels)
        loss.backward()
        optimizer.step()

    return step

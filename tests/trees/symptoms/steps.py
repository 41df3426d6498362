"""A training with the mistakes that docs/troubleshooting.md starts from: each function returns what runs one step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS = 32_000


class Training:
    """A small language model and its optimizer."""

    def __init__(self, device: str) -> None:
        layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.device = device
        self.model = nn.Sequential(nn.Embedding(WORDS, 768), encoder, nn.Linear(768, WORDS)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def loss(self, batch: int, length: int) -> Tensor:
        """Return the loss of a batch."""
        tokens = torch.randint(WORDS, (batch, length)).to(self.device)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())

    def step(self, batch: int, length: int) -> Tensor:
        """Run one step, and return its loss."""
        loss = self.loss(batch, length)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def keeping(device: str, batch: int = 8) -> Callable[[], None]:
    """Return steps that keep a loss with its graph, to print the mean some day."""
    training = Training(device)
    kept: list[Tensor] = []

    def step() -> None:
        training.step(batch, 512)
        kept.append(training.loss(batch, 64))

    return step


def evaluating(device: str, batch: int = 8, evaluated: int = 24, with_graph: bool = True) -> Callable[[], None]:
    """Return steps after each of which larger batches are evaluated, without no_grad."""
    training = Training(device)

    def step() -> None:
        training.step(batch, 512)
        total = torch.zeros((), device=device)
        with torch.set_grad_enabled(with_graph):
            for _ in range(4):
                total += training.loss(evaluated, 512)

    return step


def varying(device: str, batch: int = 8, lengths: Sequence[int] = (96, 384, 160, 448, 64, 512)) -> Callable[[], None]:
    """Return steps on batches of other lengths, one after the other."""
    training = Training(device)
    num_steps = 0

    def step() -> None:
        nonlocal num_steps
        training.step(batch, lengths[num_steps % len(lengths)])
        num_steps += 1

    return step

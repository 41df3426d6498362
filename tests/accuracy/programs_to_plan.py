"""
Training steps of many kinds, small, each with a batch that can be varied: what is worked out from a few rehearsals is held to rehearsals.

    memplan rehearse --gpu t4 tests/accuracy/programs_to_plan.py:unet --set batch=16
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Step = Callable[[], None]

WIDTH, LENGTH, VOCABULARY = 256, 128, 8000


def stepping(
    optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], *, micro_batches: int = 1, dtype: torch.dtype | None = None
) -> Step:
    """A step that accumulates *micro_batches* and then optimizes; under autocast with a *dtype*."""

    def step() -> None:
        for _ in range(micro_batches):
            with torch.autocast("cuda", dtype=dtype or torch.float16, enabled=dtype is not None):
                value = loss()
            (value / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def tokens(batch: int, device: str, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), device=device)


class Attention(nn.Module):
    """Grouped queries: several heads share a key and a value."""

    def __init__(self, heads: int, shared: int, rank: int | None = None) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, WIDTH // heads
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * shared * self.size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, rank, bias=False) if rank else None
        self.up = nn.Linear(rank, WIDTH, bias=False) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.query(x)
        if self.down is not None and self.up is not None:
            query = query + self.up(self.down(x))
        query = query.view(batch, length, self.heads, self.size).transpose(1, 2)
        key, value = (
            part.view(batch, length, self.shared, self.size).transpose(1, 2).repeat_interleave(self.heads // self.shared, 1)
            for part in self.key_value(x).chunk(2, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Decoder(nn.Module):
    """A language model with a gated feed-forward and RMSNorm."""

    def __init__(self, layers: int = 3, *, shared: int = 2, rank: int | None = None, checkpoints: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.RMSNorm(WIDTH), "attention": Attention(8, shared, rank), "norm2": nn.RMSNorm(WIDTH),
                "gate": nn.Linear(WIDTH, 4 * WIDTH), "in": nn.Linear(WIDTH, 4 * WIDTH), "out": nn.Linear(4 * WIDTH, WIDTH),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpoints = checkpoints

    @staticmethod
    def block(layer: nn.ModuleDict, x: Tensor) -> Tensor:
        x = x + layer["attention"](layer["norm"](x))
        y = layer["norm2"](x)
        return x + layer["out"](functional.silu(layer["gate"](y)) * layer["in"](y))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.checkpoints else self.block(layer, x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def gqa_decoder(device: str, batch: int = 8) -> Step:
    model = Decoder().to(device)
    return stepping(torch.optim.AdamW(model.parameters()), lambda: model(tokens(batch, device)), dtype=torch.bfloat16)


def checkpointed_decoder(device: str, batch: int = 8) -> Step:
    model = Decoder(checkpoints=True).to(device)
    return stepping(torch.optim.NAdam(model.parameters()), lambda: model(tokens(batch, device)), dtype=torch.float16)


def lora(device: str, batch: int = 8) -> Step:
    model = Decoder(rank=8).to(device)
    trained = [parameter.requires_grad_("down" in name or "up" in name) for name, parameter in model.named_parameters()]
    return stepping(
        torch.optim.AdamW([parameter for parameter in trained if parameter.requires_grad], fused=True),
        lambda: model(tokens(batch, device)),
        dtype=torch.bfloat16,
    )


def accumulation(device: str, batch: int = 8) -> Step:
    model = Decoder(layers=2, shared=8).to(device)
    return stepping(torch.optim.Adam(model.parameters()), lambda: model(tokens(batch, device)), micro_batches=4)


def encoder_decoder(device: str, batch: int = 8) -> Step:
    model = nn.Transformer(WIDTH, 8, 2, 2, 4 * WIDTH, batch_first=True).to(device)
    embedding = nn.Embedding(VOCABULARY, WIDTH, device=device)
    head = nn.Linear(WIDTH, VOCABULARY, device=device)
    optimizer = torch.optim.SGD([*model.parameters(), *embedding.parameters(), *head.parameters()], lr=0.1, momentum=0.9)

    def loss() -> Tensor:
        source, target = tokens(batch, device), tokens(batch, device, LENGTH // 2)
        states = model(embedding(source), embedding(target))
        return functional.cross_entropy(head(states).flatten(0, 1), target.flatten())

    return stepping(optimizer, loss)


def vision_transformer(device: str, batch: int = 8) -> Step:
    patches = nn.Conv2d(3, WIDTH, 16, 16).to(device)
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    head = nn.Linear(WIDTH, 1000, device=device)
    optimizer = torch.optim.RMSprop([*patches.parameters(), *body.parameters(), *head.parameters()])

    def loss() -> Tensor:
        x = patches(torch.randn(batch, 3, 224, 224, device=device)).flatten(2).transpose(1, 2)
        return functional.cross_entropy(head(body(x).mean(1)), torch.randint(0, 1000, (batch,), device=device))

    return stepping(optimizer, loss, dtype=torch.float16)


def dual_encoder(device: str, batch: int = 8) -> Step:
    """Each text is compared with every other of the batch: logits of batch × batch."""
    towers = nn.ModuleList(
        nn.Sequential(nn.EmbeddingBag(VOCABULARY, WIDTH), nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, WIDTH)) for _ in range(2)
    ).to(device)

    def loss() -> Tensor:
        left, right = (functional.normalize(tower(tokens(batch * 16, device, 32)), dim=-1) for tower in towers)
        return functional.cross_entropy(left @ right.T / 0.05, torch.arange(batch * 16, device=device))

    return stepping(torch.optim.RAdam(towers.parameters()), loss)


def convolutions(channels: Iterable[int]) -> list[nn.Module]:
    sizes = [3, *channels]
    return [nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU()) for before, after in pairwise(sizes)]


class UNet(nn.Module):
    """Down and up again, with what was on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(convolutions([16, 32, 64]))
        self.up = nn.ModuleList([nn.Conv2d(64 + 32, 32, 3, padding=1), nn.Conv2d(32 + 16, 16, 3, padding=1)])
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for block in self.down:
            x = block(x)
            levels.append(x)
            x = functional.max_pool2d(x, 2)
        x = levels.pop()
        for block in self.up:
            level = levels.pop()
            x = functional.silu(block(torch.cat([functional.interpolate(x, size=level.shape[-2:]), level], 1)))
        return self.out(x)


def unet(device: str, batch: int = 8) -> Step:
    model = UNet().to(device, memory_format=torch.channels_last)

    def loss() -> Tensor:
        images = torch.randn(batch, 3, 64, 64, device=device).to(memory_format=torch.channels_last)
        return functional.mse_loss(model(images), images)

    return stepping(torch.optim.Adam(model.parameters()), loss, dtype=torch.bfloat16)


def residual_network(device: str, batch: int = 8) -> Step:
    body = nn.Sequential(*convolutions([32, 64, 64]), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100)).to(device)
    return stepping(
        torch.optim.SGD(body.parameters(), lr=0.1),
        lambda: functional.cross_entropy(
            body(torch.randn(batch, 3, 64, 64, device=device)), torch.randint(0, 100, (batch,), device=device)
        ),
    )


def recurrent(device: str, batch: int = 8) -> Step:
    embedding = nn.Embedding(VOCABULARY, WIDTH, device=device)
    body = nn.GRU(WIDTH, WIDTH, 2, batch_first=True).to(device)
    head = nn.Linear(WIDTH, VOCABULARY, device=device)
    optimizer = torch.optim.Adagrad([*embedding.parameters(), *body.parameters(), *head.parameters()])

    def loss() -> Tensor:
        ids = tokens(batch, device)
        return functional.cross_entropy(head(body(embedding(ids))[0]).flatten(0, 1), ids.flatten())

    return stepping(optimizer, loss)


def mixture(device: str, batch: int = 8) -> Step:
    """Every expert sees every token; a gate weighs them."""
    experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH)) for _ in range(6)).to(device)
    gate = nn.Linear(WIDTH, 6, device=device)

    def loss() -> Tensor:
        x = torch.randn(batch, LENGTH, WIDTH, device=device)
        shares = gate(x).softmax(-1)
        return sum((expert(x) * shares[..., [number]] for number, expert in enumerate(experts)), torch.zeros_like(x)).square().mean()

    return stepping(torch.optim.Adadelta([*experts.parameters(), *gate.parameters()]), loss, dtype=torch.float16)


def adversarial(device: str, batch: int = 8) -> Step:
    """Two networks and two optimizers in one step."""
    maker = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3 * 32 * 32), nn.Tanh()).to(device)
    judge = nn.Sequential(nn.Linear(3 * 32 * 32, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)).to(device)
    optimizers = [torch.optim.Adam(model.parameters(), foreach=False) for model in (judge, maker)]

    def step() -> None:
        noise, real = torch.randn(batch * 8, 64, device=device), torch.randn(batch * 8, 3 * 32 * 32, device=device)
        (functional.softplus(-judge(real)) + functional.softplus(judge(maker(noise).detach()))).mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        functional.softplus(-judge(maker(noise))).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def masked_encoder(device: str, batch: int = 8) -> Step:
    """A mask of true and false becomes a bias of all pairs."""
    embedding = nn.Embedding(VOCABULARY, WIDTH, device=device)
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, activation="gelu")
    body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).to(device)
    head = nn.Linear(WIDTH, VOCABULARY, device=device)
    optimizer = torch.optim.AdamW([*embedding.parameters(), *body.parameters(), *head.parameters()], foreach=False)

    def loss() -> Tensor:
        ids = tokens(batch, device)
        padding = torch.zeros(batch, LENGTH, dtype=torch.bool, device=device)
        return functional.cross_entropy(head(body(embedding(ids), src_key_padding_mask=padding)).flatten(0, 1), ids.flatten())

    return stepping(optimizer, loss, dtype=torch.bfloat16)


PROGRAMS = (
    "gqa_decoder", "checkpointed_decoder", "lora", "accumulation", "encoder_decoder", "vision_transformer", "dual_encoder", "unet",
    "residual_network", "recurrent", "mixture", "adversarial", "masked_encoder",
)  # fmt: skip

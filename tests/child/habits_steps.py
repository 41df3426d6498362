"""Steps with a habit that costs something, and clean ones. One function gives them all: `build(device, name)`."""

import copy
import io

import torch
from torch import nn


def build(device, name, batch=64, **values):
    """Return the step of the program called *name*."""
    return globals()[name](device, batch=batch, **values)


def network(device, width=256):
    """Some layers."""
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(device)


def trained(device, batch, *, forward=None, after=None, zero=None, width=256, make=torch.optim.AdamW, **options):
    """Return a step in bf16 autocast with a fused optimizer: clean, but for what is given."""
    model = network(device, width)
    optimizer = make(model.parameters(), lr=1e-3, **({"fused": True} | options))

    def step():
        rows = torch.randn(batch, width, device=device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(rows).square().mean() if forward is None else forward(model, rows)
        loss.backward()
        optimizer.step()
        (zero or torch.optim.Optimizer.zero_grad)(optimizer)
        if after is not None:
            after(model, rows, loss)

    return step


def clean(device, batch):
    """Nothing to find."""
    return trained(device, batch)


def clean_evaluation(device, batch):
    """An evaluation under no_grad, and a model in eval mode that is trained all the same."""

    def evaluate(model, rows, loss):
        model.eval()
        with torch.no_grad():
            model(rows)
        model.train()

    def in_eval_mode(model, rows):
        model.eval()
        loss = model(rows).square().mean()
        model.train()
        return loss

    return trained(device, batch, forward=in_eval_mode, after=evaluate)


def clean_fp16(device, batch, width=256):
    """A gradient scaler that is used in the right order."""
    model = network(device, width)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(batch, width, device=device)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def clean_images(device, batch):
    """Convolutions in channels_last, with cuDNN's benchmark."""
    torch.backends.cudnn.benchmark = True
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3)).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step():
        images = torch.randn(batch, 16, 32, 32, device=device).to(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def emptied(device, batch):
    """The cache is emptied in every step."""
    return trained(device, batch, after=lambda *_: torch.cuda.empty_cache())


def read(device, batch):
    """The loss is read in every step."""
    losses = []
    return trained(device, batch, after=lambda *seen: losses.append(seen[-1].item()))


def read_seldom(device, batch):
    """The loss is read in every tenth step."""
    losses = []

    def log(model, rows, loss):
        losses.append(loss.detach())
        if len(losses) % 10 == 0:
            print(losses[-1].item())
            losses.clear()

    return trained(device, batch, after=log)


def zeroed(device, batch):
    """Gradients are kept from step to step, where activations are the peak."""
    return trained(device, batch, zero=lambda optimizer: optimizer.zero_grad(set_to_none=False))


def foreach(device, batch):
    """Adam with temporaries for all parameters at once, which are the peak."""
    return trained(device, batch, width=2048, fused=False)


def for_loop(device, batch):
    """Adam parameter by parameter."""
    return trained(device, batch, fused=False, foreach=False)


def clipped_scaled(device, batch, width=256):
    """Gradients are clipped while they are scaled."""
    model = network(device, width)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(batch, width, device=device)).square().mean()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def unscaled_fp16(device, batch, width=1024):
    """Autocast in fp16 without a scaler."""
    model = network(device, width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(batch, width, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def scaled_bf16(device, batch, width=256):
    """A scaler that bf16 does not need."""
    model = network(device, width)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(torch.randn(batch, width, device=device)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def plain_fp32(device, batch, width=1024):
    """Neither autocast nor TF32."""
    model = network(device, width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        model(torch.randn(batch, width, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def unpinned(device, batch):
    """A copy that waits, whatever it is told."""

    def forward(model, rows):
        return model(torch.zeros(rows.shape).to(rows.device, non_blocking=True)).square().mean()

    return trained(device, batch, forward=forward)


def evaluated(device, batch):
    """An evaluation, larger than the training, that keeps its activations."""

    def evaluate(model, rows, loss):
        model.eval()
        model(rows.repeat(8, 1))
        model.train()

    return trained(device, batch, after=evaluate)


def clean_copies(device, batch):
    """A model that is evaluated, copied, saved whole and loaded: what is saved has nothing of memplan, and runs."""

    def evaluate(model, rows, loss):
        average = copy.deepcopy(model.eval()).eval()
        saved = io.BytesIO()
        torch.save(average, saved)
        assert b"memplan" not in saved.getvalue()
        saved.seek(0)
        with torch.no_grad():
            torch.load(saved, weights_only=False)(rows)
        model.train()

    return trained(device, batch, after=evaluate)


def images(device, batch, sizes=(32,), benchmark=False):
    """Convolutions as they come: NCHW, which of a kernel of 1×1 cannot be seen."""
    torch.backends.cudnn.benchmark = benchmark
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    number = 0

    def step():
        nonlocal number
        number += 1
        size = sizes[number % len(sizes)]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(torch.randn(batch, 16, size, size, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def recompiled(device, batch, width=64):
    """A compiled function whose input grows, and which is told that shapes are static."""
    model = network(device, width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    forward = torch.compile(model, dynamic=False, backend="eager")
    number = 0

    def step():
        nonlocal number
        number += 1
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = forward(torch.randn(batch + number, width, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def clean_compiled(device, batch, width=64):
    """A compiled model with convolutions, whose shapes stay."""
    torch.backends.cudnn.benchmark = True
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 10)).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    forward = torch.compile(model, backend="aot_eager")

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = forward(torch.randn(batch, 8, 8, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def clean_closure(device, batch, width=64):
    """L-BFGS: backwards, and cleared gradients, within a step."""
    model = network(device, width)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    rows = torch.randn(batch, width, device=device)

    def closure():
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def accumulated(device, batch, *, lengths=(4, 4, 1), divide=lambda loss, _: loss / 4, scaled=False, before=None):
    """Accumulation over four micro-batches, of losses that *divide* divides; the last step of an epoch of nine has one."""
    model = network(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    done = 0

    def step():
        nonlocal done
        if before is not None and done % 3 == 2:
            before(model)
        number = lengths[done % len(lengths)]
        for _ in range(number):
            with torch.autocast("cuda", dtype=torch.float16 if scaled else torch.bfloat16):
                loss = model(torch.randn(batch, 256, device=device)).square().mean()
            scaler.scale(divide(loss, number)).backward()
        scaler.step(optimizer)  # with what has accumulated
        scaler.update()
        optimizer.zero_grad()
        done += 1

    return step


def accumulated_scaled(device, batch):
    """The same with a gradient scaler, and a product in the place of the quotient."""
    return accumulated(device, batch, divide=lambda loss, _: loss * 0.25, scaled=True)


def accumulated_too_long(device, batch):
    """Gradients of an epoch's end that are used in the first step of the next."""
    return accumulated(device, batch, lengths=(4, 4, 5))


def clean_accumulation(device, batch):
    """A last step whose losses are divided by as many as it has."""
    return accumulated(device, batch, divide=lambda loss, number: loss / number)


def clean_cleared_by_hand(device, batch):
    """Gradients of an epoch's end that are set to None without the optimizer: no step uses them."""

    def drop(model):
        (model(torch.randn(batch, 256, device=device)).square().mean() / 4).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return accumulated(device, batch, lengths=(4,), before=drop)


def clean_sum(device, batch):
    """Losses that are summed: a step of fewer has a smaller sum, as it should."""
    return accumulated(device, batch, divide=lambda loss, _: loss)


def clean_two_losses(device, batch):
    """Losses that weigh a third each: no step has three of them."""
    return accumulated(device, batch, lengths=(1, 1, 2), divide=lambda loss, _: loss / 3)


def clean_checkpointed(device, batch):
    """A loss within a checkpointed region, which must not be computed once more."""

    computed = []

    def quarter(loss):
        computed.append(loss)
        assert len(computed) <= 2, "forward, and again for the backward"
        return loss * torch.full((), 0.25)

    def divide(loss, _):
        computed.clear()
        return torch.utils.checkpoint.checkpoint(quarter, loss, use_reentrant=False)

    return accumulated(device, batch, divide=divide)


def clean_small(device, batch):
    """Few weights in fp32: another type would bring nothing."""
    return plain_fp32(device, batch, width=64)

"""Steps with something to find in them, and their twins without. One function gives them all: `build(device, name)`."""

import copy
import itertools

import torch
from torch.utils.checkpoint import checkpoint


def build(device, name, batch=64, **values):
    """Return the step of the program called *name*."""
    return globals()[name](device, batch=batch, **values)


def training(model, *, batch, width, update=None, loss=None):
    """Return a step that trains *model* on random rows."""
    update = update or torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    device = next(model.parameters()).device

    def step():
        result = model(torch.randn(batch, width, device=device))
        (loss(result) if loss else result.square().mean()).backward()
        update.step()
        update.zero_grad()

    return step


def layers(width, depth=4):
    """Linear layers without bias."""
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(depth)])


# steps that differ


def grows_until(device, batch, width=64, last=3):
    """What is kept grows up to the step *last*, and is the same from then on."""
    step, numbers, kept = training(layers(width).to(device), batch=batch, width=width), itertools.count(1), []

    def grow():
        step()
        if next(numbers) <= last:
            kept.append(torch.empty(2**22, device=device))

    return grow


def reserves_more(device, batch, at=3):
    """From the step *at* on, what is alive is less than before and in smaller pieces, between which a larger one finds no place."""
    del batch
    numbers = itertools.count(1)

    def step():
        if next(numbers) < at:
            torch.empty(100 * 2**20, dtype=torch.uint8, device=device)
            return
        first = torch.empty(30 * 2**20, dtype=torch.uint8, device=device)
        second = torch.empty(20 * 2**20, dtype=torch.uint8, device=device)
        del first
        torch.empty(60 * 2**20, dtype=torch.uint8, device=device)
        del second

    return step


# what an optimizer does


def steps_with_a_closure(device, batch, width=256, how="none"):
    """The optimizer has the loss and its gradients computed, as Lightning's do; *how* it is given the function that does."""
    model = layers(width).to(device)
    update = torch.optim.Adam(model.parameters())

    def compute():
        update.zero_grad()
        loss = torch.nn.functional.gelu(model(torch.randn(batch, width, device=device))).square().mean()
        loss.backward()
        return loss

    def step():
        if how == "none":
            compute()
        update.step(*([compute] if how == "first" else []), **({"closure": compute} if how == "named" else {}))

    return step


def precision_after_a_check(device, batch, width=1024, is_opposite=False):
    """
    A program that trains in mixed precision where that gives about the same, which one function compares and another asserts.

    *is_opposite*: it compares whether they differ.
    """
    model = layers(width).to(device)

    def mixed(rows):
        with torch.autocast(device):
            return model(rows)

    def is_close(rows):
        return mixed(rows).shape == rows.shape and torch.allclose(model(rows), mixed(rows).float(), atol=0.1)

    def differs(rows):
        return not torch.allclose(model(rows), mixed(rows).float(), atol=0.1)

    def can_be_mixed():
        return is_close(torch.randn(4, width, device=device))

    try:
        if is_opposite:
            assert not differs(torch.randn(4, width, device=device))
        else:
            assert can_be_mixed()
        is_mixed = True
    except AssertionError:
        is_mixed = False
    update = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        with torch.autocast(device, enabled=is_mixed):
            loss = model(torch.randn(batch, width, device=device)).float().mean()
        loss.backward()
        update.step()
        update.zero_grad()
        assert is_mixed or is_opposite

    return step


# activation checkpointing


class Encoder(torch.nn.Module):
    """Two blocks with a switch, as libraries have it: without effect in eval mode, or where nobody asks."""

    def __init__(self, width, *, asks=True):
        super().__init__()
        self.gradient_checkpointing = True
        self.blocks = torch.nn.ModuleList([layers(width, 2) for _ in range(2)])
        self.asks = asks

    def forward(self, rows):
        """Run the blocks, checkpointed where the switch has an effect."""
        for block in self.blocks:
            if self.gradient_checkpointing and self.training and self.asks:
                rows = checkpoint(block, rows, use_reentrant=False)
            else:
                rows = block(rows)
        return rows


def checkpoints(device, batch, width=256):
    """The switch works."""
    return training(Encoder(width).to(device), batch=batch, width=width)


def checkpoints_reentrant(device, batch, width=256):
    """The older way, called by a module without any switch of the name."""
    encoder = Encoder(width, asks=False).to(device)
    block = layers(width).to(device)
    update = torch.optim.SGD([*encoder.parameters(), *block.parameters()], lr=1e-3)

    def step():
        rows = torch.randn(batch, width, device=device, requires_grad=True)
        encoder(checkpoint(block, rows, use_reentrant=True)).square().mean().backward()
        update.step()
        update.zero_grad()

    return step


def switch_in_eval_mode(device, batch, width=256):
    """The guide's trap: the encoder was left in eval mode."""
    model = torch.nn.Sequential(Encoder(width), layers(width)).to(device)
    model[0].eval()
    return training(model, batch=batch, width=width)


def switch_that_nobody_asks(device, batch, width=256):
    """In training mode, and still not one region is checkpointed."""
    return training(Encoder(width, asks=False).to(device), batch=batch, width=width)


# parameters without gradient


class TwoHeads(torch.nn.Module):
    """Only one of the heads reaches the loss."""

    def __init__(self, width):
        super().__init__()
        self.body = layers(width, 1)
        self.used = torch.nn.Linear(width, width)
        self.unused = torch.nn.Linear(width, width)

    def forward(self, rows):
        """Run the body and one head."""
        return self.used(self.body(rows))


def head_without_gradient(device, batch, width=64, frozen=False):
    """The unused head is in the optimizer all the same, and in another that wraps it; *frozen*: it was told not to learn."""
    model = TwoHeads(width).to(device)
    model.unused.requires_grad_(not frozen)
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    update.wrapper = torch.optim.SGD(model.parameters(), lr=1e-3)
    return training(model, batch=batch, width=width, update=update)


def heads_in_turn(device, batch, width=64, accumulation=2):
    """Over the accumulated batches of a step every head gets its gradient."""
    model = TwoHeads(width).to(device)
    update = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        for number in range(accumulation):
            rows = model.body(torch.randn(batch, width, device=device))
            (model.used if number % 2 else model.unused)(rows).mean().backward()
        update.step()
        update.zero_grad()

    return step


def drops_gradients(device, batch, width=64, kept_from=None):
    """The last layer learns nothing until step *kept_from*: the program drops its gradients, as a recipe does in its first epoch."""
    model = TwoHeads(width).to(device)
    update = torch.optim.AdamW([*model.body.parameters(), *model.used.parameters()])
    num_steps = 0

    def step():
        nonlocal num_steps
        num_steps += 1
        model(torch.randn(batch, width, device=device)).mean().backward()
        if kept_from is None or num_steps < kept_from:
            model.used.zero_grad()
        update.step()
        update.zero_grad()

    return step


# wide tensors


def wide_loss(device, batch, width=1024):
    """Under autocast, the loss is taken of an fp32 copy of everything."""
    model = layers(width).to(device)

    def loss(result):
        return torch.log_softmax(result.float(), dim=-1).mean()

    trained = training(model, batch=batch, width=width, loss=loss)

    def step():
        with torch.autocast(device, dtype=torch.float16):
            trained()

    return step


def short_loss(device, batch, width=1024):
    """Under autocast, and nothing is widened."""
    trained = training(layers(width).to(device), batch=batch, width=width, loss=lambda result: (result * result).mean(dtype=torch.float16))

    def step():
        with torch.autocast(device, dtype=torch.float16):
            trained()

    return step


def single_precision(device, batch, width=1024):
    """All fp32: nothing is wider than the rest."""
    return training(layers(width).to(device), batch=batch, width=width)


def double_by_accident(device, batch, width=1024):
    """A numpy default gets into the features."""
    model = layers(width).double().to(device)
    update = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        features = torch.zeros(batch, width, dtype=torch.float64, device=device)
        model(features).square().mean().backward()
        update.step()
        update.zero_grad()

    return step


# growth


def leaks(device, batch):
    """Keeps every loss with its graph."""
    model, kept = layers(256).to(device), []

    def step():
        kept.append(model(torch.randn(batch, 256, device=device)).square().mean())
        kept[-1].backward(retain_graph=True)

    return step


def settles(device, batch, at=4):
    """A buffer of the last steps, full after *at* of them."""
    kept = []

    def step():
        kept.append(torch.empty(batch, 2**14, device=device))
        del kept[:-at]

    return step


def gives_back(device, batch):
    """Keeps something of each of the first three steps, and lets go of what the second and the third made in the fourth."""
    kept, numbers = [], itertools.count(1)

    def step():
        if next(numbers) <= 3:
            kept.append(torch.empty(batch, 2**14, device=device))
        else:
            del kept[1:]

    return step


def steady(device, batch):
    """The same in every step."""
    return training(layers(256).to(device), batch=batch, width=256)


def loads_ahead(device, batch):
    """The batch of the next step is there at the end of each, and batches grow."""
    sizes = itertools.count(batch)
    ahead = [None]

    def step():
        here = ahead[0] if ahead[0] is not None else torch.empty(next(sizes), 2**14, device=device)
        ahead[0] = torch.empty(next(sizes), 2**14, device=device)
        del here

    return step


def second_network_later(device, batch, width=512):
    """A generator that takes its first step in the third of its critic."""
    networks = [layers(width).to(device) for _ in range(2)]
    updates = [torch.optim.Adam(network.parameters()) for network in networks]
    numbers = itertools.count(1)

    def step():
        for network, update in list(zip(networks, updates, strict=True))[: 1 + next(numbers) // 3]:
            network(torch.randn(batch, width, device=device)).square().mean().backward()
            update.step()
            update.zero_grad()

    return step


def varies(device, batch):
    """Takes 512 bytes more in every step and keeps nothing: a table of whatever the batch has."""
    numbers = itertools.count(1)

    def step():
        torch.empty(2**20 + 512 * next(numbers), dtype=torch.uint8, device=device)

    return step


def boxes(device, batch):
    """Images that are all alike, and of boxes one more with each batch."""
    samples = [(torch.zeros(3, 32, 32), torch.zeros(number, 5)) for number in range(1, 20)]
    loader = iter(torch.utils.data.DataLoader(samples, batch_size=1))

    def step():
        next(loader)
        torch.empty(2**20, device=device)

    return step


# what memory is for


def frozen_body(device, batch, width=512):
    """LoRA's shape: four layers that do not learn, one that does."""
    model = torch.nn.Sequential(layers(width).requires_grad_(False), layers(width, 1)).to(device)
    return training(model, batch=batch, width=width, update=torch.optim.AdamW(model[1].parameters(), foreach=True))


def buffers(device, batch, width=512):
    """A table that is part of the model and no parameter."""
    model = layers(width).to(device)
    model.register_buffer("table", torch.zeros(2**20, device=device))
    return training(model, batch=batch, width=width)


def moving_average(device, batch, width=512):
    """A copy of the model that follows it."""
    model = layers(width).to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    trained = training(model, batch=batch, width=width)

    def step():
        trained()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.01)

    return step


def average_in_a_dict(device, batch, width=512, is_new=False):
    """A copy of the weights that is no module: a dict of tensors, made anew or changed in place."""
    model = layers(width).to(device)
    average = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    trained = training(model, batch=batch, width=width)

    def step():
        trained()
        for name, weight in model.named_parameters():
            if is_new:
                average[name] = 0.99 * average[name] + 0.01 * weight.detach()
            else:
                average[name].lerp_(weight.detach(), 0.01)

    return step


def from_meta(device, batch, width=512):
    """Weights without memory at first, that get it from a checkpoint; those of a teacher are empty until they are filled."""
    with torch.device("meta"):
        model, teacher = layers(width), layers(width)
    model.load_state_dict({name: torch.zeros(weight.shape, device=device) for name, weight in model.state_dict().items()}, assign=True)
    teacher.to_empty(device=device).requires_grad_(False)
    trained = training(model, batch=batch, width=width)

    def step():
        teacher(torch.randn(batch, width, device=device))
        trained()

    return step


def no_module(device, batch, width=512):
    """Weights in a list, of a class of its own and plain, that a hand-written update changes."""
    weights = [Weight(torch.zeros(width, width, device=device)), torch.zeros(width, width, device=device, requires_grad=True)]

    def step():
        hidden = torch.randn(batch, width, device=device)
        for weight in weights:
            hidden = hidden @ weight
        hidden.square().mean().backward()
        with torch.no_grad():
            for weight in weights:
                weight.sub_(0.1 * weight.grad)
                weight.grad = None

    return step


def optimizer_of_its_own(device, batch, width=512, are_parameters=False, is_late=False):
    """Momentum that the program keeps itself, in tensors or in Parameters; made before the first step, or in it."""
    model = layers(width).to(device)
    momentum = {}

    def of(weight):
        kept = torch.zeros_like(weight)
        return torch.nn.Parameter(kept, requires_grad=False) if are_parameters else kept

    if not is_late:
        momentum.update({weight: of(weight) for weight in model.parameters()})

    def step():
        model(torch.randn(batch, width, device=device)).square().mean().backward()
        with torch.no_grad():
            for weight in model.parameters():
                kept = momentum[weight] = momentum[weight] if weight in momentum else of(weight)
                kept.mul_(0.9).add_(weight.grad)
                weight.sub_(kept, alpha=0.1)
                weight.grad = None

    return step


class Weight(torch.nn.Parameter):
    """A parameter of a class of the program's own."""


def with_optimizer(device, batch, optimizer, width=512, accumulation=1, **settings):
    """Any of torch's optimizers, with accumulation."""
    model = layers(width).to(device)
    update = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3, **settings)

    def step():
        for _ in range(accumulation):
            model(torch.randn(batch, width, device=device)).square().mean().backward()
        update.step()
        update.zero_grad()

    return step


def peaks_forward(device, batch):
    """Everything is taken and given back before any backward."""
    weight = torch.nn.Parameter(torch.zeros(16, device=device))

    def step():
        with torch.no_grad():
            torch.empty(batch, 2**18, device=device)
        weight.sum().backward()

    return step


# values read from the device


def reads_item(device, batch):
    """Logs its loss, four times a step."""
    trained = training(layers(64).to(device), batch=batch, width=64)
    loss = torch.zeros((), device=device) + 1

    def step():
        trained()
        for _ in range(4):
            loss.item()

    return step


def reads_finite(device, batch):
    """Goes on where the loss is finite, and says so by what it allocates."""
    loss = torch.zeros((), device=device) + 1

    def step():
        if torch.isfinite(loss).all():
            torch.empty(2**20, device=device)
        if torch.isnan(loss).any():
            torch.empty(2**24, device=device)

    return step


def reads_scaler_state(device, batch):
    """Keeps the state of its loss scaler."""
    scaler = torch.amp.GradScaler(device)
    scaler.scale(torch.zeros((), device=device))

    def step():
        return scaler.state_dict()

    return step


def reads_checks(device, batch):
    """Asserts, and raises for what is wrong."""
    values = torch.arange(8, device=device) * 2

    def step():
        assert (values >= 0).all(), "negative"
        assert not (values < 0).any()
        if (values < 0).any():
            raise ValueError("negative")
        if not (values >= 0).all():
            raise ValueError("negative")
        torch.empty(2**20, device=device)

    return step


def reads_mask(device, batch):
    """Takes a short cut where nothing is padding."""
    mask = torch.ones(batch, 16, device=device) > 0

    def step():
        if mask.all():
            return
        torch.empty(2**20, device=device)

    return step


def reads_bool(device, batch):
    """Something that no rule knows."""
    flag = torch.ones((), device=device) > 0

    def step():
        torch.empty(2**22 if bool(flag) else 2**20, device=device)

    return step


def reads_distribution(device, batch):
    """torch.distributions looks at its arguments."""

    def step():
        mean = torch.randn(batch, device=device)
        torch.distributions.Normal(mean, mean.exp()).log_prob(mean)

    return step


def reads_anomalies(device, batch):
    """Anomaly detection looks at every gradient of 200 layers."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8, device=device) for _ in range(200)))

    def step():
        with torch.autograd.detect_anomaly():
            layers(torch.randn(batch, 8, device=device)).sum().backward()

    return step


def reads_nonzero(device, batch):
    """Takes the rows of a mask: how many, only the device would know."""
    rows, mask = torch.zeros(batch * 2**12, 64, device=device), torch.zeros(batch * 2**12, device=device) > 0

    def step():
        rows[mask].clone()

    return step


def reads_over_lines(device, batch):
    """Takes rows that the model chooses, in an expression of several lines, and asks for them again in the backward."""
    rows, model = torch.zeros(batch * 2**12, 64, device=device, requires_grad=True), torch.nn.Linear(64, 1, device=device)

    def step():
        chosen = model(rows.detach()).squeeze(1) > 0.3
        kept = torch.mul(
            rows[
                chosen  # by a threshold
            ],
            2,
        )  # fmt: skip
        kept.square().mean().backward()

    return step


def copies_back(device, batch):
    """What went to the device and came straight back is what it was."""

    def step():
        lengths = torch.tensor([3, 5, 7]).to(device)
        assert lengths.tolist() == [3, 5, 7]
        torch.empty(int(lengths.max().cpu()) + 1, 2**18, device=device)

    return step


# peaks


def resets(device, batch, width=1024):
    """Resets PyTorch's peaks in each step, as training loops do at each epoch; the first step is the largest."""
    sizes = iter([16 * batch, batch, batch, batch])  # the fourth is for the closer look

    def step():
        torch.empty(next(sizes), width, device=device)
        torch.cuda.reset_peak_memory_stats()

    return step


def teacher(device, batch, width=64):
    """A frozen teacher in eval mode beside a student: its switch has nothing to act on."""
    student = Encoder(width).train()
    frozen = Encoder(width).eval().requires_grad_(False)
    frozen.gradient_checkpointing = True
    student.to(device)
    frozen.to(device)
    update = torch.optim.SGD(student.parameters(), lr=1e-3)

    def step():
        x = torch.randn(batch, width, device=device)
        with torch.no_grad():
            target = frozen(x)
        (student(x) - target).square().mean().backward()
        update.step()
        update.zero_grad()

    return step


def reads_counts(device, batch, width=1024):
    """Sizes that values decide: how often rows are repeated, how many are chosen, and counts that become a list."""

    def step():
        rows = torch.randn(batch, width, device=device)
        repeated = torch.repeat_interleave(rows, torch.randint(1, 4, (batch,), device=device), dim=0)
        chosen = rows[rows[:, 0] > 0]
        counts = torch.bincount(rows.argmax(1) % 4, minlength=4)
        sizes = counts.tolist()
        return repeated, chosen, [torch.empty(size, width, device=device) for size in sizes]

    return step


def many_events(device, batch, width=1024):
    """So many events in its second step that recording ends there; the fourth is the largest."""
    numbers = iter(range(1, 100))

    def step():
        number = next(numbers)
        for _ in range(350_000 if number == 2 else 0):
            torch.empty(1, device=device)
        torch.empty(batch * (8 if number == 4 else 1), width, device=device)

    return step


def larger_when_types_are_checked(device, batch, mib=24):
    """Needs more in its fourth step, which is the one that is looked at closely: cached memory has to be given back for it."""
    numbers = iter(range(1, 100))

    def step():
        torch.empty((mib if next(numbers) < 4 else 2 * mib) * 2**20, dtype=torch.uint8, device=device)

    return step


def not_served_when_types_are_checked(device, batch, width=64):
    """Calls what the device does not serve in its fourth step, which is the one that is looked at closely."""
    numbers = iter(range(1, 100))

    def step():
        rows = torch.eye(width).to_sparse_csr().to(device)
        if next(numbers) == 4:
            rows @ rows

    return step


def of_several_sizes(device, batch):
    """Steps on batches of so many MiB, each with a copy of it."""
    sizes = iter((3, 2, 5, 2, 3, 4, 9, 2, 3, 2))

    def step():
        inputs = torch.ones(next(sizes) * 2**18, device=device)
        inputs + 1

    return step


class Coded(torch.Tensor):
    """Numbers that are kept as codes, as those of 8-bit optimizers are."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device)

    def __init__(self, codes):
        self.codes = codes

    def __tensor_flatten__(self):
        return ["codes"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(func)


class OfCodes(torch.optim.Optimizer):
    """Keeps one code for each parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter not in self.state:
                self.state[parameter]["exp_avg"] = Coded(torch.zeros_like(parameter, dtype=torch.uint8))


def optimizer_of_codes(device, batch, width=1024):
    """8 bits for each of 1024 x 1024 parameters."""
    model = torch.nn.Linear(width, width, bias=False, device=device)
    optimizer = OfCodes(model.parameters())

    def step():
        model(torch.ones(batch, width, device=device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

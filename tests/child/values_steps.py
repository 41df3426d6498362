"""Steps whose sizes come from data: what they read from the device has to be what the host would compute."""

from __future__ import annotations

import io
import random
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.optim import lbfgs
from torch.package import PackageExporter
from torch.utils.data import DataLoader, Dataset

MIB_OF_FLOATS = 2**18


def build(device, program, **values):
    """The step of the function *program* of this file."""
    return globals()[program](device, **values)


def host(*shape, low=0, high=100, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def padded(device):
    """Texts of several lengths, and their mask, as a loader gives them."""
    lengths = torch.tensor([5, 2, 7, 3])
    return (torch.arange(8) < lengths[:, None]).to(device)


def _buffer(device):
    kept = torch.zeros(6, dtype=torch.int64, device=device)
    kept[2:4] = host(2, seed=5).to(device)
    kept.view(2, 3)[1].add_(7)
    return kept.sum().item()


def _two_masks(device):
    table = host(5, 4).to(device)
    return table[table[:, 0] > 20][:, table[0] > 10].numel()


def _marked_on_the_host(device):
    mask, places = torch.ones(100, dtype=torch.bool), host(9).to(device)
    mask[places + 0] = False  # computed: what was only copied, the device itself knows
    return int(mask.sum())


def _marked_by_a_mask_of_the_device(device):
    mask = torch.ones(4, 50, dtype=torch.bool)
    mask[host(4, 50).to(device) > 25] = False
    return int(mask.sum())


def _in_an_expression(device):
    mask = padded(device)
    return int(
        mask
        .sum()
        .item()
    )  # fmt: skip


def _for_attention(device, length=300):
    """A mask that is the same for every query, in the types that models make of it, and then written to."""
    mask = (torch.arange(length) < torch.tensor([5, 200, 300, 64])[:, None]).to(device)
    left_out = 1 - mask[:, None, None, :].expand(4, 1, length, length).to(torch.int64)
    wide = 1.0 - mask[:, None, None, :].expand(4, 1, length, length).to(torch.float32)
    allowed = ~(wide.to(torch.bool) | left_out.bool())
    allowed[0, 0, 7] = False
    return allowed.nonzero().shape[0] + int(left_out[:, :, 3:5].sum())


def _scores(device):
    return nn.Linear(4, 9, device=device)(torch.ones(4, device=device)).detach()


def _marked(tensor):
    tensor[[2, 5]] = 1
    return (tensor != 0).nonzero().numel()


def _rows_of_a_gradient(device):
    table = nn.Embedding(100, 4, sparse=True, device=device)
    table(host(40).to(device)).sum().backward()
    return table.weight.grad.coalesce()._nnz()


def _lengths_of_a_loss(device):
    texts, lengths, sizes = (host(*shape, low=1, high=8).to(device) for shape in ((4, 8), (4,), (4,)))
    logs = nn.Linear(4, 20, device=device)(torch.ones(9, 4, 4, device=device)).log_softmax(-1)
    return functional.ctc_loss(logs, texts, lengths + 1, sizes.clamp(max=2), zero_infinity=True).numel()


def _where_the_device_is_the_default(device):
    """As programs say it that are older than `torch.set_default_device`."""
    torch.set_default_tensor_type("torch.cuda.FloatTensor" if torch.device(device).type == "cuda" else "torch.FloatTensor")
    try:
        numbers = torch.Tensor([3, 0, 5, 1])
        marked = torch.zeros(4).masked_fill_(numbers > 2, 7) + torch.arange(4)
        return marked.sum().item(), numbers[numbers > 2].numel(), marked.long().repeat_interleave(marked.long()).numel()
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")


def _loaded(device):
    file = io.BytesIO()
    torch.save(host(50), file)
    file.seek(0)
    return (torch.load(file, map_location=device) > 50).sum().item()


def _replaced(device):
    labels = torch.zeros(1, dtype=torch.int64, device=device)
    labels.data = host(50).to(device)
    return labels[labels > 50].numel()


def _sparse(device):
    edges = torch.sparse_coo_tensor(host(2, 20, high=9), torch.ones(20), (9, 9)).coalesce()
    return (edges.to(device).to_dense() > 0).sum().item(), edges.to(device).cpu().to_dense().sum().item()


def _edges(device, places=9):
    """Edges of a graph, of which some stand twice."""
    return torch.sparse_coo_tensor(host(2, 30, high=places), torch.ones(30), (places, places), check_invariants=False).to(device)


def _of_edges(device):
    """Ways to count them, and what each makes of them: of a small matrix and of one that no host should make dense."""
    found = []
    for places in (9, 100_000):
        edges = _edges(device, places)
        both = (edges + edges.t()).coalesce()
        found += [edges.t().coalesce()._nnz(), both._nnz(), torch.cat([edges, edges]).coalesce().indices().shape[1]]
        found += [int((both.indices()[0] < both.indices()[1]).sum()), (edges * 2.0).coalesce().transpose(0, 1).coalesce()._nnz()]
        found.append(torch.sparse.mm(edges.t(), torch.ones(places, 2, device=device)).shape[0])
    return found


class Labels(torch.Tensor):
    """A class that sees every operation on it, as MONAI's and torchvision's do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


READS = {
    "labels of a class of their own": lambda device: int((host(50).as_subclass(Labels).to(device) > 50).sum()),
    "elements of a mask": lambda device: padded(device).nonzero().shape[0],
    "rows of a mask": lambda device: torch.zeros(4, 8, 3, device=device)[padded(device)].shape[0],
    "where": lambda device: torch.where(host(50).to(device) > 50)[0].numel(),
    "masked_select": lambda device: host(50).to(device).masked_select(host(50, seed=1).to(device) < 30).numel(),
    "masked_select of rows": lambda device: torch.ones(50, 4, device=device).masked_select((host(50).to(device) < 30)[:, None]).numel(),
    "argwhere": lambda device: torch.argwhere(host(4, 5).to(device) % 3 == 0).shape[0],
    "columns of a mask": lambda device: host(2, 100).to(device)[:, host(100, seed=2).to(device) != 5].shape[1],
    "two masks": _two_masks,
    "labels that count": lambda device: int((torch.where(host(64) < 20, host(64), -100).to(device) != -100).sum()),
    "the longest": lambda device: padded(device).sum(1).max().item(),
    "lengths as a list": lambda device: sum(padded(device).sum(1).tolist()),
    "lengths to the host": lambda device: int(padded(device).sum(1).cpu()[2]),
    "lengths to numpy": lambda device: int(padded(device).sum(1).to("cpu", torch.int32).numpy()[0]),
    "is all padding": lambda device: 3 if padded(device).all() else 4,
    "is any": lambda device: 3 if bool((host(9).to(device) == host(9)[3].item()).any()) else 4,
    "equal": lambda device: 1 + torch.equal(host(9).to(device), host(9).to(device)),
    "unique": lambda device: host(200).to(device).unique().numel(),
    "unique with counts": lambda device: host(200).to(device).unique(return_inverse=True, return_counts=True)[2].max().item(),
    "unique rows": lambda device: host(50, 2, high=4).to(device).unique(dim=0).shape[0],
    "unique_consecutive": lambda device: host(200, high=3).to(device).unique_consecutive().numel(),
    "unique floats": lambda device: host(50).float().to(device).unique().numel(),
    "sort": lambda device: host(40).to(device).sort().values[7].item(),
    "argsort": lambda device: host(40).to(device).argsort(stable=True)[7].item(),
    "topk": lambda device: host(40).to(device).topk(3).values.sum().item(),
    "cumsum": lambda device: padded(device).sum(1).cumsum(0)[-1].item(),
    "bincount": lambda device: host(40, high=6).to(device).bincount(minlength=4).numel(),
    "one_hot": lambda device: functional.one_hot(host(40, high=6).to(device)).shape[1],
    "repeat_interleave": lambda device: torch.arange(4, device=device).repeat_interleave(padded(device).sum(1)).numel(),
    "scatter_add": lambda device: (
        torch.zeros(9, dtype=torch.int64, device=device).scatter_add_(0, host(40, high=9).to(device), host(40).to(device)).max().item()
    ),
    "gather": lambda device: host(5, 5).to(device).gather(1, host(5, 2, high=5).to(device)).sum().item(),
    "index by integers": lambda device: host(50).to(device)[host(9, high=50).to(device)].max().item(),
    "arithmetic": lambda device: ((host(9).to(device) * 3 - 7) // 2 % 11).sum().item(),
    "a buffer that is filled in parts": _buffer,
    "a mask for attention": _for_attention,
    "views": lambda device: host(4, 6).to(device).t().reshape(2, -1)[1].view(-1)[::2].sum().item(),
    "boxes": lambda device: (torch.tensor([[0.0, 0.5], [1.0, 0.2], [1.0, 0.9]]).to(device)[:, 1] > 0.4).sum().item(),
    "factories": lambda device: (torch.arange(10, device=device) + torch.full((10,), 3, device=device)).max().item(),
    "cat and stack": lambda device: torch.cat([host(3).to(device), torch.stack([host(3).to(device)[0]] * 2)]).sum().item(),
    "an expression of several lines": _in_an_expression,
    "segments": lambda device: torch.bucketize(host(9).to(device), torch.tensor([10, 50]).to(device)).sum().item(),
    "a list of numbers": lambda device: torch.tensor([3, 1, 2], device=device).cumsum(0).max().item(),
    "a list as an index": lambda device: host(50).to(device)[[7, 3, 7]].sum().item(),
    "a new tensor of a list": lambda device: host(50).to(device).new_tensor([[7], [3]]).repeat(1, 3).sum().item(),
    "zeros like scores": lambda device: _marked(torch.zeros_like(_scores(device), dtype=torch.bool)),
    "new zeros of scores": lambda device: _marked(_scores(device).new_zeros(9, dtype=torch.int64)),
    "like scores, and all the same": lambda device: torch.full_like(_scores(device), 3, dtype=torch.int64).sum().item(),
    "filled": lambda device: _marked(torch.empty(9, device=device).fill_(0)),
    "filled with what the device has": lambda device: int(_marked(torch.zeros(9, device=device).fill_(host(1).to(device)[0]))),
    "rows of a sparse gradient": _rows_of_a_gradient,
    "letters of a CTC loss": _lengths_of_a_loss,
    "where the device is the default": _where_the_device_is_the_default,
    "loaded to the device": _loaded,
    "put in the place of other data": _replaced,
    "a sparse tensor": _sparse,
    "edges": _of_edges,
    "a long list": lambda device: int((torch.tensor([0, 1] * 10_000).to(device) + torch.tensor([0, 1] * 10_000, device=device)).sum()),
    "a list of numbers of the device": lambda device: torch.tensor(list(host(3).to(device)[:2])).sum().item(),
    "a nested list of them": lambda device: torch.tensor([[host(3).to(device)[0], 5]]).max().item(),
    "places of the device in a mask of the host": _marked_on_the_host,
    "a mask of the device in one of the host": _marked_by_a_mask_of_the_device,
    "padding a sequence": lambda device: nn.utils.rnn.pad_sequence([host(n).to(device) for n in (3, 5)]).ne(0).sum().item(),
}
"""Each asks for a number that the host's integers decide."""

NEEDS_GRADIENTS = ("rows of a sparse gradient",)


def reads(device, is_inference=0):
    """Fails with the names of those that got another number than the host computes."""
    asked = {name: ask for name, ask in READS.items() if not (is_inference and name in NEEDS_GRADIENTS)}
    wanted = {name: ask("cpu") for name, ask in asked.items()}

    @torch.inference_mode(bool(is_inference))
    def step():
        got = {name: _result(ask, device) for name, ask in asked.items()}
        wrong = {name: (got[name], wanted[name]) for name in asked if got[name] != wanted[name]}
        assert not wrong, wrong

    return step


def _result(ask, device):
    try:
        return ask(device)
    except RuntimeError as error:  # of a first run, whose zeros go with nothing
        return str(error)


OPERATIONS = [
    lambda x: x + 3,
    lambda x: x * x % 97,
    lambda x: x[x % 2 == 0],
    lambda x: x.sort().values,
    lambda x: x.flip(0),
    lambda x: x.unique(),
    lambda x: x.cumsum(0) % 1009,
    lambda x: torch.where(x > 20, x, -x),
    lambda x: x.view(-1, 1).expand(-1, 2).reshape(-1),
    lambda x: x[: max(1, x.numel() // 2)],
    lambda x: x.clone().add_(5),
    lambda x: x.roll(1),
    lambda x: x.repeat_interleave(x.abs() % 3),
    lambda x: x[(x % 7).argsort(stable=True)],
    lambda x: torch.cat([x, x.max().view(1)]),
    lambda x: x.clone().masked_fill_(x < 0, 1),
    lambda x: (x.float() / 2).long(),
    lambda x: x.bincount() if x.numel() and bool((x >= 0).all()) and int(x.max()) < 5000 else x.abs(),
    lambda x: x.clamp(-50, 50),
    lambda x: x.to(torch.int32).to(torch.int64),
]


def pipelines(device, count=60, length=8):
    """Random chains of operations, each ended by a sum: the same on the device as on the host."""

    def chain(seed, where):
        choose = random.Random(seed)
        tensor = host(30, low=-40, seed=seed).to(where)
        for _ in range(length):
            tensor = choose.choice(OPERATIONS)(tensor)
            if not tensor.numel():
                break
        return tensor.numel(), int(tensor.sum())

    def step():
        wrong = {
            seed: (found, chain(seed, "cpu")) for seed in range(count) if (found := _chained(chain, seed, device)) != chain(seed, "cpu")
        }
        assert not wrong, wrong

    return step


def _chained(chain, seed, device):
    try:
        return chain(seed, device)
    except RuntimeError as error:
        return str(error)


def keeps_rows(device, rows=256):
    """A quarter of the labels count; the rows that do are kept for the backward: 1 MiB each of logits."""
    labels = torch.arange(rows) % 4
    states = torch.randn(rows, 64, device=device, requires_grad=True)
    head = nn.Linear(64, MIB_OF_FLOATS, bias=False, device=device)

    def step():
        head(states[labels.to(device) == 0]).square().mean().backward()

    return step


def is_traced(device, rows=256):
    """Its graph is drawn before the first step, as TensorBoard's `add_graph` does; then labels decide how much is kept."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 64)).to(device)
    torch.jit.trace(model, torch.randn(1, 3, 8, 8, device=device))
    labels = torch.arange(rows) % 4
    head = nn.Linear(64, MIB_OF_FLOATS, bias=False, device=device)

    def step():
        states = model(torch.randn(rows, 3, 8, 8, device=device))
        head(states[labels.to(device) == 0]).square().mean().backward()

    return step


def is_loaded(device, rows=256):
    """Workers load its labels, and say how many modes their operations go through; then the labels decide how much is kept."""
    loaded = iter(DataLoader(ManyLabels(), batch_size=rows, num_workers=1))
    head = nn.Linear(64, MIB_OF_FLOATS, bias=False, device=device)

    def step():
        labels, num_modes = next(loaded)
        assert not num_modes.any()
        states = torch.randn(rows, 64, device=device)
        head(states[labels.to(device) == 0]).square().mean().backward()

    return step


class ManyLabels(Dataset):
    """A quarter of them is 0."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return index % 4, torch._C._len_torch_dispatch_stack()


def routed(device, tokens=64, experts=4, chosen=2, is_one_hot=0):
    """Each expert keeps 1 MiB for every token that the router sends to it; the peak is that of all of them."""
    gate = nn.Linear(16, experts, device=device)
    weight = torch.ones(1, MIB_OF_FLOATS, device=device, requires_grad=True)

    def step():
        scores, indices = gate(torch.randn(tokens, 16, device=device)).softmax(-1).topk(chosen)
        kept = []
        for expert in range(experts):
            rows, places = torch.where(functional.one_hot(indices, experts)[..., expert] if is_one_hot else indices == expert)
            kept.append((scores[rows, places, None] * weight).sum() if expert == 0 else scores[rows, places].sum())
        torch.stack(kept).sum().backward()

    return step


def gated(device, tokens=64, experts=8, chosen=2, is_scattered=1):
    """Rows by the gates that are not zero, split by how many these are of each expert: 1 MiB a row. Else every positive score is a gate."""
    gate = nn.Linear(16, experts, device=device)

    def step():
        scores = gate(torch.randn(tokens, 16, device=device))
        best, indices = scores.topk(chosen)
        gates = torch.zeros_like(scores).scatter(1, indices, best.softmax(1)) if is_scattered else scores.relu()
        rows, experts_of = torch.nonzero(gates).t()
        counts = (gates > 0).sum(0).tolist()
        parts = torch.empty(tokens, MIB_OF_FLOATS, device=device)[rows[experts_of.argsort()]].split(counts)
        assert len(parts) == experts
        assert not is_scattered or sum(counts) in (0, tokens * chosen)  # none in a first run

    return step


def passes_a_threshold(device, rows=128):
    """Keeps the rows of which the model says that they are good: 1 MiB each."""
    model = nn.Linear(16, 1, device=device)

    def step():
        scores = model(torch.randn(rows, 16, device=device)).squeeze(1)
        torch.empty(int((scores > 0.5).nonzero().shape[0]), MIB_OF_FLOATS, device=device)

    return step


def chooses_a_length(device, is_of_rows=0):
    """Keeps as many rows of 1 MiB as the place of the largest score says: a period, a duration, the end of a segment."""
    model = nn.Linear(16, 49, device=device)

    def step():
        scores = model(torch.randn(4, 16, device=device))
        places = scores.argmax(1) if is_of_rows else scores.mean(0).argmax().view(1)
        torch.empty(int(places.max()) + 1, MIB_OF_FLOATS, device=device)

    return step


def counts_classes(device):
    """Segmentation's usual measure, by a histogram of integers; as many rows of 1 MiB are kept as pixels are of class 2."""
    model = nn.Linear(16, 4, device=device)

    def step():
        target = (torch.arange(64) % 4).to(device)
        output = model(torch.randn(64, 16, device=device)).max(1)[1]
        output[target == 3] = 255
        right = torch.histc(output[output == target], bins=4, min=0, max=3).cpu().numpy()
        of_class = torch.histc(target, bins=4, min=0, max=3).cpu().numpy()
        assert right.sum() <= of_class.sum()
        torch.empty(int(of_class[2]), MIB_OF_FLOATS, device=device)

    return step


def learns_letters(device):
    """A loss and its backward in one line, of texts of other lengths each time: kernels check that these are within the text."""
    model = nn.Linear(4, 20, device=device)

    def step():
        for letters in (8, 3, 12):
            texts, lengths = host(4, letters, low=1, high=20).to(device), torch.tensor([9, 30, 20, 30]).to(device)
            logs, sizes = model(torch.ones(30, 4, 4, device=device)).log_softmax(-1), torch.tensor([1, letters, 2, 3]).to(device)
            functional.ctc_loss(logs, texts, lengths, sizes, zero_infinity=True).backward()

    return step


def acts(device):
    """A policy that draws one action at a time and takes the best of the last ones: places, which decide no size."""
    model = nn.Linear(4, 3, device=device)

    def step():
        scores = model(torch.ones(1, 4, device=device))
        torch.distributions.Categorical(logits=scores).sample().cpu().numpy()
        scores.argmax().item()
        scores.sum().backward()

    return step


def looks_at_its_weights(device):
    """Makes a tensor of a weight, copies a loss to the host, and saves the model: none of it decides a size."""
    model = nn.Linear(16, 4, device=device)

    def step():
        torch.zeros(2, device=device).new_full((3,), model.weight[0, 0].detach())
        model(torch.ones(2, 16, device=device)).sum().detach().to("cpu")
        torch.save(model.state_dict() | {"steps": torch.zeros(1, device=device).long()}, io.BytesIO())

    return step


def packages_its_model(device):
    """Trains, and saves the whole model with torch.package: its storages are read as bytes, of no type."""
    model = nn.Linear(16, 4, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step():
        model(torch.randn(2, 16, device=device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with PackageExporter(io.BytesIO()) as package:
            package.extern("**")
            package.save_pickle("model", "model.pkl", model)

    return step


def samples(device):
    """A policy whose distribution checks its arguments, and asserts that they are small: 64 MiB where it goes on."""
    model = nn.Linear(16, 4, device=device)

    def step():
        logits = model(torch.randn(8, 16, device=device))
        assert (logits < 1e6).all()
        torch.distributions.Categorical(logits=logits).sample()
        torch.empty(64, MIB_OF_FLOATS, device=device)
        host(8).to(device).nonzero()

    return step


def copied_lbfgs():
    """PyTorch's L-BFGS in a file of its own, as packages have it that change it."""
    file = Path(COPIES.name, "LBFGS.py")
    file.write_text(Path(lbfgs.__file__).read_text().replace("from .optimizer", "from torch.optim.optimizer"))
    names = {}
    exec(compile(file.read_text(), file, "exec"), names)
    return names["LBFGS"]


COPIES = tempfile.TemporaryDirectory()


def keeps_a_history(device, is_copy=0):
    """L-BFGS on 1 MiB: eight iterations, and of the last four the steps and the gradients' differences; PyTorch's, or a copy of it."""
    weight = nn.Parameter(torch.zeros(MIB_OF_FLOATS, device=device))
    kind, search = (copied_lbfgs(), "strong_wolfe") if is_copy else (torch.optim.LBFGS, None)
    optimizer = kind([weight], max_iter=8, history_size=4, line_search_fn=search)

    def closure():
        optimizer.zero_grad()
        loss = (weight - 1).square().sum()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def rounds_a_float(device):
    """Its longest text, by way of floats: 7 MiB."""

    def step():
        torch.empty(int(padded(device).sum(1).float().max().item()), MIB_OF_FLOATS, device=device)

    return step


def rounds_a_float_later(device):
    """Its longest text, by way of a share that has a name: 7 MiB."""

    def step():
        share = (padded(device).sum(1).float().max() / 8).item()
        longest = share * 8
        torch.empty(round(longest), MIB_OF_FLOATS, device=device)

    return step


def rounds_what_it_shows(device):
    """Rounds its loss to print it, which makes no size of it."""
    model = nn.Linear(16, 8, device=device)

    def step():
        loss = model(torch.randn(64, 16, device=device)).square().mean()
        number = loss.item()
        print(f"{round(loss.item(), 3)} {int(number * 100)}%", round(number))

    return step


def copies_edges(device, edges=100_000, is_moved=0):
    """Takes its edges back to the host, all of them, and keeps as many MiB as there are kinds: 5."""
    kinds = host(edges, high=5)

    def step():
        told = kinds.to(device) + 1
        told = told.to("cpu") if is_moved else told.cpu()
        torch.empty(told.max(), MIB_OF_FLOATS, device=device)

    return step


def copies_a_picture(device):
    """Of its input, which it does not look at; and takes 8 MiB after that."""
    picture = torch.rand(64, 64)

    def step():
        shown = (picture.to(device) + 1).cpu().numpy()
        assert shown.shape == (64, 64)
        torch.empty(8, MIB_OF_FLOATS, device=device)
        torch.empty(int((host(9).to(device) > 50).sum()), device=device)  # so that values are looked for

    return step


def paints_what_it_computes(device, is_mask=0):
    """Takes 64 x 64 shades of what its model computes to the host; *is_mask*: and a mask of its data, which decides a size of 8 MiB."""
    model = nn.Linear(64, 64, device=device)
    picture = torch.ones(64, 64)

    def step():
        shades = model(picture.to(device))
        if is_mask:
            mask = (picture.to(device)[:, :1] > 0).byte().expand(-1, 64).contiguous().cpu().numpy()
            torch.empty(int(mask.sum()) // 512, MIB_OF_FLOATS, device=device)
        painted = shades.mul(255).clamp(0, 255).byte().cpu().numpy()
        assert painted.shape == (64, 64)
        torch.empty(int((host(9).to(device) > 50).sum()), device=device)  # so that values are looked for

    return step


def checks_its_numbers(device):
    """Asserts that its loss is finite, stops where it is too small or too large, and divides by its norm: 64 MiB where it goes on."""
    model = nn.Linear(16, 16, device=device)

    def step():
        loss = model(torch.randn(8, 16, device=device)).square().mean()
        assert torch.isfinite(loss)
        assert loss.item() > 0
        if loss.item() < 1e-6 or loss.item() > 1e6:
            return
        loss.backward()
        scale = 1.0 / nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        torch.empty(int(64 * min(scale, 1)), MIB_OF_FLOATS, device=device)

    return step


def keeps_a_share(device, rows=64):
    """Rows that the model's numbers choose, and their backward; 1 MiB each."""
    states = torch.randn(rows, MIB_OF_FLOATS, device=device, requires_grad=True)
    model = nn.Linear(16, 1, device=device)

    def step():
        mask = model(torch.randn(rows, 16, device=device)).squeeze(1) > 0
        states[mask].sum().backward()

    return step


def scores_labels(device):
    """Scores the tokens that have a label, and puts the scores in their places, as trainers do: 48 of 64 rows of 1 MiB."""
    states = torch.randn(64, MIB_OF_FLOATS, device=device, requires_grad=True)
    labels = torch.arange(64).remainder(4)

    def step():
        mask = labels.to(device) > 0
        chosen = states[mask]
        torch.zeros(64, MIB_OF_FLOATS, device=device).masked_scatter(mask[:, None], chosen).sum().backward()

    return step


class Mover(threading.Thread):
    """Moves labels to the device."""

    def __init__(self, device):
        super().__init__()
        self.device, self.moved = device, None

    def run(self):
        self.moved = (torch.arange(64) < 16).to(self.device)

    def result(self):
        self.join()
        return self.moved


def moved_by_a_thread(device, is_of_pool=0):
    """Rows that labels choose, which another thread moves to the device: one of a class of its own, or a worker of a pool."""
    rows, pool = torch.randn(64, MIB_OF_FLOATS, device=device), ThreadPoolExecutor(1)

    def step():
        mover = Mover(device)
        if is_of_pool:
            pool.submit(mover.run).result()
        else:
            mover.start()
        rows[mover.moved if is_of_pool else mover.result()].square()

    return step


def keeps_more_and_more(device):
    """Of labels that say 1 there are more in every step, and 1 MiB is kept for each until the next step."""
    kept, numbers = [], iter(range(1, 100))

    def step():
        count = (torch.arange(64) < next(numbers)).to(device).sum()
        kept[:] = [torch.empty(int(count), MIB_OF_FLOATS, device=device)]

    return step


def acts_by_one_hot(device, way=0):
    """An environment checks the action that it gets: one is 1, the others are 0."""
    model = nn.Linear(64, 17).to(device)

    def step():
        logits = model(torch.ones(1, 64, device=device))
        shares = logits.softmax(-1)
        hot = functional.one_hot(logits.argmax(-1), 17)
        drawn = torch.distributions.OneHotCategorical(logits=logits).sample()
        action = (hot.float(), hot.detach() + logits - logits.detach(), drawn + (shares - shares.detach()))[way]
        found = action.detach().cpu().numpy()[0]
        assert sorted(found.tolist()) == [0.0] * 16 + [1.0], found
        logits.square().sum().backward()

    return step


def decodes_the_longest(device, way="max"):
    """The longest of the lengths that a model computes decides a size: it is no choice among several, and may be any number."""
    model = nn.Linear(256, 64).to(device)

    def step():
        lengths = model(torch.ones(4, 256, device=device)).exp().round().long().sum(1)
        found = torch.empty(int(getattr(lengths, way)()), MIB_OF_FLOATS, device=device)
        (model(torch.ones(4, 256, device=device)).sum() + found.sum()).backward()

    return step


def adds_edges(device, places=2000):
    """A matrix that edges are added to in place is no longer what it was."""
    edges = torch.sparse_coo_tensor(host(2, 50, high=places), torch.ones(50), (places, places), check_invariants=False).to(device)
    weight = nn.Parameter(torch.ones(1, device=device))

    def step():
        dense = torch.zeros(places, places, device=device)
        dense.add_(edges)
        rows = torch.empty(int((dense > 0).any(1).sum()), 2**10, device=device)
        (weight * rows.sum()).backward()

    return step


def convolves_a_graph(device, places=100_000):
    """A product with an adjacency whose edges may stand twice: forward and backward count them before they multiply."""
    edges = torch.sparse_coo_tensor(host(2, 2**18, high=places), torch.ones(2**18), (places, places), check_invariants=False).to(device)
    states = nn.Parameter(torch.ones(places, 4, device=device))

    def step():
        torch.sparse.mm(edges, states).square().sum().backward()
        states.grad = None

    return step


def shows_a_share(device):
    """Keeps 1 MiB for each label; prints shares of their number, and looks for NaN, before a backward that takes as much again."""
    model = nn.Linear(16, 8, device=device)

    def step():
        counts = (host(64, high=8).to(device) >= 0).sum()
        loss = model(torch.randn(64, 16, device=device)).square().mean()
        shares = {"share": counts / 128, "one": 1.0 / counts}
        if torch.isnan(loss):
            return
        kept = torch.ones(int(counts), MIB_OF_FLOATS, device=device, requires_grad=True)
        for name, share in shares.items():
            print(f"{name}: {share}")
        ((kept * kept).sum() + loss).backward()

    return step


def counts_what_is_right(device, is_kept=0):
    """Keeps the labels that count, 1 MiB each, and prints or keeps how many of the model's answers are right: that decides no size."""
    model = nn.Linear(16, 8, device=device)
    counts = []

    def step():
        labels = host(64, high=8).to(device)
        scores = model(torch.randn(64, 16, device=device))
        torch.empty(int((labels > 3).sum()), MIB_OF_FLOATS, device=device)
        if is_kept:
            counts.append((scores.argmax(-1) == labels).sum().item())
            return
        right = (scores.argmax(-1) == labels).sum().item()
        right += 0
        print(f"{right} of {len(labels)}", right / len(labels))

    return step


def multiplies(device):
    """Areas of boxes, as products of what a model computes, whole and by rows: their backward counts how many factors are zero."""
    model = nn.Linear(64, 4, device=device)

    def step():
        boxes = model(torch.randn(4096, 64, device=device))
        (boxes[:, 2:].prod(1).mean() + boxes.prod()).backward()

    return step


def generates(device, tokens=300, vocabulary=2000):
    """Generates until every text has ended or is long enough, and keeps 64 KiB for each token: what ends first is the length."""
    model = nn.Linear(16, vocabulary, device=device)

    def step():
        kept, texts = [], torch.zeros(3, 1, dtype=torch.int64, device=device)
        is_finished = torch.zeros(3, dtype=torch.bool, device=device)
        while not is_finished.all():
            chosen = torch.multinomial(model(torch.randn(3, 16, device=device)).softmax(-1), 1)
            texts = torch.cat([texts, chosen], 1)
            is_finished = is_finished | (chosen[:, 0] == 0) | torch.full((3,), texts.shape[1] > tokens, device=device)
            kept.append(torch.empty(MIB_OF_FLOATS // 16, device=device))

    return step


def grows_until_long_enough(device, length=100, direction="up"):
    """Waits for a length that is kept on the device, whole or not, and keeps 1 MiB for each of it."""
    start = {"up": 1, "down": 6400, "half": 0.5}[direction]

    def step():
        now = torch.tensor(start).to(device)
        if direction == "down":
            while now.item() > length:
                now = now // 2
        elif direction == "up":
            while length > now.item():
                now = now * 2
        else:
            while now.item() < length:
                now = now * 2
        torch.empty(int(now.item()), MIB_OF_FLOATS, device=device)

    return step


def attends(device):
    """Attention that saves for its backward on the host, among it the state of its dropout."""
    model = nn.Linear(64, 64, device=device, dtype=torch.bfloat16)

    def step():
        states = model(torch.randn(2, 4, 16, 64, device=device, dtype=torch.bfloat16))
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            attended = functional.scaled_dot_product_attention(states, states, states, is_causal=True)
        attended.square().mean().backward()

    return step


def attends_by_a_rule(device):
    """Attention by a function of its own, among the texts of a batch; keeps 1 MiB for each place that counts."""
    model = nn.Linear(16, 16, device=device)

    def step():
        texts = (torch.arange(128) // 50).to(device)
        mask = create_block_mask(lambda batch, head, i, j: texts[i] == texts[j], 1, 1, 128, 128, device=device)  # noqa: ARG005
        states = model(torch.randn(1, 4, 128, 16, device=device))
        attended = flex_attention(states, states, states, block_mask=mask)
        torch.empty(int((texts == 1).sum()), MIB_OF_FLOATS, device=device)
        attended.square().mean().backward()

    return step


def copies_two_numbers(device):
    """In one line a loss and a whole number that comes from it, which both read zero, and the second as a size."""
    model = nn.Linear(16, 8, device=device, dtype=torch.bfloat16)

    def step():
        loss = model(torch.ones(2, 16, device=device, dtype=torch.bfloat16)).sum()
        copied = [number.detach().cpu() for number in (loss, loss.long())]
        torch.empty(int(copied[1]), device=device)

    return step


def saves(device):
    """Gives its batch norm, in which there is a count, to safetensors."""
    from safetensors.torch import save

    model = nn.BatchNorm1d(16, device=device)

    def step():
        model(torch.randn(8, 16, device=device)).square().mean().backward()
        save({name: value.detach() for name, value in model.state_dict().items()})

    return step


def drops_what_is_not_finite(device):
    """Takes the least of its loss, as a vector of one and of many, where that is a number: it always is."""
    model = nn.Linear(16, 8, device=device)

    def step():
        losses = model(torch.randn(64, 16, device=device)).square().mean(1)
        for numbers in (losses, losses.mean()[None], losses.mean()):
            for is_bad in (torch.isnan(numbers), ~torch.isfinite(numbers), torch.isinf(numbers), numbers.abs() == float("inf")):
                assert torch.min(numbers[~is_bad]).numel() == 1
                assert numbers[is_bad].numel() == 0
        right = (losses > 0).float().mean()  # by assumption
        torch.empty(int(right[~torch.isnan(right)].numel()), device=device)
        assert right[~torch.isnan(right)].numel() == 1

    return step


def draws_a_size(device, most=64):
    """Keeps as many MiB as one number says that is drawn on the device."""

    def step():
        size = int(torch.randint(1, most + 1, (1,), device=device).item())
        torch.empty(size, MIB_OF_FLOATS, device=device)

    return step


def draws_a_branch(device):
    """Takes 64 MiB in one of five steps; and waits for a draw that it likes."""

    def step():
        while torch.rand((), device=device) < 0.5:
            pass
        if torch.rand(1, device=device) > 0.8:
            torch.empty(64, MIB_OF_FLOATS, device=device)

    return step


def draws_a_mask(device):
    """Takes 16 KiB for each of 4096 places that is drawn, one of eight."""

    def step():
        chosen = torch.rand(4096, device=device) < 0.125
        torch.empty(4096, MIB_OF_FLOATS // 64, device=device)[chosen]

    return step


def draws_by_a_distribution(device, way="beta"):
    """Takes as many rows of 64 KiB as something else than a range draws, up to some 4096."""
    few = functional.one_hot(torch.arange(1), 2)[0].float().to(device)  # 1, 0
    ways = {
        "beta": lambda: torch.distributions.Beta(few[0], few[0] * 5).sample() * 4096,
        "binomial": lambda: torch.distributions.Binomial(4096, few[0] / 2).sample(),
        "poisson": lambda: torch.poisson(few[0] * 1000),
        "gamma": lambda: torch.distributions.Gamma(few[0] * 2, few[0] / 500).sample().clamp(max=4096),
        "dropout": lambda: torch.count_nonzero(functional.dropout(few[0].expand(4096), 0.5)),
    }

    def step():
        rows = int(ways[way]().item())
        torch.empty(rows, MIB_OF_FLOATS // 16, device=device)

    return step


def chooses_by_a_hard_sample(device):
    """Takes as many rows of 1 MiB as the place says that a hard Gumbel softmax sets, with the gradient of the soft one."""
    model = nn.Linear(16, 49, device=device)

    def step():
        chosen = functional.gumbel_softmax(model(torch.randn(1, 16, device=device))[0], hard=True)
        torch.empty(int(chosen.argmax().item()) + 1, MIB_OF_FLOATS, device=device)

    return step


def groups_around_points(device, num_points=128):
    """
    The four points of each of 8 balls, as point networks group them: those outside get a number that is no place, and come last.

    Where all are outside, the first place is none either. What is copied is a number for each place that was filled up, 1 MiB each.
    """
    distances = nn.Linear(16, num_points, device=device)
    weight = nn.Parameter(torch.ones(num_points, 16, device=device))

    def step():
        places = torch.arange(num_points).to(device).repeat(8, 1)
        places[distances(torch.randn(8, 16, device=device)) > 0.5] = num_points
        places = places.sort(dim=-1)[0][:, :4]
        is_outside = places == num_points
        places[is_outside] = places[:, :1].repeat(1, 4)[is_outside]
        (weight[places].sum() * 1.0).backward()
        torch.empty(int(is_outside.sum()), MIB_OF_FLOATS, device=device)
        weight.grad = None

    return step


def unfreezes_when_right(device, way="share"):
    """Takes 64 MiB more as soon as most of the model's answers are those of the labels."""
    model = nn.Linear(16, 8, device=device)

    def step():
        labels = host(64, high=8).to(device)
        answers = model(torch.randn(64, 16, device=device)).argmax(-1)
        right = (answers == labels).float().mean() if way == "mean" else (answers == labels).sum()
        share = right if way == "mean" else right.item() / len(labels) if way == "share" else 1 - (answers != labels).sum() / len(labels)
        if share > 0.5:
            torch.empty(64, MIB_OF_FLOATS, device=device)

    return step


class Pruned(torch.autograd.Function):
    """Hands its input on; its backward makes room for the rows that a mask of the batch keeps."""

    @staticmethod
    def forward(ctx, rows, mask):
        ctx.save_for_backward(mask)
        return rows * 1

    @staticmethod
    def backward(ctx, gradient):
        return kept_of(gradient, *ctx.saved_tensors), None


def kept_of(gradient, mask):
    """Return the gradient, after room was made for the rows that *mask* keeps."""
    torch.empty(gradient[mask].shape[0], MIB_OF_FLOATS, device=gradient.device)
    return gradient


def keeps_rows_in_a_backward(device, way="function"):
    """Takes 1 MiB for every other one of 64 rows, in the backward alone: by a function of its own, or by a hook."""
    model = nn.Linear(16, 16, device=device)

    def step():
        mask = (torch.arange(64) % 2 == 0).to(device)
        found = model(torch.randn(64, 16, device=device))
        if way == "hook":
            found.register_hook(lambda gradient: kept_of(gradient, mask))
        else:
            found = Pruned.apply(found, mask)
        found.square().mean().backward()

    return step


def draws_an_order(device, room=300):
    """Takes some of the rows whose label is even, whichever, and tells a number that it drew."""

    def step():
        even = (host(1000) % 2 == 0).to(device).nonzero().flatten()
        is_chosen = torch.zeros(1000, dtype=torch.bool, device=device)
        is_chosen[even[torch.randperm(len(even), device=device)[:room]]] = True
        torch.empty(1000, MIB_OF_FLOATS // 64, device=device)[is_chosen.nonzero()]
        print(torch.rand(1, device=device).item())

    return step


def waits(device):
    """Goes on as long as all that its model computes is positive."""
    model = nn.Linear(16, 16, device=device)

    def step():
        torch.empty(int((host(8) > 50).to(device).sum()), device=device)
        while (model(torch.ones(4, 16, device=device)) > 0).all():
            pass

    return step


def branches(device, mib=64, is_called=0, is_told=0):
    """So many MiB where a mean that the model computes is large: in a line, or by a function that says so; or only a word of it."""
    model = nn.Linear(16, 16, device=device)

    def is_large(values):
        return bool(values.mean() > 0.5)

    def step():
        values = model(torch.ones(4, 16, device=device))
        if is_told:
            if values.mean() > 0.5:
                print("large")
        elif is_called:
            if is_large(values):
                torch.empty(mib, MIB_OF_FLOATS, device=device)
        elif values.mean() > 0.5:
            torch.empty(mib, MIB_OF_FLOATS, device=device)

    return step


def branches_by_a_name(device, is_float=0):
    """64 MiB where a mean that the model computes is large, and 1 where not: the number is given a name."""
    model = nn.Linear(16, 16, device=device)

    def step():
        mean = model(torch.ones(4, 16, device=device)).mean()
        if is_float:
            mib = 1 if mean.item() > 0.5 else 64
        else:
            mib = 1
            if mean > 0.5:
                mib = 64
        torch.empty(mib, MIB_OF_FLOATS, device=device)

    return step


def branches_to_a_size(device):
    """48 MiB, as data say, on the one way; none on the other."""
    model = nn.Linear(16, 16, device=device)

    def step():
        mask = (torch.arange(64) < 48).to(device)
        if model(torch.ones(4, 16, device=device)).mean() > 0.5:
            torch.empty(int(mask.sum()), MIB_OF_FLOATS, device=device)

    return step


def branches_and_fails(device, mib=64):
    """Another matrix where the first has no root, as numbers decide; the program ends where the second has none either."""
    model = nn.Linear(16, 16, device=device)

    def step():
        values = model(torch.ones(4, 16, device=device))
        tried = []
        for _ in range(3):
            info = values.mean() > 0.5
            if not torch.any(info):
                return
            tried.append(torch.empty(mib, MIB_OF_FLOATS, device=device))
        raise RuntimeError("no root")

    return step


def branches_and_breaks(device, mib=64, is_chosen=0):
    """Where its numbers are far apart it takes what it was given as an index, or says itself that it cannot go on."""
    model = nn.Linear(16, 16, device=device)

    def step():
        values = model(torch.ones(4, 16, device=device))
        if values.mean() > 0.5:
            values = model(values)
            if is_chosen:
                raise ValueError("diverged")
            values = values[:, :8] @ values
        torch.empty(mib, MIB_OF_FLOATS, device=device)

    return step


def constant_beside_statistic(device):
    """A buffer of floats with a count in it that decides a size, 16 MiB, and a statistic that the model writes beside it."""
    model = nn.Linear(16, 16, device=device)
    buffer = torch.tensor([16.0, 0.07, -1.0], device=device)

    def step():
        mib = int(buffer[0].item())
        buffer[2] = model(torch.ones(4, 16, device=device)).mean().detach()
        torch.empty(mib, MIB_OF_FLOATS, device=device)

    return step


def finds_boxes(device, way="where"):
    """A table of boxes with their scores and classes, as detectors make it; eight MiB for each class up to the last that is found."""
    model = nn.Linear(16, 4 + 8, device=device)

    def step():
        boxes, scores = model(torch.ones(100, 16, device=device)).split((4, 8), dim=1)
        if way == "where":
            found, classes = torch.where(scores > 0.5)
            table = torch.cat((boxes[found], scores[found, classes, None], classes[:, None].float()), 1)
        else:
            best, classes = scores.max(-1)
            table = torch.cat((boxes, best[:, None], classes[:, None]), dim=-1)
            table = table[best > 0.5]
        table = table[table[:, 4].argsort(descending=True)][:300].double()
        classes = table[table[:, 4] > 0.25][:, 5].int().tolist()
        torch.empty(8 * (1 + max(classes, default=-1)), MIB_OF_FLOATS, device=device)

    return step


def statistic_as_size(device):
    """A float that the model computes and that is a number of MiB."""
    model = nn.Linear(16, 16, device=device)

    def step():
        mib = int(model(torch.ones(4, 16, device=device)).mean().item())
        torch.empty(mib, MIB_OF_FLOATS, device=device)

    return step

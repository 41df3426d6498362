"""
What calls of CUDA's libraries make PyTorch allocate, call by call: on a GPU to record it, on the simulated GPU to compare.

    python library_calls.py OUT.jsonl [KIND[:PART/PARTS] …]

Convolutions, recurrent networks, fused attention, CTC, Fourier transforms, factorizations of many shapes, drawn with a fixed seed. A line
for each: its kind, what it was given, and for each call the bytes that were asked for and given back (negative), in their order.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.nn import functional

Config = dict[str, Any]
Calls = dict[str, Callable[[], Any]]
DTYPES = ("float32", "bfloat16", "float16")
LARGEST_ELEMENTS = 2**26
"""Of a tensor: what is looked for shows on small ones."""


def log_uniform(chance: random.Random, low: int, high: int, step: int = 1) -> int:
    """A multiple of *step* from *low* to *high*, small ones as often as large ones."""
    return max(low, round(low * (high / low) ** chance.random() / step) * step)


def convolutions(chance: random.Random) -> Iterator[Config]:
    """Shapes as networks have them: images, sounds, volumes; grouped, depthwise, strided, dilated, transposed."""
    for _ in range(1500):
        dims = chance.choices((1, 2, 3), (2, 7, 1))[0]
        side = log_uniform(chance, 7, {1: 20000, 2: 224, 3: 48}[dims])
        inner, outer = (chance.choice((3, log_uniform(chance, 8, 1024, 8), log_uniform(chance, 8, 512, 8))) for _ in range(2))
        groups = chance.choices((1, 2, inner), (8, 1, 1))[0] if inner % 2 == 0 else 1
        if groups > 1:
            outer = max(groups, outer // groups * groups)
        kernel = chance.choice((1, 3, 3, 3, 4, 5, 7))
        config = {
            "shape": [log_uniform(chance, 1, 128), inner] + [side] * dims, "out": outer, "kernel": kernel,
            "stride": chance.choice((1, 1, 1, 2)),
            "dilation": chance.choices((1, 2), (9, 1))[0], "groups": groups, "transposed": chance.random() < 0.12,
            "dtype": chance.choice(DTYPES), "channels_last": dims > 1 and chance.random() < 0.35, "tf32": chance.random() < 0.8,
        }  # fmt: skip
        padding = kernel // 2 * config["dilation"]
        if side + 2 * padding < config["dilation"] * (kernel - 1) + 1:
            continue
        config["padding"] = padding
        elements = config["shape"][0] * max(inner, outer) * (side * (2 if config["transposed"] else 1)) ** dims
        if elements <= LARGEST_ELEMENTS:
            yield config


def convolution(config: Config) -> Calls:
    """Forward, and both gradients apart."""
    dims, dtype = len(config["shape"]) - 2, getattr(torch, config["dtype"])
    torch.backends.cudnn.allow_tf32 = config["tf32"]
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[dims] if config["channels_last"] else torch.contiguous_format
    inner, outer, groups = config["shape"][1], config["out"], config["groups"]
    ends = (inner, outer // groups) if config["transposed"] else (outer, inner // groups)
    x = torch.empty(config["shape"], device="cuda", dtype=dtype).to(memory_format=layout)
    weight = torch.empty([*ends] + [config["kernel"]] * dims, device="cuda", dtype=dtype).to(memory_format=layout)
    stride, padding, dilation = ([config[name]] * dims for name in ("stride", "padding", "dilation"))
    outputs = [0] * dims
    gradient = torch.empty_like(
        torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, config["transposed"], outputs, groups)
    )

    def backward(*wanted: bool) -> Any:
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, None, stride, padding, dilation, config["transposed"], outputs, groups, list(wanted)
        )

    return {
        "forward": lambda: torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, config["transposed"], outputs, groups),
        "input": lambda: backward(True, False, False),
        "weight": lambda: backward(False, True, False),
    }


def recurrences(chance: random.Random) -> Iterator[Config]:
    """Of all kinds, packed and not."""
    for number in range(260):
        yield {
            "cell": chance.choice(("LSTM", "GRU", "RNN")), "input": log_uniform(chance, 8, 512, 8),
            "hidden": log_uniform(chance, 16, 1024, 16),
            "layers": chance.choice((1, 1, 2, 3)), "directions": chance.choice((1, 2)), "steps": log_uniform(chance, 5, 300),
            "batch": log_uniform(chance, 1, 128), "dtype": chance.choice(DTYPES), "packed": chance.random() < 0.3,
            "bias": chance.random() < 0.9, "dropout": chance.choice((0.0, 0.3)), "training": chance.random() < 0.85, "seed": number,
        }  # fmt: skip


def recurrence(config: Config) -> Calls:
    """Forward and backward."""
    body = getattr(nn, config["cell"])(
        config["input"], config["hidden"], config["layers"], bias=config["bias"], bidirectional=config["directions"] == 2,
        dropout=config["dropout"] if config["layers"] > 1 else 0.0, device="cuda", dtype=getattr(torch, config["dtype"]),
    ).train(config["training"])  # fmt: skip
    x = torch.zeros(config["steps"], config["batch"], config["input"], device="cuda", dtype=getattr(torch, config["dtype"]))
    given: Any = x
    if config["packed"]:
        lengths = torch.randint(1, config["steps"] + 1, (config["batch"],), generator=torch.Generator().manual_seed(config["seed"]))
        given = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    kept: list[torch.Tensor] = []

    def forward() -> None:
        with torch.set_grad_enabled(config["training"]):
            out = body(given)[0]
        kept[:] = [out.data if config["packed"] else out]

    def backward() -> None:
        if config["training"]:
            kept[0].backward(torch.zeros_like(kept[0]))

    return {"forward": forward, "backward": backward}


def attentions(chance: random.Random) -> Iterator[Config]:
    """As PyTorch chooses the kernel."""
    for _ in range(260):
        head = chance.choice((32, 40, 64, 64, 80, 96, 128, 128, 192, 256))
        heads = chance.choice((1, 4, 8, 12, 16))
        queries = log_uniform(chance, 16, 4096, chance.choice((1, 64)))
        yield {
            "batch": log_uniform(chance, 1, 32), "heads": heads, "shared": chance.choice((1, 1, 1, 4)) if heads % 4 == 0 else 1,
            "queries": queries, "keys": queries if chance.random() < 0.8 else log_uniform(chance, 16, 2048), "head": head,
            "dtype": chance.choice(("bfloat16", "bfloat16", "float16", "float32")), "causal": chance.random() < 0.5,
            "mask": chance.choice(("", "", "", "bool", "float")), "dropout": chance.choice((0.0, 0.0, 0.1)),
            "transposed": chance.random() < 0.7,
        }  # fmt: skip


def attention(config: Config) -> Calls:
    """Forward and backward of scaled_dot_product_attention."""
    dtype = getattr(torch, config["dtype"])

    def tensor(length: int, heads: int) -> torch.Tensor:
        if config["transposed"]:
            made = torch.zeros(config["batch"], length, heads, config["head"], device="cuda", dtype=dtype).transpose(1, 2)
        else:
            made = torch.zeros(config["batch"], heads, length, config["head"], device="cuda", dtype=dtype)
        return made.requires_grad_()

    query = tensor(config["queries"], config["heads"])
    key, value = (tensor(config["keys"], config["heads"] // config["shared"]) for _ in range(2))
    mask = None
    if config["mask"]:
        mask = torch.ones(config["batch"], 1, config["queries"], config["keys"], device="cuda", dtype=torch.bool)
        mask = mask if config["mask"] == "bool" else torch.zeros_like(mask, dtype=dtype)
    kept: list[torch.Tensor] = []
    is_causal = config["causal"] and mask is None
    options: Any = {"attn_mask": mask, "dropout_p": config["dropout"], "is_causal": is_causal, "enable_gqa": config["shared"] > 1}
    config["chosen"] = torch._fused_sdp_choice(query, key, value, **options)
    gradient: list[torch.Tensor] = []

    def forward() -> None:
        kept[:] = [functional.scaled_dot_product_attention(query, key, value, **options)]

    def backward() -> None:
        gradient[:] = torch.autograd.grad(kept[0], (query, key, value), torch.zeros_like(kept[0]))

    return {"forward": forward, "backward": backward}


def transcriptions(chance: random.Random) -> Iterator[Config]:
    """With labels short enough for cuDNN, and longer ones."""
    for _ in range(120):
        steps = log_uniform(chance, 20, 1500)
        yield {
            "steps": steps, "batch": log_uniform(chance, 1, 64), "classes": log_uniform(chance, 10, 4000),
            "labels": min(steps // 2, log_uniform(chance, 4, 400)), "targets": chance.choice(("cpu", "cuda")),
            "lengths": chance.choice(("cpu", "cuda")),
        }  # fmt: skip


def transcription(config: Config) -> Calls:
    """Forward and backward of ctc_loss, of lengths on the host and on the GPU."""
    rows = (config["steps"], config["batch"], config["classes"])
    logits = torch.zeros(rows, device="cuda").log_softmax(-1).requires_grad_()
    lengths, steps = (
        torch.full((config["batch"],), config[name], dtype=torch.int32, device=config["lengths"]) for name in ("labels", "steps")
    )
    targets = torch.ones(config["batch"] * config["labels"], dtype=torch.int32, device=config["targets"])
    kept: list[torch.Tensor] = []

    def forward() -> None:
        kept[:] = [functional.ctc_loss(logits, targets, steps, lengths)]

    return {"forward": forward, "backward": lambda: torch.autograd.grad(kept[0], logits)}


def transforms(chance: random.Random) -> Iterator[Config]:
    """Of powers of two, of products of small primes, and of others."""
    for _ in range(160):
        dims = chance.choice((1, 1, 2, 2, 3))
        sides = [chance.choice((2 ** chance.randint(3, {1: 14, 2: 9, 3: 6}[dims]), log_uniform(chance, 7, {1: 20000, 2: 500, 3: 60}[dims])))
                 for _ in range(dims)]  # fmt: skip
        config = {"batch": log_uniform(chance, 1, 256), "sides": sides, "name": chance.choice(("fftn", "rfftn", "ifftn", "irfftn"))}
        elements = config["batch"]
        for side in sides:
            elements *= side
        if elements <= LARGEST_ELEMENTS // 4:
            yield config


def transform(config: Config) -> Calls:
    """One transform of all but the first dimension."""
    dtype = torch.float32 if config["name"] == "rfftn" else torch.complex64
    x = torch.zeros(config["batch"], *config["sides"], device="cuda", dtype=dtype)
    torch.backends.cuda.cufft_plan_cache.clear()
    return {"forward": lambda: getattr(torch.fft, config["name"])(x, dim=tuple(range(1, x.dim())))}


FACTORIZATIONS = (
    "cholesky", "qr", "svd", "svdvals", "eigh", "eigvalsh", "solve", "inv", "det", "lstsq", "lu_factor", "cholesky_inverse", "eigvals",
    "pinv",
)  # fmt: skip


def factorizations(chance: random.Random) -> Iterator[Config]:
    """Of single matrices and of batches."""
    for _ in range(300):
        columns = log_uniform(chance, 2, 768)
        config = {"name": chance.choice(FACTORIZATIONS), "batch": chance.choice((0, 0, 1, 2, 8, 64)), "columns": columns,
                  "rows": chance.choice((columns, log_uniform(chance, columns, 1024))),
                  "dtype": chance.choice(("float32", "float32", "float64"))}  # fmt: skip
        if config["name"] not in {"qr", "svd", "svdvals", "lstsq", "pinv"}:
            config["rows"] = columns
        if max(1, config["batch"]) * config["rows"] * columns <= 2**20:
            yield config


def factorization(config: Config) -> Calls:
    """One call, of matrices near the identity."""
    sizes = ([config["batch"]] if config["batch"] else []) + [config["rows"], config["columns"]]
    matrices = torch.eye(*sizes[-2:], dtype=getattr(torch, config["dtype"])).expand(sizes).contiguous().cuda()
    function = getattr(torch.linalg, config["name"], None) or getattr(torch, config["name"])
    arguments = [matrices] + ([matrices.clone()] if config["name"] in {"solve", "lstsq"} else [])
    options = {"full_matrices": False} if config["name"] == "svd" else {}
    return {"forward": lambda: function(*arguments, **options)}


def sparse_products(chance: random.Random) -> Iterator[Config]:
    """A sparse matrix with a dense one."""
    for _ in range(40):
        rows = log_uniform(chance, 100, 50_000)
        yield {
            "rows": rows,
            "each": log_uniform(chance, 1, 40),
            "columns": log_uniform(chance, 1, 256),
            "layout": chance.choice(("csr", "coo")),
        }


def sparse_product(config: Config) -> Calls:
    """Their product."""
    rows, each = config["rows"], config["each"]
    starts = torch.arange(rows).repeat_interleave(each)
    places = torch.stack([starts, (starts + torch.arange(each).repeat(rows) * 7) % rows])
    matrix = torch.sparse_coo_tensor(places, torch.ones(rows * each), (rows, rows)).coalesce().cuda()
    matrix = matrix.to_sparse_csr() if config["layout"] == "csr" else matrix
    dense = torch.zeros(rows, config["columns"], device="cuda")
    return {"forward": lambda: matrix @ dense}


def normalizations(chance: random.Random) -> Iterator[Config]:
    """Batch normalization, of which cuDNN does some."""
    for _ in range(40):
        yield {"shape": [log_uniform(chance, 2, 64), log_uniform(chance, 8, 512, 8)] + [log_uniform(chance, 7, 64)] * 2,
               "dtype": chance.choice(DTYPES), "channels_last": chance.random() < 0.6, "float_weights": chance.random() < 0.7}  # fmt: skip


def normalization(config: Config) -> Calls:
    """Forward and backward."""
    dtype = getattr(torch, config["dtype"])
    layout = torch.channels_last if config["channels_last"] else torch.contiguous_format
    x = torch.zeros(config["shape"], device="cuda", dtype=dtype).to(memory_format=layout).requires_grad_()
    module = nn.BatchNorm2d(config["shape"][1], device="cuda", dtype=None if config["float_weights"] else dtype)
    kept: list[torch.Tensor] = []

    def forward() -> None:
        kept[:] = [module(x)]

    return {"forward": forward, "backward": lambda: torch.autograd.grad(kept[0], [x, *module.parameters()], torch.empty_like(kept[0]))}


def benchmarked(config: Config) -> Calls:
    """As *convolution*, where cuDNN tries what it has and takes the fastest, at the first call."""
    torch.backends.cudnn.benchmark = False
    calls = convolution(config)
    torch.backends.cudnn.benchmark = True
    return calls


KINDS: dict[str, tuple[Callable[[random.Random], Iterator[Config]], Callable[[Config], Calls]]] = {
    "attention": (attentions, attention),
    "recurrence": (recurrences, recurrence),
    "convolution": (convolutions, convolution),
    "benchmarked": (lambda chance: islice(convolutions(chance), 120), benchmarked),
    "factorization": (factorizations, factorization),
    "fourier": (transforms, transform),
    "ctc": (transcriptions, transcription),
    "sparse": (sparse_products, sparse_product),
    "normalization": (normalizations, normalization),
}


def allocations(call: Callable[[], Any]) -> list[int] | str:
    """Return what *call* asks for and gives back, in bytes, in order; or its error."""
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000, clear_history=True)
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    return [-event["size"] if event["action"] == "free_completed" else event["size"]
            for event in events if event["action"] in {"alloc", "free_completed"}]  # fmt: skip


def record(kind: str, out: TextIO, seconds: float) -> None:
    """Write a line for each configuration of *kind*, for as long as there is time."""
    kind, _, share = kind.partition(":")
    part, parts = (int(number) for number in (share or "0/1").split("/"))
    draw, prepare = KINDS[kind]
    began = time.monotonic()
    for number, config in enumerate(islice(draw(random.Random(0)), part, None, parts)):
        if time.monotonic() - began > seconds:
            print(f"{kind}: stopped after {number} in {seconds:.0f} s", flush=True)
            break
        try:
            calls = prepare(config)
            for call in calls.values() if kind != "benchmarked" else ():  # handles, plans and workspaces of cuBLAS are there afterwards
                call()
            told: Any = {name: allocations(call) for name, call in calls.items()}
        except RuntimeError as error:
            told = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        out.write(json.dumps({"kind": kind, **config, "calls": told}) + "\n")
    out.flush()
    print(f"{kind}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        for name in sys.argv[2:] or KINDS:
            record(name, file, 110.0)

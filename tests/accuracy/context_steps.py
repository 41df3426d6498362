"""
What a process holds of a GPU beside PyTorch's allocator, after each of several things that training does.

    python context_steps.py OUT.jsonl

The driver's figure of a process less what the allocator has reserved: after all of them one after the other in one process, and after each
in a process of its own. A line of JSON for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pynvml
import torch
from torch import nn
from torch.nn import functional


def outside_bytes() -> int:
    """Return what the driver says that this process holds, less what the allocator has."""
    torch.cuda.synchronize()
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    held = next(process.usedGpuMemory for process in processes if process.pid == os.getpid())
    return held - torch.cuda.memory_reserved()


def attention(dtype: torch.dtype, backend: str = "") -> None:
    query = torch.zeros(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
    if backend:
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    else:
        functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()


def convolution(dtype: torch.dtype) -> None:
    module = nn.Conv2d(32, 64, 3, padding=1).cuda().to(dtype)
    module(torch.zeros(4, 32, 32, 32, device="cuda", dtype=dtype)).sum().backward()


def optimizer(**options: bool) -> None:
    parameter = nn.Parameter(torch.zeros(1000, device="cuda"))
    parameter.sum().backward()
    torch.optim.AdamW([parameter], **options).step()


def loss() -> None:
    logits = torch.zeros(8, 10, device="cuda", requires_grad=True)
    functional.cross_entropy(logits, torch.zeros(8, device="cuda").long()).backward()


def compiled() -> None:
    torch.compile(lambda x: torch.nn.functional.gelu(x).sum())(torch.zeros(1000, device="cuda"))


def nccl() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    torch.distributed.all_reduce(torch.zeros(1000, device="cuda"))


def graph() -> None:
    x = torch.zeros(64, 64, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        _ = x @ x


STEPS = {
    "init": lambda: torch.zeros(1, device="cuda"),
    "elementwise": lambda: (torch.ones(1000, device="cuda").exp() * 2).sum().item(),
    "matmul": lambda: torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda"),
    "matmul_bf16": lambda: torch.ones(64, 64, device="cuda").bfloat16() @ torch.ones(64, 64, device="cuda").bfloat16(),
    "linear": lambda: nn.Linear(64, 64).cuda()(torch.ones(8, 64, device="cuda")).sum().backward(),
    "conv": lambda: convolution(torch.float32),
    "conv_bf16": lambda: convolution(torch.bfloat16),
    "sdpa_fp32": lambda: attention(torch.float32),
    "sdpa_bf16": lambda: attention(torch.bfloat16),
    "sdpa_flash": lambda: attention(torch.bfloat16, "FLASH_ATTENTION"),
    "sdpa_efficient": lambda: attention(torch.bfloat16, "EFFICIENT_ATTENTION"),
    "norms": lambda: nn.LayerNorm(64).cuda()(torch.ones(8, 64, device="cuda")).sum().backward(),
    "embedding": lambda: nn.Embedding(100, 64).cuda()(torch.ones(8, 64, device="cuda", dtype=torch.long)).sum().backward(),
    "loss": loss,
    "foreach": optimizer,
    "fused": lambda: optimizer(fused=True),
    "sort": lambda: (torch.rand(10_000, device="cuda").sort(), torch.rand(10_000, device="cuda").gt(0.5).nonzero().unique(dim=0)),
    "fft": lambda: torch.fft.rfft2(torch.zeros(8, 32, 32, device="cuda")),
    "cholesky": lambda: torch.linalg.cholesky(torch.eye(64, device="cuda")),
    "svd": lambda: torch.linalg.svd(torch.eye(64, device="cuda")),
    "eigh": lambda: torch.linalg.eigh(torch.eye(64, device="cuda")),
    "sparse": lambda: torch.eye(64, device="cuda").to_sparse_csr() @ torch.ones(64, 8, device="cuda"),
    "rnn": lambda: nn.LSTM(64, 64).cuda()(torch.zeros(10, 4, 64, device="cuda"))[0].sum().backward(),
    "graph": graph,
    "nccl": nccl,
    "compiled": compiled,
}


def run(names: list[str]) -> None:
    """Do the steps with these *names*, all where there are none, and print what each leaves."""
    pynvml.nvmlInit()
    for name in names or STEPS:
        STEPS[name]()
        print(json.dumps({"after": name, "of": names or "all", "outside_mib": outside_bytes() / 2**20}), flush=True)


if __name__ == "__main__":
    if "--run" in sys.argv:
        run(sys.argv[2:])
    else:
        with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
            for steps in ([], *(["init", name] for name in STEPS if name != "init")):
                subprocess.run([sys.executable, __file__, "--run", *steps], stdout=file, check=True)

"""Training steps to rehearse: one that trains, and ways to go wrong."""

import sys
import time

import torch


def mlp(device, batch=256, width=1024, depth=4, optimizer="AdamW", activations=True):
    """Linear layers without bias: parameters of depth x width x width x 4 bytes."""
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(depth)]
    model = torch.nn.Sequential(*layers).to(device)
    update = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-4)

    def step():
        model(torch.randn(batch, width, device=device)).square().mean().backward()
        update.step()
        update.zero_grad()

    return step


def grows(device):
    """Keeps a tensor of every step."""
    kept = []
    return lambda: kept.append(torch.empty(2**22, device=device))


def chooses_its_device(batch: "int" = 256, *, width=1024):
    """Takes no device: what is called so is on the GPU."""
    return mlp("cuda", batch, width)


def takes_nothing():
    """Neither a device nor a value."""
    return mlp("cuda")


def fails(device):
    """Breaks in its second step."""
    steps = []

    def step():
        steps.append(torch.empty(1, device=device))
        if len(steps) == 2:
            raise RuntimeError("the data ran out")

    return step


def hangs(device):
    """Never ends."""
    return lambda: time.sleep(3600)


def floods(device):
    """Prints without end, and then leaves without a word."""

    def step():
        for _ in range(200_000):
            print("so much to say " * 4)
        print("the very last words", flush=True)
        sys.exit(7)

    return step


def reads_values(device):
    """What is copied to the device comes back while no kernel ran; afterwards every float reads one."""

    def step():
        there = torch.tensor([1.5, 2.5]).to(device)
        there[1:].copy_(torch.tensor([3.5]))
        told, cloned = there.cpu().tolist(), there.clone().cpu().tolist()
        computed = (torch.ones(2, device=device) * 3).cpu().tolist()
        assert told == cloned == [1.5, 3.5], (told, cloned)
        assert computed == [1.0, 1.0], computed

    return step


def asks_nvml(device):
    """The device's NVML, as nvidia-ml-py sees it."""

    def step():
        import pynvml

        held = torch.empty(2**28, dtype=torch.uint8, device=device)
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        assert pynvml.nvmlDeviceGetName(handle) == torch.cuda.get_device_name(0)
        assert memory.total == torch.cuda.get_device_properties(0).total_memory
        assert memory.used >= held.numel()
        pynvml.nvmlShutdown()

    return step


def multiplies_sparse(device):
    """Asks a library how large the product of two sparse matrices is, which only their values say."""

    def step():
        sparse = torch.eye(64).to_sparse_csr().to(device)
        sparse @ sparse

    return step


def runs_triton(device):
    """A kernel of Triton's, which it compiles and keeps in its cache; the step tells where that is."""
    import triton
    import triton.language as tl

    @triton.jit
    def copies(source, target):
        tl.store(target + tl.program_id(0), tl.load(source + tl.program_id(0)))

    def step():
        copies[(8,)](torch.ones(8, device=device), torch.empty(8, device=device))

    return step


not_a_function = 3

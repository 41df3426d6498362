"""
Runs a program on this machine's GPU with PyTorch's memory history on, and writes what the allocator did.

    python recorded_run.py FOLDER program.py [ARGUMENT …]

FOLDER/peaks.json: peaks and what the driver holds beside them; FOLDER/history.pickle: `torch.cuda.memory._snapshot()`, for the reader of
snapshots. Stacks are not kept.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import sys
from pathlib import Path

import pynvml
import torch

EVENTS = 2_000_000


def held_bytes() -> int | None:
    """Return what the driver says that this process holds; None where it does not say."""
    pynvml.nvmlInit()
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)


def main(folder: Path, program: str, arguments: list[str]) -> None:
    """Run *program*, and write in every case."""
    sys.argv[:] = [program, *arguments]
    sys.path[0] = str(Path(program).parent.resolve())
    torch.cuda.memory._record_memory_history(context=None, max_entries=EVENTS)
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        folder.mkdir(parents=True, exist_ok=True)
        statistics = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        told = {
            "peak_allocated_bytes": statistics["allocated_bytes.all.peak"],
            "peak_requested_bytes": statistics["requested_bytes.all.peak"],
            "peak_reserved_bytes": statistics["reserved_bytes.all.peak"],
            "reserved_bytes": statistics["reserved_bytes.all.current"],
            "num_alloc_retries": statistics["num_alloc_retries"],
            "num_ooms": statistics["num_ooms"],
            "held_bytes": held_bytes(),
            "used_bytes": total - free,
            "gpu": torch.cuda.get_device_name(),
            "total_memory_bytes": torch.cuda.get_device_properties(0).total_memory,
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
        }
        (folder / "history.pickle").write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
        (folder / "peaks.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3:])

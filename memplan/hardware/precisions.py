"""
Which types a GPU's tensor cores multiply, by its compute capability.

As the CUDA C++ programming guide has it (technical specifications by compute capability): fp16 from 7.0 on, bf16 and TF32 from 8.0, fp8
from 8.9. PyTorch emulates bf16 on older GPUs: it runs there, slowly (`torch.cuda.is_bf16_supported(including_emulation=False)` tells).
"""

from __future__ import annotations

from typing import Literal

FP16_FROM, BF16_FROM, TF32_FROM, FP8_FROM = (7, 0), (8, 0), (8, 0), (8, 9)

Support = Literal["native", "emulated", "none"]


def precision_support(capability: tuple[int, int]) -> dict[str, Support]:
    """Return how a GPU with that compute capability computes in each type."""
    return {
        "fp16": "native" if capability >= FP16_FROM else "none",
        "bf16": "native" if capability >= BF16_FROM else "emulated",
        "tf32": "native" if capability >= TF32_FROM else "none",
        "fp8": "native" if capability >= FP8_FROM else "none",
    }

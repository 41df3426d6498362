"""The optimizer, as far as memory depends on it: its state for each trainable parameter, and what a step needs on top."""

from typing import Literal

from memplan.description import Description

OptimizerName = Literal[
    "sgd", "sgd_momentum", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta", "adafactor", "lion", "adam8bit", "lion8bit"
]

OPTIMIZER_PACKAGES: dict[OptimizerName, str] = {"adafactor": "transformers"}
"""The package of each optimizer that is not torch.optim's; memplan has Lion and the 8-bit ones of its own for rehearsals."""


# bitsandbytes keeps one byte a moment and an fp32 maximum for each block of 256; tensors under 4096 elements stay fp32
# (bitsandbytes 0.45 and 0.50, optim/optimizer.py: min_8bit_size, and functional.py: blocksize 256).
QUANTIZED_MOMENTS: dict[OptimizerName, int] = {"adam8bit": 2, "lion8bit": 1}
QUANTIZED_BLOCK = 256
QUANTIZED_FROM = 4096


class Optimizer(Description):
    """An optimizer of torch.optim, transformers' Adafactor, Lion, or the 8-bit ones of bitsandbytes."""

    name: OptimizerName = "adamw"
    """Which one; `adam8bit` stands for AdamW8bit too."""

    implementation: Literal["foreach", "for_loop", "fused"] = "foreach"
    """How torch.optim runs it: foreach (its default on CUDA) needs temporaries as large as the trainable parameters, fused none."""

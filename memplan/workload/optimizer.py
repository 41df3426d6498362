"""The optimizer, as far as memory depends on it: its state for each trainable parameter, and what a step needs on top."""

from typing import Literal, NamedTuple

from pydantic import model_validator

from memplan.description import Description

OptimizerName = Literal[
    "sgd", "sgd_momentum", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta", "adafactor", "lion",
    "adam8bit", "lion8bit", "adam32bit"
]  # fmt: skip

OPTIMIZER_PACKAGES: dict[OptimizerName, str] = {"adafactor": "transformers"}
"""The package of each optimizer that is not torch.optim's; memplan has Lion and those of bitsandbytes of its own for rehearsals."""


class BitsAndBytes(NamedTuple):
    """What an optimizer of bitsandbytes keeps of a parameter."""

    num_moments: int
    num_bits: Literal[8, 32]


# bitsandbytes keeps one byte a moment and an fp32 maximum for each block of 256; tensors under 4096 elements stay fp32
# (bitsandbytes 0.45 and 0.50, optim/optimizer.py: min_8bit_size, and functional.py: blocksize 256).
# Of 32 bits a moment is fp32, whatever the type of the weights.
BITSANDBYTES: dict[OptimizerName, BitsAndBytes] = {
    "adam8bit": BitsAndBytes(2, 8),
    "lion8bit": BitsAndBytes(1, 8),
    "adam32bit": BitsAndBytes(2, 32),
}
QUANTIZED_BLOCK = 256
QUANTIZED_FROM = 4096

# A paged optimizer has the moments of tensors from this many elements on in CUDA's managed memory (bitsandbytes 0.45 and 0.50,
# optim/optimizer.py: get_state_buffer), which moves to the host where the GPU is full.
PAGED_FROM = 100_000


class Optimizer(Description):
    """An optimizer of torch.optim, transformers' Adafactor, Lion, or one of bitsandbytes."""

    name: OptimizerName = "adamw"
    """Which one; `adam8bit` and `adam32bit` are bitsandbytes' and stand for AdamW too."""

    implementation: Literal["foreach", "for_loop", "fused"] = "foreach"
    """How torch.optim runs it: foreach (its default on CUDA) needs temporaries as large as the trainable parameters, fused none."""

    quantizes_embeddings: bool = True
    """Whether an 8-bit optimizer keeps its moments of embeddings in 8 bits; transformers' Trainer has it keep those in fp32."""

    is_paged: bool = False
    """Whether one of bitsandbytes is paged: the moments of large tensors are in managed memory, which moves to the host where the GPU is
    full, and is not counted."""

    steps_in_backward: bool = False
    """Each parameter is updated within the backward, as soon as its gradient is whole, and the gradient is let go: there is no
    accumulation. torchtune's `optimizer_in_bwd`."""

    @model_validator(mode="after")
    def _paging_is_of_bitsandbytes(self) -> "Optimizer":
        if self.is_paged and self.name not in BITSANDBYTES:
            raise ValueError(f"is_paged is for optimizers of bitsandbytes ({', '.join(BITSANDBYTES)}), and this one is {self.name}")
        return self

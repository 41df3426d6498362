"""A model of which only counts are known: matrices of a usual size, and activations of so many bytes a sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memplan.workload.model import COUNTED_SIDE, ParametersModel

PIECES = 32
"""Tensors that the activations of a forward are kept in, and parts that the matrices come in: as a model of this many layers has them."""

ELEMENT_BYTES = 4


class CountedPiece(nn.Module):
    """Some of the matrices, as a layer has them: what is sharded by layers is sharded by these."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, loss: Tensor) -> Tensor:
        """Return *loss* with a part in it of every trainable parameter."""
        for weight in self.weights:
            if weight.requires_grad:
                loss = loss + weight.view(-1)[0]
        return loss


class CountedModel(nn.Module):
    """Parameters, activations, batch and overhead as counted."""

    overhead: Tensor

    def __init__(self, model: ParametersModel) -> None:
        super().__init__()
        self.model = model
        trainable = model.num_parameters if model.num_trainable_parameters is None else model.num_trainable_parameters
        weights = [*_matrices(trainable, True), *_matrices(model.num_parameters - trainable, False)]
        size = -(-len(weights) // PIECES) or 1
        self.pieces = nn.ModuleList(CountedPiece(weights[at : at + size]) for at in range(0, len(weights), size))
        self.register_buffer("overhead", torch.empty(model.overhead_bytes, dtype=torch.uint8))

    def forward(self, batch: int) -> Tensor:
        """Return a loss that every trainable parameter has a part in, with the activations of *batch* samples kept behind it."""
        data = torch.empty(batch * self.model.batch_data_bytes_per_sample, dtype=torch.uint8, device=self.overhead.device)
        seed = torch.zeros(1, device=data.device, requires_grad=True)
        x = seed.expand(max(1, batch * self.model.activation_bytes_per_sample // PIECES // ELEMENT_BYTES))
        for _ in range(PIECES):
            x = x.exp()  # keeps what it returns
        loss = x.mean()
        for piece in self.pieces:
            loss = piece(loss)
        return loss


def _matrices(elements: int, trainable: bool) -> list[nn.Parameter]:
    whole, rest = divmod(elements, COUNTED_SIDE**2)
    shapes = [(COUNTED_SIDE, COUNTED_SIDE)] * whole + ([(rest,)] if rest else [])
    return [nn.Parameter(torch.empty(shape), requires_grad=trainable) for shape in shapes]

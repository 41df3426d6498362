"""Bytes by category: what the memory of a step is made of."""

from pydantic import NonNegativeInt

from memplan.description import Description


class MemoryBreakdown(Description):
    """Bytes by category at the moment of the peak. The first six are what torch calls allocated, with the slack they are reserved."""

    parameters_bytes: NonNegativeInt = 0
    """All weights, frozen ones included."""

    gradients_bytes: NonNegativeInt = 0
    """Gradients that exist at the peak: all of them in the optimizer's step, none at the loss of a first micro-batch."""

    optimizer_state_bytes: NonNegativeInt = 0
    """What the optimizer keeps between steps."""

    activations_bytes: NonNegativeInt = 0
    """What the forward keeps for the backward, autocast's copies, logits and loss, and what is being computed."""

    batch_data_bytes: NonNegativeInt = 0
    """Inputs, masks and labels."""

    workspaces_bytes: NonNegativeInt = 0
    """cuBLAS workspaces, partial sums, the optimizer's temporaries, DDP's buckets."""

    allocator_slack_bytes: NonNegativeInt = 0
    """Reserved by the caching allocator and in no tensor: rounding and fragmentation."""

    cuda_context_bytes: NonNegativeInt = 0
    """What CUDA itself takes before the first tensor."""

    nccl_buffers_bytes: NonNegativeInt = 0
    """What NCCL takes for its communicators, beside PyTorch's allocator."""

    symmetric_memory_bytes: NonNegativeInt = 0
    """What ranks share with each other (`torch.distributed._symmetric_memory`), beside PyTorch's allocator."""

    other_processes_bytes: NonNegativeInt = 0
    """What other processes of the same program had of the GPU at the same time."""

    @property
    def allocated_bytes(self) -> int:
        """Return the part that torch counts as allocated."""
        return self.reserved_bytes - self.allocator_slack_bytes

    @property
    def reserved_bytes(self) -> int:
        """Return the part that torch counts as reserved."""
        beside = self.cuda_context_bytes + self.nccl_buffers_bytes + self.symmetric_memory_bytes + self.other_processes_bytes
        return self.total_bytes - beside

    @property
    def total_bytes(self) -> int:
        """Return all of it: what the device shows as used by this program."""
        return sum(value for _, value in self)

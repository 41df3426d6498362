"""The budget: how much of a GPU a plan may use.

budget = (what programs can have - what others hold) x (1 - margin) / (1 + what a model of a program may miss)
"""

from pydantic import NonNegativeInt

from memplan.description import Description
from memplan.memory.estimate import MemoryRange

DEFAULT_MARGIN = 0.05
"""Left free for what no plan sees: evaluation between epochs, a longer last batch, another program's window."""


MODEL_ERROR = 0.1
"""What a program may take more than memplan's model of its configuration. The most that was seen is 8.7%: RAG-Retrieval (commit 950da57)
at 24 queries on a simulated T4, PyTorch 2.13; it allocates 0.9% more, and reserves more for that."""


class MemoryBudget(Description):
    """What a plan may use of one GPU, this program's CUDA context included."""

    total_bytes: NonNegativeInt
    """What programs can allocate on the empty GPU."""

    others_used_bytes: NonNegativeInt = 0
    """What other processes hold."""

    margin: float = DEFAULT_MARGIN
    """Share of what is free that stays free."""

    model_error: float = 0.0
    """Share by which the training may take more than what is estimated, where that is memplan's model of another program."""

    @property
    def budget_bytes(self) -> int:
        """Return the bytes that a plan may use."""
        return int(max(0, self.total_bytes - self.others_used_bytes) * (1 - self.margin) / (1 + self.model_error))

    def fits(self, used: MemoryRange) -> bool:
        """Say whether a step of that range fits: its high end has to."""
        return used.high_bytes <= self.budget_bytes

    def missing_bytes(self, used: MemoryRange) -> int:
        """Return the bytes by which a step is over the budget; 0 when it fits."""
        return max(0, used.high_bytes - self.budget_bytes)

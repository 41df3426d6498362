"""The budget: how much of a GPU a plan may use.

budget = (what programs can have - what others hold) x (1 - margin)
"""

from pydantic import NonNegativeInt

from memplan.description import Description
from memplan.memory.estimate import MemoryRange

DEFAULT_MARGIN = 0.05
"""Left free for what no plan sees: evaluation between epochs, a longer last batch, another program's window."""


class MemoryBudget(Description):
    """What a plan may use of one GPU, this program's CUDA context included."""

    total_bytes: NonNegativeInt
    """What programs can allocate on the empty GPU."""

    others_used_bytes: NonNegativeInt = 0
    """What other processes hold."""

    margin: float = DEFAULT_MARGIN
    """Share of what is free that stays free."""

    @property
    def budget_bytes(self) -> int:
        """Return the bytes that a plan may use."""
        return int(max(0, self.total_bytes - self.others_used_bytes) * (1 - self.margin))

    def fits(self, used: MemoryRange) -> bool:
        """Say whether a step of that range fits: its high end has to."""
        return used.high_bytes <= self.budget_bytes

    def missing_bytes(self, used: MemoryRange) -> int:
        """Return the bytes by which a step is over the budget; 0 when it fits."""
        return max(0, used.high_bytes - self.budget_bytes)

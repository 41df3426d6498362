"""How many GPUs train together."""

from pydantic import PositiveInt

from memplan.description import Description


class Parallelism(Description):
    """Data parallelism: every rank holds the whole model and a batch of its own."""

    devices: PositiveInt = 1
    """GPUs in each machine."""

    nodes: PositiveInt = 1
    """Machines."""

    @property
    def data_parallel_size(self) -> int:
        """Return the number of ranks."""
        return self.devices * self.nodes

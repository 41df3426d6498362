"""A GPU as memplan plans for it: how much memory its programs can have, and what decides how much they need."""

from pydantic import Field, NonNegativeInt, PositiveInt

from memplan.description import Description

_MULTIPROCESSORS_OF_A100, _CAPABILITY_OF_A100 = 108, (8, 0)

UNLIMITED_BYTES = 2**46
"""Unlimited memory: more than any program asks for, and less than the addresses that the simulated GPU hands out."""


class GpuSpec(Description):
    """
    One GPU, or one MIG instance.

    >>> import memplan
    >>> gpu = memplan.GpuSpec(name="a GPU of 16 GiB", total_memory_bytes=16 * 2**30, compute_capability=(8, 6), origin="by hand")
    >>> memplan.plan("built-in", gpu=gpu, method="analytic").fits
    True

    """

    name: str
    """The name that the driver gives."""

    total_memory_bytes: PositiveInt
    """What a program can allocate on the empty GPU, as `torch.cuda.get_device_properties().total_memory` shows it."""

    others_used_bytes: NonNegativeInt = 0
    """What other processes hold now; it is taken off the budget."""

    compute_capability: tuple[int, int] | None = None
    """Major and minor; decides which attention kernel runs and how large cuBLAS's workspaces are. None when unknown."""

    multiprocessors: PositiveInt | None = None
    """Streaming multiprocessors; decides how large the partial sums of reductions are. None when unknown."""

    unified_memory: bool = False
    """The GPU shares the host's memory, so that other programs' RAM counts against it."""

    origin: str
    """Where these figures are from, for the report: a catalogue entry, a size that was typed, this machine's driver."""

    marketing_gb: PositiveInt | None = None
    """The size on the box, where the GPU has one."""

    uuid: str | None = None
    """The driver's name for this one GPU; None for a GPU that is not of this machine."""

    driver_version: str | None = None
    """The driver that runs it; None for a GPU that is not of this machine."""

    context_bytes: NonNegativeInt | None = None
    """What CUDA and its libraries take of the GPU beside PyTorch's allocator, where a profile on this machine has measured it."""

    kernels_of: tuple[tuple[int, int], int] | None = Field(default=None, exclude=True, repr=False)
    """The `kind` whose kernels it is taken to run, where a program asks the same of memory on both; None: its own."""

    @property
    def free_memory_bytes(self) -> int:
        """Return what is left for this program, its CUDA context included."""
        return max(0, self.total_memory_bytes - self.others_used_bytes)

    @property
    def kind(self) -> tuple[tuple[int, int], int]:
        """Return the compute capability and the multiprocessors; a GPU of which only the size is known is taken for an A100."""
        return self.compute_capability or _CAPABILITY_OF_A100, self.multiprocessors or _MULTIPROCESSORS_OF_A100

    @property
    def threads_per_multiprocessor(self) -> int:
        """Return how many threads a multiprocessor holds (CUDA C++ programming guide, technical specifications by compute capability)."""
        (major, minor), _ = self.kind
        if (major, minor) == (7, 5):
            return 1024
        return 1536 if major >= 12 or (major == 8 and minor in {6, 7, 9}) else 2048

    @property
    def resident_threads(self) -> int:
        """Return how many threads the GPU holds at once."""
        return self.kind[1] * self.threads_per_multiprocessor

    def endless(self) -> "GpuSpec":
        """Return the kind of GPU whose kernels it runs with unlimited memory, all of it free."""
        capability, multiprocessors = self.kernels_of or self.kind
        kind = {"compute_capability": capability, "multiprocessors": multiprocessors, "kernels_of": None}
        return self.model_copy(update={"total_memory_bytes": UNLIMITED_BYTES, "others_used_bytes": 0, **kind})

"""A program: a training step with named variables. It is what travels from a command line or a configuration to a plan."""

from typing_extensions import Self

from memplan.description import Description
from memplan.workload.contrastive import Contrastive
from memplan.workload.parallelism import Parallelism
from memplan.workload.stage import Stage
from memplan.workload.training import Batching


class Program(Description):
    """
    What can be planned: its batch, its stages, and how many GPUs train it.

    A Workload describes its model too; a command or a function is the user's own code, and only a rehearsal can tell of it.
    """

    name: str = "program"
    """What the report calls it."""

    training: Batching = Batching()
    """How a step is run, as far as a plan decides it."""

    contrastive: Contrastive | None = None
    """How anchors, positives and negatives make a batch. None: samples are just samples."""

    stages: tuple[Stage, ...] = ()
    """The curriculum, in order. Empty for training without stages."""

    parallelism: Parallelism = Parallelism()
    """How many GPUs train together."""

    @property
    def has_present_batch(self) -> bool:
        """Say whether its present batch is known; else a plan has nothing to compare itself with."""
        return True

    def varies(self, name: str) -> bool:
        """Say whether what a plan decides by that *name* can be given another value."""
        del name
        return True

    @property
    def stage_variables(self) -> frozenset[str]:
        """Return the names of the fields of a stage that say something of its training."""
        return frozenset({"n_positives", "n_negatives"})

    @property
    def effective_batch_size(self) -> int:
        """Return the samples that one optimizer step sees: micro-batch x accumulation x data-parallel size."""
        return self.training.micro_batch_size * self.training.gradient_accumulation_steps * self.parallelism.data_parallel_size

    def with_training(self, **changes: object) -> Self:
        """Return a copy whose training differs in *changes*. Raises ValidationError when they make no sense."""
        training = type(self.training)
        return self.model_copy(update={"training": training.model_validate(self.training.model_dump() | changes)})

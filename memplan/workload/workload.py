"""The workload: everything that is trained, in one value. It is what travels from a configuration to a plan."""

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from memplan.description import Description
from memplan.workload.contrastive import Contrastive
from memplan.workload.model import ContrastiveEncoderModel, Model, encoder_of
from memplan.workload.optimizer import Optimizer
from memplan.workload.parallelism import Parallelism
from memplan.workload.stage import Stage
from memplan.workload.training import Training


class Workload(Description):
    """
    A training: its model, its optimizer, how a step is run, and the stages of its curriculum.

    >>> import memplan
    >>> workload = memplan.Workload.model_validate({
    ...     "name": "a model by counts",
    ...     "model": {"kind": "parameters", "num_parameters": 124_000_000, "activation_bytes_per_sample": 500_000_000},
    ...     "training": {"precision": "bf16-mixed", "target_effective_batch_size": 64},
    ... })
    >>> memplan.plan(workload, gpu="a100-80", method="analytic").effective_batch_size
    64

    """

    name: str = "workload"
    """What the report calls it."""

    model: Model
    """What is trained."""

    optimizer: Optimizer = Optimizer()
    """What updates it."""

    training: Training = Training()
    """How a step is run."""

    contrastive: Contrastive | None = None
    """How anchors, positives and negatives make a batch. None: samples are just samples."""

    stages: tuple[Stage, ...] = ()
    """The curriculum, in order. Empty for training without stages."""

    parallelism: Parallelism = Parallelism()
    """How many GPUs train together."""

    @model_validator(mode="after")
    def _stages_are_contrastive(self) -> "Workload":
        if isinstance(self.model, ContrastiveEncoderModel) and self.contrastive is None:
            raise ValueError("a contrastive_encoder needs `contrastive`: how anchors, positives and negatives make a batch")
        if self.contrastive is not None and not self.stages:
            raise ValueError("contrastive training needs at least one stage: how many positives and negatives an anchor has")
        if self.contrastive is None and self.stages:
            raise ValueError("stages need `contrastive`: how anchors, positives and negatives make a batch")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"two stages have the same name: {', '.join(sorted({name for name in names if names.count(name) > 1}))}")
        return self

    @model_validator(mode="after")
    def _positions_suffice(self) -> "Workload":
        encoder = encoder_of(self.model)
        if encoder is not None and encoder.num_positions and self.training.sequence_length > encoder.num_positions:
            raise PydanticCustomError(
                "too_long",
                "sequence_length {length} is more than the model's {positions} learned positions",
                {"length": self.training.sequence_length, "positions": encoder.num_positions, "field": "training.sequence_length"},
            )
        return self

    @property
    def effective_batch_size(self) -> int:
        """Return the samples that one optimizer step sees: micro-batch x accumulation x data-parallel size."""
        return self.training.micro_batch_size * self.training.gradient_accumulation_steps * self.parallelism.data_parallel_size

    def with_training(self, **changes: object) -> "Workload":
        """Return a copy whose training differs in *changes*. Raises ValidationError when they make no sense."""
        return self.model_copy(update={"training": Training.model_validate(self.training.model_dump() | changes)})

"""The workload: everything that is trained, in one value. It is what travels from a configuration to a plan."""

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from memplan.errors import NotEstimatedError
from memplan.workload.model import ContrastiveEncoderModel, HuggingFaceModel, Model, TorchtuneModel, encoder_of
from memplan.workload.optimizer import Optimizer
from memplan.workload.program import Program
from memplan.workload.training import Training


class Workload(Program):
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

    stands_for_a_program: bool = False
    """It was read from the configuration of another program, which may take somewhat more: the budget leaves room for that."""

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
    def _references_are_whole(self) -> "Workload":
        preference = self.model.preference if isinstance(self.model, HuggingFaceModel) else None
        if preference is not None and self.parallelism.num_gpus > 1 and self.parallelism.strategy != "ddp":
            raise ValueError(
                f"a model that is trained on pairs of answers is whole on each GPU (ddp), and the strategy is {self.parallelism.strategy}"
            )
        if preference is not None and self.contrastive is not None:
            raise ValueError("a training on pairs of answers has no `contrastive`")
        return self

    @model_validator(mode="after")
    def _nothing_accumulates_without_gradients(self) -> "Workload":
        if self.optimizer.steps_in_backward and self.training.gradient_accumulation_steps > 1:
            raise ValueError(
                f"gradient_accumulation_steps is {self.training.gradient_accumulation_steps}, and the optimizer steps in each backward: "
                f"no gradient is there to add to"
            )
        if self.optimizer.steps_in_backward and self.training.precision == "fp16-mixed":
            raise ValueError("the optimizer steps in the backward, before the gradients of fp16-mixed are scaled back")
        return self

    def varies(self, name: str) -> bool:
        """Say whether what a plan decides by that *name* can be given another value."""
        return name != "gradient_accumulation_steps" or not self.optimizer.steps_in_backward

    @model_validator(mode="after")
    def _positions_suffice(self) -> "Workload":
        if isinstance(self.model, TorchtuneModel):
            positions, kind = self.model.positions, "positions"
        else:
            encoder = encoder_of(self.model)
            positions, kind = (encoder.num_positions if encoder is not None else 0), "learned positions"
        lengths = {"training.sequence_length": self.training.sequence_length}
        if self.contrastive is not None and self.contrastive.query_length is not None:
            lengths["contrastive.query_length"] = self.contrastive.query_length
        for field, length in lengths.items():
            if positions and length > positions:
                raise PydanticCustomError(
                    "too_long",
                    "{name} {length} is more than the model's {positions} {kind}",
                    {"name": field.partition(".")[2], "length": length, "positions": positions, "kind": kind, "field": field},
                )
        return self


def workload_of(program: Program) -> Workload:
    """Return *program* as the workload that it is. Raises NotEstimatedError for another: nobody knows its model but itself."""
    if not isinstance(program, Workload):
        raise NotEstimatedError(f"there are no formulas for {program.name}, which is run as it is", hint='use `method="rehearsed"`')
    return program

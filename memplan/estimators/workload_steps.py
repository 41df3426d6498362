"""The steps of workloads: built as torch modules (`child/models/built_in.py`), and run by one process that lives as long as this one."""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from memplan.errors import NotEstimatedError, NotRehearsedError, UsageError
from memplan.estimators.analytic.estimate import estimate
from memplan.estimators.rehearsal_cache import family_of
from memplan.estimators.steps import Step, StepRunner, with_fewest_micro_batches
from memplan.execution.ranks import MOST_GPUS, Ranks
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import find_torch
from memplan.memory.estimate import MemoryRange
from memplan.memory.nccl_buffers import link_of
from memplan.workload.model import KERNEL_PACKAGES, HuggingFaceModel, RehearsedModel, TorchtuneModel, TransformerModel
from memplan.workload.optimizer import OPTIMIZER_PACKAGES
from memplan.workload.parallelism import ZERO_PACKAGE, ZERO_STAGES, Parallelism
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload, workload_of

if TYPE_CHECKING:
    from memplan.estimators.beside import Job
    from memplan.execution.rehearse import Rehearser


MODEL_PACKAGE = "transformers"
"""What builds a model that there are no formulas for."""

OLDEST_OF_RANKS = (2, 6)
"""The oldest PyTorch of which one rank can be run without the others."""


class WorkloadSteps(StepRunner):
    """Runs steps of workloads."""

    def step_of(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> Step:
        """Return the step; equal whatever the workload and the stage are called."""
        return step_of(workload_of(program), gpu, stage)

    def check(self, step: Step) -> None:
        """Raise NotRehearsedError where a package that the step needs is missing."""
        check_packages(step)

    def rehearse(self, step: Step) -> Rehearsal:
        """Return what *step* does. Raises NotRehearsedError where it cannot be built or run."""
        begun = self.begun(step)
        return run_step(step, None) if begun is None else begun.rehearsal

    def job_of(self, step: Step) -> Job:
        """Return its run."""
        from memplan.estimators.beside import Job  # noqa: PLC0415

        return Job(run_step, (step, None))

    def beginning_of(self, step: Step) -> Callable[[], Rehearsal]:
        """
        Return what runs its first optimizer step: each that follows runs the same kernels with the same sizes.

        Of several GPUs its first two: DistributedDataParallel makes its buckets anew in the second.
        """
        return partial(run_step, step, 1 if step.program.parallelism.num_gpus == 1 else 2)

    def kept_as(self, step: Step) -> str:
        """Return the step's own family: all that decides it is in that."""
        return step.family

    def by_formula(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        """Return what the formulas say; None for a model that there are none for."""
        try:
            return estimate(workload_of(program), gpu, stage).device_used
        except NotEstimatedError:
            return None


def run_step(step: Step, steps: int | None) -> Rehearsal:
    """
    Return what so many optimizer steps of *step* do; None: as many as tell of all. Raises NotRehearsedError.

    Of a pipeline, what the stage does that takes most: the first has the embeddings and the most micro-batches in flight, the second
    receives hidden states too, the last has the logits; each other has less than the second.
    """
    parallelism = step.program.parallelism
    stages = parallelism.pipeline_parallel_size
    ranks = [stage * (parallelism.num_gpus // stages) for stage in sorted({0, min(1, stages - 1), stages - 1})]
    found = [_run_rank(step, steps, rank) for rank in ranks]
    return max(found, key=lambda rehearsal: rehearsal.device_used.high_bytes)


def _run_rank(step: Step, steps: int | None, rank: int) -> Rehearsal:
    settings, parallelism = allocator_environment(step.program.training.allocator_settings), step.program.parallelism
    ranks = Ranks(parallelism.devices, parallelism.nodes, rank)
    try:
        rehearsal = _rehearser().rehearse(
            gpu=step.gpu, values=values_of(step), steps=steps, environment=settings, has_padding=True, ranks=ranks
        )
    except UsageError as error:
        from memplan.execution.runner import not_run  # noqa: PLC0415

        raise not_run(error, instead=instead_of_running(step)) from error
    refuse_guesses(rehearsal)
    return rehearsal.model_copy(update={"values": {}})


def values_of(step: Step) -> dict[str, object]:
    """Return the arguments of `build` in child/models/built_in.py."""
    return {"workload": json.loads(step.program.model_dump_json())}


def refuse_guesses(rehearsal: Rehearsal) -> None:
    """Raise NotRehearsedError where sizes were read from the device and taken as zero: more than that would be called a fit."""
    if rehearsal.lower_bound_reasons:
        raise NotRehearsedError(
            f"the memory of this step is not known: {'; '.join(rehearsal.lower_bound_reasons)}",
            hint="rehearse your own program, which has the data, and say what it reads",
        )


def allocator_environment(settings: str) -> dict[str, str]:
    """Return the variables under which a step runs with *settings* and nothing else, whatever this shell and the PyTorch there."""
    return {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}


def instead_of_running(step: Step) -> str:
    """Return what can be done where *step* does not run."""
    workload = workload_of(step.program)
    has_no_formulas = isinstance(workload.model, RehearsedModel) or workload.parallelism.split_by
    return "rehearse your own program" if has_no_formulas else 'plan by formulas: `method="analytic"`'


def check_packages(step: Step) -> None:
    """Raise NotRehearsedError where the model or optimizer comes from a package that is missing: no process has to begin for that."""
    workload = workload_of(step.program)
    if isinstance(workload.model, HuggingFaceModel) and PathFinder.find_spec(MODEL_PACKAGE) is None:
        raise NotRehearsedError(
            f"the model is built by {MODEL_PACKAGE}, which is not installed, and there are no formulas for it",
            hint=f"`pip install {MODEL_PACKAGE}`",
        )
    kernels = _package_of_kernels(workload)
    if kernels is not None and PathFinder.find_spec(kernels) is None:
        name = kernels.replace("_", "-")
        raise NotRehearsedError(f"the model's kernels are those of {name}, which is not installed", hint=f"`pip install {name}`")
    optimizer = workload.optimizer
    package = OPTIMIZER_PACKAGES.get(optimizer.name)
    if package is not None and PathFinder.find_spec(package) is None:
        raise NotRehearsedError(
            f"the optimizer {optimizer.name} is that of {package}, which is not installed", hint=f"`pip install {package}`"
        )
    check_ranks(workload)


def check_ranks(workload: Workload) -> None:
    """Raise NotRehearsedError where the ranks of *workload* cannot train together as it says."""
    parallelism = workload.parallelism
    if parallelism.num_gpus == 1:
        return
    if parallelism.devices > MOST_GPUS:
        raise NotRehearsedError(f"a machine has at most {MOST_GPUS} GPUs here", hint="say how many machines there are: `nodes`")
    if find_torch().numbers < OLDEST_OF_RANKS:
        raise NotRehearsedError(f"PyTorch {find_torch().version} has no process group that waits for nobody", hint="PyTorch 2.6 has one")
    if workload.optimizer.steps_in_backward:
        raise NotRehearsedError("an optimizer that steps in the backward is planned for one GPU", hint="rehearse your own program")
    if parallelism.split_by:
        _check_split(workload)
    if parallelism.strategy not in ZERO_STAGES:
        return
    if PathFinder.find_spec(ZERO_PACKAGE) is None:
        raise NotRehearsedError(
            f"the strategy {parallelism.strategy} is {ZERO_PACKAGE}'s, which is not installed", hint=f"`pip install {ZERO_PACKAGE}`"
        )
    if workload.contrastive is not None and workload.contrastive.cached_loss_mini_batch_size is not None:
        raise NotRehearsedError(
            f"{ZERO_PACKAGE} runs no backward from gradients, which a cached loss needs", hint="try the strategy ddp or fsdp"
        )


def _check_split(workload: Workload) -> None:
    """Raise NotRehearsedError where the GPUs of *workload* cannot split its model or its sequence as it says."""
    model, parallelism = workload.model, workload.parallelism
    tensor, context = parallelism.tensor_parallel_size, parallelism.context_parallel_size
    sizes = " and ".join(parallelism.split_by)
    if not isinstance(model, TransformerModel) or model.head != "language_model" or model.lora is not None or workload.contrastive:
        raise NotRehearsedError(
            f"{sizes}: only a language model without adapters is split, of `kind: transformer`",
            hint="rehearse your own program: `-- torchrun --nproc-per-node 8 train.py`",
        )
    stages = parallelism.pipeline_parallel_size
    if stages > 1 and (model.has_attention_mask or model.norm_position == "post"):
        raise NotRehearsedError(
            f"pipeline_parallel_size {stages}: what passes from stage to stage is hidden states alone, without a mask of padding",
            hint="say `has_attention_mask: false` of the model, where its texts are packed",
        )
    if tensor > 1 and parallelism.strategy == "ddp" and parallelism.num_copies > 1:
        raise NotRehearsedError(
            f"tensor_parallel_size {tensor} with data parallelism needs shards: DistributedDataParallel takes no split parameters",
            hint="choose the strategy fsdp, or as many GPUs as split the matrices",
        )
    if context > 1 and (model.has_attention_mask or model.attention == "eager" or model.architecture == "encoder"):
        raise NotRehearsedError(
            f"context_parallel_size {context}: PyTorch passes keys and values around for causal attention without a mask of padding",
            hint="say `has_attention_mask: false` and `attention: sdpa` of the model, where its texts are packed",
        )
    length_unit = tensor * (2 * context if context > 1 else 1)  # causal parts are two, from both ends, so that all have the same work
    units = {
        "num_attention_heads": (model.num_attention_heads, tensor),
        "num_key_value_heads": (model.key_value_heads, tensor),
        "intermediate_size": (model.intermediate_size, tensor),
        "vocab_size": (model.vocab_size, tensor),
        "num_positions": (model.num_positions, tensor),
        "num_layers": (model.num_layers, stages),
        "sequence_length": (workload.training.sequence_length, length_unit),
    }
    for name, (value, unit) in units.items():
        if value % unit:
            hint = f"take sizes that divide it, or {value + unit - value % unit} for {name}"
            raise NotRehearsedError(f"{sizes}: {name} is {value}, which {unit} does not divide", hint=hint)


def step_of(workload: Workload, gpu: GpuSpec, stage: Stage | None) -> Step:
    """Return what of *workload*, *gpu* and *stage* decides a rehearsal."""
    unread: dict[str, object] = {"name": "stage", "max_n_negatives": None}
    if workload.contrastive is not None and workload.contrastive.sampling == "pair":
        unread["n_positives"] = 1  # each row has one of them, whatever their number
    anonymous = None if stage is None else stage.model_copy(update=unread)
    alike: dict[str, object] = {"name": "", "stands_for_a_program": False}
    alike |= {"parallelism": Parallelism()} if workload.parallelism.num_gpus == 1 else {}
    reduced = with_fewest_micro_batches(workload, anonymous).model_copy(update=alike)
    card = of_some_kind(gpu).endless()
    alone = reduced.with_training(micro_batch_size=1)
    likeness = alone.model_dump_json()
    family = _family(likeness, card, _packages_of(workload), workload.parallelism.num_gpus > 1)
    return Step(family, workload.training.micro_batch_size, likeness, reduced, card)


@lru_cache(maxsize=4096)
def _family(step: str, gpu: GpuSpec, packages: tuple[str, ...], has_ranks: bool) -> str:
    kind: dict[str, object] = {name: getattr(gpu, name) for name in ("compute_capability", "multiprocessors")}
    kind |= {"link": link_of(gpu).name} if has_ranks else {}
    versions: dict[str, object] = {"torch": find_torch()[:3]}
    if packages:
        from importlib import metadata  # noqa: PLC0415

        versions |= {package: metadata.version(package) for package in packages if PathFinder.find_spec(package)}
    return family_of({"step": step, "card": kind, "packages": versions})


def _packages_of(workload: Workload) -> tuple[str, ...]:
    """Return the packages besides PyTorch that build the step."""
    is_huggingface = getattr(workload.model, "huggingface_config", None) is not None and not isinstance(workload.model, TorchtuneModel)
    optimizer = OPTIMIZER_PACKAGES.get(workload.optimizer.name)
    has_zero = workload.parallelism.strategy in ZERO_STAGES and workload.parallelism.num_gpus > 1
    zero = ZERO_PACKAGE if has_zero else None
    packages = (MODEL_PACKAGE if is_huggingface else None, optimizer, zero, _package_of_kernels(workload))
    return tuple(package for package in packages if package is not None)


def _package_of_kernels(workload: Workload) -> str | None:
    """Return the package whose kernels take the place of the model's own; None where none does."""
    kernels = workload.model.kernels if isinstance(workload.model, HuggingFaceModel) else None
    return None if kernels is None else KERNEL_PACKAGES[kernels]


_own = threading.local()
"""By thread, the process that rehearses workloads for it. It ends with the thread that started it, as `standin/launch.py` has it."""


def _rehearser() -> Rehearser:
    """Return the process that rehearses workloads for this thread; it lives as long as that."""
    if not hasattr(_own, "rehearser"):
        from memplan.execution.rehearse import Rehearser  # noqa: PLC0415
        from memplan.execution.step_source import StepSource  # noqa: PLC0415

        _own.rehearser = Rehearser(StepSource("memplan.child.models.built_in", "build"), allow_writes=True)  # it writes nothing
        atexit.register(_own.rehearser.close)
    rehearser: Rehearser = _own.rehearser
    return rehearser

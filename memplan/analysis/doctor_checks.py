"""
What costs a training memory or time without need: evidence in, suspicions out. No finding without evidence.

Each check is a small function in the table CHECKS. It looks at what is known (the configuration, one rehearsal of the program, the GPU)
and yields a suspicion where it has seen something: what was seen and where, what to change, and how the change can be tried. What the
change saves is rehearsed by whoever asks (`api/diagnosis.py`); a suspicion that only counts where memory is saved says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from memplan.analysis.levers import in_training_mode
from memplan.description import Description
from memplan.execution.program_habits import Change, Habit, HabitKind, Habits
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.wording import shown_place
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.precisions import BF16_FROM, FP16_FROM, TF32_FROM
from memplan.workload.model import encoder_of
from memplan.workload.workload import Workload

EXPANDABLE = "expandable_segments:True"

LEAST_STEPS = 2
"""In so many steps a line has to do a thing to do it in the loop; the first may be one-time work."""

IN_LOOP, IN_EACH_STEP = 0.5, 0.9
"""In more than this share of the steps: what is done once in an epoch of two steps is not in the loop. Logging in every other step is no
habit, and reading a loss in each one is."""

LEAST_PARAMETERS = 1_000_000
"""From which the type of the weights is judged: a step of fewer is mostly the launching of kernels, whatever they compute in."""

FIXED_SHAPES = 2
"""What one convolution gets where shapes are fixed: that of a full batch, and that of the last one of an epoch."""

VARYING_SHAPES = 4
"""Shapes of one convolution from which they vary."""

LEAST_RECOMPILATIONS = 2
"""With the first one PyTorch takes the dimension that changed for dynamic, and compiles no more for it."""


class ProgramChange(NamedTuple):
    """A change that a rehearsal makes itself while the program runs."""

    name: Change
    places: tuple[str, ...] = ()


class AllocatorChange(NamedTuple):
    """Other allocator settings, with which the recorded requests are replayed."""

    settings: str


class WorkloadChange(NamedTuple):
    """Another value in the configuration."""

    workload: Workload
    is_in_files: bool = False
    """The value may have a key in the files: it can be written."""


Trial = ProgramChange | AllocatorChange | WorkloadChange


class Suspicion(NamedTuple):
    """Something that was seen, and what could be done."""

    check: str
    evidence: str
    change: str
    place: str | None = None
    """FILE:LINE."""
    trial: Trial | None = None
    """What shows the effect on memory; None: it has none, or none that a rehearsal can show."""
    only_if_it_saves: bool = False
    """Memory is the only reason for it."""


class Diagnosed(Description):
    """A finding."""

    check: str
    """Which check found it."""

    evidence: str
    """What was seen."""

    change: str
    """What to do."""

    place: str | None = None
    """FILE:LINE, where it has one."""

    saving_bytes: int | None = None
    """What the change saves of the GPU's memory; below zero: what it costs. None: it was not found out."""

    saving_method: Literal["rehearsed", "analytic"] | None = None
    """How that was found out."""

    is_written_by_apply: bool = False
    """It is a value that a key of the configuration has, and can be written there."""


class Written(NamedTuple):
    """Where a value of the configuration stands."""

    place: str | None
    """FILE:LINE."""
    text: str
    """As "`trainer.precision` is 16-mixed"."""


class Evidence(NamedTuple):
    """All that is known."""

    gpu: GpuSpec
    workload: Workload | None = None
    """What a configuration describes; None: the program is the user's own."""
    written: Mapping[str, Written] = {}
    """Where its fields stand, by their dotted names."""
    rehearsal: Rehearsal | None = None
    """One run of the program, with its habits."""
    configured_batch_size: int | None = None
    """The micro-batch that the program's files or arguments name."""
    has_allocator_settings: bool = False

    @property
    def habits(self) -> Habits | None:
        """Return what the program was seen to do."""
        return self.rehearsal.habits if self.rehearsal is not None else None

    @property
    def num_steps(self) -> int:
        """Return how many steps of it ran."""
        return len(self.rehearsal.steps) if self.rehearsal is not None else 0

    def supports(self, capability: tuple[int, int]) -> bool:
        """Say whether the GPU has at least that compute capability; one whose is unknown is not judged by it."""
        return self.gpu.compute_capability is not None and self.gpu.compute_capability >= capability

    def lacks(self, capability: tuple[int, int]) -> bool:
        """Say whether the GPU has less than that compute capability."""
        return self.gpu.compute_capability is not None and self.gpu.compute_capability < capability

    def written_as(self, field: str) -> Written:
        """Return where *field* stands, or its value in memplan's words."""
        return self.written.get(field, Written(None, f"`{field}` is {_value_at(self.workload, field)}"))


def suspect(evidence: Evidence) -> tuple[Suspicion, ...]:
    """Return what was seen, in the order of the table."""
    return tuple(suspicion for check in CHECKS for suspicion in check(evidence))


# precision


def _configured_precision(evidence: Evidence) -> Iterator[Suspicion]:
    workload = evidence.workload
    if workload is None:
        return
    precision, written = workload.training.precision, evidence.written_as("training.precision")
    better = _better_precision(evidence, precision)
    if better is None:
        return
    trial = WorkloadChange(workload.with_training(precision=better), is_in_files=True)
    seen = f"{written.text}; {_why(evidence, precision)}"
    yield Suspicion("precision", seen, f"train in {better}", written.place, trial)


def _better_precision(evidence: Evidence, precision: str) -> str | None:
    if precision.startswith("bf16") and evidence.lacks(BF16_FROM):
        return "fp16-mixed" if evidence.supports(FP16_FROM) else None
    if precision == "fp16-mixed" and evidence.supports(BF16_FROM):
        return "bf16-mixed"
    if precision == "fp32" and evidence.supports(FP16_FROM):
        return "bf16-mixed" if evidence.supports(BF16_FROM) else "fp16-mixed"
    return None


def _why(evidence: Evidence, precision: str) -> str:
    capability = ".".join(map(str, evidence.gpu.compute_capability or ()))
    gpu = f"{evidence.gpu.name} (compute capability {capability})"
    if precision.startswith("bf16"):
        return f"{gpu} has no bf16 units and emulates it"
    if precision.startswith("fp16"):
        return f"{gpu} computes in bf16 as fast, which needs no loss scaling"
    return f"{gpu} has tensor cores for {'bf16' if evidence.supports(BF16_FROM) else 'fp16'}, and none is used"


def _program_precision(evidence: Evidence) -> Iterator[Suspicion]:
    habits = evidence.habits
    if habits is None or not habits.optimizers:
        return
    for dtype, place in habits.autocasts.items():
        short = {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, dtype)
        better = _better_precision(evidence, f"{short}-mixed")
        if better is not None:
            seen = f"autocast runs in {short}; {_why(evidence, short)}"
            yield Suspicion("precision", seen, f"autocast in {better.removesuffix('-mixed')}", place or None)
    if not habits.autocasts and _trains_in_fp32(habits):
        better = _better_precision(evidence, "fp32")
        if better is not None:
            dtype = "bfloat16" if better.startswith("bf16") else "float16"
            scaler = "" if better.startswith("bf16") else ", with a torch.amp.GradScaler"
            seen = f"all weights are fp32, and none of {_steps(evidence)} used autocast; {_why(evidence, 'fp32')}"
            yield Suspicion("precision", seen, f'run the forward under torch.autocast("cuda", dtype=torch.{dtype}){scaler}')


def _trains_in_fp32(habits: Habits) -> bool:
    """Say whether all weights that are trained are fp32, and enough of them for their type to matter."""
    are_all = all(set(used.num_parameters) == {"float32"} for used in habits.optimizers)
    return are_all and sum(sum(used.num_parameters.values()) for used in habits.optimizers) >= LEAST_PARAMETERS


def _tf32(evidence: Evidence) -> Iterator[Suspicion]:
    habits = evidence.habits
    if habits is None or not evidence.supports(TF32_FROM) or habits.autocasts or not habits.optimizers or not _trains_in_fp32(habits):
        return
    in_matrices = sum(used.num_in_matrices for used in habits.optimizers)  # convolutions have a switch of their own, and it is on
    if in_matrices >= LEAST_PARAMETERS and habits.settings.matmul_precision == "highest":
        yield Suspicion(
            "tf32",
            f'torch.get_float32_matmul_precision() is "highest", and {_steps(evidence)} multiplied matrices in fp32 on a GPU with TF32',
            'call torch.set_float32_matmul_precision("high") where the program begins',
        )


def _gradient_scaling(evidence: Evidence) -> Iterator[Suspicion]:
    habits = evidence.habits
    if habits is None or not habits.autocasts or not habits.optimizers:
        return
    if "float16" in habits.autocasts and not habits.has_scaled and _trains_in_fp32(habits):
        yield Suspicion(
            "gradient-scaler",
            f"autocast runs in fp16, and no loss was scaled in {_steps(evidence)}: small gradients become zero",
            "scale the loss with torch.amp.GradScaler, or autocast in bf16",
            habits.autocasts["float16"] or None,
        )
    if set(habits.autocasts) == {"bfloat16"} and habits.has_scaled:
        yield Suspicion(
            "gradient-scaler",
            "autocast runs in bf16, and the loss is scaled: bf16 has the range of fp32 and needs none",
            "leave the GradScaler out, or create it with enabled=False",
            habits.autocasts["bfloat16"] or None,
        )


# convolutions


def _cudnn_benchmark(evidence: Evidence) -> Iterator[Suspicion]:
    habits = evidence.habits
    if habits is None or not habits.convolutions:
        return
    most = max(len(each.shapes) for each in habits.convolutions)
    seen = f"{len(habits.convolutions)} convolutions ran in {_steps(evidence)}"
    settings = habits.settings
    if settings.cudnn_benchmark and most >= VARYING_SHAPES:
        yield Suspicion(
            "cudnn-benchmark",
            f"torch.backends.cudnn.benchmark is on, and one of {seen} with {most} different shapes: each is timed anew",
            "turn it off, or pad batches to few sizes",
        )
    if not settings.cudnn_benchmark and not settings.is_deterministic and most <= FIXED_SHAPES and evidence.num_steps > FIXED_SHAPES:
        yield Suspicion(
            "cudnn-benchmark",
            f"{seen}, none with more than {most} shape{'s' if most > 1 else ''}, and torch.backends.cudnn.benchmark is off",
            "set torch.backends.cudnn.benchmark = True: cuDNN times its algorithms once for each shape (and may choose one with a larger "
            "workspace)",
        )


def _channels_last(evidence: Evidence) -> Iterator[Suspicion]:
    habits = evidence.habits
    planes = [each for each in habits.convolutions if each.kind == "Conv2d"] if habits is not None else []
    count, half = sum(each.count for each in planes), sum(each.num_half for each in planes)
    if count and half == count and not any(each.num_channels_last for each in planes) and evidence.supports(FP16_FROM):
        yield Suspicion(
            "channels-last",
            f"{len(planes)} Conv2d ran {count} times in half precision, and each got NCHW tensors: cuDNN's tensor-core kernels take NHWC",
            "move the model and the images with .to(memory_format=torch.channels_last)",
        )


# calls in the loop


def _of_kind(evidence: Evidence, kind: HabitKind, *, share: float = IN_LOOP) -> list[Habit]:
    """Return the lines that do it in more than that *share* of the steps, and in two at least; 0: at all."""
    habits = evidence.habits
    found = [habit for habit in habits.found if habit.kind == kind] if habits is not None else []
    return [habit for habit in found if not share or habit.num_steps > max(LEAST_STEPS - 1, share * evidence.num_steps)]


def _seen_in(habit: Habit, evidence: Evidence) -> str:
    return f"{_times(habit.count)}, in {min(habit.num_steps, evidence.num_steps)} of {_steps(evidence)}"


def _steps(evidence: Evidence) -> str:
    return f"{evidence.num_steps} step{'' if evidence.num_steps == 1 else 's'}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _empty_cache(evidence: Evidence) -> Iterator[Suspicion]:
    for habit in _of_kind(evidence, "empty_cache"):
        yield Suspicion(
            "empty-cache",
            f"`{habit.text}` was called {_seen_in(habit, evidence)}: the memory that it gives back is asked for again",
            "take it out of the loop",
            habit.place,
            ProgramChange("empty_cache"),
        )


def _reads(evidence: Evidence) -> Iterator[Suspicion]:
    for habit in _of_kind(evidence, "read", share=IN_EACH_STEP):
        yield Suspicion(
            "item-in-loop",
            f"`{habit.text}` read a value from the GPU {_seen_in(habit, evidence)}: each read waits until the GPU is done",
            "keep the tensor (`.detach()`), and read or check it every so many steps",
            habit.place,
        )


def _set_to_none(evidence: Evidence) -> Iterator[Suspicion]:
    for habit in _of_kind(evidence, "zeroed_in_place"):
        yield Suspicion(
            "set-to-none",
            f"`{habit.text}` kept the gradients and filled them with zeros {_seen_in(habit, evidence)}",
            "leave set_to_none=False out: gradients then take no memory during the forward",
            habit.place,
            ProgramChange("set_to_none"),
        )


def _clipping(evidence: Evidence) -> Iterator[Suspicion]:
    for habit in _of_kind(evidence, "clipped_before_unscale", share=0):
        yield Suspicion(
            "clip-before-unscale",
            f"`{habit.text}` clipped gradients that a GradScaler had scaled, {_seen_in(habit, evidence)}: the limit is off by the scale",
            "call scaler.unscale_(optimizer) before it",
            habit.place,
        )


def _pinning(evidence: Evidence) -> Iterator[Suspicion]:
    habits = evidence.habits
    for habit in _of_kind(evidence, "unpinned_copy"):
        loaders = [each for each in habits.loaders if not each.pin_memory] if habits is not None else []
        seen = f"; the DataLoader at {shown_place(loaders[0].place)} has pin_memory=False" if loaders else ""
        yield Suspicion(
            "non-blocking-unpinned",
            f"`{habit.text}` copied with non_blocking=True from memory that is not pinned {_seen_in(habit, evidence)}{seen}: such a copy "
            "waits all the same",
            "create the DataLoader with pin_memory=True",
            habit.place,
        )


def _evaluation(evidence: Evidence) -> Iterator[Suspicion]:
    for habit in _of_kind(evidence, "evaluation_with_gradient", share=0):
        yield Suspicion(
            "evaluation-with-gradient",
            f"`{habit.text}` ran {_times(habit.count)} in eval mode with gradients on, and no backward followed: its activations were kept",
            "run the evaluation under torch.no_grad() or torch.inference_mode()",
            habit.place,
            ProgramChange("no_grad", (habit.place,)),
        )


# optimizer, accumulation, batch


def _configured_optimizer(evidence: Evidence) -> Iterator[Suspicion]:
    workload = evidence.workload
    if workload is None or workload.optimizer.name not in ("adam", "adamw") or workload.optimizer.implementation == "fused":
        return
    fused = workload.optimizer.model_copy(update={"implementation": "fused"})
    written = evidence.written_as("optimizer.implementation")
    trial = WorkloadChange(workload.model_copy(update={"optimizer": fused}), is_in_files=True)
    seen = f"{written.text}: the step needs temporaries beside the optimizer's state"
    yield Suspicion("fused-optimizer", seen, "use the fused optimizer (fused=True)", written.place, trial, only_if_it_saves=True)


def _program_optimizer(evidence: Evidence) -> Iterator[Suspicion]:
    for used in evidence.habits.optimizers if evidence.habits is not None else ():
        if used.can_be_fused and not used.is_fused:
            is_loop = used.foreach is False
            how = "one parameter after the other (foreach=False)" if is_loop else "by foreach, with temporaries for all parameters at once"
            seen = f"{used.name} with {sum(used.num_parameters.values()):,} parameters steps {how}"
            yield Suspicion(
                "fused-optimizer", seen, f"{used.name}(…, fused=True)", trial=ProgramChange("fused"), only_if_it_saves=not is_loop
            )


def _dropped_accumulation(evidence: Evidence) -> Iterator[Suspicion]:
    habits = evidence.habits
    usual = _usual_backwards(habits) if habits is not None else 1
    if habits is None or usual < 2:
        return
    change = "step with what is left at the end of an epoch, with the loss divided by as many micro-batches as there are"
    for habit in _of_kind(evidence, "dropped_gradients", share=0):
        seen = f"`{habit.text}` cleared gradients {_times(habit.count)} that no optimizer step had used"
        yield Suspicion("dropped-accumulation", f"{seen}; {usual} backward passes make a step", change, habit.place)
    left, is_whole = habits.num_backwards_left, evidence.rehearsal is not None and not evidence.rehearsal.was_cut
    if is_whole and 0 < left < usual and evidence.rehearsal is not None and evidence.rehearsal.failure is None:
        seen = f"the program ended with {left} backward pass{'es' if left > 1 else ''} after its last optimizer step"
        yield Suspicion("dropped-accumulation", f"{seen}; {usual} make a step", change)


def _usual_backwards(habits: Habits) -> int:
    """Return how many backwards make most steps of the one optimizer; 1 where there are several, whose steps may share them."""
    steps = habits.optimizer_steps if len(habits.optimizers) == 1 else ()
    counts: Counter[int] = Counter()
    for each in steps:
        counts[each.num_backwards] += each.count
    return max(counts, key=lambda number: (counts[number], number), default=1)


def _misscaled_accumulation(evidence: Evidence) -> Iterator[Suspicion]:
    """Tell of steps of fewer or more backwards than their losses were divided by, where other steps have exactly so many."""
    habits = evidence.habits
    steps = habits.optimizer_steps if habits is not None and len(habits.optimizers) == 1 else ()
    divisors = {each.num_backwards for each in steps if each.num_backwards >= 2 and each.divisor == each.num_backwards}
    for each in steps:
        if each.divisor in divisors and each.divisor != each.num_backwards:
            number, divisor = each.num_backwards, int(each.divisor)
            passes = f"{number} backward pass{'es' if number > 1 else ''}"
            yield Suspicion(
                "misscaled-accumulation",
                f"{each.count} of {sum(every.count for every in steps)} optimizer steps used {passes} of losses that were divided by "
                f"{divisor}, as those of whole steps: their gradients are {number}/{divisor} of the mean",
                "divide the loss by as many micro-batches as the step has, or let the number of batches of an epoch be a multiple of "
                f"{divisor}",
                each.place or None,
            )


def _batch_size(evidence: Evidence) -> Iterator[Suspicion]:
    habits, configured = evidence.habits, evidence.configured_batch_size
    if habits is None or configured is None or evidence.rehearsal is None:
        return
    sizes = evidence.rehearsal.trained_batch_sizes
    usual = max(sizes, key=sizes.count, default=None)
    loader = next((each for each in habits.loaders if each.batch_size == usual), None)
    if usual is not None and usual != configured and loader is not None:
        written = evidence.written.get("training.micro_batch_size", Written(None, f"micro_batch_size is {configured}"))
        yield Suspicion(
            "batch-size-overridden",
            f"{written.text}, and the DataLoader at {shown_place(loader.place)} gave batches of {usual}",
            "look for what sets another batch size in between, and keep one of them",
            written.place or loader.place,
        )


# checkpointing, allocator, compiler


def _checkpointing(evidence: Evidence) -> Iterator[Suspicion]:
    workload = evidence.workload
    encoder = encoder_of(workload.model) if workload is not None else None
    if workload is not None and encoder is not None and encoder.is_in_eval_mode:
        yield Suspicion(
            "checkpointing-without-effect",
            "the trainer leaves the encoder in eval mode, where gradient checkpointing has no effect",
            "call .train() on the encoder, with checkpointing on",
            trial=WorkloadChange(in_training_mode(workload)),
        )
    for finding in evidence.rehearsal.findings if evidence.rehearsal is not None else ():
        if finding.kind == "checkpointing_without_effect":
            seen, _, change = finding.message.partition("; ")
            yield Suspicion("checkpointing-without-effect", seen, change)


def _expandable_segments(evidence: Evidence) -> Iterator[Suspicion]:
    if evidence.has_allocator_settings:
        return
    rehearsal = evidence.rehearsal
    seen = f"{rehearsal.fragmentation:.0%} of the reserved peak was in no tensor" if rehearsal is not None else "no allocator settings"
    yield Suspicion(
        "expandable-segments", seen, f"run with PYTORCH_ALLOC_CONF={EXPANDABLE}", trial=AllocatorChange(EXPANDABLE), only_if_it_saves=True
    )


def _recompilation(evidence: Evidence) -> Iterator[Suspicion]:
    for again in evidence.habits.recompilations if evidence.habits is not None else ():
        if again.count >= LEAST_RECOMPILATIONS:
            yield Suspicion(
                "recompilation",
                f"torch.compile compiled {again.name} {_times(again.count)} more because a shape changed: {again.reason.strip()}",
                "mark the dimension (torch._dynamo.mark_dynamic), compile with dynamic=True, or pad batches to few sizes",
                again.place,
            )


CHECKS: tuple[Callable[[Evidence], Iterator[Suspicion]], ...] = (
    _configured_precision,
    _program_precision,
    _tf32,
    _gradient_scaling,
    _clipping,
    _checkpointing,
    _evaluation,
    _empty_cache,
    _set_to_none,
    _configured_optimizer,
    _program_optimizer,
    _expandable_segments,
    _dropped_accumulation,
    _misscaled_accumulation,
    _batch_size,
    _reads,
    _pinning,
    _cudnn_benchmark,
    _channels_last,
    _recompilation,
)
"""In the order of a report: what is wrong first, then memory, then time."""


def _value_at(workload: Workload | None, field: str) -> object:
    value: object = workload
    for name in field.split("."):
        value = getattr(value, name, None)
    return value

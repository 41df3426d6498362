"""`memplan.plan` and `memplan.undo`: the main job from Python; the command line does the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pydantic import Field, InstanceOf

from memplan.analysis.explain import warn_of_other_stages
from memplan.analysis.make_plan import make_plan
from memplan.analysis.profile import Profile
from memplan.api.arguments import check_arguments
from memplan.api.configuration import (
    Configuration,
    command_configuration,
    function_configuration,
    is_function,
    read_configuration,
    source_of,
    trainer_of,
)
from memplan.api.gpus import gpus_of_this_machine, named_gpu, warn_of_kernels
from memplan.api.journals import journal_root
from memplan.api.methods import Answered, Method, by_method
from memplan.edits.apply import FileChange, prepare
from memplan.edits.apply import apply as apply_changes
from memplan.edits.apply import undo as undo_apply
from memplan.edits.edit import Edit
from memplan.errors import DoesNotFitError, MissingError, NotRehearsedError, UsageError, reason_of
from memplan.estimators.base import Estimator
from memplan.estimators.registry import OnRehearsal
from memplan.hardware.gpu import GpuSpec
from memplan.layouts.checkpoints import checkpoint_beside
from memplan.layouts.reader import Reading
from memplan.layouts.writer import edits_for, planned_edits, unwritable
from memplan.memory.budget import DEFAULT_MARGIN
from memplan.planner.decision import DecisionOptions
from memplan.planner.pins import Pins, pin
from memplan.planner.plan import Plan as PlainPlan
from memplan.programs.command_line import edits_of
from memplan.programs.command_program import CommandProgram
from memplan.programs.function_program import FunctionProgram
from memplan.workload.training import TargetBatch
from memplan.workload.workload import Workload

Source: TypeAlias = "str | Path | Workload | Sequence[str] | Callable[..., Any] | None"
"""What can be planned."""

T = TypeVar("T")


class Plan(PlainPlan):
    """A plan that knows the configuration it is of: it can be shown as a diff, and written."""

    configuration: InstanceOf[Configuration] = Field(exclude=True, repr=False)
    """Where the workload was read."""

    def diff(self) -> str:
        """
        Return what `apply` would change, as a unified diff; empty where the files have these values already.

        Raises UsageError where there are no files to write, or no key for what the plan counts on; EditRefusedError for a value that cannot
        be changed without guessing.
        """
        from memplan.reports.diff import diff_lines  # noqa: PLC0415

        return "".join(f"{line}\n" for line in diff_lines(changes_of(self, self.configuration)))

    def apply(self) -> tuple[Path, ...]:
        """
        Write the plan into the configuration, all files or none, and return those that changed; `memplan.undo` puts them back.

        Raises DoesNotFitError for a plan that does not fit, and as `diff`; ConfigError where a file cannot be written.
        """
        if not self.fits:
            raise DoesNotFitError("a plan that does not fit is not written", hint="see its `levers` for what would help")
        return write_changes(changes_of(self, self.configuration), self.configuration)

    def profile(self) -> Profile:
        """
        Return what this machine's GPU says to the plan: its steps are run there, and their peaks stand beside the planned ones.

        Raises NotRehearsedError where a step cannot be built or run, MissingError without a GPU.
        """
        gpus_of_this_machine()  # says so where there is none
        from memplan.api.profiling import run_profile  # noqa: PLC0415

        found = run_profile(self)
        assert found is not None  # this process's own plan
        return found

    def save(self, path: str | Path) -> None:
        """
        Write the plan as JSON into the file at *path*, for a monitor or a callback to compare a training with.

        Raises UsageError where it cannot be written.
        """
        check_arguments(path=path)
        try:
            Path(path).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: {reason_of(error)}", hint="name a file that can be written") from error

    def _repr_html_(self) -> str:
        """Return the report, for a notebook."""
        from memplan.reports.html import plan_as_html  # noqa: PLC0415

        return plan_as_html(self, source=self.configuration.source, notes=self.configuration.notes, is_page=False)


def plan(
    source: Source = None,
    *,
    fields: Sequence[str] = (),
    short: Sequence[str] = (),
    stages: str | Sequence[str] = (),
    num_gpus: int | None = None,
    num_nodes: int | None = None,
    launch_config: str | Path | None = None,
    gpu: str | GpuSpec | None = None,
    gpu_memory: str | float | None = None,
    target_effective_batch_size: TargetBatch | None = None,
    target_tolerance: float | None = None,
    method: Method = "auto",
    margin: float = DEFAULT_MARGIN,
    pins: Mapping[str, object] | None = None,
    grow_negatives: bool = False,
    with_levers: bool = False,
    skip_weights: bool = False,
    on_rehearsal: OnRehearsal | None = None,
) -> Plan:
    """
    Return the plan for a GPU: which micro-batch and accumulation to use, what they take, and why.

    Args:
        source: A configuration (its folder, the project's, or its main file), a workload.yaml, a Hugging Face config.json or the folder of
            one, "built-in", or a Workload. None: the configuration of the working directory. Or a program of your own, which is run on a
            simulated GPU: a function ("FILE.py:build", or itself), whose arguments are its variables; or a command as a list of words, with
            `{micro_batch_size}` and `{gradient_accumulation_steps}` where these are written.
        fields: Where a command's variables are written besides, as "micro_batch_size=conf/config.yaml:data.batch_size", or
            "micro_batch_size=BATCH_SIZE" for a variable of the environment. Of a function: which of its arguments is which variable, where
            their names do not say so, as "micro_batch_size=items".
        short: What makes a rehearsal of a command short, as "conf/config.yaml:trainer.limit_val_batches=0".
        stages: Files, or patterns of files as "conf/*_stage.yaml": the command is run for each, in sorted order. `{stage}` in its words is
            the stage's name, `{stage_file}` the file's path; in *fields* and *short* STAGE stands for the file: "n_negatives=STAGE:k".
        num_gpus: GPUs of each machine on which a command or a recipe trains. None: as its launcher is told.
        num_nodes: Machines on which it trains.
        launch_config: The file of `accelerate launch --config_file` beside a recipe: on how many GPUs it is trained, and how these share
            the model.
        gpu: A name of the catalogue ("rtx4090", "a100-80"), or a GpuSpec. None, without *gpu_memory*: this machine's GPU, as far as it is
            free; of several, that with least free memory.
        gpu_memory: A size: 24 is the size that GPUs are sold with, "23.5GiB" is exact. With *gpu*: that kind of GPU in another size.
        target_effective_batch_size: Samples that an optimizer step should see. None: the configuration's own target, else as many as now.
            "max": the largest batch that fits, without accumulation.
        target_tolerance: Share by which the effective batch may always be above the target. None: it is met exactly where that costs at
            most half of the micro-batch, and else within 5%.
        method: "rehearsed" runs the real step on a simulated GPU, "analytic" takes closed formulas, "auto" rehearses where it can.
        margin: Share of the free memory that stays free.
        pins: Values that stay whatever the plan, as ``{"micro_batch_size": 8, "01_stage.n_negatives": 16}``.
        grow_negatives: Give each stage as many negatives as fit.
        with_levers: Find also for a plan that fits what changes would do.
        skip_weights: For a program: build pretrained models without reading their weights, which need not be there.
        on_rehearsal: Is called before each rehearsal, and again with `where` its program is while that has not trained for long.

    Returns:
        The plan; `fits` says whether there is one, and `missing_bytes` how much it is short of where there is none.

    Raises:
        ConfigError: For a configuration that cannot be read, with file, line and value.
        UsageError: For a GPU, a pin or a number that makes no sense.
        MissingError: If this machine has no GPU and none is named, or cannot rehearse and *method* is "rehearsed".

    >>> import memplan
    >>> plan = memplan.plan("conf", gpu="rtx4090", target_effective_batch_size=64, method="analytic")
    >>> plan.fits, plan.effective_batch_size
    (True, 64)
    >>> print(plan.diff().splitlines()[0])
    --- conf/config.yaml

    """
    check_arguments(
        source=source,
        fields=fields,
        short=short,
        stages=stages,
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        launch_config=launch_config,
        gpu=gpu,
        gpu_memory=gpu_memory,
        target_effective_batch_size=target_effective_batch_size,
        target_tolerance=target_tolerance,
        margin=margin,
        pins=pins,
        grow_negatives=grow_negatives,
        with_levers=with_levers,
        skip_weights=skip_weights,
    )
    of_command = _OfCommand(fields, short, [stages] if isinstance(stages, str) else stages)
    configuration = (
        _configuration_of(source, of_command, _Launched(num_gpus, num_nodes, launch_config), pins or {})
        .with_pins(pins or {})
        .with_target(target_effective_batch_size)
    )
    if skip_weights:
        configuration = configuration.skipping_weights()
    request = PlanRequest(
        target=target_effective_batch_size,
        tolerance=target_tolerance,
        margin=margin,
        pins=Pins({name: str(value) for name, value in (pins or {}).items()}),
        grows_negatives=grow_negatives,
        with_levers=with_levers,
    )
    meant = _gpu_of(gpu, None if gpu_memory is None else str(gpu_memory))
    found = planned_by(
        method, configuration, lambda meaning, estimator: plan_for(meaning, meant, estimator, request), request, on_rehearsal
    )
    return found.answer.with_first_warnings(found.notes)


def undo(path: str | Path = ".", *, files: Sequence[str | Path] = ()) -> tuple[Path, ...]:
    """
    Put the files of the last apply back, byte for byte, and return those that changed; called again, it goes one apply further back.

    *path* is a configuration, or its project's folder. *files*: only these. Raises UsageError where there is nothing to undo,
    EditRefusedError where a file has changed since; then nothing is written.

    >>> import memplan
    >>> written = memplan.plan("conf", gpu="rtx4090", target_effective_batch_size=64, method="analytic").apply()
    >>> [path.name for path in memplan.undo("conf")] == [path.name for path in written]
    True

    """
    check_arguments(path=path)
    only = [Path(file) for file in files]
    return undo_apply(journal_root(Path(path), only), only=only).restored


class PlanRequest(NamedTuple):
    """What is asked of a plan, besides the workload and the GPU."""

    target: TargetBatch | None = None
    tolerance: float | None = None
    margin: float = DEFAULT_MARGIN
    pins: Pins = Pins()
    grows_negatives: bool = False
    with_levers: bool = False

    def options(self, configuration: Configuration) -> DecisionOptions:
        """Return what `decide` is told of it. Raises UsageError where the largest batch is asked for, and a pin says which it is."""
        fixed = next((name for name in ("micro_batch_size", "target_effective_batch_size") if self.pins.pins(name)), None)
        if self.target == "max" and fixed is not None:
            raise UsageError(f"the largest batch is asked for, and {fixed} is pinned", hint="leave out one of them")
        return {
            "target": None if self.target == "max" else self.target,
            "tolerance": self.tolerance,
            "margin": self.margin,
            "fills_gpu": self.target == "max" or (self.target is None and not configuration.has_batch),
            "grows_negatives": self.grows_negatives,
        }


def planned_by(
    method: Method,
    configuration: Configuration,
    ask: Callable[[Configuration, Estimator], T],
    request: PlanRequest,
    on_rehearsal: OnRehearsal | None = None,
) -> Answered[T]:
    """
    Return what *ask* says of *configuration* by *method*: with `auto` of the program that trains from it where that is installed and runs,
    and else of memplan's own model of it. Raises as `by_method`.
    """
    trainer = _trainer(configuration, request) if method == "auto" else None
    if trainer is not None:
        program = trainer
        try:
            return by_method("rehearsed", lambda estimator: ask(program, estimator), on_rehearsal, is_slow=True)
        except (NotRehearsedError, MissingError, UsageError) as error:
            configuration = configuration.with_note(f"`{program.source}`, which trains from it, was not planned: {error.message}")
    return by_method(method, lambda estimator: ask(configuration, estimator), on_rehearsal, is_slow=configuration.is_own_program)


def _trainer(configuration: Configuration, request: PlanRequest) -> Configuration | None:
    """Return the program that trains from *configuration*, where it is installed and *request* asks nothing that it has no variable for."""
    located, reading = configuration.located, configuration.reading
    if located is None or reading is None or configuration.program.parallelism.num_gpus > 1:
        return None
    found = trainer_of(located, reading.stage_files)
    if found is None:
        return None
    needed = {name.rpartition(".")[2] for name in request.pins.values} | ({"n_negatives"} if request.grows_negatives else set())
    program = found.program
    assert isinstance(program, CommandProgram)
    return found.with_target(request.target) if needed <= {*program.variables, *program.stage_variables} else None


def plan_for(configuration: Configuration, gpu: GpuSpec, estimator: Estimator, request: PlanRequest) -> Plan:
    """Return the plan of *configuration* for *gpu* by *estimator*. Raises ConfigError for what its files leave to the data."""
    configuration.refuse_unknown()
    made = make_plan(
        configuration.program,
        gpu,
        estimator,
        pins=request.pins,
        with_levers=request.with_levers,
        finds_room=not estimator.is_slow,
        **request.options(configuration),
    )
    others = warn_of_other_stages(made, configuration.other_stages, estimator=estimator)
    first = (*warn_of_kernels(gpu), *_resumes(made, configuration))
    return of_configuration(made, configuration).with_first_warnings(first).with_warnings(others)


def _resumes(plan: PlainPlan, configuration: Configuration) -> Iterator[str]:
    """Yield the warning of a training that was begun with another effective batch, and would be resumed with that of *plan*."""
    old, new = (each.effective_batch_size for each in (plan.before, plan.after))
    if configuration.reading is None or old == new:
        return
    checkpoint = checkpoint_beside(configuration.reading)
    if checkpoint is not None:
        yield (
            f"{checkpoint}: a checkpoint of a training with an effective batch of {old}: resumed with {new}, it would skip or repeat "
            f"samples and follow another schedule; begin anew, or keep the effective batch: `target_effective_batch_size={old}`"
        )


def of_configuration(plan: PlainPlan, configuration: Configuration) -> Plan:
    """Return *plan* as one that knows its configuration."""
    return Plan.model_construct(**{name: getattr(plan, name) for name in PlainPlan.model_fields}, configuration=configuration)


def check_writable(configuration: Configuration, pins: Pins) -> None:
    """
    Refuse before planning what could not be written after it.

    Raises UsageError where there are no files to write, or no key for a pin; EditRefusedError for a key whose value cannot be changed
    without guessing.
    """
    program = configuration.program
    if not isinstance(program, Workload):
        _edits_of(program)
        return
    pinned = pin(program, pins)
    reading = _reading_of(configuration, pinned)
    prepare(edits_for(reading, pinned))
    for edit in planned_edits(reading, but=pins.values):
        prepare([edit])


def changes_of(plan: PlainPlan, configuration: Configuration) -> list[FileChange]:
    """Return what *plan* would change in the files, checked and not written. Raises as `check_writable`."""
    if not isinstance(plan.after, Workload):
        return prepare(_edits_of(plan.after))
    return prepare(edits_for(_reading_of(configuration, plan.after), plan.after))


def write_changes(changes: Sequence[FileChange], configuration: Configuration) -> tuple[Path, ...]:
    """
    Write *changes*, all of them or none, and return their files. Raises ConfigError where one cannot be written.

    The journal of a program's files is in the working folder, where `undo` looks for it.
    """
    root = Path.cwd() if configuration.reading is None else configuration.reading.root
    apply_changes(changes, root=root, now=datetime.now(timezone.utc))
    return tuple(change.path for change in changes)


def _edits_of(program: CommandProgram | FunctionProgram) -> list[Edit]:
    """Return the edits that write the values of *program*. Raises UsageError where no file has any of them."""
    edits = edits_of(program) if isinstance(program, CommandProgram) else []
    if not edits:
        raise UsageError(
            f"there is nothing to apply to: no file has the values of {program.name}",
            hint="the report says what to run; name the key of a file to have it written: "
            '`fields=["micro_batch_size=conf/config.yaml:data.batch_size"]`',
        )
    return edits


class _OfCommand(NamedTuple):
    """What only a command has; fields a function too."""

    fields: Sequence[str]
    short: Sequence[str]
    stages: Sequence[str]


class _Launched(NamedTuple):
    """On what it trains."""

    num_gpus: int | None
    num_nodes: int | None
    launch_config: str | Path | None


def _configuration_of(source: Source, of_command: _OfCommand, launched: _Launched, pins: Mapping[str, object]) -> Configuration:
    num_gpus, num_nodes, launch_config = launched
    is_path = source is None or isinstance(source, Path) or (isinstance(source, str) and not is_function(source))
    if launch_config is not None and not is_path:
        raise UsageError("launch_config is for a recipe", hint="a command names the launcher's configuration itself")
    if isinstance(source, Sequence) and not isinstance(source, str):
        return command_configuration(source, **of_command._asdict(), num_gpus=num_gpus, num_nodes=num_nodes, pinned=pins.keys())
    is_step = callable(source) or (isinstance(source, str) and is_function(source))
    if of_command.short or of_command.stages or (is_step and (num_gpus or num_nodes)):
        raise UsageError("short, stages and num_gpus are those of a command", hint='give its words: `source=["python", "train.py"]`')
    if callable(source):
        return function_configuration(source_of(source), fields=of_command.fields)
    if isinstance(source, str) and is_function(source):
        return function_configuration(source, fields=of_command.fields)
    if of_command.fields:
        raise UsageError("fields are those of a program", hint='give its words: `source=["python", "train.py"]`, or a function')
    if not isinstance(source, Workload):
        launch = None if launch_config is None else Path(launch_config)
        return read_configuration(None if source is None else Path(source), launch_config=launch).with_gpus(num_gpus, num_nodes)
    if num_gpus or num_nodes:
        raise UsageError("num_gpus is not for a Workload, which says it itself", hint="change its `parallelism`")
    chosen = source.training.model_fields_set & {"micro_batch_size", "gradient_accumulation_steps", "target_effective_batch_size"}
    return Configuration(source, source.name, has_batch=bool(chosen)).with_allocator_settings_of(os.environ)


def _gpu_of(gpu: str | GpuSpec | None, memory: str | None) -> GpuSpec:
    if isinstance(gpu, GpuSpec):
        if memory is not None:
            raise UsageError("gpu_memory goes with the name of a GPU", hint="change `total_memory_bytes` of the GpuSpec instead")
        return gpu
    return gpus_of_this_machine()[0] if gpu is None and memory is None else named_gpu(gpu, memory)


def _reading_of(configuration: Configuration, wanted: Workload) -> Reading:
    """Return the files to write *wanted* into. Raises UsageError where there are none, or they have no key for what it counts on."""
    if configuration.reading is None:
        raise UsageError(
            f"there is nothing to apply to: memplan writes no file of it ({configuration.source})",
            hint="plans are written into configuration trees that a layout describes",
        )
    lost = unwritable(configuration.reading, wanted)
    if lost:
        raise UsageError(
            f"the plan counts on {', '.join(lost)}, which these files have no key for", hint="leave the pin out, or change it in the code"
        )
    return configuration.reading

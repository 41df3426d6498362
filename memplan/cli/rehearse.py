"""`memplan rehearse`: run the user's own training step, or whole script, on a simulated GPU."""

from __future__ import annotations

import functools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from memplan.cli.asked import PROGRAM, WithProgram
from memplan.cli.options import format_option
from memplan.cli.typed_options import in_options
from memplan.errors import NothingSeenError, UsageError

if TYPE_CHECKING:
    from memplan.analysis.would_fit import WouldFit
    from memplan.execution.ranks import Ranks
    from memplan.execution.read_answers import Answers
    from memplan.execution.rehearsal import Rehearsal
    from memplan.execution.rehearse_ranks import Which
    from memplan.execution.step_source import TypedText
    from memplan.hardware.gpu import GpuSpec

EXAMPLES = """
\b
Examples:
  memplan rehearse --gpu a100-80 train_step.py:build                           the file's build(device) returns one step
  memplan rehearse --gpu t4 train_step.py:build --set batch=8 --set seq=512    build(device, batch=8, seq=512)
  memplan rehearse --gpu h100 --gpu-memory 40GiB my.package:build              that kind of GPU in another size
  memplan rehearse --gpu rtx4090 --steps 3 -- train.py --epochs 1              a whole script, stopped after 3 optimizer steps
  memplan rehearse --gpu t4 --format json -- -m my.training --lr 0.1           a module; the report as JSON
"""

MOST_WALKED = 10_000
"""Batches that --worst-batch looks at, unless told otherwise."""


class _Output(NamedTuple):
    """How a rehearsal is told."""

    format: str
    is_verbose: bool


@click.command(epilog=EXAMPLES, cls=WithProgram)
@click.argument("target", metavar="FILE.py:FUNCTION | -- SCRIPT.py [ARG …] | -m MODULE [ARG …]", required=False)
@click.option(
    "--gpu",
    "gpu_name",
    metavar="NAME[,NAME]",
    help="The GPU to simulate; `memplan gpus` lists them. Several names: the unlike GPUs of each machine, as CUDA counts them.",
)
@click.option("--gpu-memory", metavar="SIZE", help="Its memory size, if another: 24GiB. Alone, 24 is the smallest GPU sold with 24 GB.")
@click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A keyword argument for FUNCTION: batch=8. May be repeated."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Steps to run. Default: 3, or 10 if the third takes more than the second; a script runs to its end.",
)
@click.option(
    "--read",
    "reads",
    multiple=True,
    metavar="FILE.py:LINE=ANSWER",
    help="The value that a line reads from the GPU: true, false, a number, or a share of a mask's elements (1/8). Remembered.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Seconds that the program may take. Default: 600 for each rehearsal; unlimited for a script.",
)
@click.option(
    "--worst-batch",
    is_flag=True,
    help="Look through the DataLoaders of the program first, without training, and take the largest batches after the first.",
)
@click.option(
    "--batches",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --worst-batch: how many batches to look at. Default: an epoch, at most 10000.",
)
@click.option(
    "--keep-warm",
    is_flag=True,
    help="Leave a process behind that spares the next rehearsal of a program in this folder the imports; it ends after ten idle minutes.",
)
@click.option(
    "--num-gpus",
    type=click.IntRange(min=1),
    metavar="N",
    help="GPUs of each machine that train together. One rank is run; the others need not be there. Default: as the launcher is told.",
)
@click.option(
    "--num-nodes", type=click.IntRange(min=1), metavar="N", help="Machines that train together. Default: as the launcher is told."
)
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Run this rank alone. Default: rank 0, and those that differ from it."
)
@click.option(
    "--ranks", "which_ranks", type=click.Choice(["all"]), help="all: run every rank of a machine, that of --rank or the first, and compare."
)
@click.option(
    "--skip-weights",
    is_flag=True,
    help="Build pretrained models without reading their weights, which need not be there: the configuration says their sizes.",
)
@click.option("--allow-writes", is_flag=True, help="Let the program change your files, and upload; by default all that is held back.")
@click.option("--verbose", "-v", "is_verbose", is_flag=True, help="Every value that was read from the GPU, those that decide no size too.")
@format_option
@click.pass_context
def rehearse(
    context: click.Context,
    *,
    target: str | None,
    gpu_name: str | None,
    gpu_memory: str | None,
    assignments: Sequence[str],
    steps: int | None,
    reads: Sequence[str],
    timeout: float | None,
    worst_batch: bool,
    batches: int | None,
    num_gpus: int | None,
    num_nodes: int | None,
    rank: int | None,
    which_ranks: str | None,
    keep_warm: bool,
    skip_weights: bool,
    allow_writes: bool,
    is_verbose: bool,
    output_format: str,
) -> int:
    """
    Run training with the real PyTorch on a simulated GPU, and report its exact memory.

    FUNCTION is called with the device and the arguments that --set gives, and returns a function that runs one whole step (forward,
    backward, optimizer); exit code 1: out of memory, or tight; 3: sizes were guessed. A program after -- (train.py, torchrun …, accelerate
    launch …) runs unchanged; its output passes through, and its exit code is kept. What it writes is held back. Needs Linux, a CUDA build
    of PyTorch (no GPU) and a C compiler.
    """
    program: list[str] = context.meta.get(PROGRAM, [])
    if (target is None) == (not program):
        raise UsageError(
            "nothing to rehearse is named: give FILE.py:FUNCTION, or a script after `--`",
            hint="`memplan rehearse --gpu t4 -- train.py --epochs 1`",
        )
    if target is not None and ":" not in target and target.endswith(".py"):
        raise UsageError(
            f"{target!r} does not say FILE.py:build",
            hint=f"name the function, `{target}:build`, or run the whole script: `memplan rehearse --gpu t4 -- {target}`",
        )
    if program and assignments:
        raise UsageError("--set gives values to a function, not to a script", hint="write the script's own arguments after it")
    if batches and not worst_batch:
        raise UsageError("--batches says how many batches --worst-batch looks at", hint="give both")
    if worst_batch and not program:
        raise UsageError(
            "--worst-batch looks through the DataLoaders of a program, not of a function", hint="run the program: `-- train.py`"
        )
    if keep_warm and not program:
        raise UsageError("--keep-warm is for a program, not for a function", hint="run the program: `-- train.py`")
    if (num_gpus or num_nodes or rank is not None or which_ranks) and not program:
        raise UsageError(
            "--num-gpus is for a program, not for a function", hint="run the program: `-- torchrun --nproc-per-node 8 train.py`"
        )
    walked = (batches or MOST_WALKED) if worst_batch else 0
    gpus, output = _gpus_named(gpu_name, gpu_memory), _Output(output_format, is_verbose)
    if len(gpus) > 1 and not program:
        raise UsageError("several GPUs are for a program, not for a function", hint="run the program: `-- torchrun … train.py`")
    gpu = gpus[0]
    if program:
        ranks = ranks_for(program, gpus, num_gpus, num_nodes, rank or 0)
        return _rehearse_script(
            program,
            ranks.gpu_of(ranks.rank, gpu),
            steps=steps,
            reads=reads,
            timeout=timeout,
            most_walked_batches=walked,
            ranks=ranks,
            which="node" if which_ranks else "kinds" if rank is None else "one",
            keep_warm=keep_warm,
            skip_weights=skip_weights,
            allow_writes=allow_writes,
            output=output,
        )
    assert target is not None
    return _rehearse_step(
        target,
        gpu,
        values_from(assignments),
        steps=steps,
        reads=reads,
        timeout=timeout,
        skip_weights=skip_weights,
        allow_writes=allow_writes,
        output=output,
    )


def ranks_for(program: Sequence[str], gpus: Sequence[GpuSpec], num_gpus: int | None, num_nodes: int | None, rank: int) -> Ranks:
    """
    Return the ranks that train together: as the options say, else as the launcher in *program* is told.

    *gpus*: those of each machine, or the one that all are. Raises UsageError where several are named, and not as many as ranks.
    """
    from memplan.execution.ranks import Ranks, launched_by
    from memplan.programs.run_script import launcher_words

    told, kinds = launched_by(launcher_words(program)), tuple(gpus) if len(gpus) > 1 else ()
    nodes = num_nodes or (told.num_nodes if num_gpus is None else 1)
    asked = num_gpus or (len(kinds) if told.num_gpus == 1 else 0)
    count = asked or told.num_gpus
    if kinds and count != len(kinds):
        problem = f"{len(kinds)} GPUs are named, and {count} train together on each machine"
        raise UsageError(problem, hint="name each of them, or one for all")
    return Ranks(count, nodes, rank, is_asked=asked > 0, kinds=kinds).checked()


def _gpus_named(names: str | None, memory: str | None) -> list[GpuSpec]:
    """Return the GPUs of *names*, separated by commas; a size of memory is for one kind alone."""
    several = [name.strip() for name in (names or "").split(",")]
    if len(several) > 1 and memory is not None:
        raise UsageError("--gpu-memory is for one kind of GPU", hint="name the GPUs alone: their own memory counts")
    return [_gpu_named(name or None, memory) for name in several]


def _gpu_named(name: str | None, memory: str | None) -> GpuSpec:
    from memplan.api.gpus import named_gpu
    from memplan.hardware.catalog import of_some_kind

    if name is None and memory is None:
        raise UsageError("no GPU to simulate is named", hint="`--gpu a100-80`; `memplan gpus` lists the names")
    return of_some_kind(named_gpu(name, memory))


def _rehearse_step(
    text: str,
    gpu: GpuSpec,
    values: dict[str, TypedText],
    *,
    steps: int | None,
    reads: Sequence[str],
    timeout: float | None,
    skip_weights: bool,
    allow_writes: bool,
    output: _Output,
) -> int:
    from memplan.analysis.would_fit import what_would_fit
    from memplan.execution.needed_memory import with_needs
    from memplan.execution.read_answers import read_answers
    from memplan.execution.rehearse import Rehearser
    from memplan.execution.runner import DEFAULT_TIMEOUT_SECONDS
    from memplan.execution.step_source import step_source_from
    from memplan.hardware.torch_install import find_torch

    source = step_source_from(text)
    folder = Path(source.name).parent if source.name.endswith(".py") else Path()
    answers = read_answers(reads, folder)
    with Rehearser(source, skip_weights=skip_weights, allow_writes=allow_writes) as rehearser:

        def run(kind: GpuSpec, tried: Any, *, checks_tensor_types: bool = False) -> Rehearsal:
            def on(one: GpuSpec) -> Rehearsal:
                return rehearser.rehearse(
                    gpu=one,
                    values=tried,
                    steps=steps,
                    answers=answers.request(),
                    timeout_seconds=timeout or DEFAULT_TIMEOUT_SECONDS,
                    checks_tensor_types=checks_tensor_types,
                )

            return on(kind) if allow_writes else with_needs(on, kind)

        rehearsal = run(gpu, values, checks_tensor_types=True)
        would_fit = (
            None if rehearsal.fits is not False else what_would_fit(run, gpu=gpu, values=values, runs_on=find_torch().has_kernels_for)
        )
    _report(rehearsal, gpu, would_fit, _kept(answers, rehearsal, folder), output)
    return {"fits": 0, "unknown": 3}.get(rehearsal.verdict, 1)


def _rehearse_script(
    program: Sequence[str],
    gpu: GpuSpec,
    *,
    steps: int | None,
    reads: Sequence[str],
    timeout: float | None,
    most_walked_batches: int,
    ranks: Ranks,
    which: Which,
    keep_warm: bool,
    skip_weights: bool,
    allow_writes: bool,
    output: _Output,
) -> int:
    from memplan.analysis.would_fit import what_program_needs
    from memplan.cli.progress import program_progress, show_next_run
    from memplan.execution.command import command_from
    from memplan.execution.needed_memory import with_needs
    from memplan.execution.read_answers import read_answers
    from memplan.execution.rehearse_ranks import rehearse_ranks
    from memplan.execution.rehearse_script import rehearse_in_both_orders, rehearse_script, torch_of

    folder = next((Path(word).parent for word in program if word.endswith(".py")), Path())
    answers = read_answers(reads, folder)
    in_some_way = rehearse_in_both_orders if most_walked_batches else rehearse_script
    if ranks.size > 1:
        in_some_way = functools.partial(rehearse_ranks, which=which)
    try:
        with program_progress() as on_progress:
            run = functools.partial(
                in_some_way,
                program,
                answers=answers.request(),
                timeout_seconds=timeout,
                output_to_stderr=output.format == "json",
                skip_weights=skip_weights,
                allow_writes=allow_writes,
                most_walked_batches=most_walked_batches,
                keep_warm=keep_warm,
                on_progress=on_progress,
                on_next_run=show_next_run,
                ranks=ranks,
            )

            def run_unheard(kind: GpuSpec, most: int | None) -> Rehearsal:
                return with_needs(lambda one: run(gpu=one, steps=most, is_heard=False, on_next_run=None), kind)

            def run_first(kind: GpuSpec) -> Rehearsal:
                return run(gpu=kind, steps=steps) if kind == gpu else run(gpu=kind, steps=steps, is_heard=False, on_next_run=None)

            # What a program wrote is there, and stays; of unlike GPUs only one could be another.
            is_run_once = allow_writes or bool(ranks.kinds)
            rehearsal = run_first(gpu) if is_run_once else with_needs(run_first, gpu, on_next_run=show_next_run)
            would_fit = None
            if rehearsal.fits is False and not (rehearsal.was_interrupted or is_run_once):
                show_next_run("unlimited memory, to find how much it needs")
                would_fit = what_program_needs(
                    run_unheard,
                    rehearsal,
                    gpu=gpu,
                    steps=steps,
                    runs_on=torch_of(command_from(program)).has_kernels_for,
                )
    except NothingSeenError as error:
        if output.format == "json":
            from memplan.reports.json import nothing_seen_as_json

            click.echo(nothing_seen_as_json(error, gpu))
        raise
    gpu = ranks.gpu_of(rehearsal.rank, gpu)
    notes = _kept(answers, rehearsal, folder)
    if any(finding.kind == "batch_shapes" for finding in rehearsal.findings):
        notes.append("--worst-batch finds the largest batches of the program's DataLoaders, and takes them after the first")
    _report(rehearsal, gpu, would_fit, notes, output)
    if rehearsal.was_interrupted and rehearsal.exit_code == 0:  # a signal ended a further run, for the values that decide sizes
        return 128 + signal.SIGINT
    return rehearsal.exit_code if rehearsal.exit_code >= 0 else 128 - rehearsal.exit_code


def _kept(answers: Answers, rehearsal: Rehearsal, folder: Path) -> list[str]:
    """Remember the answers that were used; say of the others that they were not."""
    from memplan.execution.read_answers import remember

    unused = remember(answers, rehearsal.reads, folder) if rehearsal.failure is None else []
    return [f"--read {place}: {_why_unused(place, answers, rehearsal)}" for place in unused]


def _why_unused(place: str, answers: Answers, rehearsal: Rehearsal) -> str:
    """Say why an answer for *place* was not used: nothing is read there, or what is read is no mask, of which alone there is a share."""
    if "/" in answers.given[place] and any(f"/{read.place}".endswith(f"/{place}") for read in rehearsal.reads):
        return f"the program reads no mask there, of which {answers.given[place]} would be a share: give the value that it reads"
    return "the program read no value from the device at that line"


def _report(rehearsal: Rehearsal, gpu: GpuSpec, would_fit: WouldFit | None, notes: Sequence[str], output: _Output) -> None:
    findings = tuple(finding.model_copy(update={"message": in_options(finding.message)}) for finding in rehearsal.findings)
    typed = rehearsal.model_copy(update={"findings": findings})
    if output.format == "json":
        from memplan.reports.json import rehearsal_as_json

        click.echo(rehearsal_as_json(typed, would_fit, notes))
    else:
        from memplan.reports.terminal import print_rehearsal

        print_rehearsal(typed, gpu, would_fit=would_fit, notes=notes, in_words=in_options, shows_all=output.is_verbose)


def values_from(assignments: Sequence[str]) -> dict[str, TypedText]:
    """Return the values that "NAME=VALUE" texts say; what they mean, the function's parameters decide."""
    from memplan.execution.step_source import TypedText

    values: dict[str, TypedText] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set {text!r} does not say NAME=VALUE", hint="write it as `--set batch=8`")
        values[name] = TypedText(value)
    return values

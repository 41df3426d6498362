"""`memplan dataset`: how much of a dataset can live on the GPU beside the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from memplan.cli.options import format_option, margin_option, method_option, pin_option, target_option
from memplan.cli.typed_options import in_options
from memplan.errors import UsageError

if TYPE_CHECKING:
    from memplan.analysis.dataset_memory import SampleValue, Training
    from memplan.api.methods import Method
    from memplan.hardware.gpu import GpuSpec
    from memplan.workload.training import TargetBatch

EXAMPLES = """
\b
Examples:
  memplan dataset --sample 3x224x224:bf16 --num-samples 100000        on every GPU that memplan knows
  memplan dataset --sample image=3x224x224:uint8 --sample label=scalar:int64 --gpu rtx4090
  memplan dataset train.py:make_dataset --gpu a100-80 --beside 30GiB  shapes and number are those of the dataset; 30 GiB are the training's
  memplan dataset sample.safetensors --num-samples 50000 --config-path conf --pin micro_batch_size=8
"""


class _Dataset(NamedTuple):
    """What is known of the dataset."""

    source: str
    values: Sequence[SampleValue]
    host_values: Sequence[str]
    num_samples: int | None


class _Beside(NamedTuple):
    """The training, in words and for each GPU."""

    words: str
    on: Callable[[GpuSpec], Training]
    notes: Sequence[str] = ()


@click.command(epilog=EXAMPLES)
@click.argument("source", metavar="[FILE.py:make_dataset | module:Dataset | SAMPLE.safetensors | SAMPLE.npy]", required=False)
@click.option(
    "--sample",
    "samples",
    multiple=True,
    metavar="[NAME=]SHAPE:TYPE",
    help="A value of a sample: 3x224x224:bf16, label=scalar:int64. May be repeated.",
)
@click.option("--num-samples", type=click.IntRange(min=1), metavar="N", help="Samples of the dataset. Default: its length, if it is named.")
@click.option("--gpu", "names", multiple=True, metavar="NAME", help="A GPU; `memplan gpus` lists them. May be repeated.  [default: all]")
@click.option("--gpu-memory", metavar="SIZE", help="A memory size: 24 is the size that a GPU is sold with, 23.5GiB is exact.")
@click.option("--auto", is_flag=True, help="This machine's GPUs, as far as they are free.")
@click.option(
    "--beside",
    metavar="SIZE",
    help="What the training takes of the GPU at its peak, CUDA context included: 12GiB.  [default: a CUDA context alone]",
)
@click.option(
    "--config-path",
    type=click.Path(path_type=Path),
    help="The configuration of the training; its plan for each GPU says what it takes there. Pin micro_batch_size, or the plan takes more "
    "where there is more.",
)
@target_option
@pin_option
@method_option(["auto", "analytic", "rehearsed"])
@margin_option
@click.option("--mig", "with_mig", is_flag=True, help="Include MIG instances.")
@format_option
def dataset(
    *,
    source: str | None,
    samples: Sequence[str],
    num_samples: int | None,
    names: Sequence[str],
    gpu_memory: str | None,
    auto: bool,
    beside: str | None,
    config_path: Path | None,
    target: TargetBatch | None,
    pins: Sequence[str],
    method: Method,
    margin: float | None,
    with_mig: bool,
    output_format: str,
) -> int:
    """
    Show how much of a dataset can live on the GPU beside the training: bytes of a sample, samples that fit on each GPU, host memory, disk.

    A dataset that is named is made, and eight of its samples are read, in a process of its own; nothing else runs code. In a training,
    memplan.data.DeviceCachedDataset keeps them. Exit code 0: it fits on at least one GPU; 1: on none.
    """
    from memplan.analysis.dataset_memory import dataset_memory
    from memplan.memory.budget import DEFAULT_MARGIN

    if beside is not None and config_path is not None:
        raise UsageError("the training is given twice: by its size, and by its configuration", hint="leave one of them out")
    known = _dataset(source, samples, num_samples)
    gpus = _gpus(names, gpu_memory, auto=auto, with_mig=with_mig)
    share = DEFAULT_MARGIN if margin is None else margin
    training = _beside(beside) if config_path is None else _plans(config_path, gpus, target, pins, method, share)
    memory = dataset_memory(known.values, gpus, training.on, host_values=known.host_values, num_samples=known.num_samples, margin=share)
    if output_format == "json":
        from memplan.reports.json import dataset_as_json

        click.echo(dataset_as_json(memory, source=known.source, beside=training.words, notes=in_options(tuple(training.notes))))
    else:
        from memplan.reports.terminal import print_dataset

        print_dataset(memory, beside=training.words)
        for note in in_options(tuple(training.notes)):
            click.echo(f"\n{note}", err=True)
    return 0 if memory.fits else 1


def _dataset(source: str | None, samples: Sequence[str], num_samples: int | None) -> _Dataset:
    from memplan.analysis.dataset_memory import SampleValue
    from memplan.api.sample_files import SUFFIXES, sample_value_from, sample_values_in

    if (source is None) == (not samples):
        raise UsageError(
            "name a dataset or a file, or describe a sample" if source is None else "a sample is described, and a dataset or file is named",
            hint="one of both: `memplan dataset --sample 3x224x224:bf16`, or `memplan dataset train.py:make_dataset`",
        )
    if source is None:
        return _Dataset("typed", [sample_value_from(text) for text in samples], (), num_samples)
    if source.endswith(SUFFIXES):
        return _Dataset(source, sample_values_in(Path(source)), (), num_samples)
    if not all(source.rpartition(":")):
        raise UsageError(
            f"{source!r} is no dataset and no sample", hint="FILE.py:make_dataset, module:Dataset, SAMPLE.safetensors or SAMPLE.npy"
        )
    from memplan.execution.dataset_process import describe_dataset

    answer = describe_dataset(source)
    values = [SampleValue.model_validate(value) for value in answer["values"]]
    return _Dataset(source, values, answer["host_values"], num_samples or answer["num_samples"])


def _gpus(names: Sequence[str], memory: str | None, *, auto: bool, with_mig: bool) -> Sequence[GpuSpec]:
    """Return the GPUs that were named, in that order and each once; else all, the smallest first."""
    from memplan.api.gpus import gpus, gpus_of_this_machine, named_gpu
    from memplan.hardware.catalog import catalog_gpus

    if auto and (names or memory):
        raise UsageError("this machine's GPUs are asked for, and others", hint="leave one of them out")
    if auto:
        return gpus_of_this_machine()
    if names or memory:
        return list(dict.fromkeys(named_gpu(name, memory) for name in names)) or [named_gpu(None, memory)]
    instances = {card.spec for card in catalog_gpus() if card.is_mig}
    return [gpu for gpu in gpus() if with_mig or gpu not in instances]


def _beside(size: str | None) -> _Beside:
    from memplan.analysis.dataset_memory import Training
    from memplan.memory.cuda_context import context_of
    from memplan.units import format_bytes, parse_size

    if size is None:
        return _Beside("a CUDA context alone, and no training", lambda gpu: Training(context_of(gpu).high_bytes))
    used_bytes = parse_size(size).size_bytes
    return _Beside(f"a training that takes {format_bytes(used_bytes)}", lambda _: Training(used_bytes))


def _plans(
    config_path: Path, gpus: Sequence[GpuSpec], target: TargetBatch | None, pins: Sequence[str], method: Method, margin: float
) -> _Beside:
    """Return what the plan of the configuration takes of each GPU."""
    from memplan.analysis.dataset_memory import Training
    from memplan.api.configuration import read_configuration
    from memplan.api.methods import by_method
    from memplan.api.plans import PlanRequest, plan_for
    from memplan.cli.progress import rehearsal_progress
    from memplan.planner.pins import read_pins

    pinned = read_pins(pins)
    configuration = read_configuration(config_path).with_pins(pinned.values).with_target(target)
    request = PlanRequest(target=target, margin=margin, pins=pinned)
    with rehearsal_progress() as on_rehearsal:
        found = by_method(
            method,
            lambda estimator: {gpu: plan_for(configuration, gpu, estimator, request) for gpu in gpus},
            on_rehearsal,
            is_slow=configuration.is_own_program,
        )

    def training_on(gpu: GpuSpec) -> Training:
        plan = found.answer[gpu]
        return Training(max(stage.estimate.device_used.high_bytes for stage in plan.stages), plan.fits)

    leaves_none = "micro_batch_size" not in pinned.values
    more = ('the plans take as large a micro-batch as fits: `pins={"micro_batch_size": 8}` leaves more for samples',) if leaves_none else ()
    return _Beside(f"the plan of {configuration.source} for each GPU, at its upper bound", training_on, (*found.notes, *more))

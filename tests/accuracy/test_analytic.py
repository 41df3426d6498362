"""
The analytic estimate against what PyTorch really allocated.

`reference_peaks.jsonl` is ours: the steps of `reference_steps.py` on the simulated GPU (PyTorch 2.13.0+cu130, transformers 4.57.6,
recorded 2026-11-21). `grid_peaks.jsonl` holds those of `grid.py`, for the upper bound. `shared/recordings/standin` holds further
recordings of other programs.
"""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memplan.estimators.analytic.estimate import estimate
from memplan.estimators.analytic.fragmentation import HELD_OUT_COVERAGE
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import GpuSpec
from memplan.layouts.templates import template_data, templates_folder
from memplan.memory.cuda_context import context_of
from memplan.memory.estimate import MemoryEstimate
from memplan.workload.workload import Workload
from memplan.workload.workload_file import workload_from
from tests.accuracy import grid
from tests.accuracy.grid import Peak
from tests.accuracy.reference_steps import CASES
from tests.conftest import SHARED

PEAKS = [json.loads(line) for line in Path(__file__).with_name("reference_peaks.jsonl").read_text().splitlines()]
OPTIMIZERS = {"SGD": "sgd", "AdamW": "adamw"}
GPT2 = {"model_type": "gpt2"}


class Recorded(NamedTuple):
    """A step that was recorded, as a workload."""

    name: str
    workload: Workload
    gpu: GpuSpec
    peak_allocated_bytes: int
    peak_reserved_bytes: int

    def estimate(self) -> MemoryEstimate:
        stages = self.workload.stages
        return estimate(self.workload, self.gpu, stages[0] if stages else None)

    @property
    def allocated_error(self) -> float:
        return self.estimate().peak_allocated_bytes / self.peak_allocated_bytes - 1


def workload_of(config: dict[str, Any] | None, training: dict[str, Any], *, optimizer: str = "adamw", **changes: Any) -> Workload:
    """A language model by its Hugging Face config, or (None) the built-in contrastive encoder, under *training*."""
    template = templates_folder() / "hydra-contrastive" / "workload.yaml"
    data = template_data(template)
    data["training"] = training
    data["optimizer"] = {"name": optimizer}
    if config is None:
        data["model"]["encoder"]["is_in_eval_mode"] = changes.get("eval_mode", False)
        data["stages"] = [{"name": "stage", "n_negatives": changes["n_negatives"]}]
        return workload_from(data, template)
    from memplan.workload.huggingface import ConfigJson, model_from_config

    model = model_from_config(ConfigJson(config, template)) | {"attention": changes.get("attention", "sdpa")}
    return workload_from({"model": model, "training": training, "optimizer": {"name": optimizer}}, template)


def ours() -> list[Recorded]:
    """The recordings of our own steps."""
    recordings = []
    for peak in PEAKS:
        case = CASES[peak["name"]]
        training = {
            "micro_batch_size": case["batch"],
            "sequence_length": case["seq"],
            "precision": case["precision"],
            "activation_checkpointing": case.get("checkpoint", False),
        }
        others = {key: case[key] for key in ("n_negatives", "eval_mode", "attention") if key in case}
        workload = workload_of(case.get("config"), training, optimizer=OPTIMIZERS[case.get("optimizer", "AdamW")], **others)
        gpu = find_gpu(peak["card"])
        recordings.append(Recorded(f"{peak['name']}@{gpu.name}", workload, gpu, peak["peak_allocated_bytes"], peak["peak_reserved_bytes"]))
    return recordings


def shared() -> list[Recorded]:
    """The shared recordings of gpt2 and contrastive that ran to their end."""
    precisions = {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp32": "fp32"}
    recordings = []
    for path in sorted((SHARED / "recordings" / "standin").glob("*.json.gz")):
        record = json.loads(gzip.decompress(path.read_bytes()))
        if record["workload"] not in ("gpt2.py", "contrastive.py") or record["failure"]:
            continue
        values, is_gpt2 = record["values"], record["workload"] == "gpt2.py"
        training = {
            "micro_batch_size": values.get("batch", 4),
            "sequence_length": values.get("seq", 512 if is_gpt2 else 128),
            "precision": precisions[values.get("amp", "bf16" if is_gpt2 else "fp16")],
            "activation_checkpointing": values.get("checkpoint", not is_gpt2),
            "gradient_accumulation_steps": values.get("accumulate", 1),
            "allocator_settings": record["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"],
        }
        workload = workload_of(GPT2 if is_gpt2 else None, training, n_negatives=values.get("n_negatives", 8))
        peaks = [max(step[f"peak_{kind}"] for step in record["steps"]) for kind in ("allocated", "reserved")]
        recordings.append(Recorded(path.name.removesuffix(".json.gz"), workload, find_gpu(record["device"]), *peaks))
    return recordings


def by_name(recording: Recorded) -> str:
    return recording.name


@pytest.mark.parametrize("recording", shared(), ids=by_name)
def test_shared_recordings_are_within_ten_percent_and_none_is_under_by_more_than_five(recording: Recorded) -> None:
    """Peak allocated of every gpt2 and contrastive recording: 10% above at most, 5% below at most."""
    assert -0.05 <= recording.allocated_error <= 0.10


# bf16 on a GPU without bf16 attention keeps the matrix of all pairs; with checkpointing the formulas are too careful there.
CAREFUL = {"contrastive-checkpoint@Tesla T4"}


@pytest.mark.parametrize("recording", ours(), ids=by_name)
def test_own_recordings_are_within_ten_percent_and_none_is_under_by_more_than_five(recording: Recorded) -> None:
    """Peak allocated of decoders, encoders, LoRA, eager attention, pure bf16, checkpointing on two to four kinds of GPU."""
    assert -0.05 <= recording.allocated_error <= (0.15 if recording.name in CAREFUL else 0.10)


def test_the_median_error_is_below_one_percent() -> None:
    """Half of all estimates of allocated are within 1%: what the report and the README say."""
    assert statistics.median(abs(recording.allocated_error) for recording in ours()) <= 0.01


def test_no_own_recording_reserves_more_than_the_upper_bound_or_less_than_the_lower() -> None:
    """The range covers fragmentation in all of them."""
    for recording in ours():
        used, context = recording.estimate().device_used, recording.estimate().breakdown.cuda_context_bytes

        assert used.low_bytes <= recording.peak_reserved_bytes + context <= used.high_bytes, recording.name


def reserved_within(peaks: list[Peak]) -> float:
    """The share of steps whose reserved memory is no more than the upper bound less the CUDA context's."""
    bounds = [
        estimate(point.workload, point.gpu, point.stage).device_used.high_bytes - context_of(point.gpu).high_bytes for point, _, _ in peaks
    ]
    return statistics.mean(peak.reserved_bytes <= bound for peak, bound in zip(peaks, bounds, strict=True))


def test_the_upper_bound_covers_what_was_held_back_as_the_report_says() -> None:
    """Of the grid's steps that the bound was not fitted to, at least 98% reserve no more: what the report says under "method"."""
    held_out = [peak for peak in grid.peaks() if peak.point.is_held_out]

    assert len({peak.point.model for peak in held_out}) >= 12
    assert len(held_out) >= 190
    assert reserved_within(held_out) >= HELD_OUT_COVERAGE


def test_the_upper_bound_is_fitted_to_the_other_half() -> None:
    """At least 99% of the steps that it was fitted to; and it is no wider than the 20% of allocated that it replaced, in the mean."""
    fitted = [peak for peak in grid.peaks() if not peak.point.is_held_out]
    widths = [
        estimate(point.workload, point.gpu, point.stage).device_used.high_bytes / (reserved_bytes + context_of(point.gpu).high_bytes)
        for point, _, reserved_bytes in fitted
    ]

    assert reserved_within(fitted) >= 0.99
    assert statistics.mean(widths) <= 1.14


# Steps whose formulas said "fits" and whose rehearsals were far over (PyTorch 2.13.0, RTX 4090, bf16-mixed, sequence 512).
CALLED_FITTING = {"minilm": 90, "distilbert": 70, "xlm-roberta-base": 10}


@pytest.mark.parametrize("name", CALLED_FITTING)
def test_a_large_vocabulary_under_autocast_is_not_called_fitting(name: str) -> None:
    """Masked-LM heads: these batches take more than the GPU has, and the upper bound says so."""
    config = grid.MODELS[name]
    head = {"architectures": [f"{grid.PREFIXES[config['model_type']]}ForMaskedLM"]}
    training = {"micro_batch_size": CALLED_FITTING[name], "sequence_length": 512, "precision": "bf16-mixed"}
    gpu = find_gpu("rtx4090")

    used = estimate(workload_of(config | head, training), gpu, None).device_used

    assert used.high_bytes > gpu.total_memory_bytes


def test_more_of_anything_never_takes_less(a100: GpuSpec) -> None:
    """The estimate grows with the batch, the sequence and the negatives: searching for the largest relies on it."""
    for recording in {recording.workload.name + recording.name.split("@")[0]: recording for recording in ours()}.values():
        stage = recording.workload.stages[0] if recording.workload.stages else None
        sizes = [
            estimate(recording.workload.with_training(micro_batch_size=size), a100, stage).device_used.high_bytes
            for size in (1, 2, 3, 5, 8, 13, 21, 34, 55)
        ]

        assert sizes == sorted(sizes), recording.name

"""What the callbacks of Lightning and transformers share: planned and observed peaks, batch sizes, speed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from memplan.hardware.device_report import report_of
from memplan.hardware.gpu import GpuSpec
from memplan.planner.saved_plan import SavedPlan, read_saved_plan
from memplan.training.batch_parts import batch_size_of
from memplan.units import GIB, format_bytes


class EpochSeen(NamedTuple):
    """What was seen until the end of an epoch."""

    epoch: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    samples_per_second: float
    batches_per_second: float


def to_standard_error(text: str) -> None:
    """Print *text* where it does not disturb what a program prints."""
    print(f"memplan: {text}", file=sys.stderr, flush=True)


class Watch:
    """
    Watches a training: told when it begins, of every batch, and when steps and epochs end.

    *plan*: a plan in a file, as `plan.save` writes it. *on_message* is called with what there is to say, *on_metrics* with the numbers by
    name, after the first step and each epoch. When it first begins it says on which GPU. Without a GPU it does nothing.
    """

    def __init__(
        self,
        plan: str | Path | None = None,
        on_message: Callable[[str], None] = to_standard_error,
        on_metrics: Callable[[dict[str, float]], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.plan: SavedPlan | None = read_saved_plan(Path(plan)) if plan is not None else None
        self.epochs: list[EpochSeen] = []
        """What was seen, by epoch."""
        self.warnings: list[str] = []
        """What was warned of."""
        self.batch_size: int | None = None
        """Of the largest batch that was seen."""
        self._on_message, self._clock = on_message, clock
        self.on_metrics = on_metrics
        """What gets the numbers; a callback sets it when it knows its trainer."""
        self._is_on = False
        self._configured: int | None = None
        self._is_first_step = True
        self._has_reported = False
        self._before = 0
        self._begin, self._samples, self._batches = clock(), 0, 0
        self._paused_at: float | None = None

    def begin(self, *, device: torch.device | None, configured: int | None, accumulation: int | None) -> None:
        """
        Note that a training begins on *device*.

        Its batches have *configured* samples, so many of them to a step, where that is known. Nothing is watched but a GPU.
        """
        self._is_on = torch.cuda.is_available() and (device is None or device.type == "cuda")
        self._before = torch.cuda.max_memory_reserved() if self._is_on else 0
        self._configured = configured
        self._is_first_step = True
        self._restart()
        if self._is_on and not self._has_reported:
            self._has_reported = True
            self._on_message(_device_in_use(device))
        if not self._is_on or self.plan is None:
            return
        if configured is not None and configured != self.plan.micro_batch_size:
            self._warn(
                f"the plan is for a micro-batch of {self.plan.micro_batch_size}, and {configured} is configured: something overrides it"
            )
        if accumulation is not None and accumulation != self.plan.gradient_accumulation_steps:
            planned = self.plan.gradient_accumulation_steps
            self._warn(f"the plan accumulates {planned} micro-batches, and {accumulation} are configured: something overrides it")

    def batch(self, batch: Any) -> None:
        """Note that *batch* goes through the model."""
        size = batch_size_of(batch) if self._is_on else None
        if size is None:
            return
        self._samples += size
        self._batches += 1
        if size > (self.batch_size or 0):
            before, self.batch_size = self.batch_size, size
            expected = self._configured or (self.plan.micro_batch_size if self.plan else None)
            if expected is not None and size > expected:
                self._warn(f"a batch has {size} samples where {expected} are configured: the batch size is changed elsewhere")
            elif before is not None and expected is None:
                self._warn(f"batches have grown from {before} samples to {size}")

    def changed(self, configured: int | None) -> None:
        """Note the batch size that is configured now, which something may have changed."""
        if self._is_on and configured is not None and self._configured is not None and configured != self._configured:
            self._warn(f"the configured batch size was {self._configured} and is {configured} now: it is changed elsewhere")
            self._configured = configured

    def step_ended(self) -> None:
        """Compare the first step's peak with the plan."""
        if not self._is_on or not self._is_first_step:
            return
        self._is_first_step = False
        self._on_message(f"first step: {self._peaks()}{self._real_batch()}")
        self._log(self._peak_metrics())

    def epoch_ended(self, epoch: int) -> None:
        """Compare the peak until now with the plan, and say how fast it went."""
        if not self._is_on:
            return
        seconds = max(self._clock() - self._begin, 1e-9)
        seen = EpochSeen(
            epoch, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), self._samples / seconds, self._batches / seconds
        )
        self.epochs.append(seen)
        speed = f"{seen.samples_per_second:.1f} samples/s, {seen.batches_per_second:.2f} batches/s"
        self._on_message(f"epoch {epoch}: {self._peaks()}{self._real_batch()}; {speed}")
        speeds = {"memplan/samples_per_second": seen.samples_per_second, "memplan/batches_per_second": seen.batches_per_second}
        self._log(self._peak_metrics() | speeds)
        self._restart()

    def epoch_began(self) -> None:
        """Begin to count anew: what came between two epochs is no training."""
        self._restart()

    def pause(self) -> None:
        """Stop the clock: an evaluation begins. Once is enough."""
        if self._paused_at is None:
            self._paused_at = self._clock()

    def resume(self) -> None:
        """Let the clock go on."""
        if self._paused_at is not None:
            self._begin += self._clock() - self._paused_at
            self._paused_at = None

    def _restart(self) -> None:
        self._begin, self._samples, self._batches = self._clock(), 0, 0
        self._paused_at = None

    def _log(self, metrics: dict[str, float]) -> None:
        if self.on_metrics is not None:
            self.on_metrics(metrics)

    def _peak_metrics(self) -> dict[str, float]:
        """Return the peaks in GiB, and the planned one."""
        metrics = {
            "memplan/peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
            "memplan/peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }
        if self.plan is not None:
            metrics["memplan/planned_reserved_gib"] = self.plan.peak_reserved_bytes / GIB
        return metrics

    def _peaks(self) -> str:
        reserved = torch.cuda.max_memory_reserved()
        said = f"{format_bytes(torch.cuda.max_memory_allocated())} allocated, {format_bytes(reserved)} reserved at the peak"
        if self._before and reserved == self._before:
            said += " (an upper bound: this process had reached that before the training began)"
        if self.plan is None:
            return said
        difference = reserved - self.plan.peak_reserved_bytes
        share = 100 * difference / max(self.plan.peak_reserved_bytes, 1)
        return f"{said}, planned {format_bytes(self.plan.peak_reserved_bytes)} ({share:+.1f}%)"

    def _real_batch(self) -> str:
        if self.batch_size is None:
            return ""
        configured = f", configured {self._configured}" if self._configured is not None else ""
        return f"; micro-batch {self.batch_size}{configured}"

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            self._on_message(f"warning: {text}")


def _device_in_use(device: torch.device | None) -> str:
    """Return one line that says all of the GPU on which the training begins."""
    seen = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None or device.index is None else device.index)
    uuid = getattr(seen, "uuid", None)  # from PyTorch 2.6 on
    gpu = GpuSpec(
        name=seen.name,
        total_memory_bytes=seen.total_memory,
        compute_capability=(seen.major, seen.minor),
        uuid=None if uuid is None else f"GPU-{uuid}",
        origin="the GPU of this training",
    )
    cudnn = torch.backends.cudnn.version()
    brings = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}" + (f", cuDNN {cudnn}" if cudnn else "")
    facts = "; ".join(f"{name} {text}" for name, text in report_of(gpu).facts)
    return f"training on {gpu.name}: {facts}; {brings}"

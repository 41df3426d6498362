"""
`memplan.integrations.lightning.MemoryPlanCallback`: a Lightning training beside its plan.

    from memplan.integrations.lightning import MemoryPlanCallback
    trainer = L.Trainer(callbacks=[MemoryPlanCallback("plan.json")])

Imported only when asked; needs `lightning`, or `pytorch_lightning`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the same under its old name
    from pytorch_lightning import Callback  # type: ignore[assignment]

from memplan.integrations.watch import Watch


class MemoryPlanCallback(Callback):
    """
    Reports planned and observed peak, real and configured batch size, and speed, after the first step and each epoch.

    They go to standard error, and as metrics (`memplan/peak_reserved_gib`, `memplan/samples_per_second`, …) to the trainer's loggers.
    *plan*: a plan in a file, as `plan.save` writes it; None: what is observed only. Nothing happens without a GPU.
    """

    def __init__(self, plan: str | Path | None = None) -> None:
        self.watch = Watch(plan)
        """What was seen: `.epochs`, `.warnings`, `.batch_size`."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note what is configured."""
        del pl_module
        if trainer.is_global_zero:
            self.watch.on_metrics = lambda metrics: _log(trainer, metrics)
            self.watch.begin(
                device=trainer.strategy.root_device, configured=_configured(trainer), accumulation=trainer.accumulate_grad_batches
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the batch."""
        del pl_module, batch_idx
        if trainer.is_global_zero:
            self.watch.batch(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compare the first step, when the optimizer has stepped."""
        del pl_module, outputs, batch, batch_idx
        if trainer.is_global_zero and trainer.global_step > 0:
            self.watch.step_ended()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Count anew."""
        del trainer, pl_module
        self.watch.epoch_began()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock while the model is evaluated."""
        del trainer, pl_module
        self.watch.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Let it go on."""
        del trainer, pl_module
        self.watch.resume()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Compare the epoch."""
        del pl_module
        if trainer.is_global_zero:
            self.watch.changed(_configured(trainer))
            self.watch.epoch_ended(trainer.current_epoch)


def _log(trainer: Any, metrics: dict[str, float]) -> None:
    for each in trainer.loggers:
        each.log_metrics(metrics, step=trainer.global_step)


def _configured(trainer: Any) -> int | None:
    """Return the batch size of the training's loader; None where it has none of its own."""
    size = getattr(trainer.train_dataloader, "batch_size", None)
    return size if isinstance(size, int) else None

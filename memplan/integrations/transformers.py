"""
`memplan.integrations.transformers.MemoryPlanCallback`: a training by transformers' Trainer beside its plan.

    from memplan.integrations.transformers import MemoryPlanCallback
    trainer = Trainer(...)
    trainer.add_callback(MemoryPlanCallback("plan.json", trainer))

Imported only when asked; needs `transformers`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from memplan.integrations.watch import Watch


class MemoryPlanCallback(TrainerCallback):
    """
    Reports planned and observed peak, real and configured batch size, and speed, after the first step and each epoch.

    They go to standard error, and as metrics (`memplan/peak_reserved_gib`, `memplan/samples_per_second`, …) into the trainer's log history.
    *plan*: a plan in a file, as `plan.save` writes it; None: what is observed only. *trainer*: logs the metrics, so that Weights & Biases,
    TensorBoard and others get them too; a Trainer does not tell its callbacks who it is. Nothing happens without a GPU.
    """

    def __init__(self, plan: str | Path | None = None, trainer: Trainer | None = None) -> None:
        self._trainer = trainer
        self.watch = Watch(plan)
        """What was seen: `.epochs`, `.warnings`, `.batch_size`."""
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Note what is configured, and look at the batches that reach the model."""
        del control, more
        if not state.is_world_process_zero:
            return
        self.watch.on_metrics = lambda metrics: self._log(state, metrics)
        self.watch.begin(device=args.device, configured=args.per_device_train_batch_size, accumulation=args.gradient_accumulation_steps)
        self._unhook()  # a training that was begun anew after it ran out of memory
        if model is not None:
            self._hook = model.register_forward_pre_hook(self._forward, with_kwargs=True)

    def _log(self, state: Any, metrics: dict[str, float]) -> None:
        if self._trainer is not None:
            self._trainer.log(metrics)
        else:
            state.log_history.append(metrics | {"step": state.global_step})

    def _forward(self, model: Any, arguments: Any, keywords: Any) -> None:
        if model.training:
            self.watch.batch(arguments or keywords)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Compare the first step."""
        del args, control, more
        if state.is_world_process_zero:
            self.watch.step_ended()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Compare the epoch. `auto_find_batch_size` changes what the state says, not the arguments."""
        del control, more
        if state.is_world_process_zero:
            if args.n_gpu <= 1:
                self.watch.changed(state.train_batch_size)
            self.watch.epoch_ended(max(0, math.ceil(state.epoch) - 1))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Count anew."""
        del args, state, control, more
        self.watch.epoch_began()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop the clock while the model is evaluated."""
        del args, state, control, more
        self.watch.pause()

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Let it go on."""
        del args, state, control, more
        self.watch.resume()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Look no more."""
        del args, state, control, more
        self._unhook()

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

"""What trains on the simulated GPU in the tests of this folder; each prints JSON at its end."""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

import memplan

WIDTH = 1024


def retries(total_mib: int, batch: int) -> None:
    """A step whose batch is too large for the GPU: until it is not."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = []

    def loss_of(part):
        parts.append(len(part["x"]))
        return model(part["x"].cuda()).square().mean()

    with memplan.fits_or_smaller() as fitting:
        for _ in range(2):
            loss = fitting.step(loss_of, {"x": torch.randn(batch, WIDTH), "scale": 2.0}, optimizer)
    told = {"micro": fitting.micro_batch_size, "retries": fitting.num_retries, "parts": parts, "shape": list(loss.shape)}
    print(json.dumps(told | {"peak": torch.cuda.max_memory_reserved()}))


def one_does_not_fit() -> None:
    """Not even one sample."""
    model = nn.Linear(WIDTH, WIDTH).cuda()

    def loss_of(part):
        return model(part.cuda()).square().mean() + torch.empty(2**34, device="cuda").mean()

    with memplan.fits_or_smaller(4) as fitting:
        try:
            fitting.step(loss_of, torch.randn(4, WIDTH), torch.optim.SGD(model.parameters()))
        except torch.OutOfMemoryError as error:
            print(json.dumps({"error": type(error).__name__, "retries": fitting.num_retries}))


def generators(batch: int) -> None:
    """Two steps with dropout; the state of the GPU's generator at the beginning of each try."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(8))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fitting = memplan.fits_or_smaller()
    tries = []

    def loss_of(part):
        if not tries[-1] or tries[-1][-1][0] != fitting.micro_batch_size:
            tries[-1].append((fitting.micro_batch_size, str(torch.cuda.get_rng_state().tolist())))
        return model(part.cuda()).square().mean()

    for _ in range(2):
        tries.append([])
        fitting.step(loss_of, torch.randn(batch, WIDTH), optimizer)
    first, second = ([state for _, state in step] for step in tries)
    print(json.dumps({"retries": fitting.num_retries, "first_step": first, "second_step": second}))


def large_buffer() -> None:
    """A module with a buffer of 10 GiB, of which a clone does not fit."""
    model = nn.Linear(WIDTH, WIDTH).cuda()
    model.register_buffer("table", torch.empty(10 * 2**30, dtype=torch.uint8, device="cuda"))
    fitting = memplan.fits_or_smaller(4)
    try:
        fitting.step(lambda part: model(part.cuda()).mean(), torch.randn(4, WIDTH), torch.optim.SGD(model.parameters()))
    except torch.OutOfMemoryError as error:
        hooks = torch.nn.modules.module._global_forward_pre_hooks
        print(json.dumps({"error": type(error).__name__, "retries": fitting.num_retries, "hooks": len(hooks)}))


def decorated(size: int) -> None:
    """A function that makes its model anew, and what is allocated when it is called."""
    sizes, allocated, reserved = [], [], []

    @memplan.fits_or_smaller(micro_batch_size=size)
    def fit(micro_batch_size):
        sizes.append(micro_batch_size)
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))).cuda()
        model(torch.randn(micro_batch_size, WIDTH, device="cuda")).mean().backward()

    fit()
    print(json.dumps({"sizes": sizes, "allocated": allocated, "reserved": reserved}))


def transformers_trainer(folder: str, plan: str, batch: int) -> None:
    """Two epochs of a small model by transformers' Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from memplan.integrations.transformers import MemoryPlanCallback

    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=128, n_positions=64))
    ids = torch.zeros(64, dtype=torch.long)
    data = [{"input_ids": ids, "labels": ids}] * 16
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=batch, gradient_accumulation_steps=2, num_train_epochs=2, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    reported = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **more):
            reported.append(logs)

    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Reporter()])
    callback = MemoryPlanCallback(plan or None, trainer if plan else None)
    trainer.add_callback(callback)
    trainer.train()
    tell(callback.watch, reported if plan else trainer.state.log_history)


def lightning_trainer(folder: str, plan: str, batch: int) -> None:
    """Two epochs of a small model by Lightning, whose loader changes its batch in the second."""
    import lightning

    from memplan.integrations.lightning import MemoryPlanCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def training_step(self, part):
            return self.layer(part[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self):
            return torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(torch.randn(16, WIDTH)), batch_size=batch * (self.current_epoch + 1)
            )

    class Logger(lightning.pytorch.loggers.logger.DummyLogger):
        def __init__(self):
            super().__init__()
            self.metrics = []

        def log_metrics(self, metrics, step=None):
            self.metrics.append(metrics)

    callback = MemoryPlanCallback(plan or None)
    logger = Logger()
    lightning.Trainer(
        max_epochs=2, callbacks=[callback], logger=logger, enable_checkpointing=False, enable_progress_bar=False, default_root_dir=folder,
        reload_dataloaders_every_n_epochs=1, log_every_n_steps=1,
    ).fit(Model())  # fmt: skip
    tell(callback.watch, logger.metrics)


def tell(watch, metrics) -> None:
    epochs = [epoch._asdict() for epoch in watch.epochs]
    metrics = [{name: value for name, value in each.items() if name.startswith("memplan/")} for each in metrics]
    print(json.dumps({"batch": watch.batch_size, "warnings": watch.warnings, "epochs": epochs, "metrics": [*filter(None, metrics)]}))


if __name__ == "__main__":
    SETTLE_SECONDS = 0.2
    """A thread of autograd that still lets go of its last backward when Python has ended would abort the process: where
    kernels take no time, a program that ends with a backward gets there before it."""

    globals()[sys.argv[1]](*(int(argument) if argument.isdigit() else argument for argument in sys.argv[2:]))
    time.sleep(SETTLE_SECONDS)

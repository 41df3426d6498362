"""A LightningModule with a metric, gradient clipping, accumulation and 16-bit precision."""

import sys

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self, width=1024, classes=10):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=classes)

    def training_step(self, batch, number):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)}


data = TensorDataset(torch.randn(2048, 1, 28, 28), torch.randint(0, 10, (2048,)))
trainer = L.Trainer(
    max_epochs=2,
    accelerator="gpu",
    devices=1,
    precision="16-mixed",
    gradient_clip_val=1.0,
    accumulate_grad_batches=2,
    default_root_dir=sys.argv[1],
    enable_checkpointing=False,
    logger=False,
    num_sanity_val_steps=1,
)
trainer.fit(Classifier(), DataLoader(data, 256, shuffle=True), DataLoader(data, 256))

"""The Trainer on sequence classification: texts of many lengths, padded batch by batch, grouped by length, evaluated with a metric."""

import sys

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Texts(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(10, 129, (1,), generator=generator))
        return {"input_ids": torch.randint(5, 8000, (length,), generator=generator), "labels": index % 3}


def collate(samples):
    tokens = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": torch.tensor([sample["labels"] for sample in samples])}


def accuracy(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


config = BertConfig(
    vocab_size=8000,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=1024,
    num_labels=3,
    max_position_embeddings=128,
)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=32,
    num_train_epochs=1,
    fp16=True,
    logging_steps=1,
    report_to=[],
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="no",
    gradient_accumulation_steps=2,
)
trainer = Trainer(
    BertForSequenceClassification(config),
    arguments,
    data_collator=collate,
    train_dataset=Texts(),
    eval_dataset=Texts(),
    compute_metrics=accuracy,
)
trainer.train()
print(trainer.evaluate())

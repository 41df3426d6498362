"""Seq2SeqTrainer on T5: inputs and targets of several lengths, labels padded with -100, Adafactor."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration


class Pairs(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        source, target = torch.randint(8, 65, (2,), generator=generator).tolist()
        return {
            "input_ids": torch.randint(2, 4000, (source,), generator=generator),
            "labels": torch.randint(2, 4000, (target,), generator=generator),
        }


def collate(samples):
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([sample["input_ids"] for sample in samples], batch_first=True)
    labels = pad([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


config = T5Config(vocab_size=4000, d_model=256, d_kv=32, d_ff=1024, num_layers=3, num_heads=8, decoder_start_token_id=0)
arguments = Seq2SeqTrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=16,
    num_train_epochs=1,
    optim="adafactor",
    logging_steps=1,
    report_to=[],
    save_strategy="no",
)
Seq2SeqTrainer(T5ForConditionalGeneration(config), arguments, data_collator=collate, train_dataset=Pairs()).train()

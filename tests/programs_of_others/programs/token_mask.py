"""BERT's masked language model, whose head sees the masked positions only: their number is data."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCAB, WIDTH, LENGTH, BATCH, MASK, IGNORED = 30_000, 256, 128, 64, 4, -100


class Sentences(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(5, VOCAB, (LENGTH,), generator=generator)
        labels = torch.full_like(tokens, IGNORED)
        chosen = torch.randperm(LENGTH, generator=generator)[: LENGTH // 4]  # a quarter of them, so that the test can count
        labels[chosen] = tokens[chosen]
        tokens[chosen] = MASK
        return {"input_ids": tokens, "labels": labels}


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.1)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, labels):
        hidden = self.layer(self.embed(input_ids))
        masked = labels != IGNORED
        logits = self.head(hidden[masked])
        return F.cross_entropy(logits, labels[masked]), logits, labels[masked]


model = Bert().to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for epoch in range(2):
    right = total = 0
    for batch in DataLoader(Sentences(), batch_size=BATCH, shuffle=True):
        batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
        loss, logits, labels = model(**batch)
        right += (logits.argmax(-1) == labels).sum().item()
        total += labels.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {right / total:.3f} of the masked tokens")

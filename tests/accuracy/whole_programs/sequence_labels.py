"""An LSTM of packed sequences, two directions, and a label for each step of each text."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20_000, 256, padding_idx=0)
        self.body = nn.LSTM(256, 512, 2, batch_first=True, bidirectional=True, dropout=0.3)
        self.head = nn.Linear(1024, 32)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.body(packed)[0], batch_first=True)[0])


generator = torch.Generator().manual_seed(0)
model = Tagger().cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(6):
    lengths = torch.randint(10, 200, (64,), generator=generator)
    tokens = torch.randint(1, 20_000, (64, int(lengths.max())), generator=generator)
    tokens[torch.arange(tokens.shape[1]) >= lengths[:, None]] = 0
    labels = torch.randint(0, 32, tokens.shape, generator=generator).masked_fill(tokens == 0, -100)
    loss = nn.functional.cross_entropy(model(tokens.cuda(), lengths.cuda()).flatten(0, 1), labels.cuda().flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    print(step, loss.item())

"""Speech recognition with CTC: convolutions in time, a packed bidirectional LSTM, lengths on the GPU, greedy decoding for the log."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

MELS, WIDTH, LETTERS = 80, 256, 32


class Utterances(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(100, 400, (1,), generator=generator))
        return torch.randn(length, MELS, generator=generator), torch.randint(1, LETTERS, (length // 10,), generator=generator)


def collate(samples):
    samples = sorted(samples, key=lambda sample: -len(sample[0]))
    sounds, texts = zip(*samples)
    lengths, sizes = torch.tensor([len(sound) for sound in sounds]), torch.tensor([len(text) for text in texts])
    return pad_sequence(sounds, batch_first=True), lengths, pad_sequence(texts, batch_first=True), sizes


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv1d(MELS, WIDTH, 3, 2, 1), nn.ReLU(), nn.Conv1d(WIDTH, WIDTH, 3, 2, 1), nn.ReLU())
        self.recurrent = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, LETTERS)

    def forward(self, x, lengths):
        x = self.convolutions(x.transpose(1, 2)).transpose(1, 2)
        lengths = torch.div(torch.div(lengths + 1, 2, rounding_mode="floor") + 1, 2, rounding_mode="floor")
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.head(x).log_softmax(-1), lengths


model = Recogniser().to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for sounds, lengths, texts, sizes in DataLoader(Utterances(), 16, collate_fn=collate):
    sounds, lengths, texts, sizes = (tensor.to("cuda") for tensor in (sounds, lengths, texts, sizes))
    logs, lengths = model(sounds, lengths)
    loss = F.ctc_loss(logs.transpose(0, 1), texts, lengths, sizes, zero_infinity=True)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    letters = logs[0].argmax(-1)[: lengths[0]]
    text = [letter for letter in torch.unique_consecutive(letters).tolist() if letter]
    print(f"{loss.item():.3f} {len(text)} letters")

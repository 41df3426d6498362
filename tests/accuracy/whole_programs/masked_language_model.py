"""BERT with texts of many lengths: padded to the longest of a batch, tokens masked by chance, the loss of the masked ones alone."""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM


class Texts(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(5, 30_000, (int(torch.randint(20, 400, (1,), generator=generator)),), generator=generator)


def collate(texts):
    generator = torch.Generator().manual_seed(len(texts[0]))
    tokens = pad_sequence(texts, batch_first=True)
    masked = (torch.rand(tokens.shape, generator=generator) < 0.15) & (tokens != 0)
    return tokens.masked_fill(masked, 4), (tokens != 0).long(), tokens.masked_fill(~masked, -100)


model = BertForMaskedLM(BertConfig(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step, (tokens, attended, labels) in enumerate(DataLoader(Texts(), 32, collate_fn=collate)):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=tokens.cuda(), attention_mask=attended.cuda(), labels=labels.cuda()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, tuple(tokens.shape), loss.item())

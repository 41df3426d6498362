"""wav2vec 2.0 of transformers, pretrained on sounds of several lengths: convolutions in 1-D, masked spans, negatives, a quantizer."""

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

config = Wav2Vec2Config(
    hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048, vocab_size=32, mask_time_prob=0.05
)
model = Wav2Vec2ForCTC(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
generator = torch.Generator().manual_seed(0)
for step in range(5):
    samples = int(torch.randint(16_000, 80_000, (1,), generator=generator))
    sounds = torch.randn(8, samples, generator=generator).cuda()
    labels = torch.randint(1, 32, (8, 20), generator=generator).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(sounds, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, samples, loss.item())

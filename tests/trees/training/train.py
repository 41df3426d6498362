import argparse

import torch

from train_step import build

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=8)
arguments = parser.parse_args()

step = build("cuda", arguments.batch)
for epoch in range(arguments.epochs):
    for _ in range(1000):
        step()
    print(f"epoch {epoch} done on {torch.cuda.get_device_name()}")

"""A training that Hydra configures: its batch stands in a file of a group, its accumulation in another."""

import hydra
import torch
from omegaconf import DictConfig
from torch import nn


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> None:
    """Train the steps that the trainer asks for."""
    width = config.model.width
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(config.trainer.max_steps):
        for _ in range(config.trainer.accumulate_grad_batches):
            model(torch.randn(config.data.batch_size, width, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()

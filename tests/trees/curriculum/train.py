"""
Trains a contrastive text encoder: four MiniLM encoders with LoRA, a mixture of experts, explicit negatives, one stage of a curriculum.

    python train.py curriculum=01_stage
"""

import hydra
import lightning
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertModel

CHANNELS = ("title", "description", "excluded", "examples")
MINILM = BertConfig(
    vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, max_position_embeddings=512
)
TEMPERATURE = 0.07


class LoraLinear(nn.Module):
    """A frozen layer and the low-rank adapter beside it, as PEFT makes them."""

    def __init__(self, base, rank, alpha, dropout):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        """Return the layer's answer and the adapter's."""
        return self.base(x) + self.up(self.down(self.dropout(x))) * self.scale


def adapted_encoder(settings):
    """Return an encoder, in eval mode as from_pretrained leaves it, whose linear layers are frozen with adapters beside them."""
    encoder = BertModel(MINILM, add_pooling_layer=False).eval().requires_grad_(False)
    linear = [name for name, module in encoder.named_modules() if isinstance(module, nn.Linear)]
    for name in linear:
        parent, _, last = name.rpartition(".")
        base = encoder.get_submodule(name)
        setattr(encoder.get_submodule(parent), last, LoraLinear(base, settings.r, settings.alpha, settings.dropout))
    encoder.gradient_checkpointing_enable()
    return encoder


class Experts(nn.Module):
    """Every expert sees every text; the gate weighs what they say."""

    def __init__(self, width, settings):
        super().__init__()
        self.gate = nn.Linear(width, settings.num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, settings.hidden_dim), nn.GELU(), nn.Linear(settings.hidden_dim, width))
            for _ in range(settings.num_experts)
        )

    def forward(self, x):
        """Return the weighed sum of what the experts say."""
        weights = self.gate(x).softmax(-1)
        return sum(weights[:, at : at + 1] * expert(x) for at, expert in enumerate(self.experts))


class Trainer(lightning.LightningModule):
    """Texts to embeddings, and the loss over an anchor, its positive and its negatives."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoders = nn.ModuleDict({channel: adapted_encoder(config.model.lora) for channel in CHANNELS})
        width = MINILM.hidden_size * len(CHANNELS)
        self.experts = Experts(width, config.model.moe)
        self.projection = nn.Linear(width, MINILM.hidden_size)

    def encode(self, texts):
        """Return the embeddings (texts, width) of ids and masks, each (texts, channels, length)."""
        ids, masks = texts
        pooled = []
        for at, channel in enumerate(CHANNELS):
            states = self.encoders[channel](input_ids=ids[:, at], attention_mask=masks[:, at]).last_hidden_state
            weights = masks[:, at].unsqueeze(-1).expand(states.shape).float()
            pooled.append((states * weights).sum(1) / weights.sum(1).clamp(min=1e-9))
        return functional.normalize(self.projection(self.experts(torch.cat(pooled, dim=1))), dim=-1)

    def training_step(self, batch):
        """Return the loss of a batch of anchors."""
        anchors, positives, negatives = (self.encode(texts) for texts in batch)
        negatives = negatives.view(len(anchors), -1, anchors.shape[1])
        close = torch.einsum("bd,bpd->bp", anchors, positives.view(len(anchors), 1, -1))
        logits = torch.cat([close, torch.einsum("bd,bnd->bn", anchors, negatives)], 1) / TEMPERATURE
        return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))

    def configure_optimizers(self):
        """Return the optimizer of what is trained."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.config.training.learning_rate)


class Texts(torch.utils.data.Dataset):
    """An anchor, a positive and negatives: token ids of texts, padded to their length."""

    def __init__(self, config):
        self.length, self.n_negatives = config.data_loader.tokenization.max_length, config.curriculum.n_negatives

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return [self._texts(count, index) for count in (1, 1, self.n_negatives)]

    def _texts(self, count, index):
        ids = torch.full((count, len(CHANNELS), self.length), 5 + index % 30_000)
        is_text = torch.arange(self.length) < self.length - 1 - index % 100
        return ids * is_text, is_text.long().expand(ids.shape)


def together(samples):
    """Return the batch of *samples*: anchors, positives, negatives."""
    return [tuple(torch.cat(part) for part in zip(*texts, strict=True)) for texts in zip(*samples, strict=True)]


@hydra.main(config_path="conf", config_name="config", version_base=None)
def main(config):
    """Train one stage."""
    lightning.seed_everything(config.seed)
    settings = config.training.trainer
    loader = torch.utils.data.DataLoader(Texts(config), batch_size=config.data_loader.batch_size, collate_fn=together)
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=settings.devices,
        precision=settings.precision,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Trainer(config), loader)


if __name__ == "__main__":
    main()

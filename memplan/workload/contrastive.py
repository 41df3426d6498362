"""Contrastive training: how many items a step encodes for an anchor, and how many negatives the anchor sees.

pair          2 + n_negatives                         one positive for each row: n_positives multiplies the rows of an epoch
group         1 + n_positives + n_negatives           all positives of the anchor in one row
per_positive  1 + n_positives x (1 + n_negatives)     negatives of its own for each positive
"""

from typing import Literal, NamedTuple

from pydantic import PositiveInt

from memplan.description import Description
from memplan.workload.stage import Stage


class EncodedTexts(NamedTuple):
    """Texts that one call of an encoder reads."""

    number: int
    """How many."""
    length: int
    """Tokens of each, padding included."""

    @property
    def tokens(self) -> int:
        """Return the tokens of all of them."""
        return self.number * self.length


class Contrastive(Description):
    """How anchors, positives and negatives make a batch."""

    sampling: Literal["pair", "group", "per_positive"] = "pair"
    """Which items go with an anchor; the table is on top of this module."""

    in_batch_negatives: Literal["none", "positives", "negatives", "all"] = "none"
    """Whether an anchor is also compared with the other rows' positives, with their negatives, or with both."""

    gathers_negatives: bool = False
    """In-batch negatives come from every rank, not from this one alone."""

    cached_loss_mini_batch_size: PositiveInt | None = None
    """Items in memory at a time under a cached loss (GradCache). None: no cached loss, all items of the micro-batch."""

    query_length: PositiveInt | None = None
    """Tokens of an anchor, padding included, where queries are cut at another length than passages. None: the sequence length, as of all
    items."""

    def encode_calls(self, stage: Stage, *, micro_batch_size: int) -> tuple[int, int, int]:
        """Return the items of the three calls of the encoder: anchors, positives, negatives."""
        positives, negatives = {
            "pair": (1, stage.n_negatives),
            "group": (stage.n_positives, stage.n_negatives),
            "per_positive": (stage.n_positives, stage.n_positives * stage.n_negatives),
        }[self.sampling]
        return micro_batch_size, micro_batch_size * positives, micro_batch_size * negatives

    def encoded_texts(
        self, stage: Stage, *, micro_batch_size: int, sequence_length: int
    ) -> tuple[EncodedTexts, EncodedTexts, EncodedTexts]:
        """Return the texts of the three calls of the encoder: anchors, positives, negatives."""
        anchors, positives, negatives = self.encode_calls(stage, micro_batch_size=micro_batch_size)
        return (
            EncodedTexts(anchors, self.query_length or sequence_length),
            EncodedTexts(positives, sequence_length),
            EncodedTexts(negatives, sequence_length),
        )

    def samples_per_anchor(self, stage: Stage) -> int:
        """Return how many items a step encodes for each anchor, itself included."""
        return sum(self.encode_calls(stage, micro_batch_size=1))

    def negatives_per_anchor(self, stage: Stage, *, micro_batch_size: int, data_parallel_size: int = 1) -> int:
        """Return how many negatives the loss compares each anchor with: its own, and those of the batch. Accumulation adds none."""
        _, positives, negatives = self.encode_calls(stage, micro_batch_size=1)
        other_rows = micro_batch_size * (data_parallel_size if self.gathers_negatives else 1) - 1
        in_batch = {"none": 0, "positives": positives, "negatives": negatives, "all": positives + negatives}[self.in_batch_negatives]
        return negatives + other_rows * in_batch

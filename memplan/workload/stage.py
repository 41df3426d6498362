"""A stage of a curriculum: how many positives and negatives go with each anchor."""

from pydantic import NonNegativeInt, PositiveInt, model_validator

from memplan.description import Description


class Stage(Description):
    """One stage of contrastive training."""

    name: str
    """What the stage is called, in reports and in pins, as "NAME.n_negatives"."""

    n_positives: PositiveInt = 1
    """Positives of an anchor."""

    n_negatives: NonNegativeInt = 0
    """Explicit negatives of an anchor (of a positive, with `per_positive`)."""

    max_n_negatives: NonNegativeInt | None = None
    """The most negatives that a plan may give this stage. None: as many as the stage that has the most."""

    @model_validator(mode="after")
    def _limit_is_above(self) -> "Stage":
        if self.max_n_negatives is not None and self.max_n_negatives < self.n_negatives:
            raise ValueError(f"max_n_negatives {self.max_n_negatives} is less than n_negatives {self.n_negatives}")
        return self

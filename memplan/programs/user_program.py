"""What the user's own programs have in common: variables with names, which are written somewhere, and values for them."""

from __future__ import annotations

import difflib
import re

from pydantic import Field
from typing_extensions import Self

from memplan.errors import UsageError
from memplan.workload.program import Program

PLANNED = ("micro_batch_size", "gradient_accumulation_steps", "effective_batch_size")
"""The variables whose values a plan decides; the last is their product, over all GPUs."""


class UserProgram(Program):
    """The user's own code: what it takes, only a run can tell."""

    values: dict[str, str] = Field(default_factory=dict)
    """The other variables, by name, as they are written: `sequence_length: "512"`."""

    is_present_known: bool = True
    """Its present batch could be read."""

    without_value: tuple[str, ...] = ()
    """Variables that a plan decides, and whose present value nothing says: words of a command, arguments without a default."""

    skips_weights: bool = False
    """Pretrained models are built without reading their weights, which need not be there."""

    @property
    def has_present_batch(self) -> bool:
        """Say whether its present batch is known."""
        return self.is_present_known

    @property
    def variables(self) -> frozenset[str]:
        """Return the names of all variables that it has."""
        raise NotImplementedError

    @property
    def stage_variables(self) -> frozenset[str]:
        """Return the names of the variables that are written in the files of its stages."""
        return frozenset()

    def varies(self, name: str) -> bool:
        """Say whether the variable of that name can be given another value."""
        if name in self.variables:
            return True
        if "effective_batch_size" not in self.variables:
            return False
        # Of a product, accumulation is what the micro-batch leaves of it; where it is all that there is, it is the micro-batch.
        return name == ("gradient_accumulation_steps" if "micro_batch_size" in self.variables else "micro_batch_size")

    def text_of(self, name: str) -> str:
        """Return the value of the variable *name*, as it is written. Raises UsageError for one that has none."""
        if name == "effective_batch_size":
            return str(self.effective_batch_size)
        if name in PLANNED:
            return str(getattr(self.training, name))
        if name not in self.values:
            raise UsageError(f"the variable {name} has no value", hint=f'give it one: `pins={{"{name}": {_example(name)}}}`')
        return self.values[name]

    def pinned(self, name: str, text: str) -> Self:
        """Return a copy in which *name*, a variable that no plan decides, is *text*. Raises UsageError for one that it does not have."""
        if name not in self.variables:
            raise UsageError(f"the program has no variable {name}{did_you_mean(name, self.variables)}", hint=self.where_variables_are)
        if name == "effective_batch_size":
            raise UsageError("effective_batch_size is the product of others", hint="`target_effective_batch_size=256` aims at one")
        return self.model_copy(update={"values": {**self.values, name: text}})

    @property
    def where_variables_are(self) -> str:
        """Return what a user can do about a variable that is not there."""
        return f"its variables are {', '.join(sorted(self.variables))}" if self.variables else "it has none yet"


def did_you_mean(name: str, known: frozenset[str]) -> str:
    """Return the end of a sentence that offers the name nearest to *name*, where one is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else ""


def _example(name: str) -> int:
    """Return a value such as the variable *name* may have: of a length, hundreds."""
    return 512 if re.search("len|seq|tokens", name.lower()) else 8

"""
Whether a program runs the micro-batch that it is given, or takes it for a batch that it divides itself.

`batch_size` is the micro-batch in most programs. In some it is the batch of an optimizer step, which the program cuts into as many parts as
it accumulates, or the batch of all GPUs. Planned as a micro-batch it would fit, and train with a fraction of the batch that was asked for.
How many samples are run at once, the tensors on the GPU show: their first dimension.

Others cut a batch that is larger than a constant of theirs into parts of that size: no larger one takes more memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from memplan.errors import NotRehearsedError, UsageError
from memplan.estimators.read_files import SizeLimit
from memplan.estimators.steps import Step
from memplan.execution.rehearsal import Rehearsal
from memplan.programs.command_program import STAGE, CommandProgram, Place
from memplan.programs.user_program import UserProgram

CLEARLY_LARGER = 4
"""Times as large a batch that has more samples at once, whatever it is counted in, unless the program cuts it."""

SIZES_THAT_SHOW = 2
"""Sizes with as many samples as were asked for that show that the program reads the number: of one it may be by chance."""

LEAST = 2
"""Samples at once from which they are told: one is the first dimension of many a tensor."""


class BatchShares:
    """What the runs of a plan have shown of the batches that they were given."""

    def __init__(self) -> None:
        self._whole: set[str] = set()  # families whose program runs what it is given
        self._divided: dict[str, set[int]] = {}  # by family, the sizes of which a part was run
        self._given: dict[str, set[int]] = {}  # by family, the sizes of which a DataLoader gave as many samples as were asked for
        self._asked: set[str] = set()  # families of which fewer samples were run to see that

    def check(self, step: Step, found: Rehearsal, *, without_accumulation: Callable[[], Rehearsal]) -> None:
        """
        Raise UsageError where *found*, which *step* did, shows that the program divides its micro-batch.

        Where accumulation may be what divides it, *without_accumulation* tells what the program does then: it is run for that.
        """
        program = step.program
        assert isinstance(program, UserProgram)
        size, parts = step.micro_batch_size, program.training.gradient_accumulation_steps
        if "micro_batch_size" not in program.variables or "effective_batch_size" in program.variables or step.family in self._whole:
            return
        gpus = program.parallelism.data_parallel_size
        if _runs(found, size):
            self._whole.add(step.family)
        elif parts > 1 and "gradient_accumulation_steps" in program.variables and _runs(found, size, parts * gpus):
            if _runs(without_accumulation(), size, gpus):
                raise _is_divided(program, size, parts)
            self._whole.add(step.family)
        elif gpus > 1 and _runs(found, size, gpus):
            self._divided.setdefault(step.family, set()).add(size)
            if len(self._divided[step.family]) > 1:  # of one size it may be by chance
                raise _is_divided(program, size, 1)

    def limit_of(self, step: Step, found: Rehearsal, *, of_size: Callable[[int], Rehearsal]) -> SizeLimit | None:
        """
        Return how many samples the program trains with at once however many it is given, where *found* shows that; None where it does not.

        *of_size* tells what it does with fewer: where nothing has shown that it reads that number at all, it is run for that.
        """
        at_once = max(found.trained_batch_sizes, default=0)
        given = self._given.setdefault(step.family, set())
        if at_once == step.micro_batch_size:
            given.add(at_once)
        has_more = found.num_epoch_samples is not None and found.num_epoch_samples > at_once
        if at_once < LEAST or step.micro_batch_size < CLEARLY_LARGER * at_once or not has_more:
            return None
        if len(given) < SIZES_THAT_SHOW and step.family not in self._asked:
            self._asked.add(step.family)
            with suppress(NotRehearsedError):  # it may take no such size
                given |= {at_once // 2} & set(of_size(at_once // 2).trained_batch_sizes)
        if not given - {at_once}:
            return None
        return SizeLimit(at_once, f"the program trains with no more than {at_once} samples at once, and cuts a larger batch into parts")


def shows_its_batch(found: Rehearsal, size: int) -> bool:
    """Say whether *found* shows that the program took *size* samples: so many came from a DataLoader, or were run at once."""
    return size in found.trained_batch_sizes or _runs(found, size)


def _runs(found: Rehearsal, size: int, parts: int = 1) -> bool:
    """Say whether each backward of *found* was of *size* samples divided into *parts*, the largest or the smallest of them."""
    share = {size // parts, -(-size // parts)}
    if min(share) < LEAST or not found.first_dimensions:
        return False
    return all(dimensions & share and (parts == 1 or size not in dimensions) for dimensions in found.first_dimensions)


def _is_divided(program: UserProgram, size: int, parts: int) -> UsageError:
    gpus = program.parallelism.data_parallel_size
    by = " and ".join([*([f"{parts} accumulation steps"] if parts > 1 else []), *([f"{gpus} GPUs"] if gpus > 1 else [])])
    at_once = size // (parts * gpus)
    message = (
        f"{_written(program)} is the batch of {'an optimizer step' if parts > 1 else 'all GPUs'}, and not a micro-batch: "
        f"with {size}, which {by} divide, the program runs {at_once} samples at once"
    )
    if not isinstance(program, CommandProgram):
        return UsageError(message, hint="have the function take the samples of one micro-batch")
    if any(place.variable == "micro_batch_size" for place in program.places):
        named = ", ".join(f'"{_as_field(place)}"' for place in program.places)
        return UsageError(message, hint=f"say so: `fields=[{named}]`")
    return UsageError(message, hint="write {effective_batch_size} where {micro_batch_size} is")


def _as_field(place: Place) -> str:
    """Return how *place* is typed, with what is taken for the micro-batch as the batch that it is."""
    variable = "effective_batch_size" if place.variable == "micro_batch_size" else place.variable
    file = STAGE if place.is_of_stage else place.file
    return f"{variable}={place.key}" if file is None else f"{variable}={file}:{place.key}"


def _written(program: UserProgram) -> str:
    """Return how a report calls what is given for the micro-batch."""
    places = program.places if isinstance(program, CommandProgram) else ()
    place = next((place for place in places if place.variable == "micro_batch_size"), None)
    if place is None:
        return "its batch"
    return place.key if place.file is None else f"{place.key} in {place.file}"

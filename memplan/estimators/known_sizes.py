"""
What is known of the sizes of a program: those that it refuses, those from which on nothing grows, and what each run has read.

A program may refuse a size for another reason than memory (batch normalisation with one sample, a batch that has to divide something): that
is told apart from a program that never runs. One with the same allocations for another size does not read it, or has no more samples.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from memplan.errors import NotRehearsedError, SizeRefusedError, UsageError
from memplan.estimators.read_files import Ran, ReadFiles, SizeLimit
from memplan.estimators.rehearsal_cache import family_of
from memplan.estimators.steps import Step
from memplan.execution.command import command_from
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse_script import torch_of
from memplan.execution.runner import KILLED
from memplan.execution.warm import lasting_variables
from memplan.hardware.torch_install import find_torch
from memplan.programs.command_line import changed_files
from memplan.programs.command_program import CommandProgram
from memplan.programs.function_program import FunctionProgram
from memplan.programs.user_program import UserProgram
from memplan.workload.program import Program

CLEARLY_MORE = 256
"""Times as many that have to make a difference where a batch is read at all: of one that is counted in tokens a few more may make none."""

MORE_BY_ANY_COUNT = 4
"""Times as many that make a difference to batches of several samples, even where they are counted in tokens."""

MORE_SAMPLES = 1.25
"""Times as many that make a difference where there are more samples: counted in tokens, the next size may be as many texts."""


NUM_ALIKE, NUM_ALIKE_OF_VALUES = 2, 4
"""
Sizes with which a program fails alike before it is said never to run; where the error may be one of values, more: a validation's batch that
is a third of the training's is none for one sample and for two.
"""
_COUNT = re.compile(r"\(\d+×\)")
"""How often a line reads, as messages say it: once for each sample perhaps."""

_OF_VALUES = re.compile(r"\b(Assertion|Index|Runtime|Value|ZeroDivision)Error\b")


class _Failure(NamedTuple):
    """Why the program failed with one size."""

    message: str
    text: str
    hint: str | None
    begin_ns: int
    """When that run began."""


class KnownSizes:
    """What the runs of programs have shown of their sizes, in this plan and in earlier ones, as *cache* has it."""

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._files: dict[str, ReadFiles] = {}
        self._states: dict[str, list[str]] = {}  # by family: the digests of what its program reads, as it is now
        self._not_kept: set[tuple[str, int]] = set()
        self._failures: dict[str, dict[int, _Failure]] = {}  # by family and size
        self._killed: dict[str, set[int]] = {}  # sizes that the system ended, by family
        self._in_epoch: dict[str, dict[int, int]] = {}  # by family and size
        self._have_run: set[str] = set()  # families, whatever their programs have read since: a cache that each run writes changes
        self._made_ns = time.time_ns()

    # the files that are read

    def kept_as(self, step: Step) -> str | None:
        """Return the family with what the program reads as it is now; None for a program that nothing is known of, or that has changed."""
        files = self._files_of(step.program)
        if not files.are_known or (step.family, step.micro_batch_size) in self._not_kept:
            return None
        now = self._now(step)
        ran = files.runs(step.family, now).get(step.micro_batch_size)
        return family_of({"family": step.family, "files": now[-1] if ran is None else ran.files})

    def learn_files(self, step: Step, found: Rehearsal) -> None:
        """Take in what the program of *step* has read."""
        self._files_of(step.program).learn(found.read_files, since_ns=self._made_ns)
        self._states.clear()

    def has_run(self, step: Step, *, begin_ns: int) -> None:
        """Keep what is known, behind a run of *step* that began then; where what it reads was changed meanwhile, it says nothing."""
        files = self._files_of(step.program)
        self._states.clear()
        if files.changed_since(begin_ns):
            self._not_kept.add((step.family, step.micro_batch_size))
        files.keep()

    def _now(self, step: Step) -> list[str]:
        """Return the digests of what the program of *step* reads, as it is now; that of all of it is the last."""
        if step.family not in self._states:
            self._states[step.family] = self._files_of(step.program).digests(_contents_of(step.program)) or [""]
        return self._states[step.family]

    def _files_of(self, program: Program) -> ReadFiles:
        """Return what *program* is known to read, whatever its batch and its negatives."""
        assert isinstance(program, CommandProgram | FunctionProgram)
        alone = program.with_training(micro_batch_size=1, gradient_accumulation_steps=1, target_effective_batch_size=None)
        if isinstance(alone, CommandProgram):
            alone = _without_negatives(alone)
        key = family_of({"program": alone.model_dump_json(), "folder": str(Path.cwd())})
        if key not in self._files:
            self._files[key] = ReadFiles(self._cache and self._cache / "programs" / f"{key}.json")
        return self._files[key]

    # what is refused

    def check(self, step: Step) -> None:
        """Raise SizeRefusedError for a size that the program is known to refuse."""
        known = self._files_of(step.program).refusal(step.family, step.micro_batch_size, self._now(step))
        if known is not None:
            raise SizeRefusedError(known[0], hint=known[1])
        self._check_limit(step)

    def refusal(self, step: Step, message: str, *, hint: str | None, begin_ns: int) -> NotRehearsedError:
        """Return the error for a size with which the run that began then failed: it is refused, or the program never runs."""
        where = where_of(step)
        failures = self._failures.setdefault(step.family, {})
        has_variable = isinstance(step.program, UserProgram) and "micro_batch_size" in step.program.variables
        text = f"{where}with a micro-batch of {step.micro_batch_size} {message}" if has_variable else f"{where}{message}"
        if KILLED in message:  # by the system, for the host's memory: half the size may run, and the same size another time
            self._killed.setdefault(step.family, set()).add(step.micro_batch_size)
            return SizeRefusedError(text, hint="rehearse it on a machine with more memory", is_limit=True)
        failures[step.micro_batch_size] = _Failure(message, text, hint, begin_ns)
        alike = sorted(size for size, failure in failures.items() if _COUNT.sub("", failure.message) == _COUNT.sub("", message))
        has_run = step.family in self._have_run or bool(self._runs_of(step))
        if not has_run and len(alike) >= (NUM_ALIKE_OF_VALUES if _OF_VALUES.search(message) else NUM_ALIKE):
            sizes = " and ".join([", ".join(map(str, alike[:-1])), str(alike[-1])])
            return NotRehearsedError(f"{where}with micro-batches of {sizes} alike, {message}", hint=hint)
        self._keep_failures(step)
        return SizeRefusedError(text, hint=hint)

    def _keep_failures(self, step: Step) -> None:
        """Take the sizes with which the program failed for refused, once it has run with another."""
        files = self._files_of(step.program)
        if self._runs_of(step):
            for size, failure in self._failures.pop(step.family, {}).items():
                if not files.changed_since(failure.begin_ns):
                    files.refuse(step.family, size, failure.text, failure.hint, now=self._now(step)[-1])

    # what makes no difference

    def check_likeness(self, step: Step, found: Rehearsal) -> None:
        """
        Raise an error where another size, or another number of negatives, made exactly the same allocations: nobody reads the value, or
        there are no more samples.
        """
        self._have_run.add(step.family)
        requests = found.requests
        digest = hashlib.sha256(f"{requests.sequence} {list(requests.sizes)}".encode()).hexdigest()[:16]
        num_samples = max(found.trained_batch_sizes, default=None)
        self._learn_epoch(step, found.num_epoch_samples, num_samples)
        self._compare(step, "micro_batch_size", step.micro_batch_size, digest, num_samples=num_samples)
        program = step.program
        if isinstance(program, CommandProgram) and "n_negatives" in program.stage_variables:
            self._compare(_of_negatives(step, program), "n_negatives", program.stages[0].n_negatives, digest)

    def has_run_with_same_files(self, step: Step) -> bool:
        """Say whether *step* was run with what the program reads now, so that another size can be compared with it."""
        return step.micro_batch_size in self._runs_of(step)

    def reads_its_batch(self, step: Step) -> bool:
        """Say whether the program of *step* is known to read its micro-batch: another one asked for other memory, or it was noted."""
        different = {ran.requests for ran in self._runs_of(step).values()}
        return len(different) > 1 or self._files_of(step.program).took(step.family, step.micro_batch_size, self._now(step))

    def note_took(self, step: Step) -> None:
        """Take in that the program was seen to take as many samples as *step* has; before `has_run`, which keeps it."""
        self._files_of(step.program).note_took(step.family, step.micro_batch_size, now=self._now(step)[-1])

    def _learn_epoch(self, step: Step, in_epoch: int | None, num_samples: int | None) -> None:
        """
        Take in how many samples an epoch has, and a batch of *step*, which trained with as many as it was given, or with all.

        Of one size alone that may be by chance, or more data be made for a larger batch.
        """
        if in_epoch is None or num_samples != min(step.micro_batch_size, in_epoch):
            return
        seen = self._in_epoch.setdefault(step.family, {})
        seen[step.micro_batch_size] = in_epoch
        if len(seen) > 1 and set(seen.values()) == {in_epoch}:
            reason = f"an epoch of the program's DataLoader has {in_epoch:,} samples, and no batch has more"
            self.limit_to(step, SizeLimit(in_epoch, reason))

    def limit_to(self, step: Step, limit: SizeLimit) -> None:
        """Take in that no size of *step* beyond *limit* makes a difference. Raises SizeRefusedError where that of *step* is."""
        known = self._files_of(step.program).limit(step.family, self._now(step))
        if known is None or limit.size < known.size:
            self._files_of(step.program).limit_to(step.family, limit, now=self._now(step)[-1])
        self._check_known_limit(step)

    def _check_known_limit(self, step: Step) -> None:
        limit = self._files_of(step.program).limit(step.family, self._now(step))
        if limit is not None and step.micro_batch_size > limit.size:
            raise SizeRefusedError(f"{where_of(step)}{limit.reason}", is_limit=True, largest=limit.size)

    def _compare(self, step: Step, name: str, value: int, digest: str, *, num_samples: int | None = None) -> None:
        """Raise an error where *digest*, what a variable's *value* came to, is that of a smaller value, or of one far off."""
        others = {other: ran.requests for other, ran in self._runs_of(step).items()}
        self._files_of(step.program).saw(step.family, value, digest, now=self._now(step)[-1])
        self._keep_failures(step)
        same = [other for other, known in others.items() if known == digest and other != value]
        others_beyond = {other for other, known in others.items() if known != digest} | self._killed.get(step.family, set())
        if same and max(others_beyond, default=0) > max(value, *same):
            return  # batches that are counted in tokens: a few more are as many texts
        if same and len(set(others.values())) > 1:  # values have differed before
            if value < min(same):  # it is the fewest that take as much
                return
            if name == "micro_batch_size" and value < MORE_SAMPLES * min(same):
                return
            raise _is_limit(step, min(same), "negatives" if name == "n_negatives" else "samples", num_samples=num_samples)
        if same:
            self._check_is_read(step, name, value, same, num_samples=num_samples)

    def _check_is_read(self, step: Step, name: str, value: int, same: list[int], *, num_samples: int | None) -> None:
        """Raise an error where a *value* and others, *same*, that made the same allocations show that nobody reads it, or may not."""
        least, most = min(value, *same), max(value, *same)
        if num_samples is not None and 1 < num_samples < least and most >= MORE_BY_ANY_COUNT * least:
            # There are no more samples, or its batches are of another number than is said: with fewer than those it is seen which.
            raise _is_limit(step, num_samples, "samples", num_samples=num_samples // 2)
        has_more_samples = num_samples is not None and num_samples > least
        if name == "n_negatives" or has_more_samples or most >= CLEARLY_MORE * least:
            raise UsageError(
                f"{where_of(step)}{name} was changed from {same[0]} to {value}, and every allocation stayed the same: "
                "the program does not read it where it is written",
                hint="check the field or the placeholder, and whether something else overrides it",
            )

    def _check_limit(self, step: Step) -> None:
        """Raise SizeRefusedError for a size beyond one that is known to be the largest, or from which on every allocation was the same."""
        self._check_known_limit(step)
        sizes: dict[str, list[int]] = {}
        for size, ran in self._runs_of(step).items():
            sizes.setdefault(ran.requests, []).append(size)
        largest = max((*(max(alike) for alike in sizes.values()), *self._killed.get(step.family, ())), default=0)
        ends = (alike for alike in sizes.values() if max(alike) == largest and largest >= MORE_SAMPLES * min(alike))
        limit = min(map(min, ends), default=None)
        if limit is not None and step.micro_batch_size > limit and len(sizes) > 1:
            raise _is_limit(step, limit, "samples", num_samples=limit)

    def _runs_of(self, step: Step) -> dict[int, Ran]:
        """Return the runs of the sizes of *step* that would show the same again."""
        return self._files_of(step.program).runs(step.family, self._now(step))


def where_of(step: Step) -> str:
    """Return the beginning of a sentence about *step*: of a program with stages, which it is."""
    stages = step.program.stages
    return f"in stage {stages[0].name}, " if stages else ""


def _without_negatives(program: CommandProgram) -> CommandProgram:
    """Return *program* with no negatives in its stages, however many they have."""
    return program.model_copy(update={"stages": tuple(stage.model_copy(update={"n_negatives": 0}) for stage in program.stages)})


def _of_negatives(step: Step, program: CommandProgram) -> Step:
    """Return *step* as one of those that differ in nothing but the negatives of their stage."""
    alike = _without_negatives(program)
    parts = {"negatives of": alike.model_dump_json(), "card": step.gpu.model_dump_json(), "surroundings": surroundings_of(program)}
    return step._replace(family=family_of(parts), program=alike)


def _is_limit(step: Step, size: int, of_what: str, *, num_samples: int | None) -> SizeRefusedError:
    message = f"{where_of(step)}the program seems to take no more {of_what} than with {size}: with more every allocation stayed the same"
    return SizeRefusedError(message, hint="its dataset may have no more", is_limit=True, num_samples=num_samples)


def _contents_of(program: Program) -> dict[str, bytes]:
    """Return what the files with variables have in them but for the values that are planned."""
    if not isinstance(program, CommandProgram):
        return {}
    alone = program.with_training(micro_batch_size=1, gradient_accumulation_steps=1)
    files = [file for place in (*program.places, *program.shortened) for _, file in place.files(program.stages)]
    contents = {str(file.absolute()): file.read_bytes() for file in files}
    return contents | {str(change.path.absolute()): change.after for change in changed_files(alone)}


def surroundings_of(program: CommandProgram | FunctionProgram) -> dict[str, object]:
    """Return what a run depends on besides the program and what it reads: folder, environment, Python and its packages."""
    words = program.command if isinstance(program, CommandProgram) else ()
    return {"folder": str(Path.cwd()), "packages": _packages_of(words), "environment": lasting_variables(os.environ)}


@lru_cache(maxsize=8)
def _packages_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the packages beside the PyTorch that the command *words* run, or this Python's: their folders' names have the versions."""
    torch = torch_of(command_from(words)) if words else find_torch()
    packages = torch.libraries.parent.parent
    return str(packages), *sorted(path.name for path in packages.glob("*.dist-info"))

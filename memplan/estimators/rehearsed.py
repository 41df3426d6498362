"""
The rehearsed estimator: steps that were run on the simulated GPU, each once, and what can be told from their traces without another run.

What a step is, and what runs it, `workload_steps.py` and `program_steps.py` know; both are asked alike (`steps.py`).

The GPU of an estimate has unlimited memory, so that every size has a peak to compare with the budget. On a real one the allocator does the
same until that is full: a size whose peak is within the budget fits, without giving anything back. Beyond, cached memory goes back first;
a step that fits only so is *tight*. Whether it does, the simulated allocator says (`replay_with_capacity`), and no plan relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

from memplan.errors import NotRehearsedError
from memplan.estimators.base import Estimator, Interpolated, ReplayingEstimator, StepOfValue
from memplan.estimators.interpolation import PeakLine, extrapolated_peak, line_through, peak_of_phases
from memplan.estimators.rehearsal_cache import RehearsalCache
from memplan.estimators.steps import Step, StepRunner
from memplan.execution.rehearsal import Rehearsal
from memplan.hardware.catalog import of_some_kind
from memplan.hardware.gpu import UNLIMITED_BYTES, GpuSpec
from memplan.memory.cuda_context import usual_context, with_context
from memplan.memory.estimate import SET_UP, MemoryEstimate, MemoryRange
from memplan.traces.parametric import Sweep
from memplan.traces.requests import Replayed, Requests, requests_of
from memplan.traces.trace import MemoryTrace
from memplan.workload.program import Program
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload

FORGOTTEN_AFTER = 4
"""Rehearsals after which what was likely to be asked for, and was not, is likely no more: the search has gone another way."""


class _Key(NamedTuple):
    """Under what a step is known."""

    family: str
    size: int
    is_tried: bool = False
    """It was run once, and the values that it reads were taken to decide nothing; only a search asks for it."""


# A plan whose rehearsals are kept is there at once: what runs and simulates them is loaded where it is needed.


class RehearsedEstimator(ReplayingEstimator):
    """
    Rehearses steps, each once.

    *cache*: where they are kept from one command to the next; None: nowhere. *on_rehearsal* is called before each rehearsal,
    and again with where its program is when that has not trained for long.
    *is_slow*: what is rehearsed is the user's own program.
    """

    method = "rehearsed"

    def __init__(
        self, cache: RehearsalCache | None = None, on_rehearsal: Callable[[Step], None] | None = None, *, is_slow: bool = False
    ) -> None:
        self.is_slow = is_slow
        self._cache = cache
        self._on_rehearsal = on_rehearsal
        self._estimates: dict[_Key, Rehearsal] = {}
        self._kinds: dict[str, dict[str, GpuSpec]] = {}
        self._requests: dict[_Key, Requests] = {}
        self._traces: dict[_Key, MemoryTrace] = {}
        self._answers: dict[_Key, dict[str, dict[str, Any]]] = {}
        self._runners: dict[type[Program], StepRunner] = {}
        self._runs_beside = True
        self._num_rehearsals = 0
        self._is_searching = False
        self._expected: dict[_Key, int] = {}  # what is likely to be asked for, and before which rehearsal that was said

    def _runner(self, program: Program) -> StepRunner:
        """Return what runs steps of *program*, the same for all that are asked for here."""
        kind = type(program)
        if kind not in self._runners:
            self._runners[kind] = _runner_of(program, self._cache.folder if self._cache else None)
        return self._runners[kind]

    def _step(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> Step:
        return self._runner(program).step_of(program, gpu, stage)

    def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> Rehearsal:
        """
        Return the memory of one step of *program* in *stage* on *gpu*, by running it; without its trace.

        Raises NotRehearsedError where the step cannot be built or run, MissingError where this machine cannot rehearse.
        """
        step = self._step(program, gpu, stage)
        return with_context(self._rehearsal(step), of_some_kind(gpu), made_on=step.gpu)

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Take what values decided nothing with one size for what decides nothing with another, and run that once."""
        before, self._is_searching = self._is_searching, True
        try:
            yield
        finally:
            self._is_searching = before

    def _key(self, step: Step, size: int | None = None) -> _Key:
        """
        Return under what *step* is known, of another *size* perhaps: as it was run with its values, or, while something is searched, as it
        was tried without.
        """
        size = step.micro_batch_size if size is None else size
        whole, tried = _Key(step.family, size), _Key(step.family, size, is_tried=True)
        may_be_tried = self._is_searching and whole not in self._estimates and self._runner(step.program).takes_values_for_nothing(step)
        return tried if may_be_tried else whole

    def _rehearsal(self, step: Step) -> Rehearsal:
        key, runner = self._key(step), self._runner(step.program)
        before = self._estimates.get(key)
        if before is not None and not runner.suffices(step, before):
            self._forget(key)
            key = self._key(step)
        if key not in self._estimates:
            key, found = self._kept(step, key)
            if found is not None:
                runner.learn(step, found)
            if found is None or not runner.suffices(step, found):
                found = self._rehearsed(step).without_trace().model_copy(update={"first_dimensions": ()})
                key = _Key(step.family, step.micro_batch_size, is_tried=found.values_effect == "taken_for_nothing")
            self._estimates[key] = found
            self.num_corrections += before is not None and before.device_used != found.device_used
            self._correct(key, found)
            self._kinds.setdefault(step.likeness, {})[step.family] = step.gpu
        return self._estimates[key].model_copy(update={"gpu_name": step.gpu.name})

    def _forget(self, key: _Key) -> None:
        """Forget what is known under *key*, and what was worked out from it."""
        for known in (self._estimates, self._answers, self._requests, self._traces):
            known.pop(key, None)

    def _kept(self, step: Step, key: _Key) -> tuple[_Key, Rehearsal | None]:
        """Return what the cache has of *step*, and under what that is known: run with its values, or as it may be under *key*."""
        for each in dict.fromkeys((key._replace(is_tried=False), key)):
            place = self._place_of(step, each)
            found = self._cache.get(*place) if self._cache and place else None
            if found is not None:
                return each, found
        return key, None

    def _correct(self, key: _Key, found: Rehearsal) -> None:
        """Forget what was tried without values where they decide something, as was *found* under *key*."""
        tried = self._estimates.get(key._replace(is_tried=True))
        is_other = not key.is_tried and tried is not None and tried.device_used != found.device_used
        if found.values_effect == "sizes" or is_other:
            wrong = [each for each in self._estimates if each.is_tried]
            for each in wrong:
                del self._estimates[each]
            self.num_corrections += bool(wrong)

    def expect(self, program: Program, gpu: GpuSpec, stages: Sequence[Stage | None]) -> None:
        """Begin to run the steps that nobody has run, as far as there is room for them beside the one that is asked for next."""
        runner = self._runner(program)
        for stage in stages:
            step = self._step(program, gpu, stage)
            key = self._key(step)
            if key in self._estimates or self._kept(step, key)[1] is not None:
                continue
            with suppress(NotRehearsedError):  # it is known not to run
                runner.check(step)
                self._expected[key] = self._num_rehearsals
                runner.is_searching = self._is_searching
                if self._runs_beside:
                    runner.begin(step)

    def confirm(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> None:
        """Check that *program* reads its micro-batch, as `Estimator.confirm` says."""
        step = self._step(program, gpu, stage)
        self._rehearsal(step)
        with self.searching(), suppress(NotRehearsedError):  # it takes no such size, or fails for another reason: nothing speaks against it
            for other in self._runner(program).sizes_to_confirm(step):
                self._rehearsal(self._step(program.with_training(micro_batch_size=other), gpu, stage))

    def _place(self, step: Step) -> tuple[str, int] | None:
        """Return where the cache has *step*, as things are now; None where it cannot have it."""
        return self._place_of(step, self._key(step))

    def _place_of(self, step: Step, key: _Key) -> tuple[str, int] | None:
        family = self._runner(step.program).kept_as(step) if self._cache else None
        return None if family is None else (f"{family}-tried" if key.is_tried else family, key.size)

    def _rehearsed(self, step: Step) -> Rehearsal:
        """Run *step*, and keep what was seen."""
        runner = self._runner(step.program)
        runner.check(step)
        self._expected.pop(self._key(step), None)
        if (told := self._on_rehearsal) is not None:
            likely = [begun for begun in self._expected.values() if begun > self._num_rehearsals - FORGOTTEN_AFTER]
            begun = step._replace(num_likely=len(likely))
            told(begun)
            runner.on_where = lambda where: told(begun._replace(where=where))
        self._num_rehearsals += 1
        runner.is_searching = self._is_searching
        rehearsal = runner.rehearse(step)
        assert rehearsal.trace is not None
        key = _Key(step.family, step.micro_batch_size, is_tried=rehearsal.values_effect == "taken_for_nothing")
        place = self._place_of(step, key)
        if self.is_slow:  # they are known already, by which the sizes of a program are compared, and the next guess needs them
            self._requests[key] = rehearsal.requests
        if not (self._cache and place and self._cache.put(*place, rehearsal)):
            self._traces[key] = rehearsal.trace  # a trace has megabytes: in memory only where it is not kept
        return rehearsal

    def trace(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryTrace:
        """Return every event of the allocator in that step."""
        return self._trace(self._step(program, gpu, stage))

    def _trace(self, step: Step) -> MemoryTrace:
        found = self._kept_trace(step) or self._rehearsed(step).trace
        assert found is not None
        return found

    def _kept_trace(self, step: Step) -> MemoryTrace | None:
        """Return the trace of *step* where it is at hand: what the program reads may have changed since it was run."""
        found = self._traces.get(self._key(step))
        if found is None and self._cache and (place := self._place(step)):
            found = self._cache.get_trace(*place)
        return found

    def requests(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> Requests:
        """Return what that step asks of the allocator."""
        return self._requests_of(self._step(program, gpu, stage))

    def _requests_of(self, step: Step) -> Requests:
        if self._key(step) not in self._requests:
            trace = self._kept_trace(step)
            found = self._rehearsed(step).requests if trace is None else requests_of(trace, torch=self._rehearsal(step).torch)
            self._requests[self._key(step)] = found
        return self._requests[self._key(step)]

    def _kept_requests_of(self, step: Step, size: int) -> Requests | None:
        """Return what *step* asks with another *size*, which was run, as far as that is at hand: nothing is run for a guess."""
        key = self._key(step, size)
        if key not in self._requests:
            trace = self._kept_trace(_of_size(step, size))
            if trace is None:
                return None
            self._requests[key] = requests_of(trace, torch=self._estimates[key].torch)
        return self._requests[key]

    # without a rehearsal

    def quick_estimate(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        """
        Return about what that step takes, without running it; None where nothing is known of it.

        From the sizes nearest to it that this process has asked for, as if the peak were a straight line, or else from those of the GPU
        that is most like it; from the formulas where there is one or none, corrected by how far they were off at the one. What others have
        kept on disk plays no part: a plan is the same whatever the cache holds.
        """
        step = self._step(program, gpu, stage)
        size = step.micro_batch_size
        known = self._asked(step.family)
        if size in known:
            return known[size].device_used
        known = known or self._of_likest_card(step)
        guessed = self._extrapolated(step) if self.is_slow else None
        if guessed is None:
            guessed = self._by_lines(step, known)
        if guessed is None:
            guessed = self._in_proportion(step) if self.is_slow else self._by_formula(program, gpu, stage, known)
        return None if guessed is None else MemoryRange(low_bytes=guessed, expected_bytes=guessed, high_bytes=guessed)

    def _by_lines(self, step: Step, known: Mapping[int, Rehearsal]) -> int | None:
        """
        Return the bytes that *step* takes by the straight lines through the sizes that are *known*; None where they tell nothing.

        The peak is on one line, and the peak of each phase of the steps on one of its own: that which is highest in small steps, as the
        optimizer's, is seldom that of a large one. What comes before the steps does not grow with the batch, as weights that are loaded and
        quantized: where the peak is there, the phases alone count.
        """
        size = step.micro_batch_size
        line = line_through(known, size)
        if line is None:
            return None
        ends = [known[end] for end in line]
        of_all = PeakLine({each: known[each].device_used.high_bytes for each in known}).at(size)
        if any(self._estimates.get(self._key(step, each)) is not known[each] for each in line):
            return of_all
        peak = peak_of_phases(line, *(self._phase_peaks(step, each) for each in line), size=size)
        if peak is None:
            return of_all
        nearest = min(ends, key=lambda end: abs(end.peak_allocated_bytes - peak))
        of_phases = nearest.device_used.high_bytes - nearest.peak_allocated_bytes + peak
        is_before_steps = any(end.peak_phase == SET_UP for end in ends)
        return of_phases if is_before_steps or of_all is None else max(of_all, of_phases)

    def _phase_peaks(self, step: Step, size: int) -> dict[tuple[int, str], int]:
        """Return the peak of each phase of *step* with another *size*, which was run; none where its trace is not at hand."""
        other = _of_size(step, size)

        def work() -> dict[str, Any] | None:
            trace = self._kept_trace(other)
            return None if trace is None else {"phases": [[*phase, peak_bytes] for phase, peak_bytes in trace.peaks_of_phases().items()]}

        found = self._answer(other, "the peaks of its phases", work)
        return {} if found is None else {(number, phase): peak_bytes for number, phase, peak_bytes in found["phases"]}

    def _by_formula(self, program: Program, gpu: GpuSpec, stage: Stage | None, known: Mapping[int, Rehearsal]) -> int | None:
        """Return the bytes that formulas say, corrected by how far they are off at the nearest of *known*; None where there are none."""
        runner = self._runner(program)
        formula = runner.by_formula(program, gpu, stage)
        if not known or formula is None:
            return None if formula is None else formula.high_bytes
        nearest = _by_distance(known, program.training.micro_batch_size)[0]
        there = runner.by_formula(program.with_training(micro_batch_size=nearest), gpu, stage)
        return None if there is None else formula.high_bytes * known[nearest].device_used.high_bytes // there.high_bytes

    def _extrapolated(self, step: Step) -> int | None:
        """
        Return the bytes that *step* would take if every allocation grew in a straight line from size to size.

        Through the nearest size that was run, and the next nearest that asks in the same sequence; None where there is none. What is
        reserved then, the simulated allocator says: the peak of a small size is another moment's than that of a large one.
        """
        runs = self._asked(step.family)
        if len(runs) < 2:
            return None
        nearest, *others = _by_distance(runs, step.micro_batch_size)
        settings = step.program.training.allocator_settings

        def work() -> dict[str, Any] | None:
            own = self._kept_requests_of(step, nearest)
            if own is None:
                return None
            for alike in others:
                theirs = self._kept_requests_of(step, alike)
                if theirs is not None and theirs.sequence == own.sequence:
                    share = (step.micro_batch_size - nearest) / (alike - nearest)
                    peak = extrapolated_peak(own, theirs, share=share, settings=settings)
                    return {"peak_reserved_bytes": max(0, peak)}
            return {"peak_reserved_bytes": None}

        question = f"the peak of {step.micro_batch_size} by those of {', '.join(map(str, sorted(runs)))} with {settings!r}"
        found = self._answer(_of_size(step, nearest), question, work)
        peak_bytes = None if found is None else found["peak_reserved_bytes"]
        return None if peak_bytes is None else runs[nearest].device_used.high_bytes + peak_bytes - runs[nearest].peak_reserved_bytes

    def _in_proportion(self, step: Step) -> int | None:
        """
        Return about what *step* takes by the nearest size that was run alone; None where nothing was.

        At most all grows with the batch but the model states and the context, at least the activations and the batch itself; the slack of
        a small size can be a hundred times either, so the geometric mean is taken. The next size is tried there, and the line through both
        tells where the end is.
        """
        if not (known := self._asked(step.family)):
            return None
        nearest = _by_distance(known, step.micro_batch_size)[0]
        parts, used_bytes = known[nearest].breakdown, known[nearest].device_used.high_bytes
        states_bytes = parts.parameters_bytes + parts.gradients_bytes + parts.optimizer_state_bytes
        most_bytes = max(0, parts.reserved_bytes - states_bytes)
        least_bytes = parts.activations_bytes + parts.batch_data_bytes
        growing_bytes = isqrt(most_bytes * least_bytes) or most_bytes
        return used_bytes + growing_bytes * (step.micro_batch_size - nearest) // nearest

    def _asked(self, family: str) -> dict[int, Rehearsal]:
        """Return what this process has asked for of *family*, by size."""
        asked = {key: rehearsal for key, rehearsal in self._estimates.items() if key.family == family}
        tried = {key.size: rehearsal for key, rehearsal in asked.items() if key.is_tried and self._is_searching}
        return tried | {key.size: rehearsal for key, rehearsal in asked.items() if not key.is_tried}

    def _of_likest_card(self, step: Step) -> dict[int, Rehearsal]:
        """Return what was run of *step* here on the GPU with the nearest capability and number of multiprocessors, by size."""
        cards = self._kinds.get(step.likeness, {})
        if not cards:
            return {}
        likest = min(cards, key=lambda family: _unlikeness(cards[family], step.gpu))
        return self._asked(likest)

    def replay_with_capacity(
        self, program: Program, gpu: GpuSpec, stage: Stage | None, *, capacity_bytes: int, settings: str | None = None
    ) -> Replayed:
        """
        Return how that step goes where the allocator can have *capacity_bytes*, with its own settings or others.

        By the simulated allocator, from one rehearsal of the step.
        """
        step = self._step(program, gpu, stage)
        text = program.training.allocator_settings if settings is None else settings

        def work() -> dict[str, Any]:
            from memplan.allocator.config import read_settings  # noqa: PLC0415
            from memplan.allocator.replay import replay  # noqa: PLC0415
            from memplan.allocator.simulator import CachingAllocator, Card  # noqa: PLC0415

            allocator = CachingAllocator(Card(gpu.total_memory_bytes, capacity_bytes), read_settings(text))
            return asdict(replay(self._requests_of(step), allocator))

        found = self._answer(step, f"{capacity_bytes} of {gpu.total_memory_bytes} with {text!r}", work)
        assert found is not None
        return Replayed(**found)

    def _answer(self, step: Step, question: str, work: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """
        Return what *work* finds out of the rehearsal of *step*, as the answer to *question*: it is kept beside that, so that a plan for
        which nothing has changed reads no trace. None, where what it needs is not at hand, is not kept.
        """
        place = self._place(step)
        answers = self._answers.setdefault(self._key(step), {})
        if question not in answers and self._cache and place:
            answers |= self._cache.get_answers(*place)
        if question not in answers:
            found = work()
            if found is None:
                return None
            answers[question] = found
            if self._cache and place:
                self._cache.put_answers(*place, answers)
        return answers[question]

    def interpolate(self, of_value: StepOfValue, values: Sequence[int], gpu: GpuSpec) -> list[Interpolated]:
        """
        Return what the step takes that *of_value* makes of each of *values*: rehearsed, or worked out between rehearsed ones.

        The two ends are rehearsed. Worked out is the reserved peak; what is added to it is as at the low end.
        """
        from memplan.allocator.config import read_settings  # noqa: PLC0415
        from memplan.allocator.replay import replay  # noqa: PLC0415
        from memplan.allocator.simulator import CachingAllocator, Card  # noqa: PLC0415

        sweep = Sweep(lambda value: self.requests(*_with_gpu(of_value(value), gpu)))
        low, high = min(values), max(values)
        for value in values:
            step = self._step(*_with_gpu(of_value(value), gpu))
            if step.micro_batch_size in self._asked(step.family):
                sweep.ask(value)
        ends = {value: self(*_with_gpu(of_value(value), gpu)) for value in (low, high)}
        found = []
        for value in values:
            requests, sizes = sweep.at(value, low=low, high=high)
            if value in sweep.rehearsed:
                found.append(Interpolated(self(*_with_gpu(of_value(value), gpu)).device_used, "rehearsed"))
                continue
            allocator = CachingAllocator(
                Card(UNLIMITED_BYTES, UNLIMITED_BYTES), read_settings(of_value(value)[0].training.allocator_settings)
            )
            reserved_bytes = replay(requests, allocator, sizes=sizes).peak_reserved_bytes
            found.append(Interpolated(_with_reserved(ends[low], reserved_bytes).device_used, "worked out"))
        return found

    def another(self) -> RehearsedEstimator | None:
        """Return one with processes of its own, and the same cache; both are busy then, and begin nothing else."""
        if self._cache is None:
            return None
        self._runs_beside = False
        other = RehearsedEstimator(self._cache, self._on_rehearsal, is_slow=self.is_slow)
        other._runs_beside = False
        return other

    def asks_alike(self, program: Program, gpu: GpuSpec, other: GpuSpec, stage: Stage | None) -> bool:
        """
        Say whether the step asks the same of memory on *gpu* as on *other*: the same requests of the allocator, in the same sequence and to
        the byte, and as much beside it. It is run on both; on *gpu* no longer than until each kind of its steps has been.
        """
        step, theirs = self._step(program, gpu, stage), self._step(program, other, stage)
        if step.family == theirs.family:
            return True
        whole = self._rehearsal(theirs)
        found = self._answer(theirs, f"asked alike by {step.family}", lambda: {"is_so": self._begins_alike(step, theirs, whole)})
        return found is not None and bool(found["is_so"])

    def _begins_alike(self, step: Step, theirs: Step, whole: Rehearsal) -> bool:
        runner = self._runner(step.program)
        is_known = self._key(step) in self._estimates
        begin = None if is_known else runner.beginning_of(step)
        if begin is not None and self._on_rehearsal is not None:
            self._on_rehearsal(step)
        beginning = None if begin is None else begin()
        own = self._rehearsal(step) if beginning is None else beginning
        asked = self._requests_of(step) if own.trace is None else own.requests
        known = self._requests_of(theirs)
        is_alike = known.begins_with(asked) and (beginning is not None or asked.begins_with(known))
        return is_alike and _beside(own, step.gpu) == _beside(whole, theirs.gpu)

    def with_allocator_settings(self, settings: str) -> Estimator:
        """Return the estimator of the same steps under other allocator *settings*."""
        return _WithSettings(self, settings)


def _of_size(step: Step, size: int) -> Step:
    """Return *step* with another *size*."""
    return step._replace(program=step.program.with_training(micro_batch_size=size), micro_batch_size=size)


def _by_distance(sizes: Iterable[int], size: int) -> list[int]:
    """Return *sizes*, the nearest to *size* first."""
    return sorted(sizes, key=lambda other: (abs(other - size), other))


def _beside(rehearsal: Rehearsal, gpu: GpuSpec) -> tuple[int, int]:
    """Return what a step takes beside PyTorch's allocator and the CUDA context of *gpu*, which it ran on: as expected, and at most."""
    used, context = rehearsal.device_used, usual_context(gpu)
    return (
        used.expected_bytes - context.expected_bytes - rehearsal.peak_reserved_bytes,
        used.high_bytes - context.high_bytes - rehearsal.peak_reserved_bytes,
    )


def _runner_of(program: Program, cache: Path | None) -> StepRunner:
    """Return what runs steps of that kind of program; loaded when it is asked for."""
    if isinstance(program, Workload):
        from memplan.estimators.workload_steps import WorkloadSteps  # noqa: PLC0415

        return WorkloadSteps()
    from memplan.estimators.program_steps import ProgramSteps  # noqa: PLC0415

    return ProgramSteps(cache)


def _with_gpu(step: tuple[Program, Stage | None], gpu: GpuSpec) -> tuple[Program, GpuSpec, Stage | None]:
    program, stage = step
    return program, gpu, stage


class _WithSettings(Estimator):
    """The same steps under other allocator settings: each rehearsed once, and its requests put to an allocator with those."""

    method = "rehearsed"

    def __init__(self, rehearsals: RehearsedEstimator, settings: str) -> None:
        self._rehearsals = rehearsals
        self._settings = settings

    def __call__(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        """Return the memory of the step with these settings."""
        usual = self._rehearsals(program, gpu, stage)
        seen = self._rehearsals.replay_with_capacity(program, gpu, stage, capacity_bytes=UNLIMITED_BYTES, settings=self._settings)
        return _with_reserved(usual, seen.peak_reserved_bytes)

    def quick_estimate(self, program: Program, gpu: GpuSpec, stage: Stage | None) -> MemoryRange | None:
        """Return about what it takes: what it takes without these settings."""
        return self._rehearsals.quick_estimate(program, gpu, stage)


def _with_reserved(estimate: MemoryEstimate, reserved_bytes: int) -> MemoryEstimate:
    """Return *estimate* with another reserved peak: what is more or less is slack."""
    more = reserved_bytes - estimate.peak_reserved_bytes
    used, slack = estimate.device_used, max(0, estimate.breakdown.allocator_slack_bytes + more)
    return estimate.model_copy(
        update={
            "peak_reserved_bytes": reserved_bytes,
            "breakdown": estimate.breakdown.model_copy(update={"allocator_slack_bytes": slack}),
            "device_used": MemoryRange(
                low_bytes=used.low_bytes + more, expected_bytes=used.expected_bytes + more, high_bytes=used.high_bytes + more
            ),
        }
    )


def _unlikeness(gpu: GpuSpec, other: GpuSpec) -> tuple[int, int]:
    """Return how far two kinds of GPU are apart: by capability, then by multiprocessors."""
    (major, minor), (other_major, other_minor) = (kind.compute_capability or (8, 0) for kind in (gpu, other))
    return abs(10 * major + minor - 10 * other_major - other_minor), abs((gpu.multiprocessors or 0) - (other.multiprocessors or 0))

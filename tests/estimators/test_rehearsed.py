"""Plans whose every size was run, and kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.analysis.make_plan import make_plan
from memplan.errors import NotRehearsedError
from memplan.estimators import beside, workload_steps
from memplan.estimators.analytic.estimate import estimate
from memplan.estimators.base import Estimator
from memplan.estimators.rehearsal_cache import RehearsalCache
from memplan.estimators.rehearsed import RehearsedEstimator
from memplan.estimators.steps import Step
from memplan.hardware.catalog import find_gpu, gpu_of_size
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import TorchBuild
from memplan.memory.estimate import MemoryEstimate, MemoryRange
from memplan.traces.requests import requests_of
from memplan.units import GIB, MIB, parse_size
from memplan.workload.model import KERNEL_PACKAGES, ContrastiveEncoderModel, HuggingFaceModel
from memplan.workload.optimizer import OPTIMIZER_PACKAGES, Optimizer
from memplan.workload.stage import Stage
from memplan.workload.workload import Workload
from memplan.workload.workload_file import workload_from
from tests.conftest import Run
from tests.standin.conftest import torch_build

__all__ = ["torch_build"]

STEPS = Path(__file__).parents[1] / "child" / "steps.py"
MODEL = {
    "kind": "transformer", "architecture": "decoder", "num_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
    "intermediate_size": 2048, "vocab_size": 16000, "num_positions": 512, "head": "language_model",
}  # fmt: skip


def workload(**training: object) -> Workload:
    """A small decoder that is to see 4096 texts a step."""
    return workload_from(
        {"model": MODEL, "training": {"sequence_length": 256, "precision": "bf16-mixed"} | training}, Path("workload.yaml")
    )


class Told(list[Step]):
    """The rehearsals that were begun."""

    @property
    def sizes(self) -> list[int]:
        """Their micro-batches."""
        return [step.micro_batch_size for step in self]


@pytest.fixture(scope="module")
def shared(torch_build: TorchBuild) -> tuple[RehearsedEstimator, Told]:
    """One estimator for the tests here, so that the same step is run once; and what it was heard to begin."""
    told = Told()
    return RehearsedEstimator(on_rehearsal=told.append), told


@pytest.fixture
def rehearsals(shared: tuple[RehearsedEstimator, Told]) -> RehearsedEstimator:
    """The shared estimator, of which nothing has been heard yet."""
    shared[1].clear()
    return shared[0]


@pytest.fixture
def told(shared: tuple[RehearsedEstimator, Told], rehearsals: RehearsedEstimator) -> Told:
    """What the shared estimator was heard to begin in this test."""
    return shared[1]


def test_a_plan_recommends_what_was_run_and_the_next_size_does_not_fit(rehearsals: RehearsedEstimator, told: Told) -> None:
    """The largest micro-batch within the budget, in a handful of rehearsals: the search begins at the formulas' answer and learns."""
    gpu = find_gpu("t4")
    plan = make_plan(workload(), gpu, rehearsals, fills_gpu=True)

    sizes, size = told.sizes, plan.after.training.micro_batch_size
    fits = [plan.budget.fits(rehearsals(workload(micro_batch_size=tried), gpu, None).device_used) for tried in (size, size + 1)]
    assert plan.fits
    assert fits == [True, False]
    assert plan.stages[0].estimate.method == "rehearsed"
    assert size in sizes
    assert len(sizes) <= 12


def test_accumulation_is_run_as_two_micro_batches(rehearsals: RehearsedEstimator, told: Told) -> None:
    """All that follow are like the second; the same step is run once."""
    few, many = (rehearsals(workload(gradient_accumulation_steps=count, micro_batch_size=3), find_gpu("t4"), None) for count in (2, 64))

    assert few == many
    assert told.sizes == [3]


def test_a_size_that_no_card_has_is_measured_all_the_same(rehearsals: RehearsedEstimator) -> None:
    """The GPU has unlimited memory, so that there is a peak to compare; one of which only the size is known gets a kind."""
    size = gpu_of_size(parse_size("2GiB"))

    seen = rehearsals(workload(micro_batch_size=256), size, None)

    assert seen.fits
    assert seen.peak_reserved_bytes > 2 * GIB


def test_the_formulas_are_near(rehearsals: RehearsedEstimator) -> None:
    """Peak allocated, by formula and by rehearsal, on two GPUs: within 5%."""
    for name in ("t4", "a100-80"):
        formula, seen = (by(workload(micro_batch_size=32), find_gpu(name), None) for by in (estimate, rehearsals))
        assert formula.peak_allocated_bytes == pytest.approx(seen.peak_allocated_bytes, rel=0.05)


def test_what_was_run_is_kept_for_the_next_command(torch_build: TorchBuild, tmp_path: Path) -> None:
    """The second is told of no rehearsal, and says the same, with the same trace; another GPU's kind is another rehearsal."""
    told: list[str] = []
    small, seen = workload(micro_batch_size=2), []
    for gpu in (find_gpu("t4"), find_gpu("t4"), find_gpu("a100-40")):
        rehearsals = RehearsedEstimator(RehearsalCache(tmp_path), on_rehearsal=lambda step: told.append(step.gpu.name))
        seen.append((rehearsals(small, gpu, None), rehearsals.trace(small, gpu, None)))

    assert told == ["Tesla T4", "NVIDIA A100-SXM4-40GB"]
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]


def test_two_cards_of_one_kind_share_a_rehearsal_and_keep_their_names(rehearsals: RehearsedEstimator, told: Told) -> None:
    """An A100 with 40 GB and one with 80 have the same multiprocessors."""
    names = [rehearsals(workload(micro_batch_size=5), find_gpu(name), None).gpu_name for name in ("a100-40", "a100-80")]

    assert names == ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"]
    assert told.sizes == [5]


@pytest.mark.parametrize("variable", ["CUBLAS_WORKSPACE_CONFIG", "PYTORCH_NO_CUDA_MEMORY_CACHING", "MEMPLAN_ASK_CUDNN"])
def test_another_environment_is_another_rehearsal(
    torch_build: TorchBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """What PyTorch and CUDA read from the environment is part of what a rehearsal depends on."""
    told: list[int] = []
    kept = RehearsalCache(tmp_path)
    RehearsedEstimator(kept)(workload(micro_batch_size=1), find_gpu("t4"), None)
    workload_steps._family.cache_clear()
    monkeypatch.setenv(variable, ":16:8" if variable.startswith("CUBLAS") else "0")

    RehearsedEstimator(kept, on_rehearsal=lambda step: told.append(step.micro_batch_size))(
        workload(micro_batch_size=1), find_gpu("t4"), None
    )

    workload_steps._family.cache_clear()
    assert told == [1]


def test_files_that_are_broken_are_made_anew(torch_build: TorchBuild, tmp_path: Path) -> None:
    """Cut off, or somebody else's: as if they were not there."""
    small, gpu = workload(micro_batch_size=1), find_gpu("t4")
    first = RehearsedEstimator(RehearsalCache(tmp_path))
    expected, trace = first(small, gpu, None), first.trace(small, gpu, None)
    for path in tmp_path.rglob("1/*"):
        path.write_bytes(path.read_bytes()[:-40])

    again = RehearsedEstimator(RehearsalCache(tmp_path))

    assert requests_of(again.trace(small, gpu, None)).sequence == requests_of(trace).sequence
    assert again(small, gpu, None) == expected


def test_a_cache_that_cannot_be_written_is_done_without(torch_build: TorchBuild, tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "rehearsals").write_text("")
    rehearsals = RehearsedEstimator(RehearsalCache(tmp_path))

    assert rehearsals(workload(micro_batch_size=1), find_gpu("t4"), None).fits
    assert len(rehearsals.trace(workload(micro_batch_size=1), find_gpu("t4"), None).actions) > 1000


def test_what_does_not_run_says_so(torch_build: TorchBuild) -> None:
    """A Hugging Face model that transformers does not know: the formulas may tell of it, a rehearsal cannot."""
    config = json.dumps({"model_type": "no_such_model", "architectures": ["NoSuchModel"]})
    model = workload().model.model_copy(update={"huggingface_config": config})

    with pytest.raises(NotRehearsedError, match="does not run"):
        RehearsedEstimator()(workload().model_copy(update={"model": model}), find_gpu("t4"), None)


def test_a_step_is_tight_where_it_runs_by_giving_cached_memory_back(rehearsals: RehearsedEstimator) -> None:
    """Just below its peak it goes on with a retry; the real allocator on such a GPU says the same."""
    gpu, step = find_gpu("t4"), workload(micro_batch_size=32)
    peak = rehearsals(step, gpu, None).peak_reserved_bytes
    squeezed = [rehearsals.replay_with_capacity(step, gpu, None, capacity_bytes=capacity) for capacity in (peak, peak - 4 * MIB, peak // 2)]

    assert [(seen.fits, seen.gave_back) for seen in squeezed] == [(True, False), (True, True), (False, True)]


def quick_bytes(rehearsals: RehearsedEstimator, size: int, card: str) -> int:
    """The quick estimate of a micro-batch."""
    quick = rehearsals.quick_estimate(workload(micro_batch_size=size), find_gpu(card), None)
    assert quick is not None
    return quick.high_bytes


def test_a_quick_estimate_learns_from_what_was_run(torch_build: TorchBuild) -> None:
    """From the formulas' figure to the line through the two nearest sizes: within a percent; another GPU begins with what this one had."""
    gpu, rehearsals = find_gpu("rtx4090"), RehearsedEstimator()
    formula = quick_bytes(rehearsals, 48, "rtx4090")
    for size in (32, 64):
        rehearsals(workload(micro_batch_size=size), gpu, None)
    guess = quick_bytes(rehearsals, 48, "rtx4090")

    seen = rehearsals(workload(micro_batch_size=48), gpu, None).device_used.high_bytes
    assert formula == estimate(workload(micro_batch_size=48), gpu, None).device_used.high_bytes
    assert guess == pytest.approx(seen, rel=0.01)
    assert quick_bytes(rehearsals, 48, "rtx4090") == seen
    assert quick_bytes(rehearsals, 48, "l4") == pytest.approx(seen, rel=0.05)


def test_one_run_of_a_program_says_where_to_try_the_next(torch_build: TorchBuild) -> None:
    """With the batch grows something between its activations and all but the model states."""
    gpu, rehearsals = find_gpu("rtx4090"), RehearsedEstimator(is_slow=True)
    seen = rehearsals(workload(micro_batch_size=8), gpu, None)
    parts = seen.breakdown
    states = parts.parameters_bytes + parts.gradients_bytes + parts.optimizer_state_bytes

    guesses = [quick_bytes(rehearsals, size, "rtx4090") - quick_bytes(rehearsals, 8, "rtx4090") for size in (16, 24)]

    assert parts.activations_bytes + parts.batch_data_bytes < guesses[0] < seen.peak_reserved_bytes - states
    assert guesses[1] == 2 * guesses[0]


def test_two_runs_of_a_program_that_ask_in_one_sequence_tell_of_others_to_the_byte(torch_build: TorchBuild) -> None:
    """Each allocation on the straight line through both, put to the simulated allocator; a run of another sequence is passed over."""
    gpu, rehearsals = find_gpu("rtx4090"), RehearsedEstimator(is_slow=True)
    for size in (1, 16, 24):
        rehearsals(workload(micro_batch_size=size), gpu, None)
    guess = quick_bytes(rehearsals, 40, "rtx4090")

    assert (
        rehearsals.requests(workload(micro_batch_size=1), gpu, None).sequence
        != rehearsals.requests(workload(micro_batch_size=16), gpu, None).sequence
    )
    assert guess == rehearsals(workload(micro_batch_size=40), gpu, None).device_used.high_bytes


class Bumpy(Estimator):
    """A micro-batch takes what *used_gib* says, and a straight line is thought of until it is asked."""

    method = "analytic"

    def __init__(self, used_gib: Callable[[int], float]) -> None:
        self.used_gib = used_gib

    def __call__(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryEstimate:
        used = taking(self.used_gib(workload.training.micro_batch_size))
        return estimate(workload, gpu, stage).model_copy(update={"device_used": used})

    def quick_estimate(self, workload: Workload, gpu: GpuSpec, stage: Stage | None) -> MemoryRange:
        return taking(workload.training.micro_batch_size / 2)


def taking(gib: float) -> MemoryRange:
    return MemoryRange(low_bytes=int(gib * GIB), expected_bytes=int(gib * GIB), high_bytes=int(gib * GIB))


def test_sizes_beyond_the_first_that_does_not_fit_are_tried(built_in: Workload) -> None:
    """33 to 36 do not fit and 37 to 39 do: for a target of 74 the plan is 37, and what it says of 39 and 40 is true."""
    card = gpu_of_size(parse_size("21GiB"))
    estimator = Bumpy(lambda size: 20.5 if 33 <= size <= 36 else size / 2 if size < 33 else 19 if size < 40 else 21)

    plan = make_plan(built_in, card, estimator, target=74)

    assert (plan.after.training.micro_batch_size, plan.after.training.gradient_accumulation_steps) == (37, 2)
    assert "39 would fit, 40 would be" in " ".join(plan.reasons)


def test_a_smaller_size_that_does_not_fit_is_not_recommended(built_in: Workload) -> None:
    """Up to 20 fits, but for 16, which the rule would take for 64: it takes 8."""
    card = gpu_of_size(parse_size("21GiB"))

    plan = make_plan(built_in, card, Bumpy(lambda size: 20.5 if size in (16, 21) else 10 if size < 21 else 30), target=64)

    assert plan.after.training.micro_batch_size == 8


@pytest.mark.heavy
def test_a_plan_is_the_same_whatever_was_kept(torch_build: TorchBuild, tmp_path: Path) -> None:
    """One with an empty cache, and one with a cache that holds other sizes: the same plan, word for word."""
    gpu, kept = find_gpu("t4"), RehearsalCache(tmp_path)
    for size in (7, 50, 51, 300):
        RehearsedEstimator(kept)(workload(micro_batch_size=size, gradient_accumulation_steps=2), gpu, None)

    plans = [make_plan(workload(), gpu, RehearsedEstimator(cache), target=500) for cache in (None, kept, kept)]

    assert plans[0] == plans[1] == plans[2]


def test_a_missing_package_is_named_at_once(torch_build: TorchBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process begins, and one sentence says why."""
    monkeypatch.setitem(OPTIMIZER_PACKAGES, "adafactor", "a_package_of_nobody")
    step = workload().model_copy(update={"optimizer": Optimizer(name="adafactor")})

    with pytest.raises(NotRehearsedError, match="a_package_of_nobody, which is not installed"):
        RehearsedEstimator()(step, find_gpu("t4"), None)


def test_a_model_of_transformers_needs_transformers(torch_build: TorchBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is said at once, with what to install: there are no formulas to fall back on."""
    monkeypatch.setattr(workload_steps, "MODEL_PACKAGE", "a_package_of_nobody")
    model = HuggingFaceModel(huggingface_config='{"model_type": "llama"}')

    with pytest.raises(NotRehearsedError, match="built by a_package_of_nobody, which is not installed") as refused:
        RehearsedEstimator()(workload().model_copy(update={"model": model}), find_gpu("t4"), None)

    assert refused.value.hint == "`pip install a_package_of_nobody`"


def test_kernels_need_their_package(torch_build: TorchBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a workload asks for by itself."""
    monkeypatch.setitem(KERNEL_PACKAGES, "liger", "a_package_of_nobody")
    model = HuggingFaceModel(huggingface_config='{"model_type": "llama"}', kernels="liger")

    with pytest.raises(NotRehearsedError, match="kernels are those of a-package-of-nobody, which is not installed"):
        RehearsedEstimator()(workload().model_copy(update={"model": model}), find_gpu("t4"), None)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_contrastive_encoder_in_a_short_type_runs(torch_build: TorchBuild, built_in: Workload, precision: str) -> None:
    """Means of tokens are fp32, the weights that they meet are not."""
    assert isinstance(built_in.model, ContrastiveEncoderModel)
    encoder = built_in.model.encoder.model_copy(update={"num_layers": 1})
    small = built_in.model_copy(update={"model": built_in.model.model_copy(update={"encoder": encoder})})
    step = small.with_training(precision=precision, micro_batch_size=1, sequence_length=64)

    assert RehearsedEstimator()(step, find_gpu("a100-40"), step.stages[0]).fits


@pytest.fixture
def small_workload(tmp_path: Path) -> Path:
    file = tmp_path / "workload.json"
    file.write_text(json.dumps({"model": MODEL, "training": {"sequence_length": 256}}))
    return file


@pytest.mark.heavy
def test_auto_rehearses_where_it_can(run_memplan: Run, torch_build: TorchBuild, tmp_path: Path, small_workload: Path) -> None:
    """It is the default; the second plan comes from what was kept."""
    arguments = ["--gpu", "t4", "--config-path", small_workload, "--target-effective-batch", "64", "--format", "json"]
    first, second = (run_memplan(*arguments, MEMPLAN_METHOD="auto", XDG_CACHE_HOME=str(tmp_path / "cache")) for _ in range(2))

    plan = json.loads(first.stdout)
    assert (plan["method"], plan["fits"]) == ("rehearsed", True)
    assert first.stdout == second.stdout


def test_auto_takes_the_formulas_elsewhere_and_says_why(run_memplan: Run, tmp_path: Path, small_workload: Path) -> None:
    """Without a compiler there is no simulated GPU; without PyTorch for CUDA no rehearsal."""
    arguments = ["--gpu", "t4", "--config-path", small_workload]
    result = run_memplan(*arguments, MEMPLAN_METHOD="auto", XDG_CACHE_HOME=str(tmp_path / "cache"), PATH="", CC="")

    assert result.returncode == 0, result.stderr
    assert "analytic" in result.stdout
    assert "estimated by formulas, since it could not be rehearsed: no C compiler" in " ".join(result.stdout.split())


@pytest.mark.heavy
def test_the_command_says_how_it_found_out(run_memplan: Run, torch_build: TorchBuild, small_workload: Path) -> None:
    """--profile on a machine without a GPU rehearses, and says so; --method analytic contradicts it."""
    arguments = ["--gpu", "t4", "--config-path", small_workload, "--profile", "--target-effective-batch", "64"]

    result, answer, wrong = (run_memplan(*arguments, *more) for more in ([], ["--format", "json"], ["--method", "analytic"]))

    assert "rehearsed: real PyTorch on a simulated GPU" in result.stdout
    assert "the step was rehearsed" in result.stdout
    plan = json.loads(answer.stdout)
    assert (plan["method"], plan["fits"], plan["effective_batch_size"]) == ("rehearsed", True, 64)
    assert wrong.returncode == 2


def test_what_is_expected_is_run_beside_and_is_what_it_is_in_its_turn(
    rehearsals: RehearsedEstimator, gpu_in_no_use: GpuSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another process, to the byte; its trace is there too."""
    monkeypatch.setattr(beside, "num_processors", lambda: 2)
    program = workload(micro_batch_size=3)
    in_its_turn, trace = rehearsals(program, gpu_in_no_use, None), rehearsals.trace(program, gpu_in_no_use, None)
    told = Told()
    expecting = RehearsedEstimator(on_rehearsal=told.append)
    expecting.expect(program, gpu_in_no_use, [None])
    time.sleep(0.5)  # it is begun
    monkeypatch.setattr(workload_steps, "_rehearser", not_here)

    assert expecting(program, gpu_in_no_use, None) == in_its_turn
    assert [(step.micro_batch_size, step.num_likely) for step in told] == [(3, 0)]
    assert sorted(expecting.trace(program, gpu_in_no_use, None).sizes) == sorted(trace.sizes)


def not_here() -> None:
    """Stand in for the process that rehearses, where nothing is to be run by this one."""
    raise AssertionError("it is run in this process")


@pytest.fixture
def gpu_in_no_use() -> GpuSpec:
    """A kind of GPU that no other test here asks about."""
    return find_gpu("a100-40")


def test_how_many_more_are_likely_is_told_until_they_are_asked_for(
    torch_build: TorchBuild, gpu_in_no_use: GpuSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was said to be likely, and has not been run; after some others it is likely no more."""
    monkeypatch.setattr(beside, "num_processors", lambda: 1)
    told = Told()
    rehearsals = RehearsedEstimator(on_rehearsal=told.append)
    for size in (2, 3):
        rehearsals.expect(workload(micro_batch_size=size), gpu_in_no_use, [None])
    for size in (1, 3, 4, 5, 6):
        rehearsals(workload(micro_batch_size=size), gpu_in_no_use, None)

    assert [(step.micro_batch_size, step.num_likely) for step in told] == [(1, 2), (3, 1), (4, 1), (5, 1), (6, 0)]

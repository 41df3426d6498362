"""Steps and functions that run out of memory run again with a smaller micro-batch: in this process, and on the simulated GPU."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memplan
from memplan.errors import UsageError
from memplan.hardware.torch_install import TorchBuild
from tests.hardware.nvml_driver import GIB, Driver
from tests.standin.conftest import torch_build
from tests.standin.machine import machine
from tests.training.processes import Train

__all__ = ["torch_build"]


def fits_up_to(largest: int, loss_of: Callable[[Any], Tensor]) -> tuple[Callable[[Any], Tensor], list[int]]:
    """A loss that runs out of memory with more than *largest* samples, after its forward; and the sizes with which it was called."""
    sizes: list[int] = []

    def limited(part: Any) -> Tensor:
        sizes.append(len(part[0] if isinstance(part, tuple) else part["x"] if isinstance(part, Mapping) else part))
        loss = loss_of(part)
        if sizes[-1] > largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    return limited, sizes


def still(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that changes nothing, so that gradients can be compared."""
    return torch.optim.SGD(list(parameters), lr=0.0)


def gradient_of(loss: Tensor, parameter: Tensor) -> Tensor:
    return torch.autograd.grad(loss, parameter)[0]


@pytest.mark.heavy
def test_a_step_that_runs_out_of_memory_goes_on_smaller(train: Train, torch_build: TorchBuild, driver: Driver) -> None:
    """A GPU of which others leave 1.5 GiB; the samples of each step stay as many, and the second step begins with what fitted."""
    busy = {0: 15_835_660_288 - 3 * GIB // 2}

    told, said = train(machine(torch_build, driver, "t4", busy=busy), "retries", 0, 100_000)

    first = next(number for number in range(1, len(told["parts"])) if told["parts"][number] == told["micro"])
    assert told["retries"] >= 2
    assert sum(told["parts"][first:]) == 200_000
    assert max(told["parts"][first:]) == told["micro"] == -(-100_000 // 2 ** told["retries"])
    assert told["shape"] == []
    assert told["peak"] <= 3 * GIB // 2
    assert f"continuing with {told['micro']}" in said


@pytest.mark.heavy
def test_where_one_sample_does_not_fit_the_error_is_torchs_own(train: Train, torch_build: TorchBuild, driver: Driver) -> None:
    """After 4, 2 and 1."""
    told, _ = train(machine(torch_build, driver, "t4"), "one_does_not_fit")

    assert told == {"error": "OutOfMemoryError", "retries": 2}


def test_the_gradient_is_that_of_the_whole_batch() -> None:
    """Five samples in parts of two: 2, 2 and 1, weighed by their share; a tuple keeps its shape."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    batch = (torch.randn(5, 3), torch.randn(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_of(part):
        return torch.nn.functional.mse_loss(model(part[0]), part[1])

    with memplan.fits_or_smaller(2) as fitting:
        loss = fitting.step(loss_of, batch, optimizer)
    seen = model.weight.grad.clone()
    model.zero_grad()
    whole = loss_of(batch)
    whole.backward()

    assert torch.allclose(loss, whole)
    assert torch.allclose(seen, model.weight.grad)


def test_a_micro_batch_below_one_makes_no_sense() -> None:
    """It is said before anything runs."""
    with pytest.raises(UsageError, match="micro_batch_size=0 is not valid"), memplan.fits_or_smaller(0):
        pass


def test_a_batch_without_samples_is_said() -> None:
    """Text alone has no samples to split."""
    with memplan.fits_or_smaller() as fitting, pytest.raises(UsageError, match="holds no tensor"):
        fitting.step(lambda part: part, ["text"], torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize("message", ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"])
def test_what_cudas_libraries_raise_for_want_of_memory_counts_too(message: str) -> None:
    """They are plain RuntimeErrors; any other is the program's own, and is not tried again. With two optimizers."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=0.0) for parameter in parameters]
    calls = []

    def loss_of(part):
        calls.append(len(part))
        if len(calls) == 2:
            raise RuntimeError(message)
        return part.mean() * parameters[0].sum() * parameters[1].sum()

    def fails(part):
        raise RuntimeError(f"of the program, with {len(part)}")

    with memplan.fits_or_smaller(4) as fitting:
        fitting.step(loss_of, torch.ones(8, 1), optimizers)
        with pytest.raises(RuntimeError, match="of the program"):
            fitting.step(fails, torch.ones(8, 1), optimizers)

    assert calls == [4, 4, 2, 2, 2, 2]
    assert (fitting.micro_batch_size, fitting.num_retries) == (2, 1)


def test_a_scaler_unscales_what_all_parts_have_made() -> None:
    """The parameter moves as without one: by the gradient 3.5, at a rate of 0.1."""
    parameter = nn.Parameter(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    loss_of, sizes = fits_up_to(4, lambda part: (part * parameter).mean())

    loss = memplan.fits_or_smaller().step(loss_of, torch.arange(8.0), torch.optim.SGD([parameter], lr=0.1), scaler)

    assert sizes == [8, 4, 4]
    assert loss.item() == pytest.approx(3.5)
    assert parameter.item() == pytest.approx(1 - 0.35)
    assert scaler.get_scale() == 16.0


def test_gradients_of_a_failed_try_are_dropped() -> None:
    """Those of both optimizers: what stays is the gradient of the whole batch."""
    parameter = torch.nn.Parameter(torch.ones(1))
    calls = []

    def loss_of(part):
        calls.append(len(part))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (part * parameter).mean()

    with memplan.fits_or_smaller(4) as fitting:
        fitting.step(loss_of, torch.arange(8.0), torch.optim.SGD([parameter], lr=0.0))

    assert parameter.grad is not None
    assert parameter.grad.item() == pytest.approx(3.5)


# the batch


class Records(Mapping[str, Any]):
    """A user's own batch over an inner dict, which a shallow copy shares."""

    def __init__(self, inner: dict[str, Any]) -> None:
        self.inner = inner

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __setitem__(self, key: str, value: Any) -> None:
        self.inner[key] = value


@dataclasses.dataclass
class Example:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("make", [dict, Records, lambda inner: Example(**inner)])
def test_a_batch_of_any_type_is_the_same_after_a_split_step(make: Callable[[dict[str, Tensor]], Any]) -> None:
    """A split that wrote to what a copy shares would empty it, and train on the mean of nothing."""
    model = nn.Linear(3, 1)
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    batch = make({"x": x, "y": y})

    def values(part: Any) -> tuple[Tensor, Tensor]:
        return (part.x, part.y) if isinstance(part, Example) else (part["x"], part["y"])

    def loss_of(part: Any) -> Tensor:
        assert type(part) is type(batch)
        return nn.functional.mse_loss(model(values(part)[0]), values(part)[1])

    with memplan.fits_or_smaller(2) as fitting:
        losses = [fitting.step(loss_of, batch, still(model.parameters())) for _ in range(2)]

    assert all(torch.allclose(loss, nn.functional.mse_loss(model(x), y)) for loss in losses)
    assert values(batch)[0] is x
    assert values(batch)[1] is y


def test_a_loss_function_may_pop_from_its_part() -> None:
    """The retry gets the whole batch again."""
    parameter = nn.Parameter(torch.ones(1))
    loss_of, sizes = fits_up_to(2, lambda part: (part["x"] * part.pop("y") * parameter).mean())
    batch = {"x": torch.ones(4), "y": torch.arange(4.0)}

    loss = memplan.fits_or_smaller().step(loss_of, batch, still([parameter]))

    assert sizes == [4, 2, 2]
    assert loss.item() == pytest.approx(1.5)
    assert list(batch) == ["x", "y"]


# what the loss averages over


def tokens_with_ignored() -> dict[str, Tensor]:
    """Three samples with 4, 1 and 2 labels of 4."""
    torch.manual_seed(0)
    labels = torch.randint(0, 5, (3, 4))
    labels[1, 1:] = -100
    labels[2, 2:] = -100
    return {"x": torch.randn(3, 4, 6), "labels": labels}


def token_loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(part["x"]).flatten(0, 1), part["labels"].flatten())


def num_labels(part: dict[str, Tensor]) -> Tensor:
    return (part["labels"] != -100).sum()


@pytest.mark.parametrize("weight_of", [num_labels, lambda part: num_labels(part).item(), lambda part: float(num_labels(part))])
def test_a_loss_over_tokens_gets_the_gradient_of_the_whole_batch(weight_of: Callable[[Any], Any]) -> None:
    """Parts of 4, 1 and 2 labels weigh 4/7, 1/7 and 2/7; weighted by samples they would weigh 1/3 each."""
    model, batch = nn.Linear(6, 5), tokens_with_ignored()
    whole = token_loss(model, batch)
    expected = gradient_of(whole, model.weight)

    loss = memplan.fits_or_smaller(1).step(lambda part: token_loss(model, part), batch, still(model.parameters()), weight_of=weight_of)

    assert torch.allclose(loss, whole)
    assert torch.allclose(model.weight.grad, expected, atol=1e-6)


def test_a_part_of_weight_zero_is_left_out() -> None:
    """Its mean is that of nothing: NaN."""
    model, batch = nn.Linear(6, 5), tokens_with_ignored()
    batch["labels"][1] = -100
    loss_of, sizes = fits_up_to(1, lambda part: token_loss(model, part))
    whole = token_loss(model, batch)

    loss = memplan.fits_or_smaller().step(loss_of, batch, still(model.parameters()), weight_of=num_labels)

    assert sizes == [3, 2, 1, 1]
    assert torch.allclose(loss, whole)
    assert model.weight.grad.isfinite().all()


def test_a_batch_of_weight_zero_changes_nothing() -> None:
    """The optimizer is not stepped, nor is the scaler, which would refuse an optimizer without gradients."""
    model, batch = nn.Linear(6, 5), tokens_with_ignored()
    batch["labels"].fill_(-100)
    before = model.weight.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=1.0)

    loss = memplan.fits_or_smaller(1).step(
        lambda part: token_loss(model, part), batch, optimizer, torch.amp.GradScaler("cpu"), weight_of=num_labels
    )

    assert math.isnan(loss.item())
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("weight", [None, -1, math.nan, math.inf, "many", torch.ones(2)])
def test_a_weight_that_is_not_a_count_is_refused(weight: Any) -> None:
    """Also by the first step, which need not split."""
    model = nn.Linear(6, 5)

    with pytest.raises(UsageError, match="is not a count"):
        memplan.fits_or_smaller().step(
            lambda part: token_loss(model, part), tokens_with_ignored(), still(model.parameters()), weight_of=lambda _: weight
        )


def test_ignored_labels_that_are_unequal_between_parts_need_a_weight() -> None:
    """Of parts of 2 and 1 samples, 5 of 8 and 2 of 4 labels count; the error shows what to write for this batch."""
    model = nn.Linear(6, 5)
    loss_of, sizes = fits_up_to(2, lambda part: token_loss(model, part))

    with pytest.raises(UsageError, match="unequal shares of -100") as caught:
        memplan.fits_or_smaller().step(loss_of, tokens_with_ignored(), still(model.parameters()))

    assert "weight_of=lambda part: (part['labels'] != -100).sum()" in str(caught.value)
    assert sizes == [3]
    assert model.weight.grad is None


def test_ignored_labels_in_equal_shares_need_no_weight() -> None:
    """Every part has half of its labels, so samples weigh as labels do; a whole batch is never in question."""
    model, batch = nn.Linear(6, 5), tokens_with_ignored()
    memplan.fits_or_smaller().step(lambda part: token_loss(model, part), batch, still(model.parameters()))
    batch["labels"].fill_(1)
    batch["labels"][:, 2:] = -100
    whole = token_loss(model, batch)

    loss = memplan.fits_or_smaller(2).step(lambda part: token_loss(model, part), batch, still(model.parameters()))

    assert torch.allclose(loss, whole)


def test_a_feature_of_minus_one_hundred_is_no_label() -> None:
    """Labels are signed integers, of which there may be none."""
    parameter = nn.Parameter(torch.ones(1))
    batch = {"x": torch.tensor([-100.0, 1.0]), "labels": torch.zeros(2, 0, dtype=torch.long)}

    loss = memplan.fits_or_smaller(1).step(lambda part: (part["x"] * parameter).mean(), batch, still([parameter]))

    assert loss.item() == pytest.approx(-49.5)


# the state before the step


def test_a_retry_sees_the_state_before_the_step() -> None:
    """The running statistics and the dropout are those of a training that began with the size that fits."""

    def trained(largest: int, first: int | None) -> tuple[nn.Module, list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        loss_of, sizes = fits_up_to(largest, lambda part: model(part).square().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fitting = memplan.fits_or_smaller(first)
        for _ in range(2):
            fitting.step(loss_of, torch.arange(24.0).reshape(8, 3), optimizer)
        return model, sizes

    retried, sizes = trained(2, None)
    expected, _ = trained(8, 2)

    assert sizes == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert retried[1].num_batches_tracked == 8
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in retried.state_dict().items())


def test_a_step_that_fails_for_good_leaves_the_state_before_it() -> None:
    """A program that leaves out such a batch goes on as if it had not come."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))  # of 5 positions in each sample, so that one sample will do
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    loss_of, sizes = fits_up_to(0, lambda part: model(part).square().mean())

    with pytest.raises(torch.OutOfMemoryError):
        memplan.fits_or_smaller(2).step(loss_of, torch.arange(60.0).reshape(4, 3, 5), still(model.parameters()))

    assert sizes == [2, 1]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())


# growth


def limits_of(fitting: memplan.FittingSteps, largest: Iterator[int], batch: int = 8) -> list[int | None]:
    """The limit after each step, of which as many samples fit as *largest* says."""
    parameter = nn.Parameter(torch.ones(1))
    limits = []
    for fits in largest:
        fitting.step(fits_up_to(fits, lambda part: (part * parameter).mean())[0], torch.ones(batch), still([parameter]))
        limits.append(fitting.micro_batch_size)
    return limits


def test_the_limit_grows_back_after_one_bad_batch() -> None:
    """Doubled after every second step without running out, until whole batches fit again; the step that ran out does not count."""
    limits = limits_of(memplan.fits_or_smaller(grow_after=2), iter([2, 8, 8, 8, 8, 8]))

    assert limits == [2, 2, 4, 4, None, None]


def test_the_limit_grows_up_to_where_it_began() -> None:
    """Halved twice from 7, it is 2: 4 after the first growth, then 7."""
    assert limits_of(memplan.fits_or_smaller(7, grow_after=1), iter([2, 8, 8, 8])) == [2, 4, 7, 7]


def test_a_larger_limit_that_fails_goes_back_and_waits_twice_as_long(caplog: pytest.LogCaptureFixture) -> None:
    """5 samples fit. Attempts with 8 after 2 steps, then after 4, then after 8; each falls back to the 4 that worked."""
    fitting = memplan.fits_or_smaller(grow_after=2)

    with caplog.at_level(logging.INFO, logger="memplan"):
        limits = limits_of(fitting, iter([5] * 17))

    assert [step for step, limit in enumerate(limits) if limit is None] == [2, 7, 16]
    assert {limit for limit in limits if limit is not None} == {4}
    assert fitting.num_retries == 3
    levels = [(record.levelname, "continuing with 4" in record.message) for record in caplog.records]
    assert levels == [("WARNING", True), ("INFO", False)] * 3
    assert "the next larger one is tried after 8 steps" in caplog.text


def test_a_larger_limit_that_fails_within_as_many_steps_goes_back_too() -> None:
    """An attempt has worked when it lasted as long as the wait: a bad batch in every third step must not cost a retry each time."""
    fitting = memplan.fits_or_smaller(grow_after=3)

    limits = limits_of(fitting, iter([5, 8, 8, 8, 8, 5, *[8] * 6]))

    assert limits == [4, 4, 4, None, None, 4, 4, 4, 4, 4, 4, None]


def test_a_larger_limit_that_has_worked_shrinks_as_at_first() -> None:
    """The wait is not doubled for a bad batch that comes later."""
    limits = limits_of(memplan.fits_or_smaller(grow_after=2), iter([5, 8, 8, 8, 8, 5, 8, 8]))

    assert limits == [4, 4, None, None, None, 4, 4, None]


def test_a_small_batch_that_fails_under_a_larger_limit_halves_itself() -> None:
    """2 samples of another length: it says nothing about the growth from 4 to 8."""
    parameter = nn.Parameter(torch.ones(1))
    fitting = memplan.fits_or_smaller(grow_after=1)
    limits_of(fitting, iter([4, 8]))

    fitting.step(fits_up_to(1, lambda part: (part * parameter).mean())[0], torch.ones(2), still([parameter]))

    assert fitting.micro_batch_size == 1


def test_a_limit_can_stay_for_good() -> None:
    """With grow_after=None."""
    assert limits_of(memplan.fits_or_smaller(grow_after=None), iter([4] + [8] * 40))[-1] == 4


# three ways to use it


def test_the_object_steps_inside_a_with_block_and_without() -> None:
    """It is the same object."""
    fitting = memplan.fits_or_smaller(3)

    with fitting as entered:
        pass

    assert entered is fitting
    assert isinstance(fitting, memplan.FittingSteps)
    assert (fitting.micro_batch_size, fitting.num_retries) == (3, 0)


def test_a_decorated_function_is_called_with_half_the_size_until_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    """The next call begins with the size that worked; name, documentation and the other parameters stay."""
    fitting = memplan.fits_or_smaller(micro_batch_size=128)
    sizes = []

    @fitting
    def fit(micro_batch_size: int, epochs: int, *, rate: float = 0.1) -> tuple[int, int, float]:
        """Train."""
        sizes.append(micro_batch_size)
        if micro_batch_size > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return micro_batch_size, epochs, rate

    first = fit(3)
    second = fit(epochs=4, rate=0.2)

    assert (first, second) == ((32, 3, 0.1), (32, 4, 0.2))
    assert sizes == [128, 64, 32, 32]
    assert (fitting.micro_batch_size, fitting.num_retries) == (32, 2)
    assert (fit.__name__, fit.__doc__, list(inspect.signature(fit).parameters)) == ("fit", "Train.", ["epochs", "rate"])
    assert "fit() ran out of memory with a micro-batch of 64: calling it again with 32" in caplog.text


def test_a_decorated_function_that_does_not_fit_with_one_sample_raises_torchs_error() -> None:
    """Other errors are the function's own, and are raised at once."""

    @memplan.fits_or_smaller(2)
    def fit(size: int, error: Exception) -> None:
        sizes.append(size)
        raise error

    sizes: list[int] = []
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        fit(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fit(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))

    assert sizes == [2, 1, 1]


def test_a_failed_call_is_gone_before_the_next() -> None:
    """The error's traceback would keep the frame, and its tensors the memory that the next call needs."""
    failed: list[weakref.ref[Tensor]] = []
    were_gone = []

    @memplan.fits_or_smaller(4)
    def fit(size: int) -> None:
        were_gone.extend(reference() is None for reference in failed)
        activations = torch.ones(size)
        failed.append(weakref.ref(activations))
        if size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    fit()

    assert were_gone == [True, True, True]


@pytest.mark.parametrize("decorate", [memplan.fits_or_smaller(), memplan.fits_or_smaller])
def test_a_decorator_needs_the_size_to_begin_with(decorate: Callable[[Any], Any]) -> None:
    """With parentheses or without."""
    with pytest.raises(UsageError, match=r"write `@memplan.fits_or_smaller\(micro_batch_size=128\)`"):
        decorate(lambda _: None)


def test_a_decorated_function_needs_a_parameter_for_the_size() -> None:
    """Not by keyword only, and not after `self`, which the size would take the place of."""

    def nothing() -> None: ...

    def by_keyword(*, micro_batch_size: int) -> None: ...

    def method(self: Any, micro_batch_size: int) -> None: ...

    functions: list[Any] = [nothing, by_keyword, method]
    for function in functions:
        with pytest.raises(UsageError, match=rf"write `def {function.__name__}\(micro_batch_size, \.\.\.\)`"):
            memplan.fits_or_smaller(8)(function)


@pytest.mark.parametrize(("args", "kwargs"), [((64, "model"), {}), (("model",), {"micro_batch_size": 64})])
def test_a_caller_that_passes_the_size_is_told_to_leave_it_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """By position or by name; another wrong call is Python's to tell."""

    def fit(micro_batch_size: int, model: str) -> None: ...

    decorated: Any = memplan.fits_or_smaller(8)(fit)

    with pytest.raises(UsageError, match=r"write `fit\(model\)`"):
        decorated(*args, **kwargs)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        decorated()


def test_a_function_that_takes_any_arguments_can_be_decorated() -> None:
    """The size is the first of them."""
    decorated: Any = memplan.fits_or_smaller(8)(lambda *args: args)

    assert decorated("model") == (8, "model")


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a step and by a call; also where a function forms the group before it runs out of memory."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    @memplan.fits_or_smaller(8)
    def fit(size: int) -> None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UsageError, match="works in a single process"):
        fit()
    with pytest.raises(UsageError, match="works in a single process"):
        memplan.fits_or_smaller().step(torch.mean, torch.ones(2), still([nn.Parameter(torch.ones(1))]))


@pytest.mark.parametrize("arguments", [{"micro_batch_size": 1.5}, {"grow_after": 0}])
def test_a_number_that_makes_no_sense_is_refused(arguments: dict[str, Any]) -> None:
    """Before anything runs."""
    with pytest.raises(UsageError):
        memplan.fits_or_smaller(**arguments)


# on the simulated GPU


@pytest.mark.heavy
def test_the_generator_of_the_gpu_is_restored_before_a_retry(train: Train, torch_build: TorchBuild, driver: Driver) -> None:
    """Every try draws its dropout from the same state, and the next step goes on from another."""
    told, _ = train(machine(torch_build, driver, "t4", busy={0: 15_835_660_288 - 3 * GIB // 2}), "generators", 100_000)

    assert told["retries"] >= 2
    assert len(told["first_step"]) == told["retries"] + 1
    assert len(set(told["first_step"])) == 1
    assert len(told["second_step"]) == 1
    assert told["second_step"] != told["first_step"][:1]


@pytest.mark.heavy
def test_a_clone_of_a_buffer_that_does_not_fit_counts_as_running_out(train: Train, torch_build: TorchBuild, driver: Driver) -> None:
    """A buffer of 10 GiB on a GPU of 16 GB: tried with 4, 2 and 1, and no hook is left."""
    told, _ = train(machine(torch_build, driver, "t4"), "large_buffer")

    assert told == {"error": "OutOfMemoryError", "retries": 2, "hooks": 0}


@pytest.mark.heavy
def test_a_decorated_function_on_a_gpu_begins_with_an_empty_one(train: Train, torch_build: TorchBuild, driver: Driver) -> None:
    """Of a failed call stays cuBLAS's workspace, 8.125 MiB in a segment of 20 MiB (torch 2.13), and its cache is given back."""
    told, _ = train(machine(torch_build, driver, "t4", busy={0: 15_835_660_288 - 3 * GIB // 2}), "decorated", 2**17)

    assert len(told["sizes"]) >= 3
    assert told["sizes"] == [2**17 // 2**number for number in range(len(told["sizes"]))]
    assert max(told["allocated"]) <= 8.125 * 2**20
    assert max(told["reserved"]) <= 20 * 2**20

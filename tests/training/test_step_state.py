"""What a failed forward changed is put back, and nothing of a step is kept."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from memplan.training import step_state as state_module
from memplan.training.step_state import StepState


def hooks() -> list[Any]:
    return [*module_hooks._global_forward_pre_hooks, *module_hooks._global_forward_hooks, *module_hooks._global_forward_hooks_always_called]


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def run_and_restore(model: nn.Module, *inputs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The buffers before, after two calls of *model*, and restored."""
    before = buffers_of(model)
    with StepState() as state:
        model(*inputs)
        model(*inputs)
        during = buffers_of(model)
        state.restore()
    return before, during, buffers_of(model)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(buffer, other[name]) for name, buffer in one.items())


class MovingAverage(nn.Module):
    """Follows the mean of its inputs, in one of the ways in which modules do that."""

    def __init__(self, update: Callable[[MovingAverage, Tensor], None], size: int = 1) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("first", None)
        self.num_updates = 0
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        self.update(self, x.mean())
        self.num_updates += 1
        return x - self.mean.mean()


def in_place(module: MovingAverage, value: Tensor) -> None:
    module.mean.mul_(0.9).add_(value, alpha=0.1)


def through_data(module: MovingAverage, value: Tensor) -> None:
    module.mean.data.copy_(value)


def replaced(module: MovingAverage, value: Tensor) -> None:
    module.mean = module.mean * 0.9 + value


def changed_and_replaced(module: MovingAverage, value: Tensor) -> None:
    module.mean.add_(value)
    module.mean = module.mean.clone()


def initialized_at_the_first_call(module: MovingAverage, value: Tensor) -> None:
    if module.num_updates == 0:
        module.first = value.detach().clone()
    module.mean = module.mean + module.first


def registered_in_forward(module: MovingAverage, value: Tensor) -> None:
    module.mean.add_(value)
    module.register_buffer("cache", value.detach().clone())


def without_change(module: MovingAverage, value: Tensor) -> None: ...


UPDATES = [in_place, through_data, replaced, changed_and_replaced, initialized_at_the_first_call, registered_in_forward]


@pytest.mark.parametrize("update", UPDATES)
def test_a_buffer_is_restored_however_forward_changes_it(update: Callable[[MovingAverage, Tensor], None]) -> None:
    """In place, without a new version, with another tensor, with a tensor where none was, with a new buffer."""
    before, during, after = run_and_restore(nn.Sequential(MovingAverage(update)), torch.ones(3) * 2)

    assert not same(before, during)
    assert same(before, after)


def test_a_module_that_replaces_a_buffer_gets_its_numbers_back() -> None:
    """A cache says in an attribute how long it is; without that, it would be read beyond its end."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(4.0))
            self.length = 4

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > self.length:
                self.length = len(x)
                self.angles = torch.arange(float(self.length))
            return x * self.angles[: len(x)]

    cache = Cache()
    with StepState() as state:
        cache(torch.ones(8))
        state.restore()

    assert (cache.length, len(cache.angles)) == (4, 4)
    assert len(cache(torch.ones(6))) == 6


def test_a_large_buffer_that_changes_is_restored_and_one_that_does_not_is_not_kept() -> None:
    """The clone of a causal mask lives only during the call of its module."""
    model = nn.Sequential(MovingAverage(in_place, size=10**5), MovingAverage(without_change, size=10**5))
    before = buffers_of(model)

    with StepState() as state:
        model(torch.ones(3))
        kept = [kept.buffer for kept in state._kept.values() if kept.clone is not None]
        model(torch.ones(3))
        state.restore()

    assert [buffer is model[0].mean for buffer in kept] == [True]
    assert same(before, buffers_of(model))


def test_a_large_buffer_that_changes_in_a_later_call_is_restored() -> None:
    """Its first clone was dropped; it is cloned again with each call."""

    def every_second_time(module: MovingAverage, value: Tensor) -> None:
        if module.num_updates % 2:
            module.mean.add_(value)

    before, during, after = run_and_restore(MovingAverage(every_second_time, size=10**5), torch.ones(3))

    assert not same(before, during)
    assert same(before, after)


def test_buffers_that_share_memory_are_restored_to_what_they_were_before_the_step() -> None:
    """The second module was cloned after the first had changed what both see."""
    first, second = MovingAverage(in_place), MovingAverage(in_place)
    second.mean = first.mean.view(1)

    before, during, after = run_and_restore(nn.Sequential(first, second), torch.ones(3))

    assert not same(before, during)
    assert same(before, after)


def test_a_forward_that_fails_in_the_middle_is_undone() -> None:
    """Also where the module itself had changed its buffers before a module inside it failed."""

    class Outer(MovingAverage):
        def forward(self, x: Tensor) -> Tensor:
            self.mean.add_(1)
            self.mean = self.mean * 2
            return inner(x)

    def runs_out(module: MovingAverage, value: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    inner, outer = MovingAverage(runs_out), Outer(in_place)

    with StepState() as state:
        with pytest.raises(torch.OutOfMemoryError):
            outer(torch.ones(3))
        state.restore()

    assert outer.mean.tolist() == [0.0]
    assert hooks() == []


def test_a_module_in_evaluation_mode_is_left_alone() -> None:
    """It is not cloned either."""
    model = nn.BatchNorm1d(2).eval()

    with StepState() as state:
        model(torch.ones(3, 2))

        assert not state._kept


def test_a_functional_call_does_not_leave_its_buffers_in_the_module() -> None:
    """torch.func.functional_call swaps them during the call; the swapped ones are restored, the module's stay its own."""
    model = nn.BatchNorm1d(2)
    own, swapped = dict(model.named_buffers()), {name: buffer.clone() for name, buffer in model.named_buffers()}

    with StepState() as state:
        torch.func.functional_call(model, swapped, (torch.randn(4, 2),))
        model(torch.randn(4, 2))
        state.restore()

    assert all(buffer is own[name] for name, buffer in model.named_buffers())
    assert swapped["num_batches_tracked"] == model.num_batches_tracked == 0


def test_a_lazy_module_is_left_alone() -> None:
    """Its buffers have no values before its first call."""
    model = nn.LazyBatchNorm1d()

    with StepState() as state:
        model(torch.randn(4, 2))
        state.restore()

    assert model.running_mean.shape == (2,)


def test_a_scripted_module_is_restored() -> None:
    """TorchScript calls the modules inside without hooks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    before, during, after = run_and_restore(model, torch.randn(4, 2))

    assert not same(before, during)
    assert same(before, after)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0))
        return self.norm(x - self.mean)


@pytest.mark.parametrize("compiled_in_place", [False, True])
def test_a_compiled_module_is_restored_and_compiled_once(compiled_in_place: bool) -> None:
    """Global hooks that came and went would let torch.compile compile again for each step."""
    num_compiled = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    block = Block()
    if compiled_in_place:
        block.compile(backend=backend, fullgraph=True)
        model: nn.Module = nn.Sequential(block)
    else:
        model = torch.compile(block, backend=backend, fullgraph=True)
    outcomes = []
    for _ in range(4):
        before = buffers_of(block)
        with StepState() as state:
            model(torch.randn(4, 2)).sum().backward()
            during = buffers_of(block)
            state.restore()
        outcomes.append((same(before, during), same(before, buffers_of(block))))

    assert outcomes == [(False, True)] * 4
    assert num_compiled == 1


def test_random_numbers_are_drawn_again_after_a_restore() -> None:
    """The retry sees the dropout of the failed try."""
    with StepState() as state:
        first = torch.rand(3)
        state.restore()

    assert torch.equal(torch.rand(3), first)


class Generator:
    """A CUDA device's generator, as torch.cuda.default_generators has it."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def get_state(self) -> int:
        return self.offset

    def set_state(self, offset: int) -> None:
        self.offset = offset

    def initial_seed(self) -> int:
        return 7

    def manual_seed(self, seed: int) -> None:
        assert seed == 7
        self.offset = 0


def test_the_generators_of_all_cuda_devices_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none until CUDA is initialized; those made during the step go back to where they began."""
    generators = (Generator(4), Generator(8))
    monkeypatch.setattr(torch.cuda, "default_generators", generators[:1])

    with StepState() as state:
        monkeypatch.setattr(torch.cuda, "default_generators", generators)
        generators[0].offset = 12
        state.restore()

    assert [generator.offset for generator in generators] == [4, 0]


def test_nothing_is_kept_after_a_step() -> None:
    """No hooks and no references, whatever ended it; one state inside another keeps the hooks."""

    def interrupted(model: nn.Module) -> None:
        with state:
            with StepState():
                assert len(hooks()) == 3
            model(torch.randn(4, 2))
            assert len(hooks()) == 3
            raise KeyboardInterrupt

    state = StepState()
    model = nn.BatchNorm1d(2)
    with pytest.raises(KeyboardInterrupt):
        interrupted(model)
    gone = weakref.ref(model)
    del model
    gc.collect()

    assert hooks() == []
    assert state_module._open_states == []
    assert gone() is None

"""Programs without an optimizer of PyTorch's are run until they have updated what they train, by whatever means."""

from __future__ import annotations

import pytest

from memplan.units import MIB
from tests.execution.test_rehearse_script import Script, script, seen
from tests.standin.conftest import torch_build

__all__ = ["script", "torch_build"]

pytestmark = pytest.mark.heavy

TRAINS = """
import torch

class Momentum:
    def __init__(self, parameters):
        self.parameters, self.momenta = list(parameters), {}

    @torch.no_grad()
    def step(self):
        for parameter in self.parameters:
            momentum = self.momenta.setdefault(parameter, torch.zeros_like(parameter))
            momentum.mul_(0.9).add_(parameter.grad)
            UPDATE
            parameter.grad = None

model = torch.nn.Linear(1024, 1024, bias=False).cuda()
update = Momentum(model.parameters())
for number in range(1, 101):
    model(torch.randn(4, 1024, device="cuda")).square().mean().backward()
    if number % EVERY == 0:
        update.step()
"""
"""4 MiB of weights, of gradients, and of momenta that the first update makes."""


def trains(*, every: int, update: str = "parameter.sub_(0.1 * momentum)") -> str:
    return TRAINS.replace("EVERY", str(every)).replace("UPDATE", update)


@pytest.mark.parametrize(
    ("every", "update", "num_steps"),
    [
        (1, "parameter.sub_(0.1 * momentum)", 3),
        (1, "parameter.data.sub_(0.1 * momentum)", 3),
        (3, "parameter.sub_(0.1 * momentum)", 6),
        (8, "parameter.data.sub_(0.1 * momentum)", 16),
    ],
)
def test_a_program_is_run_until_it_has_accumulated_beside_its_state(script: Script, every: int, update: str, num_steps: int) -> None:
    """Three steps were asked for: where the update comes later, its state is there when gradients are accumulated anew."""
    found = seen(script(trains(every=every, update=update), steps=3))

    assert len(found.steps) == num_steps
    assert found.verdict == "fits"
    assert found.peak_allocated_bytes >= 12 * MIB  # weights, gradients, momenta


def test_an_update_that_does_not_come_leaves_a_lower_bound(script: Script) -> None:
    """Nobody waits for it for ever."""
    found = seen(script(trains(every=90), steps=3))

    assert found.lower_bound_reasons == (
        "it has no optimizer of PyTorch's, and updated nothing in 35 backward passes: what its own optimizer would hold is not counted",
    )


LATE = """
        adam = globals().get("adam") or torch.optim.AdamW(model.parameters())
        adam.step()
        adam.zero_grad()
"""


def test_an_optimizer_that_is_made_for_the_first_update_is_waited_for(script: Script) -> None:
    """It is PyTorch's, and nobody knows of it before."""
    late = trains(every=8).replace("        update.step()\n", LATE)

    found = seen(script(late, steps=3))

    assert found.verdict == "fits"
    assert found.breakdown.optimizer_state_bytes >= 8 * MIB
    assert found.peak_allocated_bytes >= 16 * MIB


def test_a_program_that_only_measures_ends_as_asked_when_it_clears_its_gradients(script: Script) -> None:
    """A benchmark of forward and backward has no update to wait for."""
    found = seen(script(trains(every=1, update="pass"), steps=3))

    assert (len(found.steps), found.verdict) == (3, "fits")


def test_an_error_that_ends_the_thread_that_trains_is_a_failure(script: Script) -> None:
    """Python tells of it, and the program ends as if nothing had happened."""
    threaded = """
import threading, torch

def train():
    model = torch.nn.Linear(512, 512).cuda()
    for number in range(3):
        model(torch.randn(4, 512, device="cuda")).mean().backward()
        if number == 1:
            raise ValueError("out of data")

thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
    found = script(threaded)

    assert (found.verdict, found.exit_code) == ("unknown", 0)
    assert found.failure is not None
    assert found.failure.message == "ValueError: out of data"

"""How a DataLoader is set up: from rates, by rule, and within the memory that is there."""

from __future__ import annotations

import pytest

from memplan.analysis.loader_settings import Host, LoaderAdvice, LoaderRate, Measured, advise_loading

GIB, MIB = 2**30, 2**20


def host(**changes: object) -> Host:
    """A machine with 16 processors and a GPU."""
    known = {"num_processors": 16, "num_gpus": 1, "available_bytes": 64 * GIB, "shared_bytes": 32 * GIB}
    return Host.model_validate({**known, **changes})


def measured(rates: dict[int, float], *, batch_bytes: int = MIB, worker_bytes: int = 0, num_samples: int = 1000) -> Measured:
    """Rates by number of workers, with batches of one tensor."""
    return Measured(
        num_samples=num_samples,
        tensor_bytes=(batch_bytes,),
        rates=tuple(LoaderRate(num_workers=n, samples_per_second=r, worker_bytes=n * worker_bytes) for n, r in rates.items()),
    )


def advise(rates: dict[int, float], *, on: Host | None = None, needed: float | None = None, **options: int) -> LoaderAdvice:
    """What is advised with these rates."""
    return advise_loading(on or host(), measured(rates, **options), batch_size=32, needed=needed)


@pytest.mark.parametrize(
    ("rates", "needed", "workers"),
    [
        ({0: 100, 1: 100, 2: 200, 4: 390, 8: 400}, None, 4),  # 8 bring 2.5% more
        ({0: 100, 1: 100, 2: 200, 4: 390, 8: 400}, 150, 2),  # a tenth more than is needed
        ({0: 100, 1: 100, 2: 160, 4: 390, 8: 400}, 150, 4),  # 160 is less than a tenth more
        ({0: 100, 1: 100, 2: 200, 4: 390, 8: 400}, 1000, 4),  # none is enough: as many as help
        ({0: 5000, 1: 1000, 2: 2000}, None, 0),  # samples are cheap
        ({0: 1500, 1: 1000, 2: 1400}, None, 2),  # workers load beside the step
        ({0: 5000, 1: 4000, 2: 8000}, 400, 0),  # loading takes next to nothing of the step
    ],
)
def test_the_fewest_workers_that_help_are_taken(rates: dict[int, float], needed: float | None, workers: int) -> None:
    """By what the step eats where that is known, else by what any number brings."""
    assert advise(rates, needed=needed).value_of("num_workers") == workers


def test_loading_that_is_too_slow_is_told() -> None:
    """With both figures."""
    (warning,) = advise({0: 100, 2: 200}, needed=900).warnings

    assert warning.startswith("the step eats 900 samples a second, and loading brings 200")


def test_batches_have_to_fit_into_shared_memory() -> None:
    """8 workers with 2 batches of 8 MiB take 128 MiB; of 64 MiB, a container's default, 80% hold those of 3 workers; 2 were tried."""
    found = advise({0: 100, 2: 200, 4: 400, 8: 800}, on=host(shared_bytes=64 * MIB), batch_bytes=8 * MIB)

    assert found.value_of("num_workers") == 2
    assert found.shared_bytes == 32 * MIB
    assert found.warnings == ("8 workers load faster, but their batches take 128.0 MiB of /dev/shm, which has 64.0 MiB free",)


def test_workers_have_to_fit_into_memory() -> None:
    """8 workers of 1 GiB each and their batches are more than 80% of 6 GiB, 4 are not."""
    found = advise({0: 100, 4: 400, 8: 800}, on=host(available_bytes=6 * GIB), worker_bytes=GIB)

    assert found.value_of("num_workers") == 4
    assert "of the host's memory, of which 6.00 GiB are free" in found.warnings[0]


def test_several_gpus_share_the_memory() -> None:
    """Two processes with 4 workers each."""
    one, two = (advise({0: 100, 4: 400}, on=host(available_bytes=6 * GIB, num_gpus=count), worker_bytes=GIB) for count in (1, 2))

    assert (one.value_of("num_workers"), two.value_of("num_workers")) == (4, 0)


def test_pinned_tensors_are_rounded_up_to_powers_of_two() -> None:
    """5 MiB become 8: four batches ahead and one that is copied, 40 MiB."""
    found = advise({0: 100, 2: 400}, batch_bytes=5 * MIB)

    assert found.host_bytes == 5 * 8 * MIB
    assert advise({0: 100, 2: 400}, batch_bytes=5 * MIB, on=host(num_gpus=0)).host_bytes == 0


@pytest.mark.parametrize(("gpus", "processors", "workers"), [(1, 16, 8), (1, 4, 3), (8, 64, 7), (0, 2, 1), (4, 4, 0)])
def test_without_a_dataset_a_rule_decides(gpus: int, processors: int, workers: int) -> None:
    """The processors of each GPU without one, at most 8; the reason says so."""
    found = advise_loading(host(num_gpus=gpus, num_processors=processors), None, batch_size=None)

    assert found.value_of("num_workers") == workers
    assert found.settings[0].reason.startswith(f"by rule: {processors} processors for {max(1, gpus)} GPU")
    assert not found.is_measured


def test_without_workers_nothing_that_needs_them_is_set() -> None:
    """PyTorch refuses prefetch_factor and persistent_workers then."""
    found = advise({0: 5000, 1: 100})

    assert (found.value_of("prefetch_factor"), found.value_of("persistent_workers")) == (None, False)


def test_without_a_gpu_nothing_is_pinned() -> None:
    """And the reason says what holds where there is one."""
    found = advise_loading(host(num_gpus=0), None, batch_size=None)

    assert (found.value_of("pin_memory"), found.value_of("non_blocking")) == (False, False)
    assert [one.reason for one in found.settings if one.name == "pin_memory"] == ["no GPU was found here; true where there is one"]


@pytest.mark.parametrize(("num_samples", "drops"), [(1000, True), (960, False), (20, False)])
def test_the_last_batch_is_dropped_where_it_is_another(num_samples: int, drops: bool) -> None:
    """1000 samples leave 8 of a batch of 32, 960 none, and 20 make no batch at all."""
    assert advise({0: 100, 1: 300}, num_samples=num_samples).value_of("drop_last") is drops


def test_uneven_batches_are_held_ready_twice_as_many() -> None:
    """Where one takes far longer than most, whatever the number of workers."""
    rates = tuple(LoaderRate(num_workers=n, samples_per_second=10.0, longest_wait_seconds=2.0, median_wait_seconds=0.1) for n in (0, 1, 2))
    found = advise_loading(host(), Measured(num_samples=10, tensor_bytes=(8,), rates=rates), batch_size=2)

    assert found.value_of("prefetch_factor") == 4

"""What hard programs find on the device: each is a real training step in a real process, and the numbers are worked out by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memplan.errors import MissingError, UsageError
from memplan.execution.rehearsal import Rehearsal
from memplan.execution.rehearse import Rehearser
from memplan.execution.step_source import step_source_from
from memplan.hardware.catalog import find_gpu
from memplan.hardware.gpu import UNLIMITED_BYTES
from memplan.hardware.torch_install import TorchBuild
from memplan.standin.build import ASKED_CUDNN
from memplan.units import format_bytes
from tests.conftest import RehearserOf, SharedRehearser

PROGRAMS = Path(__file__).parents[1] / "child" / "device_steps.py"
MIB = 2**20
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
SIX_CARDS = ("t4", "a100-40", "a100-80", "h100", "h200", "rtx4090")


class Device:
    """Programs of `device_steps.py` on one Rehearser: the first takes seconds, the others a fraction of one."""

    def __init__(self, rehearser: Rehearser | SharedRehearser) -> None:
        self._rehearser = rehearser

    def run(
        self,
        program: str,
        *,
        gpu: str = "h100",
        memory_bytes: int | None = None,
        settings: str = "",
        steps: int = 2,
        workspaces: bool = False,
        context_bytes: int = 0,
        asks_cudnn: bool = True,
        **values: Any,
    ) -> Rehearsal:
        """
        Rehearse *program* on a GPU, of *memory_bytes* where given, under the *settings* of PyTorch's allocator.

        *asks_cudnn*: as with a cuDNN that says its kernels without a GPU; else as with an older one.
        """
        card = find_gpu(gpu)
        return self._rehearser.rehearse(
            gpu=card.model_copy(update={"total_memory_bytes": memory_bytes or card.total_memory_bytes}),
            values={"program": program, **values},
            steps=steps,
            library_workspaces=workspaces,
            context_bytes=context_bytes,
            environment=({ALLOCATOR: settings} if settings else {}) | ({} if asks_cudnn else {"MEMPLAN_ASK_CUDNN": "0"}),
        )


@pytest.fixture(scope="module")
def device(rehearser_of: RehearserOf) -> Device:
    """A device that serves one program after the other."""
    return Device(rehearser_of(f"{PROGRAMS}:build"))


@contextmanager
def skipping_without(problem: str) -> Iterator[None]:
    """Skip where this PyTorch is too old for what is asked of it, and says so with *problem*."""
    try:
        yield
    except UsageError as error:
        if problem not in error.message:
            raise
        pytest.skip(f"this PyTorch is too old: {problem}")


# the GPU


@pytest.mark.parametrize("name", SIX_CARDS)
def test_torch_and_nvml_see_the_card(device: Device, name: str) -> None:
    """Name, capability, multiprocessors and memory are the catalogue's; the step asserts it of torch, the runtime and NVML."""
    card = find_gpu(name)
    capability = ".".join(map(str, card.compute_capability or ()))

    seen = device.run(
        "tells",
        gpu=name,
        name=card.name,
        capability=capability,
        multiprocessors=card.multiprocessors,
        total_memory=card.total_memory_bytes,
    )

    assert seen.gpu_name == card.name
    assert seen.peak_reserved_bytes == 256 * MIB


def test_a_logger_may_ask_for_the_cards_load(device: Device) -> None:
    """Utilisation, temperature, power and clock: a GPU at rest."""
    assert device.run("monitors").fits


# capacity


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
@pytest.mark.parametrize("context_mib", [0, 300])
def test_a_card_holds_what_it_has_and_not_a_byte_more(device: Device, settings: str, context_mib: int) -> None:
    """Five blocks of 20 MiB fill 100 MiB beside the context; one byte more is one page of 2 MiB too much."""
    memory = {"memory_bytes": (100 + context_mib) * MIB, "context_bytes": context_mib * MIB, "settings": settings}

    full = device.run("takes", sizes=[20 * MIB] * 5, **memory)
    over = device.run("takes", sizes=[20 * MIB] * 5 + [1], **memory)

    assert full.out_of_memory is None
    assert full.peak_reserved_bytes == 100 * MIB
    assert over.out_of_memory is not None
    assert over.out_of_memory.free_bytes == 0


def test_one_byte_of_context_costs_the_last_block(device: Device) -> None:
    """100 MiB less a byte hold four blocks of 20 MiB: what is left is 20 MiB less a byte."""
    seen = device.run("takes", sizes=[20 * MIB] * 5, memory_bytes=100 * MIB, context_bytes=1)

    assert not seen.fits
    assert seen.peak_reserved_bytes == 80 * MIB
    assert seen.out_of_memory is not None
    assert seen.out_of_memory.free_bytes == 20 * MIB - 1


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_memory_given_back_can_be_taken_again(device: Device, settings: str) -> None:
    """30, 50 and 80 MiB one after the other on a GPU of 90 MiB: each is back on the GPU before the next."""
    seen = device.run("takes", sizes=[30 * MIB, 50 * MIB, 80 * MIB], gives_back=True, memory_bytes=90 * MIB, settings=settings)

    assert (seen.out_of_memory, seen.num_alloc_retries) == (None, 0)
    assert seen.peak_reserved_bytes == 80 * MIB


def test_the_allocator_gives_its_cache_back_before_it_fails(device: Device) -> None:
    """30, 50 and 80 MiB of which the program lets go, and the allocator does not: it has to try again, and can."""
    seen = device.run("takes", sizes=[30 * MIB, 50 * MIB, 80 * MIB], lets_go=True, memory_bytes=90 * MIB, steps=1)

    assert (seen.out_of_memory, seen.verdict) == (None, "tight")
    assert seen.num_alloc_retries == 1  # 30 and 50 fit side by side, 80 takes the place of both


def test_a_program_that_survives_out_of_memory_goes_on(device: Device) -> None:
    """What could not be had is told, and the steps behind it ran."""
    seen = device.run("survives")

    assert not seen.fits
    assert seen.out_of_memory is not None
    assert seen.out_of_memory.requested_bytes == 2**40
    assert len(seen.steps) == 2
    assert seen.peak_reserved_bytes == 2 * MIB


# the allocator's settings: 1200 bytes, 1.2 MB and 30 MiB, which are given up for twice 15 MiB

NATIVE_ALLOCATED = 1536 + 1_200_128 + 30 * MIB  # multiples of 512
NATIVE_RESERVED = (2 + 20 + 30) * MIB  # a small segment, a segment of 20 MiB for blocks up to 10, and one of its own


@pytest.mark.parametrize(
    ("settings", "allocated", "reserved"),
    [
        ("backend:native", NATIVE_ALLOCATED, NATIVE_RESERVED),
        # 30 MiB are too large to be split: one half goes beside the 1.2 MB, one gets a segment, whose last MiB is too small to be split off
        ("max_split_size_mb:21", 1536 + 1_200_128 + (15 + 16) * MIB, NATIVE_RESERVED + 16 * MIB),
        # fourths between powers of two: 2**20 + 2**18 and 32 MiB
        ("roundup_power2_divisions:4", 1536 + 1_310_720 + 32 * MIB, NATIVE_RESERVED + 2 * MIB),
        # halves, for all up to 256 MiB: 2**20 + 2**19
        ("roundup_power2_divisions:[256:2,512:4,>:8]", 1536 + 1_572_864 + 32 * MIB, NATIVE_RESERVED + 2 * MIB),
        # one segment that grows by 20 MiB for all that is not small
        ("expandable_segments:True", NATIVE_ALLOCATED, (2 + 40) * MIB),
        ("max_non_split_rounding_mb:40", NATIVE_ALLOCATED, NATIVE_RESERVED),
        ("garbage_collection_threshold:0.8", NATIVE_ALLOCATED, NATIVE_RESERVED),
        ("per_process_memory_fraction:0.5", NATIVE_ALLOCATED, NATIVE_RESERVED),
        ("pinned_use_cuda_host_register:True", NATIVE_ALLOCATED, NATIVE_RESERVED),
        ("pinned_use_cuda_host_register:True,pinned_num_register_threads:4", NATIVE_ALLOCATED, NATIVE_RESERVED),
        ("pinned_use_background_threads:True", NATIVE_ALLOCATED, NATIVE_RESERVED),
        ("pinned_reserve_segment_size_mb:16", NATIVE_ALLOCATED, NATIVE_RESERVED),
        ("release_lock_on_cudamalloc:True", NATIVE_ALLOCATED, NATIVE_RESERVED),
        ("graph_capture_record_stream_reuse:True", NATIVE_ALLOCATED, NATIVE_RESERVED),
    ],
)
def test_the_allocators_settings_are_the_real_ones(device: Device, settings: str, allocated: int, reserved: int) -> None:
    """Each documented option is taken, and has the effect that it has on a GPU. PyTorch that does not know one says so by itself."""
    with skipping_without("Unrecognized"):
        seen = device.run("odd_sizes", settings=settings, steps=1)

    assert (seen.peak_allocated_bytes, seen.peak_reserved_bytes) == (allocated, reserved)


def test_a_share_of_the_card_is_a_limit(device: Device) -> None:
    """Half of 200 MiB hold 100 MiB, and not 120."""
    half = {"memory_bytes": 200 * MIB, "settings": "per_process_memory_fraction:0.5"}
    with skipping_without("Unrecognized"):
        assert device.run("takes", sizes=[100 * MIB], **half).out_of_memory is None

    assert device.run("takes", sizes=[120 * MIB], **half).out_of_memory is not None


def test_a_setting_that_does_not_exist_is_pytorchs_error(device: Device) -> None:
    """And not ignored."""
    with pytest.raises(UsageError, match="no_such_option"):
        device.run("odd_sizes", settings="no_such_option:1")


@pytest.mark.heavy
def test_another_allocator_is_refused_in_words(device: Device) -> None:
    """cudaMallocAsync's pool is the driver's: there is nothing to follow, so there is no number."""
    with pytest.raises(UsageError, match="backend parsed at runtime != allocator backend parsed at load time"):
        device.run("odd_sizes", settings="backend:cudaMallocAsync")  # PyTorch chose its own when it was loaded

    with (
        Rehearser(step_source_from(f"{PROGRAMS}:build")) as fresh,
        pytest.raises(UsageError, match=r"only PyTorch's own caching allocator can be followed"),
    ):
        Device(fresh).run("odd_sizes", settings="backend:cudaMallocAsync")


# streams, events, page-locked memory, processes


@pytest.mark.parametrize("records", [False, True], ids=["plain", "record_stream"])
def test_a_stream_has_blocks_of_its_own(device: Device, records: bool) -> None:
    """64 MiB freed on one stream do not serve another, so 128 MiB are reserved for what is never more than 64 at a time."""
    seen = device.run("side_stream", records=records)

    assert seen.peak_allocated_bytes == 64 * MIB
    assert seen.peak_reserved_bytes == 128 * MIB


def test_events_order_streams_and_tell_time(device: Device) -> None:
    """Recorded, waited for, queried, timed; the step asserts it."""
    assert device.run("events").fits


def test_pinned_memory_is_the_hosts(device: Device) -> None:
    """It is told from other memory, copies both ways keep the values, and the GPU holds only the copy."""
    assert device.run("pinned").peak_allocated_bytes == 512


def test_workers_load_and_a_thread_pins(device: Device) -> None:
    """A DataLoader with two forked workers and pin_memory: 64 samples of 16 fp32 values, 16 at a time."""
    assert device.run("loads").breakdown.parameters_bytes == 512 + 1024  # 16 biases and 16 x 16 weights


@pytest.mark.heavy
def test_workers_may_be_spawned(device: Device) -> None:
    """A new process finds what the program's file defines, as it does when the file is run by itself."""
    assert device.run("loads", start="spawn", workers=1, steps=1).fits


def test_a_fork_leaves_the_card_alone(device: Device) -> None:
    """A child that ends takes nothing with it."""
    assert device.run("forks").fits


def test_threads_may_allocate_at_the_same_time(device: Device) -> None:
    """Eight threads, each on its own stream: nothing is lost of what each frees."""
    assert device.run("threads").steps[-1].allocated_bytes == 0


# CUDA graphs


@pytest.mark.parametrize(("num_graphs", "shares_pool"), [(1, False), (2, False), (2, True)], ids=["one", "two", "two that share a pool"])
def test_replays_allocate_nothing(device: Device, num_graphs: int, shares_pool: bool) -> None:
    """Captures take from pools of their own; behind the first step's beginning there is not one allocation."""
    seen = device.run("graph", num_graphs=num_graphs, shares_pool=shares_pool, steps=3)

    assert seen.trace is not None
    first = next(mark.position for mark in seen.trace.marks if mark.step == 1)
    assert "a" in seen.trace.actions[:first]
    assert "a" not in seen.trace.actions[first:]
    assert len({step.allocated_bytes for step in seen.steps}) == 1


def test_graphs_that_share_a_pool_reserve_less(device: Device) -> None:
    """The second capture's activations lie where the first's were."""
    apart, shared = (device.run("graph", num_graphs=2, shares_pool=shares).peak_reserved_bytes for shares in (False, True))

    assert shared < apart


def test_callables_can_be_graphed(device: Device) -> None:
    """make_graphed_callables captures forward and backward; the steps keep nothing."""
    steps = device.run("graphed_callables", steps=3).steps

    assert steps[1].allocated_bytes == steps[2].allocated_bytes


def test_a_capture_that_reads_a_value_fails_as_on_a_card(device: Device) -> None:
    """CUDA does not let a program wait for a stream that captures."""
    with pytest.raises(UsageError, match="operation not permitted when stream is capturing"):
        device.run("capture_reads_value")


# recurrent networks

TOKENS = 32 * 100
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@pytest.mark.parametrize("is_half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("kind", "projection", "parameters", "kept"),
    [
        # two directions of gates·512·(256 + 512 + 2 biases) and of gates·512·(2·512 + 512 + 2); kept, as recorded of an H100
        # (tests/accuracy/recordings): 5, 6 and 1 values of each cell, and the outputs of the first layer
        ("LSTM", 0, 2 * 4 * 512 * (770 + 1538), 2 * 5 * 512 + 512),
        ("GRU", 0, 2 * 3 * 512 * (770 + 1538), 2 * 6 * 512 + 512),
        ("RNN", 0, 2 * 1 * 512 * (770 + 1538), 2 * 1 * 512 + 512),
        # outputs of 128: 4·512·(256 + 128 + 2) and the projection of 128·512, the same in the second layer, whose inputs are 2·128;
        # not recorded: the outputs before the projection are counted in
        ("LSTM", 128, 4 * (4 * 512 * 386 + 128 * 512), 2 * 6 * 512 + 128),
    ],
    ids=["LSTM", "GRU", "RNN", "projected LSTM"],
)
def test_recurrent_networks_keep_what_was_recorded(
    device: Device, kind: str, projection: int, parameters: int, kept: int, is_half: bool
) -> None:
    """Two layers, both ways: 4 cells for each of 32 x 100 tokens. The step asserts that the weights fill one buffer without a gap."""
    reserve = TOKENS * 2 * kept * (2 if is_half else 4) + 256

    seen = device.run("recurrent", kind=kind, projection=projection, is_half=is_half, kept_bytes=reserve)

    assert seen.breakdown.parameters_bytes == parameters * 4
    assert seen.peak_allocated_bytes > parameters * 4 + reserve


def test_a_single_direction_keeps_half(device: Device) -> None:
    """One layer one way is one cell a token: four gates and the state of 512."""
    seen = device.run("recurrent", layers=1, both_ways=False, kept_bytes=TOKENS * 5 * 512 * 4 + 256)

    assert seen.breakdown.parameters_bytes == 4 * 512 * 770 * 4


def test_the_workspace_of_a_recurrent_network_is_as_recorded(device: Device) -> None:
    """Of networks as an H100 ran them it is known: nothing is assumed."""
    seen = device.run("recurrent", workspaces=True)
    without = device.run("recurrent")

    assert seen.findings == without.findings == ()
    assert seen.peak_allocated_bytes == without.peak_allocated_bytes


def test_the_workspace_of_many_steps_of_layers_one_way_is_a_bound(device: Device) -> None:
    """
    From an H100's recordings, of fp32, 2 layers of 512, 100 steps of 32 sequences of 256.

    8 MiB and the weights of each layer, and for the backward pass a part of the gradient between layers (64 of 100 steps), the gradient of
    the input and the states, and twice the packed input, output and states. The bound is in the estimate and not in its low end.
    """
    seen = device.run("recurrent", kind="RNN", both_ways=False, workspaces=True)
    without = device.run("recurrent", kind="RNN", both_ways=False)

    state = 32 * 512 * 4
    weights = 512 * (256 + 512 + 512 + 512) * 4
    packed = TOKENS * (256 + 512) * 4 + 2 * 2 * state
    bound = 2 * 2**23 + weights + 64 * state + TOKENS * 512 * 4 + 2 * state + 2 * packed + 256 + 8 * 32 - 1
    assert seen.device_used.low_bytes == without.peak_reserved_bytes < seen.peak_reserved_bytes
    assert [finding.kind for finding in seen.findings] == ["library_workspaces"]
    assert f"recurrent up to {format_bytes(bound)}" in seen.findings[0].message
    assert without.findings == ()


@pytest.mark.parametrize("lengths_are_tensors", [False, True])
def test_the_workspace_of_a_ctc_loss_of_cudnn(device: Device, lengths_are_tensors: bool) -> None:
    """
    For 50 time steps of 16 sequences two variables of each label and blank, and 20 probabilities, and 513 values a sequence, in fp32.

    Where the lengths are tensors, PyTorch tells cuDNN the most labels that it takes, 255: so an H100 was recorded. Else it is an allowance.
    """
    seen = device.run("ctc_through_cudnn", lengths_are_tensors=lengths_are_tensors, workspaces=True)
    without = device.run("ctc_through_cudnn", lengths_are_tensors=lengths_are_tensors)

    workspace = 16 * (50 * (2 * (2 * (255 if lengths_are_tensors else 30) + 1) + 20) + 513) * 4
    assert seen.peak_allocated_bytes >= workspace - 1
    assert without.findings == ()
    if lengths_are_tensors:
        assert seen.findings == ()
        assert without.peak_allocated_bytes == seen.peak_allocated_bytes
    else:
        assert seen.findings[0].message.count(f"CTC loss up to {format_bytes(workspace - 1)}") == 1  # an odd number, to be found again
        assert without.peak_allocated_bytes < workspace


# attention: 2 x 8 heads of 64 values over 1024 tokens

PAIRS = 2 * 8 * 1024 * 1024


@pytest.mark.parametrize(
    ("gpu", "dtype", "backends"),
    [
        ("h100", "float16", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"]),
        ("h100", "bfloat16", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"]),
        ("h100", "float32", ["EFFICIENT_ATTENTION"]),
        ("t4", "float16", ["EFFICIENT_ATTENTION"]),
        ("t4", "bfloat16", []),
        ("t4", "float32", ["EFFICIENT_ATTENTION"]),
    ],
)
def test_attention_takes_the_kernels_that_the_card_has(device: Device, gpu: str, dtype: str, backends: list[str]) -> None:
    """No flash before 8.0, none for fp32, and bf16 on a T4 by the formula alone, which keeps the matrix of all pairs."""
    width = 4 if dtype == "float32" else 2
    formula = device.run("attention", gpu=gpu, dtype=dtype, backend="MATH").peak_allocated_bytes
    assert formula > 2 * PAIRS * width  # the weights, and their gradient

    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        if backend in backends:
            assert device.run("attention", gpu=gpu, dtype=dtype, backend=backend).peak_allocated_bytes < formula - 2 * PAIRS * width
        else:
            with pytest.raises(UsageError, match="No available kernel"):
                device.run("attention", gpu=gpu, dtype=dtype, backend=backend)


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_fused_attention_grows_with_the_sequence_the_formula_with_its_square(device: Device, backend: str) -> None:
    """From 1024 tokens to 2048: twice as much, within the few bytes that do not depend on it, and four times as much."""
    short, long = (device.run("attention", backend=backend, sequence=length).peak_allocated_bytes for length in (1024, 2048))
    by_formula = [
        device.run("attention", backend="MATH", sequence=length, is_trained=False).peak_allocated_bytes for length in (1024, 2048)
    ]

    assert long / short == pytest.approx(2, rel=0.01)
    assert by_formula[1] - by_formula[0] > 3 * PAIRS * 2


@pytest.mark.parametrize(("card", "is_known"), [("h100", True), ("b200", False)])
def test_what_cudnn_takes_for_attention_is_known_where_it_was_recorded(device: Device, card: str, is_known: bool) -> None:
    """On Hopper: `test_library_calls.py`. Elsewhere a finding says that it is not known."""
    findings = device.run("attention", gpu=card, backend="CUDNN_ATTENTION", workspaces=True).findings

    assert [("library_workspaces", "is not known" in finding.message) for finding in findings] == [("library_workspaces", True)] * (
        not is_known
    )


# convolutions: x 8 x 64 x 32 x 32, w 128 x 64 x 3 x 3, y 8 x 128 x 32 x 32, in fp32; what an H100 takes is in `test_library_calls.py`

X, W, Y = 4 * 8 * 64 * 32 * 32, 4 * 128 * 64 * 9, 4 * 8 * 128 * 32 * 32
PARTS = 8 * MIB  # of the filter's gradient, which is summed in parts
ALIGNED = 512


@pytest.mark.parametrize(
    ("dtype", "is_channels_last", "is_trained", "allowance"),
    [
        ("float32", False, False, X + W + Y + ALIGNED),  # copies in the kernels' layout
        ("float32", True, False, 0),
        ("float32", False, True, X + W + Y + ALIGNED + PARTS),
        ("bfloat16", False, True, (X + W + Y) // 2 + ALIGNED + PARTS),
        ("float16", True, True, ALIGNED + PARTS),
    ],
)
def test_a_convolution_is_allowed_copies_of_its_tensors(
    device: Device, dtype: str, is_channels_last: bool, is_trained: bool, allowance: int
) -> None:
    """
    Of a cuDNN that cannot be asked: in the kernels' own layout none, in PyTorch's default one of each tensor.

    Without `library_workspaces` nothing at all.
    """
    values = {"dtype": dtype, "is_channels_last": is_channels_last, "is_trained": is_trained, "asks_cudnn": False}

    allowed, bare = (device.run("convolution", workspaces=workspaces, **values) for workspaces in (True, False))

    assert allowed.peak_allocated_bytes - bare.peak_allocated_bytes == allowance
    assert bool(allowed.findings) == bool(allowance)
    assert bare.findings == ()


def test_no_room_for_a_kernels_workspace_is_want_of_memory(device: Device) -> None:
    """Where cuDNN tries its kernels, PyTorch leaves out those whose workspace is not free, and asks for none of it."""
    full = device.run("wide_convolution", workspaces=True, asks_cudnn=False, memory_bytes=2560 * MIB, steps=1)

    assert full.verdict == "does_not_fit"
    assert full.out_of_memory is not None
    assert "find an engine" in full.out_of_memory.message
    assert full.out_of_memory.requested_bytes > full.out_of_memory.free_bytes


@pytest.mark.parametrize("asks_cudnn", [True, False])
def test_that_cudnn_tries_its_kernels_is_told(device: Device, asks_cudnn: bool) -> None:
    """What it takes for that in the first step is known of a cuDNN that can be asked; which kernel is the fastest never is."""
    tried, usual = (
        device.run("convolution", workspaces=True, asks_cudnn=asks_cudnn, is_benchmarked=is_benchmarked).findings
        for is_benchmarked in (True, False)
    )

    assert "`torch.backends.cudnn.benchmark`" in tried[-1].message
    assert not any("benchmark" in finding.message for finding in usual)


@pytest.fixture(scope="module")
def asked(device: Device, torch_build: TorchBuild) -> Device:
    """A device whose cuDNN says its kernels without a GPU."""
    if torch_build.cudnn_version not in ASKED_CUDNN:
        pytest.skip(f"cuDNN {torch_build.cudnn} is not asked without a GPU")
    return device


def test_a_convolution_takes_what_cudnn_asks_for(asked: Device) -> None:
    """A forward of fp16 in PyTorch's default layout: as many bytes as an H100 took, whether allowances are counted or not."""
    values = {"dtype": "float16", "is_channels_last": False, "is_trained": False}

    counted, uncounted = (asked.run("convolution", workspaces=workspaces, **values) for workspaces in (True, False))

    assert counted.peak_allocated_bytes == uncounted.peak_allocated_bytes
    assert counted.breakdown.workspaces_bytes == uncounted.breakdown.workspaces_bytes > MIB
    assert not any("allowance" in finding.message for finding in counted.findings)


def test_a_kernel_in_clusters_may_take_more_or_less(asked: Device) -> None:
    """By the sums of the largest tile for each of an H100's 132 multiprocessors; an A100 has no clusters."""
    hopper, ampere = (
        asked.run("convolution", gpu=gpu, dtype="bfloat16", is_channels_last=True, is_trained=True) for gpu in ("h100", "a100-80")
    )
    (finding,) = hopper.findings

    assert "16.5 MiB larger" in finding.message
    assert hopper.device_used.expected_bytes - hopper.device_used.low_bytes == 20 * MIB  # one segment
    assert ampere.findings == ()
    assert ampere.device_used.low_bytes == ampere.device_used.expected_bytes


def test_kernels_that_are_tried_are_counted_by_the_largest_workspace(asked: Device) -> None:
    """PyTorch allocates that once for all that it tries, where it is free."""
    tried, pressed = (asked.run("wide_convolution", memory_bytes=gib << 30, steps=1) for gib in (16, 3))

    assert tried.breakdown.workspaces_bytes > 2 << 30
    assert pressed.verdict != "does_not_fit"
    assert pressed.breakdown.workspaces_bytes < 2 << 30


def test_with_unlimited_memory_kernels_are_tried_that_need_little(asked: Device) -> None:
    """It is what such a program needs: with 16 GiB the largest workspace takes 3, and with 3 GiB it trains as well, by smaller ones."""
    whole = asked.run("wide_convolution", gpu="a100-80", memory_bytes=UNLIMITED_BYTES, steps=1)

    assert whole.takes_what_is_free
    assert whole.breakdown.workspaces_bytes < 375 * MIB  # a sixty-fourth of an A30, the smallest GPU of that compute capability
    assert whole.device_used.high_bytes < 3 << 30


# optimizers: one matrix of 1024 x 1024, P = 4 MiB

P = 4 * MIB


@pytest.mark.parametrize(
    ("name", "options", "state_mib"),
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 4),
        ("Adam", {}, 8),
        ("Adam", {"amsgrad": True}, 12),
        ("Adam", {"fused": True}, 8),
        ("AdamW", {"foreach": False}, 8),
        ("AdamW", {"capturable": True}, 8),
        ("Adamax", {}, 8),
        ("NAdam", {}, 8),
        ("RAdam", {}, 8),
        ("Adadelta", {}, 8),
        ("Rprop", {}, 8),
        ("Adagrad", {}, 4),
        ("RMSprop", {}, 4),
        ("ASGD", {}, 4),
        ("Muon", {}, 4),
        ("Adafactor", {}, 0),  # a row and a column
        ("LBFGS", {"max_iter": 2}, 28),  # two pairs of differences, the last gradient, and the old direction beside the new one
    ],
)
def test_every_optimizer_steps(device: Device, name: str, options: dict[str, Any], state_mib: int) -> None:
    """With a closure, as all of them take one: their state is what their formulas hold, and every parameter has its gradient."""
    with skipping_without(f"no attribute '{name}'"):
        seen = device.run("optimizer", name=name, steps=3, **options)

    assert seen.breakdown.optimizer_state_bytes // MIB == state_mib
    assert (seen.breakdown.parameters_bytes, seen.breakdown.gradients_bytes) == (P, P)
    assert "parameters_without_gradient" not in {finding.kind for finding in seen.findings}


def test_sparse_gradients_are_gradients(device: Device) -> None:
    """An embedding of 10,000 x 64 under SparseAdam: two full moments, and gradients of the 512 rows that were looked up."""
    seen = device.run("sparse_gradients", steps=3)

    table = 10_000 * 64 * 4
    assert seen.breakdown.parameters_bytes == table
    assert seen.breakdown.optimizer_state_bytes == 2 * table
    assert seen.breakdown.gradients_bytes in (0, 512 * 64 * 4 + 512 * 8)


def test_a_parameter_that_learns_later_is_no_finding(device: Device) -> None:
    """Its first step has no gradient for it, its second has."""
    assert device.run("learns_later", steps=3).findings == ()


def test_a_parameter_that_never_learns_is_a_finding(device: Device) -> None:
    """It is named."""
    (finding,) = device.run("learns_later", steps=3, first=9).findings

    assert finding.kind == "parameters_without_gradient"
    assert "late.weight" in finding.message


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_moments_of_a_byte(device: Device) -> None:
    """bitsandbytes' AdamW8bit: two bytes a parameter, a scale of 4 bytes for each 256 of each moment, two tables of 256 fp32 values."""
    seen = device.run("eight_bits", steps=3)

    elements = 1024 * 1024
    assert seen.breakdown.optimizer_state_bytes == 2 * elements + 2 * elements // 256 * 4 + 2 * 256 * 4


# operators: each runs, or the call that the device does not serve is named

RUN = """
fft inverse_fft stft complex_abs complex_product complex_exp_angle
sort argsort_one_row topk kthvalue median mode quantile unique unique_rows unique_consecutive nonzero masked_select masked_scatter where
multinomial multinomial_with_replacement bincount histc searchsorted randperm cumsum cumsum_flat cumprod logcumsumexp cummax
embedding embedding_padded embedding_bag embedding_bag_max embedding_sparse index_put index_select index_add scatter_add scatter_amax
gather take_along_dim repeat_interleave bmm baddbmm_half einsum addmv dot double_product integer_product fp8_product cdist
cosine_similarity layer_norm rms_norm group_norm instance_norm batch_norm batch_norm_channels_last batch_norm_half batch_norm_eval
conv1d conv3d conv_depthwise conv_transpose conv_dilated max_pool adaptive_pool fractional_pool unfold pixel_shuffle pad_reflect
ctc_loss ctc_loss_cudnn
grid_sample affine_grid cross_entropy dropout multi_head_attention multi_head_attention_eval transformer_nested nested_tensor
interpolate interpolate_bicubic weight_norm spectral_norm checkpointed clip_grad_norm poisson bernoulli gamma lgamma_digamma
special_bessel igamma fake_quantize segment_reduce foreach_norm tril_indices matrix_exp matrix_power solve_triangular cholesky_solve
cholesky_batch inv_batch solve_batch
cholesky qr orthogonal lstsq svd_lowrank eigh eigh_batch eig svd svdvals_batch pinv solve inv det slogdet lu_factor ldl_factor
householder_product multivariate_normal
sparse_product sparse_product_coalesced sparse_csr sparse_csr_learns sparse_csr_vector sparse_csr_half
sparse_sampled sparse_triangular sparse_to_csr sparse_coalesce profiled list_gpu_processes second_order vmapped saved rng_state memory_pool
"""

NAMED = {
    "sparse_by_sparse": "cusparseSpGEMM_workEstimation",
    "semi_structured": r"cusparseLt\w+",
    "event_ipc": "cudaIpcGetEventHandle",
    "tensor_ipc": "cudaIpcGetMemHandle",
}


@pytest.mark.heavy
def test_operators_run(device: Device) -> None:
    """Forward and backward, twice, without a crash and without a call that is not served."""
    failed = {}
    for name in RUN.split():
        try:
            device.run("operator", name=name)
        except (MissingError, UsageError) as error:
            failed[name] = error.message

    assert failed == {}


def test_what_an_operator_wants_and_is_not_served_is_named(device: Device) -> None:
    """Sizes that only the real library knows, or only the values say, and handles for other processes: no number comes of these."""
    failed = {}
    for name, call in NAMED.items():
        try:
            device.run("operator", name=name)
            failed[name] = "ran"
        except MissingError as error:
            if not re.search(f"does not serve .*{call}", error.message):
                failed[name] = error.message
        except UsageError as error:
            failed[name] = error.message

    assert failed == {}


@pytest.mark.parametrize("name", ["fft", "inverse_fft", "stft"])
def test_fourier_transforms_of_small_factors_want_no_workspace(device: Device, name: str) -> None:
    """As none of those that were recorded of an H100 did (tests/accuracy/recordings): nothing is told."""
    assert device.run("operator", name=name, workspaces=True).findings == ()


# factorizations


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(12, 12), (3, 12, 12), (20, 12, 12), (2, 600, 600)], ids=str)
def test_factorizations_run(device: Device, shape: tuple[int, ...], dtype: str) -> None:
    """Forward and backward; and nobody is asked whether they went well, which PyTorch itself reads from the GPU."""
    seen = device.run("factorizations", shape=list(shape), dtype=dtype, steps=1)

    assert seen.reads == ()


def test_magma_works_where_a_program_wants_it(device: Device) -> None:
    """What it reads from the GPU to work on it itself is nothing that a person could answer."""
    seen = device.run("factorizations", shape=[2, 600, 600], dtype="float32", library="magma", steps=1)

    assert seen.reads == ()


def test_a_qr_decomposition_keeps_its_factors(device: Device) -> None:
    """Of five matrices of 300 x 64: Q of 5·300·64 and R of 5·64·64 fp32 values, in multiples of 512 bytes."""
    seen = device.run("keeps_qr", shape=[5, 300, 64])

    assert seen.steps[-1].allocated_bytes == 384_000 + 81_920


def test_the_workspace_of_a_factorization_is_an_allowance(device: Device) -> None:
    """Of a matrix of 1024 x 1024 fp32 values: in the peak, told, and not in the lower bound.

    They are 3·1024² + 768·1024 + 2^16 values and some, a bound on what an H100 asked for, whose largest was of 354 x 354
    (tests/accuracy/recordings). The allocator takes whole 2 MiB for it, as for all from 10 MiB on.
    """
    seen, without = (device.run("keeps_eigenvectors", size=1024, workspaces=allowed) for allowed in (True, False))
    (finding,) = seen.findings
    kept = 2 * 4 * MIB + 4096  # the matrix, its vectors and 1024 values

    assert seen.steps[-1].allocated_bytes == kept
    assert seen.peak_allocated_bytes == kept + 512 + 16 * MIB  # and whether it went well
    assert "factorization up to 15.3 MiB" in finding.message
    assert without.findings == ()
    assert seen.device_used.low_bytes == without.peak_reserved_bytes < seen.peak_reserved_bytes


def test_the_workspace_of_a_sparse_product_is_an_allowance(device: Device) -> None:
    """Of 64·32 values, 8 bytes for each 24 and 8 more, less one, as in tests/accuracy/recordings."""
    (finding,) = device.run("operator", name="sparse_csr", workspaces=True).findings

    assert "sparse product up to 695 B" in finding.message


def test_the_program_is_asked_what_it_reads_in_the_gradient_of_a_factorization(device: Device) -> None:
    """A checkpoint runs the forward again there, and gets the same answer again."""
    device.run("checkpointed_svd", steps=1)


def test_there_is_no_operator_without_an_expectation(device: Device) -> None:
    """Those that run and those that are named are all that the programs' file has."""
    operators = PROGRAMS.read_text(encoding="utf-8").partition("\nOPERATORS = {")[2].partition("\n}")[0]
    known = re.findall(r'^    "(\w+)": ', operators, re.MULTILINE)

    assert sorted(known) == sorted([*RUN.split(), *NAMED])


# torch.compile


@pytest.mark.heavy
def test_a_compiled_model_runs_inductors_kernels(device: Device) -> None:
    """Forward and backward; the hidden layer of 16,384 x 1024 fp32 values is kept, and its gradient made."""
    eager, compiled = (device.run("mlp", is_compiled=is_compiled, steps=3) for is_compiled in (False, True))

    assert compiled.breakdown.parameters_bytes == eager.breakdown.parameters_bytes
    assert compiled.peak_phase.startswith("backward")
    assert compiled.peak_allocated_bytes > 2 * 64 * MIB
    assert compiled.steps[1].allocated_bytes == compiled.steps[2].allocated_bytes


# rehearsals


@pytest.mark.heavy
def test_two_rehearsals_at_once_are_two(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own, on a GPU of its own, here even of a device of its own: a file lies where the cache should be."""
    alone = device.run("mlp", is_compiled=False)
    (tmp_path / "memplan").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def rehearse(_: int) -> Rehearsal:
        with Rehearser(step_source_from(f"{PROGRAMS}:build")) as rehearser:
            return Device(rehearser).run("mlp", is_compiled=False)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rehearse, range(2))

    assert first == second
    assert first.model_dump(exclude={"values"}) == alone.model_dump(exclude={"values"})

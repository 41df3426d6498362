"""`memplan --auto` and `memplan gpus` on machines with and without GPUs: a driver's library that answers from a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from memplan.hardware.catalog import catalog_gpus, find_gpu
from memplan.hardware.torch_install import TorchBuild
from tests.conftest import Run
from tests.hardware.nvml_driver import A100, GIB, MIG, T4, Driver, no_driver
from tests.standin.conftest import torch_build
from tests.standin.machine import machine, uuid_of

__all__ = ["torch_build"]

BUSY_A100 = A100.replace("5920 0", f"5920 {30 * GIB}")


@pytest.fixture
def without_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine without a driver."""
    return no_driver(tmp_path_factory.mktemp("no-driver")).environment()


def words(text: str) -> str:
    """A report without its line breaks."""
    return " ".join(text.split())


def plan_of(run: Any) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


# The plan


@pytest.mark.parametrize("arguments", [["--auto"], ["--auto", "--format", "json"], ["--method", "analytic"]])
def test_without_a_driver_auto_says_what_to_type_instead(run_memplan: Run, without_driver: dict[str, str], arguments: list[str]):
    """Exit code 3, nothing for programs to read; a plan without any GPU means --auto."""
    run = run_memplan(*arguments, **without_driver)

    assert (run.returncode, run.stdout) == (3, "")
    error, hint = run.stderr.strip().split("\n\n")
    assert error == "Error: no NVIDIA driver answers on this machine (NVML Shared Library Not Found)"
    assert hint == "hint: plan for a GPU by name or size instead: `--gpu rtx4090`, `--gpu-memory 24`"


def test_hidden_cards_are_no_cards(run_memplan: Run, driver: Driver):
    """CUDA_VISIBLE_DEVICES hides them from the training too; the message names it."""
    run = run_memplan("--auto", CUDA_VISIBLE_DEVICES="", **driver.environment(A100))

    assert run.returncode == 3
    assert "CUDA_VISIBLE_DEVICES='' hides all 1 GPU(s)" in run.stderr
    assert "Traceback" not in run.stderr


def test_one_card_is_planned_for_by_name(run_memplan: Run, driver: Driver):
    """The report says which GPU, and what programs can have of it."""
    run = run_memplan("--auto", **driver.environment(A100))

    assert run.returncode == 0
    assert "NVIDIA A100-SXM4-80GB" in run.stdout
    assert "79.25 GiB" in run.stdout
    assert "alone" not in run.stdout


def test_the_plan_for_a_found_card_is_the_plan_for_its_name(run_memplan: Run, driver: Driver):
    """An idle GPU of the catalogue: all that differs is where its figures are from, and which of all such GPUs it is."""
    found = plan_of(run_memplan("--auto", "--format", "json", **driver.environment(A100)))
    named = plan_of(run_memplan("--gpu", "a100-80", "--format", "json"))

    assert found["gpu"].pop("origin") == "found on this machine"
    assert (found["gpu"].pop("uuid"), named["gpu"].pop("uuid")) == ("GPU-a100bbbb-1111-2222-3333-444455556666", None)
    assert named["gpu"].pop("origin").startswith("catalogue")
    assert found == named


def test_of_two_unlike_cards_the_smallest_is_planned_for(run_memplan: Run, driver: Driver):
    """A training that is started on both has to fit on each; what the larger could take is what a plan for it alone says."""
    machine = driver.environment(A100 + T4)
    alone = plan_of(run_memplan("--auto", "--format", "json", CUDA_VISIBLE_DEVICES="0", **machine))
    both = run_memplan("--auto", **machine)
    both_json = plan_of(run_memplan("--auto", "--format", "json", **machine))

    more = alone["after"]["training"]["micro_batch_size"]

    assert more > both_json["after"]["training"]["micro_batch_size"]
    assert f"planned for the smallest of 2 GPUs, Tesla T4; NVIDIA A100-SXM4-80GB alone: micro-batch {more}" in words(both.stdout)
    assert both_json["gpu"]["name"] == "Tesla T4"
    assert both_json["other_gpus"] == [{"name": "NVIDIA A100-SXM4-80GB", "fits": True, "micro_batch_size": more}]


@pytest.mark.heavy
def test_cards_come_in_cudas_order(run_memplan: Run, torch_build: TorchBuild, driver: Driver):
    """The number in CUDA_VISIBLE_DEVICES is CUDA's, which counts the fastest GPU first: 0 is the A100 in the second slot."""
    cards_here = machine(torch_build, driver, "t4", "a100-80")

    plan = plan_of(run_memplan("--auto", "--format", "json", **cards_here | {"CUDA_VISIBLE_DEVICES": "0"}))
    listed = plan_of(run_memplan("gpus", "none", "--format", "json", **cards_here))

    assert (plan["gpu"]["name"], plan["gpu"]["uuid"]) == ("NVIDIA A100-SXM4-80GB", uuid_of(1))
    assert [card["name"] for card in listed["found"]] == ["NVIDIA A100-SXM4-80GB", "Tesla T4"]


def test_who_holds_memory_is_named(run_memplan: Run, torch_build: TorchBuild, driver: Driver):
    """This test's own process holds three GiB of the GPU."""
    plan = plan_of(run_memplan("--auto", "--format", "json", **machine(torch_build, driver, "t4", busy={0: 3 * GIB})))

    name = psutil.Process().name()
    assert plan["gpu"]["origin"] == (
        f"found on this machine, driver 580.95.05 (CUDA 13.0); 3.00 GiB in use by others now: {name} ({os.getpid()}) 3.00 GiB"
    )


def test_the_smallest_is_the_one_with_least_free(run_memplan: Run, driver: Driver):
    """An A100 of which others hold 70 GiB is smaller than an idle T4, and nothing that T4 could take fits on it."""
    crowded = A100.replace("5920 0", f"5920 {70 * GIB}")

    plan = json.loads(run_memplan("--auto", "--format", "json", **driver.environment(T4 + crowded)).stdout)

    assert plan["gpu"]["name"] == "NVIDIA A100-SXM4-80GB"
    assert [each["name"] for each in plan["other_gpus"]] == ["Tesla T4"]


def test_two_cards_alike_need_no_word(run_memplan: Run, driver: Driver):
    """Either is planned for as the other."""
    run = run_memplan("--auto", **driver.environment(T4 + T4.replace("7474aaaa", "7474bbbb")))

    assert run.returncode == 0
    assert "alone" not in run.stdout


def test_a_busy_card_is_planned_as_far_as_it_is_free(run_memplan: Run, driver: Driver):
    """The budget is what others leave, less the margin of 5 %; a warning says how much they hold."""
    machine = driver.environment(BUSY_A100)
    run, plan = run_memplan("--auto", **machine), plan_of(run_memplan("--auto", "--format", "json", **machine))

    total = find_gpu("a100-80").total_memory_bytes

    assert plan["gpu"]["others_used_bytes"] == plan["budget"]["others_used_bytes"] == 30 * GIB
    assert plan["budget_bytes"] == int((total - 30 * GIB) * 0.95)
    assert plan["stages"][0]["estimate"]["device_used"]["high_bytes"] <= plan["budget_bytes"]
    assert run.returncode == 0
    assert "other processes hold 30.00 GiB of the GPU now; the plan uses what they leave" in words(run.stdout)


def test_a_card_that_others_fill_fits_nothing(run_memplan: Run, driver: Driver):
    """Exit code 1: a plan was asked for and there is none."""
    run = run_memplan("--auto", **driver.environment(T4.replace("106127360 0", f"106127360 {14 * GIB}")))

    assert run.returncode == 1
    assert "other processes hold 14.00 GiB" in words(run.stdout + run.stderr)


def test_an_instance_is_planned_for_by_its_uuid(run_memplan: Run, driver: Driver):
    """The name is the instance's, the memory too, less the 38 MiB at most that the driver keeps of it."""
    machine = driver.environment(MIG)

    plan = plan_of(run_memplan("--auto", "--format", "json", CUDA_VISIBLE_DEVICES="MIG-33334040-1111-2222-3333-444455556666", **machine))

    assert plan["gpu"]["name"] == "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    assert 0 <= find_gpu("a100-80:3g.40gb").total_memory_bytes - plan["gpu"]["total_memory_bytes"] <= 38 * 2**20
    assert plan["other_gpus"] == []


@pytest.mark.parametrize(
    "arguments", [["--gpu", "t4"], ["--gpu-memory", "24"], ["--gpu", ""], ["--gpu-memory", ""], ["--gpu", "t4", "--gpu-memory", "24"]]
)
def test_auto_with_another_card_is_a_contradiction(run_memplan: Run, driver: Driver, arguments: list[str]):
    """One of them is a mistake, and only the user knows which; an empty name is one too."""
    run = run_memplan("--auto", *arguments, **driver.environment(A100))

    assert (run.returncode, run.stdout) == (2, "")
    assert "--auto excludes --gpu and --gpu-memory" in run.stderr


@pytest.mark.parametrize("option", ["--gpu", "--gpu-memory"])
def test_an_empty_name_is_not_this_machine(run_memplan: Run, driver: Driver, option: str):
    """`--gpu "$GPU"` with a variable that nobody set must not plan for whatever GPU is here."""
    run = run_memplan(option, "", **driver.environment(A100))

    assert (run.returncode, run.stdout) == (2, "")
    assert "hint:" in run.stderr


# The list


def test_the_cards_are_listed_without_a_driver(run_memplan: Run, without_driver: dict[str, str]):
    """What is known goes to stdout, why nothing was found to stderr; that is no error."""
    run = run_memplan("gpus", **without_driver)

    assert run.returncode == 0
    assert all(card.short_names[0] in run.stdout for card in catalog_gpus())
    assert run.stderr == "Found on this machine: none (no NVIDIA driver answers on this machine (NVML Shared Library Not Found)).\n"


def test_the_cards_of_this_machine_are_listed_first(run_memplan: Run, driver: Driver):
    """With what programs can have and what is free of it: 81153.75 MiB less 30 GiB."""
    run = run_memplan("gpus", **driver.environment(BUSY_A100))

    found, known = run.stdout.split("Known GPUs")
    assert (run.returncode, run.stderr) == (0, "")
    assert all(text in words(found) for text in ("0 NVIDIA A100-SXM4-80GB 79.25 GiB 49.25 GiB 8.0", "30.00 GiB in use by others now"))
    assert "rtx4090" in known


def test_the_list_is_one_for_programs_too(run_memplan: Run, driver: Driver, without_driver: dict[str, str]):
    """Bytes as integers, with a schema version; why nothing was found is a field."""
    found = plan_of(run_memplan("gpus", "--format", "json", **driver.environment(BUSY_A100)))
    none = plan_of(run_memplan("gpus", "--format", "json", **without_driver))

    assert [(card["name"], card["others_used_bytes"]) for card in found["found"]] == [("NVIDIA A100-SXM4-80GB", 30 * GIB)]
    assert (found["schema_version"], found["not_found_because"]) == (1, None)
    assert none["found"] == []
    assert "no NVIDIA driver" in none["not_found_because"]
    assert found["known"] == none["known"]
    assert {card["short_names"][0]: card["total_memory_bytes"] for card in none["known"]}["t4"] == 15_835_660_288


@pytest.mark.parametrize(
    ("text", "names"),
    [("4090", ["rtx4090"]), ("tesla-t4", ["t4"]), ("GB10", ["gb10"]), ("141", ["h200", "h200-nvl", "h200:7g.141gb"]), ("voodoo", [])],
)
def test_a_text_keeps_the_cards_whose_name_or_size_has_it(run_memplan: Run, without_driver: dict[str, str], text: str, names: list[str]):
    """In any case; none is an answer as well."""
    listed = plan_of(run_memplan("gpus", text, "--format", "json", **without_driver))

    assert [card["short_names"][0] for card in listed["known"]] == names


@pytest.mark.heavy
def test_the_list_says_which_pytorch_would_train_here(run_memplan: Run, torch_build: TorchBuild, driver: Driver):
    """With what it brings along, beside the driver of each GPU."""
    here = machine(torch_build, driver, "t4")
    run, listed = run_memplan("gpus", "none", **here), plan_of(run_memplan("gpus", "none", "--format", "json", **here))

    assert f"Found on this machine (PyTorch {torch_build.version} with cuDNN " in run.stdout
    assert "driver 580.95.05 (CUDA 13.0)" in words(run.stdout)
    assert listed["pytorch"]["cuda_major"] == torch_build.cuda_major


def test_a_verbose_list_is_a_report_of_each_gpu_of_this_machine(run_memplan: Run, driver: Driver, without_driver: dict[str, str]):
    """Precisions, clocks and so on; for programs beside the rest; without a driver why there is none."""
    here = driver.environment(f"{BUSY_A100}clocks 210 1410 1593 1593\necc 1\n")
    run, listed = run_memplan("gpus", "-v", **here), plan_of(run_memplan("gpus", "-v", "--format", "json", **here))
    none = run_memplan("gpus", "--verbose", **without_driver)

    assert run.stdout.startswith("cuda:0  NVIDIA A100-SXM4-80GB\n")
    assert "precisions fp16 native, bf16 native, tf32 native, fp8 none" in words(run.stdout)
    assert "30.00 GiB in use by others" in run.stdout
    (report,) = listed["reports"]
    assert (report["sm_clock_mhz"], report["max_sm_clock_mhz"], report["has_ecc_on"]) == (210, 1410, True)
    assert (none.returncode, none.stdout) == (0, "")
    assert none.stderr.startswith("Found on this machine: none (no NVIDIA driver answers")


def test_a_text_shortens_the_table(run_memplan: Run, without_driver: dict[str, str]):
    """The one line that is left is whole."""
    run = run_memplan("gpus", "4090", **without_driver)

    assert words(run.stdout.splitlines()[-1]) == "rtx4090 NVIDIA GeForce RTX 4090 24 GB 23.65 GiB 8.9 128"


def test_nothing_is_written_into_the_folder(run_memplan: Run, driver: Driver, tmp_path: Path):
    """A plan for this machine's GPU writes nothing, and neither does the list."""
    run_memplan("--auto", **driver.environment(A100))
    run_memplan("gpus", **driver.environment(A100))

    assert list(tmp_path.iterdir()) == []

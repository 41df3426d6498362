"""The catalogue's facts, and which GPU a name or a size means."""

from __future__ import annotations

import contextlib
import csv
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import UsageError
from memplan.hardware.catalog import CatalogGpu, catalog_gpus, find_gpu, gpu_of_size, of_some_kind
from memplan.units import format_bytes, parse_size
from tests.conftest import SHARED, skip_without

MIB, GIB = 2**20, 2**30

ANY_CARD = st.sampled_from(catalog_gpus())


def by_short_name(name: str) -> CatalogGpu:
    return next(card for card in catalog_gpus() if name in card.short_names)


def squeezed(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())


# The facts


def test_the_catalogue_knows_the_cards_that_people_have():
    """Those that the design names, in a list that is worth searching."""
    known = {name for card in catalog_gpus() for name in card.short_names}

    assert len(catalog_gpus()) >= 45
    assert {"t4", "a100-40", "a100-80", "h100", "h200", "rtx4090", "rtx6000"} <= known


@pytest.mark.parametrize(
    ("short_name", "name", "box", "nvml_mib", "torch_mib", "capability", "multiprocessors"),
    [
        # nvidia-smi's memory.total, and torch's total_memory in whole MiB, both as logs show them; SMs from NVIDIA's datasheets
        ("t4", "Tesla T4", 16, 15360, 15102, (7, 5), 40),
        ("a100-40", "NVIDIA A100-SXM4-40GB", 40, 40960, 40514, (8, 0), 108),
        ("a100-80", "NVIDIA A100-SXM4-80GB", 80, 81920, 81154, (8, 0), 108),
        ("h100", "NVIDIA H100 80GB HBM3", 80, 81559, None, (9, 0), 132),
        ("h200", "NVIDIA H200", 141, 143771, 143156, (9, 0), 132),
        ("b200", "NVIDIA B200", 180, 183359, 182642, (10, 0), 148),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 24, 24564, 24217, (8, 9), 128),
        ("rtx5090", "NVIDIA GeForce RTX 5090", 32, 32607, 32102, (12, 0), 170),
        ("rtx6000", "Quadro RTX 6000", 24, 24576, None, (7, 5), 72),
        ("l4", "NVIDIA L4", 24, 23034, 22563, (8, 9), 58),
    ],
)
def test_a_card_is_as_its_logs_show_it(short_name, name, box, nvml_mib, torch_mib, capability, multiprocessors):
    """Programs get less than nvidia-smi shows, and that is less than the box says."""
    card = by_short_name(short_name)

    assert (card.spec.name, card.spec.marketing_gb, card.nvml_total_bytes) == (name, box, nvml_mib * MIB)
    assert (card.spec.compute_capability, card.spec.multiprocessors) == (capability, multiprocessors)
    assert torch_mib is None or abs(card.spec.total_memory_bytes / MIB - torch_mib) < 1


def test_a_t4_offers_what_the_design_says():
    """15835660288 B: DESIGN section 9, and a T4's `get_device_properties`."""
    assert find_gpu("t4").total_memory_bytes == 15_835_660_288


def test_the_spark_shares_its_memory_with_the_host():
    """GB10: nvidia-smi shows no memory, programs have the host's: MemTotal 127600748 kB (nvitop issue 208)."""
    unified = [card for card in catalog_gpus() if card.spec.unified_memory]

    assert [card.spec.name for card in unified] == ["NVIDIA GB10"]
    assert unified[0].spec.total_memory_bytes == 127_600_748 * 1024
    assert unified[0].nvml_total_bytes is None


# How the table of the logs writes the second GPU of a row.
SECOND_CARDS = {"PCIE-40GB": "a100-40-pcie", "80GB PCIe": "a100-80-pcie"}


def test_the_catalogue_agrees_with_the_table_of_the_logs():
    """Every row is a GPU here, with its size on the box, its NVML total and a torch total that was seen."""
    table = SHARED / "gpu_memory.csv"
    skip_without(table)
    rows = list(csv.DictReader(line for line in table.read_text(encoding="utf-8").splitlines() if not line.startswith("#")))

    wrong = [(name, flaw) for row in rows for name in row["name"].split(" / ") for flaw in flaws_against(row, name)]

    assert len(rows) > 50
    assert wrong == []


def flaws_against(row: dict[str, str], name: str) -> list[str]:
    spec = find_gpu(SECOND_CARDS.get(name, name))
    card = next(card for card in catalog_gpus() if card.spec == spec)
    totals = [int(total) for total in re.findall(r"\d+", row["nvml_total_mib"])]
    # With ECC off the GPU offers more than with it on, as the catalogue has it: no figure to hold it to.
    seen = (
        [int(total) for total in re.findall(r"\b\d{4,6}\b", row["torch_total_mib_seen"])]
        if "ECC off" not in row["torch_total_mib_seen"]
        else []
    )
    flaws = []
    if str(spec.marketing_gb) != row["marketing_gb"].removesuffix(" unified"):
        flaws.append(f"{spec.marketing_gb} GB on the box, not {row['marketing_gb']}")
    if totals and card.nvml_total_bytes not in [total * MIB for total in totals]:
        flaws.append(f"{card.nvml_total_bytes} by NVML, not {totals} MiB")
    if seen and not min(seen) <= spec.total_memory_bytes / MIB < max(seen) + 1:
        flaws.append(f"{spec.total_memory_bytes / MIB} MiB for programs, seen were {seen}")
    if not seen and totals and not 0.97 <= spec.total_memory_bytes / card.nvml_total_bytes < 1:
        flaws.append(f"{spec.total_memory_bytes} for programs of NVML's {card.nvml_total_bytes}")
    return flaws


@given(ANY_CARD)
def test_no_card_offers_more_than_it_has(card: CatalogGpu):
    """Programs get 97 % or more of what NVML shows, never more; each figure names its source."""
    of_nvml = card.spec.total_memory_bytes / (card.nvml_total_bytes or card.spec.total_memory_bytes)

    assert 0.97 <= of_nvml <= 1
    assert card.memory_source
    assert card.memory_source in card.spec.origin
    assert None not in (card.spec.compute_capability, card.spec.multiprocessors)
    assert card.spec.others_used_bytes == 0


@given(st.sampled_from([card for card in catalog_gpus() if card.is_mig]))
def test_an_instance_is_a_part_of_its_card(instance: CatalogGpu):
    """No more memory and multiprocessors than the GPU has that its name starts with, and its capability."""
    card, profile = instance.short_names[0].split(":")
    whole = by_short_name(card).spec

    assert instance.spec.name == f"{whole.name} MIG {profile}"
    assert instance.spec.total_memory_bytes <= whole.total_memory_bytes
    assert instance.spec.multiprocessors <= whole.multiprocessors
    assert instance.spec.compute_capability == whole.compute_capability


# A name


def test_no_name_stands_for_two_cards():
    """Short names and driver's names, however they are spaced."""
    names = Counter(name for card in catalog_gpus() for name in {squeezed(name) for name in (*card.short_names, card.spec.name)})

    assert [name for name, count in names.items() if count > 1] == []


@given(ANY_CARD, st.data())
def test_every_card_answers_to_all_of_its_names(card: CatalogGpu, data: st.DataObject):
    """Short or the driver's, in any case, with dashes, blanks or nothing between the words."""
    name = data.draw(st.sampled_from([*card.short_names, card.spec.name]), label="name")
    space = data.draw(st.sampled_from(["-", " ", "_", ""]), label="space")
    case = data.draw(st.sampled_from([str.lower, str.upper, str]), label="case")

    assert find_gpu(case(re.sub(r"[ -]", space, name))) == card.spec


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("rtx 4090 24GB", "NVIDIA GeForce RTX 4090"),
        ("geforce 4070", "NVIDIA GeForce RTX 4070"),
        ("tesla t4", "Tesla T4"),
        ("Tesla L4", "NVIDIA L4"),
        ("nvidia t4", "Tesla T4"),
        ("T4 16 GB", "Tesla T4"),
        ("a100 80", "NVIDIA A100-SXM4-80GB"),
        ("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("A100 SXM4 80", "NVIDIA A100-SXM4-80GB"),
        ("a100 pcie 80gb", "NVIDIA A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("h100 nvl", "NVIDIA H100 NVL"),
        ("h200", "NVIDIA H200"),
        ("quadro rtx 6000", "Quadro RTX 6000"),
        ("rtx 6000", "Quadro RTX 6000"),
        ("rtx 6000 ada", "NVIDIA RTX 6000 Ada Generation"),
        ("4080 super", "NVIDIA GeForce RTX 4080 SUPER"),
        ("titan", "NVIDIA TITAN RTX"),
        ("a100-80:1g.10gb", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"),
        ("A100 80GB MIG 3g.40gb", "NVIDIA A100-SXM4-80GB MIG 3g.40gb"),
        ("h100 1g.20gb", "NVIDIA H100 80GB HBM3 MIG 1g.20gb"),
    ],
)
def test_a_card_is_found_by_what_people_call_it(typed: str, name: str):
    """A loose name is enough as long as it means one GPU."""
    assert find_gpu(typed).name == name


@pytest.mark.parametrize(
    ("typed", "candidates"),
    [
        ("a100", ["a100-40", "a100-80", "a100-80-pcie"]),
        ("v100", ["v100-16", "v100-32"]),
        ("rtx", ["rtxa4000", "rtxa6000"]),
        ("1g.10gb", ["a100-40:1g.10gb", "a100-80:1g.10gb"]),
        ("80 GB", ["a100-80", "h100"]),
    ],
)
def test_a_name_that_means_several_cards_is_refused_with_them(typed: str, candidates: list[str]):
    """Their memory differs, and no GPU is likelier than the others."""
    with pytest.raises(UsageError, match=f"{re.escape(repr(typed))} could be \\d+ GPUs") as refused:
        find_gpu(typed)

    assert set(candidates) <= set(re.split(r"[ ,]+", refused.value.hint or ""))


def test_cards_that_differ_in_their_plug_only_are_one():
    """Both A100s with 40 GB have the same memory, capability and multiprocessors: either plans alike."""
    assert find_gpu("a100 40GB").total_memory_bytes == find_gpu("a100-40-pcie").total_memory_bytes == find_gpu("a100-40").total_memory_bytes


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [("rtx4091", "rtx4090"), ("H10", "h100"), ("rtx 3080 12GB", "rtx3080"), ("a100-90", "a100-80"), ("h100:1g.5gb", "h100:1g.20gb")],
)
def test_an_unknown_card_is_refused_with_what_is_near(typed: str, suggestion: str):
    """Another GPU is never taken for it: an RTX 3080 with 12 GB is not the one with 10."""
    with pytest.raises(UsageError, match="unknown GPU") as refused:
        find_gpu(typed)

    assert suggestion in (refused.value.hint or "")


@pytest.mark.parametrize("typed", ["", " ", "-", "NVIDIA", "mi300x", "€", "x" * 1000])
def test_what_is_no_name_is_refused_with_the_list(typed: str):
    """Nothing is near; the hint says where the names are."""
    with pytest.raises(UsageError, match="unknown GPU") as refused:
        find_gpu(typed)

    assert "`memplan.gpus()`" in (refused.value.hint or "")


@given(st.text(max_size=30))
def test_any_text_is_a_card_or_refused(typed: str):
    """Nothing that can be typed is a traceback."""
    with contextlib.suppress(UsageError):
        assert find_gpu(typed) in [card.spec for card in catalog_gpus()]


# A size


def test_24_gb_is_the_least_of_the_cards_sold_with_it():
    """An L4 offers 22563 MiB, an A30 and a TITAN RTX more than a GiB more; a plan for "24" has to fit on all."""
    card = gpu_of_size(parse_size("24"))

    assert card.total_memory_bytes // MIB == 22563
    assert card.marketing_gb == 24
    for end in ("22.03 GiB", "NVIDIA L4", "23.69 GiB", "NVIDIA A30", "smallest"):
        assert end in card.origin


@pytest.mark.parametrize("marketing_gb", sorted({card.spec.marketing_gb for card in catalog_gpus() if card.spec.marketing_gb}))
def test_a_size_on_the_box_fits_every_card_sold_with_it(marketing_gb: int):
    """The least of them, and never more than the box says."""
    sold = [card.spec.total_memory_bytes for card in catalog_gpus() if card.spec.marketing_gb == marketing_gb]

    planned = gpu_of_size(parse_size(str(marketing_gb)))

    assert planned.total_memory_bytes == min(sold) < marketing_gb * GIB
    assert ("planned for the smallest" in planned.origin) == (min(sold) != max(sold))


@pytest.mark.parametrize(("typed", "name"), [("16", "t4"), ("8", "rtx4060"), ("80", "h800"), ("141", "h200"), ("40", "a100-40")])
def test_the_sizes_people_type_are_cards(typed: str, name: str):
    """The least of the 16 GB GPUs is the T4, of the 80 GB GPUs the H800."""
    assert gpu_of_size(parse_size(typed)).total_memory_bytes == find_gpu(name).total_memory_bytes


@pytest.mark.parametrize("typed", ["24GiB", "24000MB", "15835660288B", "23.5 GiB", "24.5"])
def test_an_exact_size_is_taken_to_the_byte(typed: str):
    """Whoever writes a binary unit, or a fraction, has measured."""
    card, size = gpu_of_size(parse_size(typed)), parse_size(typed)

    assert (card.total_memory_bytes, card.marketing_gb, card.origin) == (size.size_bytes, None, "as typed")
    assert format_bytes(size.size_bytes) in card.name


@pytest.mark.parametrize("typed", ["23", "1000"])
def test_a_size_that_no_card_is_sold_with_is_taken_as_typed(typed: str):
    """And says so, since it may be a slip for the size on a box."""
    card = gpu_of_size(parse_size(typed))

    assert card.total_memory_bytes == float(typed) * GIB
    assert "no GPU of the catalogue is sold with that size" in card.origin


@pytest.mark.parametrize("typed", ["24GB", "24G", "24 gb"])
def test_gigabytes_are_the_size_on_the_box_too(typed: str):
    """People type what stands there."""
    assert gpu_of_size(parse_size(typed)) == gpu_of_size(parse_size("24"))


def test_a_size_says_nothing_of_the_kind_of_card():
    """Capability and multiprocessors differ between GPUs of one size."""
    card = gpu_of_size(parse_size("24"))

    assert (card.compute_capability, card.multiprocessors) == (None, None)


@pytest.mark.parametrize("typed", ["11GiB", "16GiB", "24GiB", "32GiB", "178GiB"])
def test_a_size_is_taken_for_a_kind_that_each_pytorch_runs_on(typed: str):
    """Nearest in size may be a GTX 1080 Ti, a V100 or a B200: new builds have no kernels for some of those, old ones for others."""
    card = of_some_kind(gpu_of_size(parse_size(typed)))

    assert card.compute_capability is not None
    assert (7, 5) <= card.compute_capability <= (9, 0)
    assert card.total_memory_bytes == parse_size(typed).size_bytes

"""`memplan gpus`: the GPUs in the catalogue, and those of this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from memplan.cli.options import format_option
from memplan.errors import MissingError

if TYPE_CHECKING:
    from memplan.hardware.catalog import CatalogGpu
    from memplan.hardware.device_report import DeviceReport
    from memplan.hardware.gpu import GpuSpec

EXAMPLES = """
\b
Examples:
  memplan gpus                  every GPU that --gpu takes, and those of this machine
  memplan gpus 24               GPUs whose name or size contains "24"
  memplan gpus --verbose        all that the driver says of this machine's GPUs: precisions, clocks, ECC, MIG, P2P
  memplan gpus --format json    for a program
"""


@click.command(epilog=EXAMPLES)
@click.argument("filter_text", metavar="[TEXT]", default="")
@click.option("--verbose", "-v", "is_verbose", is_flag=True, help="All that the driver says of this machine's GPUs.")
@format_option
def gpus(*, filter_text: str, is_verbose: bool, output_format: str) -> int:
    """List the GPUs that memplan knows, and those of this machine; with TEXT those whose name or size contains it."""
    from memplan.hardware.catalog import catalog_gpus
    from memplan.hardware.detect import detect_gpus

    known = [card for card in catalog_gpus() if _matches(card, filter_text)]
    try:
        found, reason = detect_gpus(), ""
    except MissingError as error:
        found, reason = [], error.message
    if output_format == "json":
        answer = {"schema_version": 1, "found": [card.model_dump(mode="json") for card in found], "not_found_because": reason or None}
        answer["pytorch"] = _pytorch()
        if is_verbose:
            answer["reports"] = [report.model_dump(mode="json") for report in _reports(found)]
        click.echo(json.dumps(answer | {"known": [_as_json(card) for card in known]}, indent=2))
        return 0
    if is_verbose:
        _print_reports(_reports(found), reason)
    else:
        _print(known, found, reason)
    return 0


def _reports(found: list[GpuSpec]) -> list[DeviceReport]:
    from memplan.hardware.device_report import report_of

    return [report_of(gpu) for gpu in found]


def _print_reports(reports: list[DeviceReport], reason: str) -> None:
    """Print what there is to say of each GPU of this machine, with the PyTorch that would train on it."""
    from memplan.reports.terminal import print_facts

    if not reports:
        click.echo(f"Found on this machine: none ({reason}).", err=True)
        return
    torch = _pytorch()
    brings = f"{torch['version']}, CUDA {torch['cuda_major']}, cuDNN {torch['cudnn']}" if torch else "none for CUDA in this Python"
    for number, report in enumerate(reports):
        click.echo(f"{'' if number == 0 else chr(10)}cuda:{number}  {report.name}\n")
        print_facts((*report.facts, ("PyTorch", brings)))


def _pytorch() -> dict[str, Any] | None:
    """Return the PyTorch that would train here, and what it brings along; None where there is none for CUDA."""
    from memplan.hardware.torch_install import find_torch

    try:
        torch = find_torch()
    except MissingError:
        return None
    return {"version": torch.version, "cuda_major": torch.cuda_major, "cudnn": torch.cudnn}


def _matches(card: CatalogGpu, text: str) -> bool:
    words = [card.spec.name, *card.short_names, f"{card.spec.marketing_gb or ''}"]
    return any(text.lower() in word.lower() for word in words)


def _as_json(card: CatalogGpu) -> dict[str, Any]:
    return {"short_names": list(card.short_names), "is_mig": card.is_mig, "nvml_total_bytes": card.nvml_total_bytes} | card.spec.model_dump(
        mode="json"
    )


def _print(known: list[CatalogGpu], found: list[GpuSpec], reason: str) -> None:
    from memplan.reports.terminal import print_table
    from memplan.units import format_bytes

    if found:
        torch = _pytorch()
        brings = f"PyTorch {torch['version']} with cuDNN {torch['cudnn']}" if torch else "no PyTorch for CUDA in this Python"
        click.echo(f"Found on this machine ({brings}):\n")
        rows = [
            (
                str(number),
                card.name,
                format_bytes(card.total_memory_bytes),
                format_bytes(card.free_memory_bytes),
                ".".join(map(str, card.compute_capability or ())),
                card.origin.removeprefix("found on this machine").lstrip(";, "),
            )
            for number, card in enumerate(found)
        ]
        print_table(("cuda", "name", "for programs", "free now", "capability", ""), rows)
    else:
        click.echo(f"Found on this machine: none ({reason}).", err=True)
    if not known:
        click.echo("\nNo GPU of the catalogue matches.", err=True)
        return
    click.echo("\nKnown GPUs (the size sold, and what programs can use of it):\n")
    print_table(
        ("--gpu", "name", "on the box", "for programs", "capability", "SMs"),
        [
            (
                card.short_names[0],
                card.spec.name,
                f"{card.spec.marketing_gb} GB" if card.spec.marketing_gb else "",
                format_bytes(card.spec.total_memory_bytes),
                ".".join(map(str, card.spec.compute_capability or ())),
                str(card.spec.multiprocessors or ""),
            )
            for card in known
        ],
    )

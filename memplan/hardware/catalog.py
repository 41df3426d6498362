"""The GPUs that memplan knows, and how a name or a size that somebody typed becomes one.

The facts are data (`gpus.json`, each with its source). What a GPU offers to programs is less than the size on its box:
"24 GB" is anything from 22.0 to 23.7 GiB, so a size alone is planned as the least of the GPUs sold with it.
"""

import difflib
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from memplan.errors import UsageError
from memplan.hardware.gpu import GpuSpec
from memplan.units import Size, format_bytes

COMMON_KINDS = ((7, 5), (9, 0))
"""The capabilities, from the oldest to the newest, that PyTorch's builds for CUDA 12.1 (2.1) to 13.0 (2.13) all have kernels for."""


class CatalogGpu(NamedTuple):
    """One entry of `gpus.json`."""

    spec: GpuSpec
    short_names: tuple[str, ...]
    nvml_total_bytes: int | None
    is_mig: bool
    memory_source: str


@lru_cache(maxsize=1)
def catalog_gpus() -> tuple[CatalogGpu, ...]:
    """Return every GPU of the catalogue, in its order: data centre, workstation, GeForce, then MIG profiles."""
    entries = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))["cards"]
    return tuple(_read_card(entry) for entry in entries)


def _read_card(entry: dict) -> CatalogGpu:  # type: ignore[type-arg]
    major, _, minor = entry["compute_capability"].partition(".")
    spec = GpuSpec(
        name=entry["name"],
        total_memory_bytes=entry["total_memory_bytes"],
        compute_capability=(int(major), int(minor)),
        multiprocessors=entry["multiprocessors"],
        unified_memory=entry["unified_memory"],
        origin=f"catalogue: {entry['memory_source']}",
        marketing_gb=entry["marketing_gb"],
    )
    return CatalogGpu(spec, tuple(entry["short_names"]), entry["nvml_total_bytes"], entry["mig"], entry["memory_source"])


def find_gpu(name: str) -> GpuSpec:
    """
    Return the GPU that *name* means: a short name ("t4", "4090", "a100 80"), or the driver's name, however spaced.

    Raises UsageError when no GPU answers to it, or several of unlike memory do.
    """
    wanted = _squeeze(name)
    exact = [card.spec for card in catalog_gpus() if wanted in {_squeeze(known) for known in (*card.short_names, card.spec.name)}]
    if exact and wanted:
        return exact[0]
    words = _words(name)
    loose = [card for card in catalog_gpus() if words and words <= _gpu_words(card)]
    whole = [card for card in loose if not card.is_mig] or loose
    if len({(card.spec.total_memory_bytes, card.spec.compute_capability, card.spec.multiprocessors) for card in whole}) == 1:
        return whole[0].spec
    if whole:
        known = ", ".join(card.short_names[0] for card in whole[:8])
        raise UsageError(f"{name!r} could be {len(whole)} GPUs of the catalogue", hint=f"name one of them: {known}")
    raise UsageError(f"unknown GPU: {name!r}", hint=_suggest(name))


def _suggest(name: str) -> str:
    known = [short for card in catalog_gpus() for short in card.short_names]
    near = difflib.get_close_matches(name.lower().replace(" ", ""), known, n=4, cutoff=0.5)
    listing = '`memplan.gpus()` lists them; `gpu_memory="24GiB"` plans for a size alone'
    return f"did you mean {', '.join(near)}? {listing}" if near else listing


def _squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9:.]", "", name.lower().replace("nvidia", "").replace("geforce", ""))


def _words(name: str) -> set[str]:
    """Return the words of a name; a size loses its unit ("80GB" is "80") and letters part from digits ("rtx4090", "a100" stay whole)."""
    spaced = re.sub(r"(?i)\b(\d+)\s*gi?b\b", r"\1", name.lower())
    return {word for word in re.split(r"[^a-z0-9.]+", spaced) if word and word not in {"nvidia", "geforce", "tesla"}}


def _gpu_words(card: CatalogGpu) -> set[str]:
    size = {str(card.spec.marketing_gb)} if card.spec.marketing_gb else set()
    return size.union(*(_words(known) for known in (*card.short_names, card.spec.name)))


def gpu_of_size(size: Size) -> GpuSpec:
    """
    Return the GPU that a typed memory size stands for.

    "24", "24GB" and "24G" are the size on a box: the catalogue's least total among the GPUs sold with it, since a plan for "24" should fit
    on each of them (though a size says nothing of the capability). Any other size, and one that no GPU is sold with, is taken as it is.
    """
    marketing_gb = size.marketing_gb
    sold = [card.spec for card in catalog_gpus() if marketing_gb and card.spec.marketing_gb == marketing_gb and not card.is_mig]
    if not sold:
        note = "as typed" if marketing_gb is None else "as typed: no GPU of the catalogue is sold with that size"
        return GpuSpec(name=f"a GPU of {format_bytes(size.size_bytes)}", total_memory_bytes=size.size_bytes, origin=note)
    least = min(sold, key=lambda spec: spec.total_memory_bytes)
    most = max(sold, key=lambda spec: spec.total_memory_bytes)
    offers = f"sold with {marketing_gb} GB, {format_bytes(least.total_memory_bytes)} for programs"
    if most.total_memory_bytes != least.total_memory_bytes:
        offers += f" ({least.name}) to {format_bytes(most.total_memory_bytes)} ({most.name}); planned for the smallest"
    return GpuSpec(
        name=f"a GPU with {marketing_gb} GB",
        total_memory_bytes=least.total_memory_bytes,
        origin=offers,
        marketing_gb=marketing_gb,
    )


def least_memory_of_kind(gpu: GpuSpec) -> int:
    """Return the memory, in bytes, of the smallest GPU of the catalogue with the compute capability of *gpu*; else its own."""
    known = [card.spec.total_memory_bytes for card in catalog_gpus() if not card.is_mig and card.spec.compute_capability == gpu.kind[0]]
    return min(known, default=gpu.total_memory_bytes)


def of_some_kind(card: GpuSpec) -> GpuSpec:
    """
    Return *card* with a kind: one of which only the size is known is taken for the catalogue's GPU that is nearest in size.

    Of those that each PyTorch has kernels for, so that it can be rehearsed with any.
    """
    if card.compute_capability is not None:
        return card
    oldest, newest = COMMON_KINDS
    whole = [known.spec for known in catalog_gpus() if not known.is_mig and oldest <= (known.spec.compute_capability or oldest) <= newest]
    nearest = min(whole, key=lambda spec: abs(spec.total_memory_bytes - card.total_memory_bytes))
    kind = {name: getattr(nearest, name) for name in ("compute_capability", "multiprocessors", "unified_memory")}
    return card.model_copy(update={**kind, "name": f"{card.name}, as {nearest.name}"})

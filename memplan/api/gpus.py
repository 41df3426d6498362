"""Which GPU is meant: by name, by size, or this machine's."""

from __future__ import annotations

from memplan.errors import MissingError, NoKernelsError, UsageError
from memplan.estimators.calibration import calibrated
from memplan.hardware.catalog import COMMON_KINDS, catalog_gpus, find_gpu, gpu_of_size
from memplan.hardware.gpu import GpuSpec
from memplan.hardware.torch_install import find_torch
from memplan.units import parse_size


def gpus() -> list[GpuSpec]:
    """
    Return every GPU of the catalogue, as a plan takes it: the smallest first, then the MIG instances.

    >>> import memplan
    >>> memplan.gpus()[0].total_memory_bytes < memplan.gpus()[40].total_memory_bytes
    True
    """
    return [card.spec for card in sorted(catalog_gpus(), key=lambda card: (card.is_mig, card.spec.total_memory_bytes, card.spec.name))]


def named_gpu(name: str | None, memory: str | None) -> GpuSpec:
    """
    Return the GPU of that name, of that size, or of that kind in another size.

    *name*: of the catalogue, as "a100-80". *memory*: "24" and "24GB" are the size on the box, "23.5GiB" is exact. Raises UsageError where
    neither is given, and for a name or a size that makes no sense.
    """
    if name is None and memory is None:
        raise UsageError("no GPU is named", hint="name one, as a100-80, or a size, as 24; `memplan gpus` lists the names")
    sized = gpu_of_size(parse_size(memory)) if memory is not None else None
    if name is None:
        assert sized is not None
        return sized
    card = find_gpu(name)
    if sized is None:
        return card
    resized = {
        "total_memory_bytes": sized.total_memory_bytes,
        "marketing_gb": sized.marketing_gb,
        "origin": f"that kind of GPU with another size: {sized.origin}",
    }
    return card.model_copy(update=resized)


def gpus_of_this_machine() -> list[GpuSpec]:
    """
    Return the GPUs that CUDA shows here, that with least free memory first, with what a profile has measured of them.

    Raises MissingError where there are none.
    """
    from memplan.hardware.detect import detect_gpus  # noqa: PLC0415  (the driver, which a plan for a named GPU does without)

    return sorted(map(_calibrated, detect_gpus()), key=lambda gpu: gpu.free_memory_bytes)


def warn_of_kernels(gpu: GpuSpec) -> tuple[str, ...]:
    """Return the warning of a plan by formulas for *gpu*, where the PyTorch of this Python would not run there."""
    oldest, newest = COMMON_KINDS
    if gpu.compute_capability is None or oldest <= gpu.compute_capability <= newest:  # what is installed need not be looked at
        return ()
    try:
        find_torch().check_kernels(gpu)
    except NoKernelsError as error:
        return (f"{error.message}; {error.hint}",)
    except MissingError:  # nothing is installed here that could train
        return ()
    return ()


def _calibrated(gpu: GpuSpec) -> GpuSpec:
    """Return *gpu* with what a profile has measured of it with the PyTorch that is here."""
    try:
        return calibrated(gpu, find_torch().version)
    except MissingError:  # no PyTorch for CUDA: a plan by formulas, which nothing was measured for
        return gpu

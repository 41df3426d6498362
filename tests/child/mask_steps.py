"""Programs that ask a mask of theirs whether it has padding, and take 1 MiB without and 4 MiB with it."""

from __future__ import annotations

from collections.abc import Callable

import torch

LONG, SHORT = 2**22, 2**20


def build(device: str, program: str, num_padded: int = 3) -> Callable[[], None]:
    """Return the step of *program*, whose batch has two sequences of eight tokens, one of them with *num_padded* that are none."""
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 8 - num_padded :] = 0
    return PROGRAMS[program](device, mask)


def _copied(device: str, mask: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        on_device = mask.to(device, non_blocking=True)
        torch.empty(SHORT if on_device.all() else LONG, dtype=torch.uint8, device=device)

    return step


def _called_for(device: str, mask: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        as_bool = mask.cuda().bool()
        is_whole = True
        if (
            as_bool is None
            or (
                as_bool.all()
                if is_whole or device == "cpu"
                else as_bool[:, :4].all()
            )
        ):  # fmt: skip
            torch.empty(SHORT, dtype=torch.uint8, device=device)
        else:
            torch.empty(LONG, dtype=torch.uint8, device=device)

    return step


def _compared(device: str, mask: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        attention_mask = mask.to(device=device)
        if not torch.all(attention_mask == 1):
            torch.empty(LONG, dtype=torch.uint8, device=device)
        torch.empty(SHORT, dtype=torch.uint8, device=device)

    return step


def _numbered(device: str, mask: torch.Tensor) -> Callable[[], None]:
    """Two documents in a sequence: all of its tokens are set, and not all are one."""
    documents = mask + torch.tensor([[0], [1]])

    def step() -> None:
        mask = documents.to(device, torch.int32)
        is_set = mask.bool()
        torch.empty(SHORT if bool(is_set.all()) else 2 * LONG, dtype=torch.uint8, device=device)
        torch.empty(SHORT if torch.all(mask == 1).item() else LONG, dtype=torch.uint8, device=device)

    return step


def _changed(device: str, mask: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        mask_here = mask.to(device)
        mask_here[:, -3:] = 1
        torch.empty(SHORT if mask_here.all() else LONG, dtype=torch.uint8, device=device)

    return step


def _cut(device: str, mask: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        cut_mask = mask.to(device)[:, :5]
        torch.empty(SHORT if cut_mask.all() else LONG, dtype=torch.uint8, device=device)

    return step


def _lets_go(device: str, mask: torch.Tensor) -> Callable[[], None]:
    """Holds 16 MiB while it asks, and no longer."""

    def step() -> None:
        held = torch.empty(2**24, dtype=torch.uint8, device=device)
        on_device = mask.to(device)
        if on_device.all():
            return
        del held
        torch.empty(2**24, dtype=torch.uint8, device=device)

    return step


PROGRAMS = {
    "copied": _copied,
    "called for": _called_for,
    "compared": _compared,
    "numbered": _numbered,
    "changed": _changed,
    "cut": _cut,
    "lets go": _lets_go,
}

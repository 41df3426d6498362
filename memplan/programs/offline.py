"""Experiment trackers in a rehearsal: they log to files and upload nothing, by the switches that their documentation has for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_SWITCHES = {
    "WANDB_MODE": "offline",
    "COMET_START_ONLINE": "0",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
    "DVC_STUDIO_OFFLINE": "true",
    # Models and datasets are still downloaded: HF_HUB_OFFLINE would forbid that too. For uploads see child/held_back.py.
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def offline_variables(folder: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """
    Return the variables that the user has not set: trackers stay offline, and write below *folder* where they would write by themselves.

    W&B's own process is a program that calls the kernel without the C library: what it writes cannot be led to a copy.
    """
    (folder / "wandb").mkdir(exist_ok=True)  # W&B takes another where it is not there
    wanted = _SWITCHES | {
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "WANDB_DIR": str(folder / "wandb"),
        "WANDB_CACHE_DIR": str(folder / "wandb" / "cache"),
    }
    return {name: value for name, value in wanted.items() if name not in inherited}

"""`memplan loader`: what is known of this machine, of the dataset and of the configuration, and what writes the settings into that."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import NamedTuple

from memplan.analysis.loader_settings import Host, LoaderAdvice, LoaderSetting, Measured
from memplan.edits.apply import FileChange, prepare
from memplan.edits.apply import apply as apply_changes
from memplan.edits.config_file import load_config_file
from memplan.edits.edit import Edit, EditValue, Found, as_text
from memplan.edits.yaml_file import YamlFile
from memplan.errors import MissingError, UsageError, reason_of
from memplan.estimators.steps import MOST_MICRO_BATCHES
from memplan.execution.dataset_process import measure_loading
from memplan.hardware.detect import detect_gpus
from memplan.hardware.host import available_bytes, num_processors, shared_memory_bytes
from memplan.layouts.registry import Located, describe_layouts, locate

BUSY_PERCENT = 90
"""A GPU that is in use for this share of the time does not wait for data."""


class Configured(NamedTuple):
    """What a configuration says of a setting."""

    file: Path
    key: str
    line: int | None
    present: str | None
    """As it is written; None: the key is empty."""
    setting: LoaderSetting

    @property
    def is_the_users(self) -> bool:
        """Say whether the user has set it to something else."""
        return self.present is not None and self.present.lower() != as_text(self.setting.value).lower()


def this_host(num_gpus: int | None = None) -> Host:
    """Return what this machine has; *num_gpus*: that train here, where those that are found are not what is meant."""
    return Host(
        num_processors=num_processors(),
        num_gpus=_num_gpus_here() if num_gpus is None else num_gpus,
        available_bytes=available_bytes(),
        shared_bytes=shared_memory_bytes(),
    )


def _num_gpus_here() -> int:
    try:
        return len(detect_gpus())
    except MissingError:
        return 0


def measured(source: str, host: Host, *, batch_size: int, seconds: float) -> Measured:
    """Return how fast the dataset *source* is loaded here. Raises as `measure_loading`."""
    most = max(1, host.num_processors // max(1, host.num_gpus))
    counts = sorted({0, most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})
    return Measured.model_validate(measure_loading(source, batch_size=batch_size, worker_counts=counts, seconds=seconds))


def waits_for_data(log: Path) -> str:
    """
    Return what a monitor's log says of waiting: the share of the time in which its busiest GPU worked.

    Raises UsageError for a file that is no such log.
    """
    by_gpu: dict[int, list[int]] = {}
    try:
        for line in log.read_text(encoding="utf-8").splitlines():
            for gpu in json.loads(line)["gpus"]:
                if gpu["utilization_percent"] is not None:
                    by_gpu.setdefault(gpu["number"], []).append(gpu["utilization_percent"])
    except OSError as error:
        raise UsageError(f"{log}: {reason_of(error)}", hint="name a log that a monitor wrote, as run.jsonl") from error
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{log} is not a log of `memplan monitor`", hint="let a monitor write one while the training runs") from error
    if not by_gpu:
        raise UsageError(f"{log} says nothing of how busy a GPU was", hint="log on the machine that trains, while it does")
    busy = max(median(values) for values in by_gpu.values())
    verdict = "faster loading saves no more than the rest" if busy >= BUSY_PERCENT else "it waits, perhaps for data"
    return f"{log}: the GPU was in use {busy:.0f}% of the time; {verdict}"


class StepRate(NamedTuple):
    """How fast a step takes samples."""

    samples_per_second: float
    told: str
    """Where that is from."""


def step_rate_in(profile: Path) -> StepRate:
    """
    Return how many samples a second the step takes that a plan with a profile shows; of several stages, the one that takes most.

    *profile*: the file that it was printed to as JSON. The fastest step after the first counts. Raises UsageError for another
    file, and for a profile whose steps did not end.
    """
    try:
        answer = json.loads(profile.read_text(encoding="utf-8"))
        planned = {stage["name"]: stage["planned"] for stage in answer["stages"]}
        rates = [
            _samples_of(planned[stage["stages"][0]]) / min(stage["measured"]["step_seconds"][1:])
            for stage in answer["profile"]["stages"]
            if len(stage["measured"]["step_seconds"]) > 1
        ]
    except OSError as error:
        raise UsageError(f"{profile}: {reason_of(error)}", hint="name a file with a profile, as profile.json") from error
    except (ValueError, LookupError, TypeError, ZeroDivisionError) as error:
        raise UsageError(f"{profile} is not a plan with a profile", hint="print a plan with its profile as JSON, into a file") from error
    if not rates:
        raise UsageError(f"{profile} has no step after the first: memory ran out", hint="profile a plan that fits")
    return StepRate(max(rates), f"{profile}: the step takes {max(rates):,.0f} samples a second on the GPU that it was profiled on")


def _samples_of(planned: Mapping[str, int]) -> int:
    """Return the samples of a step as it was run: with no more micro-batches than tell of all."""
    return planned["micro_batch_size"] * min(planned["gradient_accumulation_steps"], MOST_MICRO_BATCHES)


def located_at(path: Path) -> Located:
    """Return the configuration at *path*. Raises UsageError where no layout knows it."""
    found = locate(path) if os.path.exists(path) else None
    if found is None:
        raise UsageError(f"{path}: no configuration that memplan knows", hint=f"looked for {describe_layouts()}")
    return found


def batch_size_in(located: Located) -> int | None:
    """Return the micro-batch that the configuration names, where it does."""
    for field in located.fields():
        name, _, place = field.partition("=")
        file, _, key = place.rpartition(":")
        if name == "micro_batch_size":
            found = load_config_file(Path(file)).get(tuple(key.split(".")))
            return int(found.value) if found is not None and isinstance(found.value, int) else None
    return None


def configured(located: Located, advice: LoaderAdvice) -> list[Configured]:
    """Return the settings for which the configuration has a key, with what stands there."""
    file = YamlFile.load(located.main)
    known = {setting.name: setting for setting in advice.settings if setting.value is not None}
    found = []
    for name, keys in located.layout.loader.items():
        key = next((key for key in keys if file.kind_of(tuple(key.split("."))) == "scalar"), None)
        if key is not None and name in known:
            value: Found | None = file.get(tuple(key.split(".")))
            present = None if value is None or value.value is None else as_text(value.value)
            found.append(Configured(located.main, key, value.line if value else None, present, known[name]))
    return found


def without_key(located: Located, advice: LoaderAdvice) -> list[str]:
    """Return where the settings would stand that the layout knows and the file has no key for: "KEY: VALUE" each."""
    there = {entry.setting.name for entry in configured(located, advice)}
    known = {setting.name: setting for setting in advice.settings if setting.value is not None}
    return [
        f"{keys[0]}: {as_text(known[name].value)}" for name, keys in located.layout.loader.items() if name in known and name not in there
    ]


def changes_of(entries: Sequence[Configured], *, overrides: bool) -> list[FileChange]:
    """
    Return what writes the settings, checked and not written: into keys that are empty, and where it *overrides* into all.

    Raises EditRefusedError for a value that cannot be changed without guessing.
    """
    edits = [
        Edit(entry.file, tuple(entry.key.split(".")), _value(entry.setting)) for entry in entries if overrides or not entry.is_the_users
    ]
    return prepare(edits)


def write(changes: Sequence[FileChange], located: Located) -> tuple[Path, ...]:
    """Write *changes*, all of them or none, and return their files; `memplan.undo` puts them back."""
    apply_changes(changes, root=located.root, now=datetime.now(timezone.utc))
    return tuple(change.path for change in changes)


def _value(setting: LoaderSetting) -> EditValue:
    assert setting.value is not None  # only those with one have a key
    return setting.value

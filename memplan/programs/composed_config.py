"""
A configuration that is composed of several files: which key holds the batch, which the accumulation, and which file holds each of them.

Programs call the same thing by different names, and a later file overrides an earlier one. The keys that say how many samples a step has
are found by their usual names, in small letters or capitals; the file that holds a key is the last one that has it, and a `${reference}`
is followed to the key that it stands for. What is not certain is not guessed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from memplan.edits.config_file import load_config_file
from memplan.errors import UsageError
from memplan.workload.step_function import ACCUMULATION_NAMES

BATCH_KEYS = (
    "micro_batch_size",
    "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu",
    "batch_size_per_device",
    "batch_size_per_gpu",
    "micro_batch_size_per_gpu",
    "per_device_batch_size",
    "per_gpu_batch_size",
    "device_batch_size",
    "samples_per_gpu",
    "train_batch_size",
    "batch_size_train",
    "dataloader_batch_size",
    "local_batch_size",
    "batch_size",
    "batchsize",
    "bsz",
)
"""What configurations call the samples of a step; the first that is there counts."""

KEYS_OF = {"micro_batch_size": BATCH_KEYS, "gradient_accumulation_steps": ACCUMULATION_NAMES}

_NOT_TRAINING = frozenset({
    "val", "valid", "validation", "test", "testing", "eval", "evaluate", "evaluation", "predict", "prediction", "infer", "inference",
    "generate", "generation",
})  # fmt: skip

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_HOLDERS = re.compile(r"(data|loader|dataloader|set|config|cfg|args)$")
"""What a name has behind the use: `testloader`."""

_MICRO = re.compile(r"micro_?batch_?size[^.]*$", re.IGNORECASE)
"""The end of a key that says how many samples a step takes at once."""

_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_][\w.]*)\}")
_MOST_REFERENCES = 20


class Part(NamedTuple):
    """A file of a configuration."""

    file: Path | None
    """None for what is in no file: of a package, or made in Python."""
    package: tuple[str, ...] = ()
    """Below which its keys stand."""


class Held(NamedTuple):
    """A key of a composed configuration, and what holds it."""

    key: str
    """In the composed configuration, dotted."""
    file: Path | None
    """None where no file of the user's holds it, for the reason that `problem` says."""
    key_in_file: str = ""
    problem: str = ""


class ComposedConfig(NamedTuple):
    """A configuration, composed."""

    name: str
    """What an error calls it."""
    values: Mapping[str, object]
    """The whole, nested; references are not resolved."""
    parts: Sequence[Part]
    """In the order in which they override each other, the last wins."""
    overridden: Mapping[str, str]
    """Keys that the command sets, and the words that do."""
    in_command: str
    """How a value is written into the command, with KEY and VALUE."""

    def fields(self, variables: Collection[str] = tuple(KEYS_OF)) -> list[str]:
        """
        Return where it holds the batch and the accumulation, as "micro_batch_size=FILE:KEY"; none where it has none.

        *variables*: those that are looked for. Raises UsageError where that is not certain: several keys, one that the command itself sets,
        one that is computed.
        """
        found = {name: self._holder_of_any(keys, name) for name, keys in KEYS_OF.items() if name in variables}
        held = {name: one for name, one in found.items() if one is not None}
        for name, one in held.items():
            if one.file is None:
                word = self.in_command.replace("KEY", one.key).replace("VALUE", f"{{{name}}}")
                raise UsageError(
                    f"{name} is `{one.key}` of {self.name}, {one.problem}", hint=f"write `{word}` into the command, and it is planned there"
                )
        return [f"{name}={one.file}:{one.key_in_file}" for name, one in held.items()]

    @property
    def keys(self) -> list[str]:
        """Return the keys of all values, with dots between their parts; those of lists by their place, from 0."""
        return [key for key, _ in _leaves(self.values, in_lists=True)]

    def held(self, name: str) -> Held | None:
        """Return what holds the key *name*, which may leave out what it stands below; None where there is none, or no file of several."""
        keys = self.keys
        found = [name] if name in keys else [key for key in keys if key.endswith(f".{name}")]
        if len(found) > 1:
            return Held(name, None, problem=f"which is several keys: {', '.join(found)}")
        return self._holder_of(found[0]) if found else None

    def has(self, file: Path) -> bool:
        """Say whether *file* is a part of it."""
        return any(part.file is not None and part.file.resolve() == file for part in self.parts)

    def _holder_of_any(self, names: Collection[str], variable: str) -> Held | None:
        """
        Return what holds *variable*: the first of *names* that is a key of the training's; None where there is none.

        Raises UsageError where several keys of that name are held in several places.
        """
        for name in names:
            is_named = re.compile(rf"(.+\.)?{name}(\.train)?", re.IGNORECASE).fullmatch
            keys = [key for key, value in _leaves(self.values) if is_named(key.replace("-", "_")) and _is_size(value)]
            keys = list(filter(is_of_training, keys))
            preferred = [key for key in keys if "train" in re.sub(rf"{name}$", "", key.lower().replace("-", "_"))] or keys
            held = list({(one.file, one.key_in_file, one.problem): one for one in map(self._holder_of, preferred)}.values())
            if len(held) > 1:
                told = " and ".join(f"`{one.key}` ({one.file or one.problem})" for one in held)
                named = next((f"{one.file}:{one.key_in_file}" for one in held if one.file is not None), "FILE:KEY")
                raise UsageError(
                    f"{self.name} has several keys that may be the one: {told}",
                    hint=f'name it: `fields=["{variable}={named}"]`',
                )
            if held:
                self._refuse_whole_batch(held[0], variable)
                return held[0]
        return None

    def _refuse_whole_batch(self, held: Held, variable: str) -> None:
        """Raise UsageError where *held* is called a batch, and other keys micro-batches, of which it may have several, as verl's has."""
        if variable != "micro_batch_size" or "micro" in held.key.rpartition(".")[2].lower():
            return
        others = [key for key, value in _leaves(self.values) if _MICRO.search(key) and is_of_training(key) and _may_be_size(value)]
        if others:
            named = next((one for one in map(self._holder_of, others) if one.file is not None), None)
            key = "FILE:KEY" if named is None else f"{named.file}:{named.key_in_file}"
            raise UsageError(
                f"`{held.key}` of {self.name} may be the batch of several micro-batches: it has `{others[0]}` too",
                hint=f'name the one that a step takes at once: `fields=["{variable}={key}"]`',
            )

    def _holder_of(self, key: str) -> Held:
        """Return what holds *key*, a `${reference}` followed."""
        value = _at(self.values, key)
        for _ in range(_MOST_REFERENCES):
            reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if reference is None:
                break
            above = key.split(".")[: -len(reference[1])] if reference[1] else []
            key = ".".join([*above, reference[2]])
            value = _at(self.values, key)
        if isinstance(value, str) and "${" in value:
            return Held(key, None, problem=f"which is computed: {value}")
        if key in self.overridden:
            return Held(key, None, problem=f"which the command sets: `{self.overridden[key]}`")
        file = in_file = None
        for part in self.parts:
            prefix = ".".join(part.package)
            if prefix and not key.startswith(f"{prefix}."):
                continue
            inner = key[len(prefix) + 1 :] if prefix else key
            if part.file is not None and load_config_file(part.file).kind_of(tuple(inner.split("."))) == "scalar":
                file, in_file = part.file, inner
        if file is None or in_file is None:
            return Held(key, None, problem="which no file of the configuration holds")
        return Held(key, Path(os.path.relpath(file)), in_file)


def is_of_training(key: str) -> bool:
    """Say whether nothing in the dotted *key* names another use of the model than its training."""
    words = [word.lower() for word in _WORD.findall(key)]
    return not any(word in _NOT_TRAINING or _HOLDERS.sub("", word) in _NOT_TRAINING for word in words)


def _leaves(data: object, path: str = "", *, in_lists: bool = False) -> Iterator[tuple[str, object]]:
    parts = _parts(data, in_lists=in_lists)
    if parts is None:
        yield path, data
        return
    for name, value in parts.items():
        yield from _leaves(value, f"{path}.{name}" if path else str(name), in_lists=in_lists)


def _parts(data: object, *, in_lists: bool = True) -> dict[str, object] | None:
    """Return the values of a mapping, or of a list, by their names; None for anything else."""
    if isinstance(data, dict):
        return data
    return {str(place): value for place, value in enumerate(data)} if in_lists and isinstance(data, list) else None


def _at(data: object, key: str) -> object:
    for name in key.split("."):
        data = (_parts(data) or {}).get(name)
    return data


def _may_be_size(value: object) -> bool:
    """Say whether *value* is a number of samples, or has still to be given."""
    return value is None or _is_size(value)


def _is_size(value: object) -> bool:
    """Say whether *value* is a number of samples, or refers to something that may be."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, str) and "${" in value)

"""
Weights that a program loads into modules of its own making: they are not read, and need not be there.

`torch.load` maps a file of PyTorch's instead of reading it, so that only what somebody looks at is read, and `load_state_dict` looks at no
large weights. A file that is not there, or that torch.hub would download, is answered with weights that every module and optimizer takes as
loaded. timm's models keep the weights that they were made with, and adapters of peft those that they begin with.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import nn
from torch.optim import Optimizer

from memplan.child.after_import import change_when_imported
from memplan.workload.published_models import WEIGHT_FILES

skipped: list[str] = []
"""Models and files whose weights were skipped, as the program named them."""

LARGE_BYTES = 2**20
"""Weights that are not looked at; smaller tensors may be counters, or statistics."""


_NAMES_OF_DOWNLOAD = ("load_state_dict_from_url", "load_url")


class AbsentWeights(dict[str, Any]):
    """
    What a file of weights that is not there holds: whatever is asked for is of weights that are not there.

    *place*: where the program asks to have them (`map_location`). What they take on a GPU is known when a module gets them; from then on
    it is taken for as long as the program keeps them.
    """

    def __init__(self, place: Any = None) -> None:
        super().__init__()
        known = isinstance(place, (str, int, torch.device))
        self._device = torch.device(place) if known else torch.device("cpu")
        self._on_gpu: list[torch.Tensor] = []

    def hold_for(self, module: nn.Module) -> None:
        """Hold on the GPU what the file has of *module*, if that is where it was to be loaded."""
        if self._device.type == "cuda":
            self._on_gpu += [torch.empty_like(tensor, device=self._device) for tensor in module.state_dict().values()]

    def __missing__(self, key: str) -> AbsentWeights:
        return self

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str)

    def get(self, key: str, default: Any = None) -> Any:
        """Return more of it, whatever *default* is."""
        del key, default
        return self

    def pop(self, key: str, default: Any = None) -> Any:
        """Return more of it, whatever *default* is."""
        del key, default
        return self


def skip_loading() -> None:
    """Change what loads weights."""
    _map_files()
    _look_at_no_weights()
    _download_no_weights()
    change_when_imported(
        {"safetensors.torch": _have_absent_files, "timm.models._builder": _keep_first_weights, "peft.utils.save_and_load": _keep_adapters}
    )


def _map_files() -> None:
    load = torch.serialization.load

    @functools.wraps(load)
    def mapped(f: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(f, (str, os.PathLike)):
            if _is_absent(f):
                return AbsentWeights(keywords.get("map_location", arguments[0] if arguments else None))
            if "MEMPLAN_OVERLAY" in os.environ and Path(f).is_file() and zipfile.is_zipfile(f):  # where nobody overwrites it
                f, keywords = os.fspath(f), keywords | {"mmap": True}
        return load(f, *arguments, **keywords)

    torch.load = torch.serialization.load = mapped


def _is_absent(file: Any) -> bool:
    """Say whether *file* is one of weights that is not there; and tell so, since what a program makes of it may fail."""
    path = Path(file)
    if not path.name.endswith(WEIGHT_FILES) or path.exists():
        return False
    skipped.append(str(path))
    print(f"memplan: {path} is not there; its weights are taken to be loaded", file=sys.stderr)
    return True


def _download_no_weights() -> None:
    """Take weights that torch.hub would download, as torchvision's models have it do, to be loaded; those in its cache are read as ever."""
    load = torch.hub.load_state_dict_from_url
    parameters = inspect.signature(load)

    @functools.wraps(load)
    def loaded(*arguments: Any, **keywords: Any) -> Any:
        given = parameters.bind(*arguments, **keywords).arguments
        folder = given.get("model_dir") or Path(torch.hub.get_dir()) / "checkpoints"
        name = given.get("file_name") or Path(urlparse(given["url"]).path).name
        if not (Path(folder) / name).exists():
            skipped.append(name)
            return AbsentWeights(given.get("map_location"))
        return load(*arguments, **keywords)

    torch.hub.load_state_dict_from_url = loaded
    for module in list(sys.modules.values()):  # torchvision and timm have names of their own for it, and may be imported in a warm process
        names = getattr(module, "__dict__", {})
        for name in _NAMES_OF_DOWNLOAD:
            if names.get(name) is load:
                names[name] = loaded


def _look_at_no_weights() -> None:
    load, load_optimizer = nn.Module.load_state_dict, Optimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if isinstance(state_dict, AbsentWeights):
            state_dict.hold_for(module)
        if isinstance(state_dict, AbsentWeights) or not state_dict:
            return nn.modules.module._IncompatibleKeys([], [])
        if assign:
            return load(module, state_dict, strict, assign)
        own: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
        seen = OrderedDict((name, _unread(value, own.get(name))) for name, value in state_dict.items())
        if hasattr(state_dict, "_metadata"):
            seen._metadata = state_dict._metadata  # type: ignore[attr-defined]
        return load(module, seen, strict)

    @functools.wraps(load_optimizer)
    def load_optimizer_state(optimizer: Optimizer, state_dict: Any) -> None:
        if not isinstance(state_dict, AbsentWeights):
            load_optimizer(optimizer, state_dict)

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]
    Optimizer.load_state_dict = load_optimizer_state  # type: ignore[method-assign, assignment]


def _unread(value: Any, own: Any) -> Any:
    """Return zeros that take no memory in place of large weights of the host, for a parameter of the host; else *value*."""
    is_weight = _is_of_host(value) and value.is_floating_point()
    if not is_weight or value.numel() * value.element_size() < LARGE_BYTES or not _is_of_host(own):
        return value
    return torch.zeros((), dtype=value.dtype).expand(value.shape)


def _is_of_host(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"


def _have_absent_files(module: Any) -> None:
    """Have *module*, `safetensors.torch`, answer for files that are not there; those that are it maps by itself."""

    def absent_file(filename: Any, device: Any = "cpu", **_: Any) -> AbsentWeights:
        del filename
        return AbsentWeights(device)

    def absent_model(model: nn.Module, filename: Any, strict: bool = True, device: Any = "cpu", **_: Any) -> tuple[list[str], list[str]]:
        del filename, strict
        AbsentWeights(device).hold_for(model)
        return [], []

    module.load_file = _unless_absent(module.load_file, absent_file)
    module.load_model = _unless_absent(module.load_model, absent_model)


def _unless_absent(load: Any, answer: Callable[..., Any]) -> Any:
    @functools.wraps(load)
    def loaded(*arguments: Any, **keywords: Any) -> Any:
        files = (value for value in (*arguments, *keywords.values()) if isinstance(value, (str, os.PathLike)))
        return (answer if any(map(_is_absent, files)) else load)(*arguments, **keywords)

    return loaded


def _keep_first_weights(module: Any) -> None:
    """Have models of *module*, `timm.models._builder`, keep the weights that they were made with: others change them on the host alone."""

    def load_pretrained(model: nn.Module, *arguments: Any, **keywords: Any) -> None:
        del arguments, keywords
        skipped.append(type(model).__name__)

    module.load_pretrained = load_pretrained


def _keep_adapters(module: Any) -> None:
    """Have adapters of *module*, `peft.utils.save_and_load`, keep the weights that they begin with where their file is not there."""
    load = module.load_peft_weights

    @functools.wraps(load)
    def load_peft_weights(model_id: str, *arguments: Any, **keywords: Any) -> Any:
        try:
            return load(model_id, *arguments, **keywords)
        except (OSError, ValueError) as error:
            skipped.append(str(model_id))
            print(f"memplan: the weights of the adapter {model_id} are not there: {error}", file=sys.stderr)
            return {}

    module.load_peft_weights = load_peft_weights

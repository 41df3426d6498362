"""
Models of transformers and diffusers whose weights are not read, and need not be there.

`from_pretrained` gets a folder like the one that was asked for, but with empty weights (`empty_weights.py`), and goes on as ever: types,
`device_map`, quantisation, heads that the checkpoint lacks. What the weights are called, and of which size they are, says the checkpoint
where there is one, and else the configuration: that of the folder, of the Hugging Face cache, or of memplan's catalogue.

MEMPLAN_SKIP_WEIGHTS is a folder for these files, where weights are to be skipped.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from memplan.child.after_import import change_when_imported
from memplan.child.empty_weights import EmptyTensor, in_shards, read_tensors, write_checkpoint
from memplan.child.skipped_loading import skip_loading, skipped
from memplan.workload.published_models import WEIGHT_FILES, cached_config, catalog_model

_TYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.bool: "BOOL", torch.uint8: "U8",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip

_WEIGHTS = (*WEIGHT_FILES, ".h5", ".msgpack", ".gguf", ".onnx")
"""What files of weights end with, those of other packages too."""

_OTHERWISE_LOADED = ("state_dict", "gguf_file", "from_tf", "from_flax")


def skip_weights() -> None:
    """Change the packages that load weights when they are imported, where weights are to be skipped."""
    if "MEMPLAN_SKIP_WEIGHTS" in os.environ:
        change_when_imported(
            {
                "transformers.configuration_utils": _find_configurations,
                "transformers.modeling_utils": _load_no_weights,
                "diffusers.models.modeling_utils": _diffuse_without_weights,
            }
        )
        skip_loading()


# configurations


def _find_configurations(module: Any) -> None:
    """Have configurations found by name in the cache of this machine, or in memplan's catalogue, before the network is asked."""
    base = getattr(module, "PreTrainedConfig", None) or module.PretrainedConfig
    find = base.get_config_dict.__func__

    @functools.wraps(find)
    def get_config_dict(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        pretrained_model_name_or_path = arguments[0] if arguments else keywords.pop("pretrained_model_name_or_path")
        name = str(pretrained_model_name_or_path)
        known = None if Path(name).exists() or keywords.get("gguf_file") or cached_config(name) else catalog_model(name)
        if known is None:
            return find(cls, pretrained_model_name_or_path, **keywords)
        folder = _new_folder()
        (folder / "config.json").write_text(json.dumps(known.config), encoding="utf-8")
        return find(cls, str(folder), **{name: value for name, value in keywords.items() if name != "subfolder"})

    base.get_config_dict = classmethod(get_config_dict)


# models


class _Stems(NamedTuple):
    """What the names of a package's files of weights begin with."""

    safetensors: str
    pickled: str


_TRANSFORMERS = _Stems("model", "pytorch_model")
_DIFFUSERS = _Stems("diffusion_pytorch_model", "diffusion_pytorch_model")


def _load_no_weights(module: Any) -> None:
    """Have every model of *module*, `transformers.modeling_utils`, loaded from empty weights."""

    def empty_copy(cls: Any, name: str, keywords: Mapping[str, Any]) -> Path | None:
        hub = {key: keywords[key] for key in _HUB if key in keywords}
        values = cls.config_class.get_config_dict(name, **hub)[0]
        dtype = _type_on_host(values, keywords)
        return _empty_copy(name, keywords, values, _TRANSFORMERS, dtype, lambda: _tensors_of(_architecture(cls, values), values))

    def named(model: Any, name: str) -> None:
        model.name_or_path = model.config.name_or_path = name

    _replace_loading(module.PreTrainedModel, empty_copy, named)


def _diffuse_without_weights(module: Any) -> None:
    """Have every model of *module*, `diffusers.models.modeling_utils`, loaded from empty weights."""

    def empty_copy(cls: Any, name: str, keywords: Mapping[str, Any]) -> Path | None:
        values = cls.load_config(name, **{key: keywords[key] for key in _HUB if key in keywords})
        dtype = _TYPES[_type_named(keywords.get("torch_dtype")) or torch.float32]  # its configurations do not say how weights are stored

        def tensors() -> dict[str, EmptyTensor]:
            with _parameters_on_meta():
                model = cls.from_config(dict(values))
            return {key: _empty(tensor).of_type(dtype) for key, tensor in model.state_dict().items()}

        return _empty_copy(name, keywords, values, _DIFFUSERS, None if keywords.get("device_map") else dtype, tensors)

    def named(model: Any, name: str) -> None:
        model.register_to_config(_name_or_path=name)

    _replace_loading(module.ModelMixin, empty_copy, named)


_HUB = ("cache_dir", "revision", "token", "local_files_only", "subfolder")
"""Arguments that say where a configuration is."""


def _replace_loading(base: Any, empty_copy: Callable[..., Path | None], named: Callable[[Any, str], None]) -> None:
    """Have `from_pretrained` of *base* load the *empty_copy* of what it is asked for; the model is *named* as it was asked for."""
    load = base.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any = None, *arguments: Any, **keywords: Any) -> Any:
        name = pretrained_model_name_or_path
        folder = None
        if name is not None and not any(keywords.get(each) for each in _OTHERWISE_LOADED):
            with suppress(OSError):  # no configuration is to be had, which the program is to be told
                folder = empty_copy(cls, str(name), keywords)
        if folder is None:
            return load(cls, name, *arguments, **keywords)
        skipped.append(str(name))
        keywords = {key: value for key, value in keywords.items() if key != "use_safetensors"}
        loaded = load(cls, str(folder), *arguments, **keywords)
        named(loaded[0] if isinstance(loaded, tuple) else loaded, str(name))
        return loaded

    base.from_pretrained = classmethod(from_pretrained)


def _empty_copy(
    name: str,
    keywords: Mapping[str, Any],
    values: Mapping[str, Any],
    stems: _Stems,
    dtype: str | None,
    tensors: Callable[[], Mapping[str, EmptyTensor]],
) -> Path | None:
    """
    Return a folder as *name* says it, with empty weights; None where the file itself may as well be loaded.

    *values*: its configuration. *dtype*: the type that floats are to have; None: as they are stored. *tensors*: those of its checkpoint,
    asked where there is none.
    """
    subfolder, variant = keywords.get("subfolder") or "", keywords.get("variant")
    source = _folder_of(name, subfolder)
    found = None if source is None else _checkpoint_in(source, stems, variant)
    if found is not None and found.is_pickled and dtype is None:
        return None  # PyTorch maps such files, and the simulated GPU does not look at what is copied to it: nothing is read
    shards = found.shards if found is not None else in_shards(tensors())
    folder = _new_folder()
    target = folder / subfolder
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir() if source else ():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and ".index." not in file.name and file.name != "config.json":
            (target / file.name).symlink_to(file.resolve())
    (target / "config.json").write_text(json.dumps(values), encoding="utf-8")
    typed = [{key: tensor.of_type(dtype) for key, tensor in shard.items()} for shard in shards]
    write_checkpoint(target, typed, stem=stems.safetensors, variant=variant)
    return folder


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="weights-", dir=os.environ["MEMPLAN_SKIP_WEIGHTS"]))


def _folder_of(name: str, subfolder: str) -> Path | None:
    """Return the folder that *name* is, or the copy of the repository in the cache of this machine; None where there is neither."""
    folder = Path(name)
    cached = None if folder.is_dir() else cached_config(name)
    folder = cached.parent if cached else folder
    return folder / subfolder if (folder / subfolder).is_dir() else None


class _Checkpoint(NamedTuple):
    shards: list[dict[str, EmptyTensor]]
    is_pickled: bool
    """`torch.save` wrote it."""


def _checkpoint_in(folder: Path, stems: _Stems, variant: str | None) -> _Checkpoint | None:
    """Return what the checkpoint in *folder* says of its tensors; None where there is none, or not all of it."""
    middle = f".{variant}" if variant else ""
    for stem, ending, read in ((stems.safetensors, "safetensors", read_tensors), (stems.pickled, "bin", _read_pickled)):
        whole = folder / f"{stem}{middle}.{ending}"
        index = folder / f"{stem}.{ending}.index{middle}.json"
        if whole.is_file():
            return _Checkpoint([read(whole)], ending == "bin")
        if index.is_file():
            shards = sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
            if all(shard.is_file() for shard in shards):
                return _Checkpoint([read(shard) for shard in shards], ending == "bin")
    return None


def _read_pickled(file: Path) -> dict[str, EmptyTensor]:
    """Return what a checkpoint that `torch.save` wrote says of its tensors."""
    found = torch.load(file, map_location="meta", weights_only=True)
    return {name: _empty(tensor) for name, tensor in found.items()}


def _architecture(cls: Any, values: Mapping[str, Any]) -> Any:
    """Return the class whose checkpoint it is: heads that another one has are not in it."""
    named = next(iter(values.get("architectures") or ()), "")
    return getattr(sys.modules["transformers"], named, cls)


def _tensors_of(architecture: Any, values: Mapping[str, Any]) -> dict[str, EmptyTensor]:
    """Return what a checkpoint of *architecture* has: each parameter once, and buffers that are kept."""
    config = architecture.config_class.from_dict(dict(values))
    with _parameters_on_meta():
        model = architecture(config)
        model.tie_weights()
    once = dict(model.named_parameters())
    every = dict(model.named_parameters(remove_duplicate=False))
    kept = {name: tensor for name, tensor in model.state_dict().items() if name in once or name not in every}
    stored = _TYPES[_stored_type(values)]
    return {name: _empty(tensor).of_type(stored) for name, tensor in kept.items()}


def _empty(tensor: Any) -> EmptyTensor:
    return EmptyTensor(_TYPES[tensor.dtype], tuple(tensor.shape))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Make modules whose parameters take no memory. What else they compute as they are made is computed."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            kind, settings = type(parameter), parameter.__dict__
            module._parameters[name] = kind(parameter.to("meta"), requires_grad=parameter.requires_grad, **settings)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


# what fails without weights

_NAMES_WEIGHTS = re.compile(r"huggingface\.co|cached files|\.(safetensors|bin|pth?|ckpt|gguf)\b")
_LOADS = "load_state_dict_from_url"
"""PyTorch's, by which torchvision, timm and many programs load weights: what it says where there is no network names none of them."""
_WITHOUT_THEM = ("EntryNotFoundError", "LocalEntryNotFoundError", "RepositoryNotFoundError", "OfflineModeIsEnabled")


def lacks_weights(error: BaseException | None) -> bool:
    """Say whether *error* is that weights of a pretrained model are not there and cannot be had, where nobody has asked to skip them."""
    while error is not None and "MEMPLAN_SKIP_WEIGHTS" not in os.environ:
        said = str(error)
        is_of_files = isinstance(error, OSError) and (_NAMES_WEIGHTS.search(said) is not None or _is_of_download(error))
        if (is_of_files or type(error).__name__ in _WITHOUT_THEM) and "tokenizer" not in said.lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_of_download(error: BaseException) -> bool:
    return any(frame.f_code.co_name == _LOADS for frame, _ in traceback.walk_tb(error.__traceback__))


# types


def _stored_type(values: Mapping[str, Any]) -> torch.dtype:
    """Return the type in which the weights are stored, as the configuration says."""
    return _type_named(values.get("dtype") or values.get("torch_dtype")) or torch.float32


def _type_on_host(values: Mapping[str, Any], keywords: Mapping[str, Any]) -> str | None:
    """
    Return the type that weights are loaded in on the host, where they may as well be stored in it: a copy of another type takes memory.

    None where they are loaded to the GPU, which sees them in the type that they are stored in, or where they are quantised.
    """
    places = (keywords.get("device_map"), getattr(torch, "get_default_device", lambda: "cpu")())
    is_on_host = all(place is None or str(place) == "cpu" for place in places)
    is_quantised = any(keywords.get(name) for name in ("quantization_config", "load_in_4bit", "load_in_8bit")) or (
        values.get("quantization_config") is not None
    )
    if not is_on_host or is_quantised:
        return None
    asked = keywords.get("dtype", keywords.get("torch_dtype"))
    if asked == "auto" or (asked is None and _is_auto_by_default()):
        return _TYPES[_stored_type(values)]
    return _TYPES.get(_type_named(asked) or torch.get_default_dtype())


def _is_auto_by_default() -> bool:
    return int(sys.modules["transformers"].__version__.partition(".")[0]) >= 5


def _type_named(named: Any) -> torch.dtype | None:
    if isinstance(named, torch.dtype):
        return named
    found = getattr(torch, str(named).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None

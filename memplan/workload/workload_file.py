"""Reading a workload: from a file of memplan's own, or from a Hugging Face `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from memplan.errors import ConfigError
from memplan.workload.huggingface import ConfigJson, model_from_config, not_heeded, torchtune_model
from memplan.workload.model_catalog import find_model, read_config_json
from memplan.workload.workload import Workload

if TYPE_CHECKING:
    from memplan.edits.yaml_file import YamlFile

DEFAULT_SEQUENCE_LENGTH = 512


def read_workload_data(path: Path) -> dict[str, Any]:
    """
    Return the content of the workload file at *path* as nested dicts, the model of a config.json that it names already read.

    Raises ConfigError when a file cannot be read or is not a mapping.
    """
    file = _load(path)
    data = file.to_python()
    if not isinstance(data, dict):
        raise ConfigError("is not a workload: no keys and values", file=path, hint="start from a copy of a workload.yaml under templates/")
    model = data.get("model")
    if isinstance(model, dict) and model.get("kind") in ("huggingface", "torchtune"):
        data["model"] = _named_model(model, file)
    return data


def read_huggingface_config(path: Path) -> tuple[Workload, list[str]]:
    """
    Return a training of the model of the Hugging Face config.json at *path*, and what the file says that is not followed.

    Raises ConfigError with file, line and value for what makes no sense.
    """
    config = read_config_json(path)
    length = min(DEFAULT_SEQUENCE_LENGTH, config.num_positions or DEFAULT_SEQUENCE_LENGTH)
    name = config.text("_name_or_path") or path.resolve().parent.name
    data = {"name": name, "model": model_from_config(config), "training": {"sequence_length": length}}
    return workload_from(data, path), not_heeded(config)


def _named_model(model: dict[str, Any], file: YamlFile) -> dict[str, Any]:
    """Return the model of `{kind: huggingface, config: FILE or name: MODEL, ...}`; the other keys overwrite what its configuration says."""
    config = _named_config(model, file)
    read = model_from_config(config) if model["kind"] == "huggingface" else torchtune_model(config)
    return read | {key: value for key, value in model.items() if key not in ("kind", "config", "name")}


def _named_config(model: dict[str, Any], file: YamlFile) -> ConfigJson:
    given = [key for key in ("config", "name") if key in model]
    line = file.line_of(("model", *given[:1]))
    if len(given) == 2:
        raise ConfigError("`model` takes `config` or `name`, not both", file=file.path, line=line, hint="keep one of them")
    if not given or not isinstance(model[given[0]], str):
        problem = "`model.config` must name a Hugging Face config.json, or `model.name` a model"
        raise ConfigError(problem, file=file.path, line=line, hint="add a line `config: path/to/config.json` below `model:`")
    if given == ["config"]:
        return read_config_json(file.path.parent / model["config"])
    try:
        return find_model(model["name"], folders=[file.path.parent]).config
    except ConfigError as error:
        if error.file is not None:
            raise
        raise ConfigError(f"`model.name`: {error.problem}", file=file.path, line=line, hint=error.hint) from error


def is_huggingface_config(path: Path) -> bool:
    """Say whether the file at *path* is a Hugging Face config.json: a model, and no training."""
    data = _load(path).to_python()
    return isinstance(data, dict) and "model_type" in data


def read_workload(path: Path) -> Workload:
    """
    Return the workload that the file at *path* describes: a workload file, or a Hugging Face config.json.

    Raises ConfigError with file, line and value for what makes no sense.
    """
    return read_huggingface_config(path)[0] if is_huggingface_config(path) else workload_from(read_workload_data(path), path)


def workload_from(data: dict[str, Any], path: Path) -> Workload:
    """
    Return the workload that *data*, the content of *path*, describes.

    Raises ConfigError with file, line and value for what makes no sense.
    """
    try:
        return Workload.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(map(str, location_of(first)))
        given = (
            f" is {first['input']!r}" if isinstance(first["input"], (str, int, float, bool)) and first["type"] != "extra_forbidden" else ""
        )
        raise ConfigError(
            f"`{'.'.join(where) or 'workload'}`{given}: {problem_of(first)}",
            file=path,
            line=_load(path).line_of(where),
            hint="the fields and what they mean: templates/workload.schema.json",
        ) from error


def _load(path: Path) -> YamlFile:
    from memplan.edits.yaml_file import YamlFile  # here, since the built-in workload does without it

    return YamlFile.load(path)


def location_of(error: Any) -> tuple[str | int, ...]:
    """Return the path of the value that pydantic's *error* is about, without names of kinds; a check of ours names it itself."""
    named = error.get("ctx", {}).get("field")
    if isinstance(named, str):
        return tuple(named.split("."))
    return tuple(
        part for part in error["loc"] if part not in ("transformer", "contrastive_encoder", "huggingface", "torchtune", "parameters")
    )


def problem_of(error: Any) -> str:
    """Return what pydantic found wrong, in a few words of its own or ours."""
    if error["type"] == "extra_forbidden":
        return "no such field"
    if error["type"] == "missing":
        return "is missing"
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return "`kind` must be transformer, contrastive_encoder, parameters or huggingface"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]

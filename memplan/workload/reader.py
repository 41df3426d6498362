"""Reading a workload: from a file of memplan's own, or from a Hugging Face `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memplan.errors import ConfigError
from memplan.workload.huggingface import transformer_from_config
from memplan.workload.workload import Workload

DEFAULT_SEQUENCE_LENGTH = 512


def read_workload_data(path: Path) -> dict[str, Any]:
    """
    Return the content of the workload file at *path* as nested dicts, a model of `kind: huggingface` already turned into a transformer.

    Raises ConfigError when the file cannot be read or is not a mapping.
    """
    data = _content(path)
    if not isinstance(data, dict):
        raise ConfigError("is not a workload: no keys and values", file=path, hint="start from a copy of a workload.yaml under templates/")
    if "model_type" in data:
        transformer = transformer_from_config(data, path)
        length = min(DEFAULT_SEQUENCE_LENGTH, transformer.get("num_positions") or DEFAULT_SEQUENCE_LENGTH)
        name = str(data.get("_name_or_path") or path.resolve().parent.name)
        return {"name": name, "model": transformer, "training": {"sequence_length": length}}
    model = data.get("model")
    if isinstance(model, dict) and model.get("kind") == "huggingface":
        data["model"] = _from_huggingface(model, path)
    return data


def _from_huggingface(model: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the transformer of `{kind: huggingface, config: FILE, ...}`; the other keys overwrite what the config says."""
    config = model.get("config")
    if not isinstance(config, str):
        raise ConfigError("`model.config` must name a Hugging Face config.json", file=path, line=_line_of(path, ("model",)))
    config_path = path.parent / config
    described = _content(config_path)
    if not isinstance(described, dict):
        raise ConfigError("is not a Hugging Face config.json", file=config_path)
    return transformer_from_config(described, config_path) | {key: value for key, value in model.items() if key not in ("kind", "config")}


def is_huggingface_config(path: Path) -> bool:
    """Say whether the file at *path* is a Hugging Face config.json: a model, and no training."""
    data = _content(path)
    return isinstance(data, dict) and "model_type" in data


def read_workload(path: Path) -> Workload:
    """
    Return the workload that the file at *path* describes.

    Raises ConfigError with file, line and value for what makes no sense.
    """
    return workload_from(read_workload_data(path), path)


def workload_from(data: dict[str, Any], path: Path) -> Workload:
    """
    Return the workload that *data*, the content of *path*, describes.

    Raises ConfigError with file, line and value for what makes no sense.
    """
    try:
        return Workload.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(str(part) for part in first["loc"] if part not in ("transformer", "contrastive_encoder", "parameters"))
        given = (
            f" is {first['input']!r}" if isinstance(first["input"], (str, int, float, bool)) and first["type"] != "extra_forbidden" else ""
        )
        raise ConfigError(
            f"`{'.'.join(where) or 'workload'}`{given}: {problem_of(first)}",
            file=path,
            line=_line_of(path, where),
            hint="the fields and what they mean: templates/workload.schema.json",
        ) from error


def _content(path: Path) -> Any:
    from memplan.edits.yaml_file import YamlFile  # here, since the built-in workload does without it

    return YamlFile.load(path).to_python()


def _line_of(path: Path, where: tuple[str, ...]) -> int | None:
    from memplan.edits.yaml_file import YamlFile

    return YamlFile.load(path).line_of(where)


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

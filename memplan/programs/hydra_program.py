"""
Programs whose configuration Hydra composes: the script, its folder, and the whole of its files.

A script says by `@hydra.main(config_path="../configs", config_name="train")` what it is configured by; the defaults lists, packages and
overrides make one configuration of many files. Hydra's own library composes it here as it would for the program, of which nothing is run.
"""

from __future__ import annotations

import ast
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from memplan.edits.yaml_file import YamlFile
from memplan.errors import ConfigError, UsageError
from memplan.programs.composed_config import BATCH_KEYS, ComposedConfig, Part, is_of_training
from memplan.programs.run_script import run_script

_OPTIONS = {"config-name": "name", "cn": "name", "config-path": "path", "cp": "path", "config-dir": "more", "cd": "more"}
"""Hydra's own, of a script that it configures."""
_PLUGINS = ("hydra/hydra_logging=default", "hydra/job_logging=default", "hydra/launcher=basic", "hydra/sweeper=basic")
"""Choices of Hydra's own configuration, which may name packages that are not installed here, and decide nothing of the program's."""

_SOMEWHERE = "..."
"""What stands for the beginning of a path that only a run of the script knows."""

MOST_ABOVE = 4
"""Folders above a file of a configuration in which the script that it is of is looked for."""

MOST_FOLDERS = 500
"""Folders that are looked into for that."""

ASIDE = frozenset({"test", "tests", "example", "examples", "docs", "benchmarks", "node_modules", "third_party"})
"""Folders of a project whose scripts are not what it trains by; one of them that is itself looked into is searched as any other."""


class HydraApp(NamedTuple):
    """A script that Hydra configures, as a command runs it."""

    script: Path
    folder: Path
    """Of its configuration."""
    config_name: str
    overrides: tuple[str, ...]
    """The words of the command that change the configuration."""

    @property
    def file(self) -> Path:
        """Return the file that its configuration begins with."""
        return self.folder / f"{self.config_name.removesuffix('.yaml')}.yaml"


def hydra_app(words: Sequence[str]) -> HydraApp | None:
    """Return the Hydra script that the command *words* runs; None for another program."""
    found = run_script(words)
    told = None if found is None else _told_by(found.path)
    if found is None or told is None:
        return None
    path, name, overrides = told.get("config_path"), told.get("config_name"), []
    rest = iter(found.words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if word.startswith("-") and flag.lstrip("-") in _OPTIONS:
            value = value if equals else next(rest, "")
            option = _OPTIONS[flag.lstrip("-")]
            if option == "name":
                name = value
            elif option == "path":
                path = value
            else:
                overrides.append(f"hydra.searchpath=[file://{Path(value).resolve()}]")
        elif not word.startswith("-") and ("=" in word or word.startswith("~")):
            overrides.append(word)
    folder = None if path is None or name is None else _folder(found.path, path, name)
    if folder is None or name is None:
        return None
    return HydraApp(found.path, folder, name, tuple(overrides))


def commands_for(place: Path) -> list[list[str]]:
    """
    Return the commands that run the Hydra scripts of a project whose configuration has the file *place*, or lies in the folder *place*.

    Those whose own configuration *place* is come first, then those called train. A file that the script does not read by itself is chosen
    in the command, where Hydra takes it.
    """
    place = place.resolve()
    apps = sorted(_apps_at(place), key=lambda app: (app.file != place, "train" not in app.script.stem, app.script))
    apps = [app for app in apps if is_of_training(app.script.stem)]
    return [["python", str(app.script), *_chosen(app, place)] for app in apps]


def _apps_at(place: Path) -> list[HydraApp]:
    """Return the Hydra scripts below *place*, or below the nearest folder above that has one for it: of a folder, in the working folder."""
    above = [folder for folder in place.parents if os.path.isfile(place) or folder.is_relative_to(Path.cwd())]
    for folder in [*([place] if os.path.isdir(place) else []), *above[:MOST_ABOVE]]:
        if folder in (Path.home(), Path(folder.anchor)):
            break
        found = [app for script in _python_files(folder) if (app := hydra_app([_relative(script)])) is not None]
        found = [app for app in found if app.folder.is_relative_to(place) or place.is_relative_to(app.folder)]
        if found:
            return found
    return []


def _python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files below *folder* that mention Hydra, but for those of virtual environments, of tests and of examples."""
    for path, folders, files in itertools.islice(os.walk(folder), MOST_FOLDERS):
        inner = (name for name in folders if name[0] not in "._" and name not in ASIDE)
        folders[:] = sorted(name for name in inner if not os.path.exists(Path(path) / name / "pyvenv.cfg"))
        for script in (Path(path) / name for name in sorted(files) if name.endswith(".py")):
            with suppress(OSError):
                if b"hydra" in script.read_bytes():
                    yield script


def _chosen(app: HydraApp, place: Path) -> list[str]:
    """Return the words by which *app* reads the file *place*, where it does not by itself and Hydra takes them."""
    if os.path.isdir(place) or find_spec("hydra") is None:
        return []
    group, name = place.relative_to(app.folder).parent.as_posix(), place.stem
    words = [f"{group}={name}"] if group != "." else [] if name == Path(app.config_name).stem else ["--config-name", name]
    with suppress(UsageError):
        if not composed_by_hydra(app).has(place) and composed_by_hydra(hydra_app([str(app.script), *words]) or app).has(place):
            return words
    return []


def _told_by(script: Path) -> dict[str, str] | None:
    """Return what `@hydra.main(…)` in *script* says, as far as that can be read without running it; None where there is no such line."""
    with suppress(OSError, SyntaxError, ValueError):
        source = script.read_bytes()
        tree = ast.parse(source) if b"hydra" in source else ast.Module([], [])
        names = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        decorators = (call for node in ast.walk(tree) for call in getattr(node, "decorator_list", ()) if isinstance(call, ast.Call))
        for call in decorators:
            if ast.unparse(call.func) in ("hydra.main", "main"):
                given = dict(_arguments(call, names))
                return {name: text for name, value in given.items() if (text := _text(value, names)) is not None}
    return None


def _arguments(call: ast.Call, names: Mapping[str, ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments of `hydra.main`; those of `**PARAMETERS` from the dict of that name."""
    yield from zip(("config_path", "config_name"), call.args, strict=False)
    for keyword in call.keywords:
        value = names.get(keyword.value.id, keyword.value) if isinstance(keyword.value, ast.Name) else keyword.value
        if keyword.arg is not None:
            yield keyword.arg, value
        elif isinstance(value, ast.Dict):
            yield from ((str(key.value), inner) for key, inner in zip(value.keys, value.values, strict=True) if _is_text(key))


def _text(value: ast.expr, names: Mapping[str, ast.expr]) -> str | None:
    """Return the text that *value* is; of a path that begins with what only a run knows, as `str(ROOT / "conf")`, the rest: ".../conf"."""
    if isinstance(value, ast.Name):
        return _text(names[value.id], {}) if value.id in names else None
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    parts = sorted((part for part in ast.walk(value) if _is_text(part)), key=lambda part: (part.lineno, part.col_offset))
    is_path = bool(parts) and isinstance(value, (ast.Call, ast.BinOp))
    return "/".join([_SOMEWHERE, *(str(part.value) for part in parts)]) if is_path else None


def _is_text(node: ast.expr | ast.AST | None) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _folder(script: Path, path: str, name: str) -> Path | None:
    """Return the folder of the configuration *name* that *script* calls *path*; None where there is none."""
    if not path.startswith(f"{_SOMEWHERE}/"):
        folder = (script.parent / path).resolve()
        return folder if os.path.isdir(folder) else None
    above = list(script.resolve().parents)[:MOST_ABOVE]
    folders = (place / path.removeprefix(f"{_SOMEWHERE}/") for place in above)
    return next((folder for folder in folders if os.path.isfile(folder / f"{Path(name).stem}.yaml")), None)


def _by_hand(app: HydraApp) -> str:
    """Return how to say what was not found: with a file that has such a key, where there is one."""
    for path in sorted(app.folder.rglob("*.yaml")):
        with suppress(ConfigError):
            for key in sorted(YamlFile.load(path).keys()):
                if key.rpartition(".")[2] in BATCH_KEYS and is_of_training(key):
                    return f'name the place: `fields=["micro_batch_size={_relative(path)}:{key}"]`'
    return "write `data.batch_size={micro_batch_size}` into the command, with the key that holds the batch"


def composed_by_hydra(app: HydraApp) -> ComposedConfig:
    """Return the configuration of *app*. Raises UsageError where Hydra is not installed here, or cannot compose it."""
    if find_spec("hydra") is None:
        raise UsageError(
            f"{app.script} is configured by Hydra, which is not installed here", hint=f"`pip install hydra-core`, or {_by_hand(app)}"
        )
    from hydra import initialize_config_dir  # noqa: PLC0415  (it need not be installed)
    from hydra.core.global_hydra import GlobalHydra  # noqa: PLC0415
    from hydra.types import RunMode  # noqa: PLC0415
    from omegaconf import OmegaConf  # noqa: PLC0415

    own = {word.partition("=")[0].lstrip("+~") for word in app.overrides}
    overrides = [*app.overrides, *(word for word in _PLUGINS if word.partition("=")[0] not in own)]
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(app.folder), version_base="1.3"):
            warnings.simplefilter("ignore")  # the program's own run gives them
            loader = GlobalHydra.instance().config_loader()
            composed: Any = loader.load_configuration(app.config_name, overrides, run_mode=RunMode.RUN)
            defaults = loader.compute_defaults_list(app.config_name, overrides, run_mode=RunMode.RUN)
            parts = [
                Part(_file_of(loader, part.config_path), tuple((part.package or "").split(".")) if part.package else ())
                for part in defaults.defaults
                if part.config_path is not None
            ]
    except Exception as error:  # Hydra's own, and of every kind
        problem = str(error).strip().splitlines()
        said = problem[0] if problem else repr(error)
        raise UsageError(f"Hydra cannot compose {app.config_name} here: {said}", hint=_by_hand(app)) from error
    content = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(content, dict)
    values = {str(name): value for name, value in content.items() if name != "hydra"}
    overridden = {one.key_or_group: one.input_line for one in defaults.config_overrides}
    return ComposedConfig(app.config_name, values, parts, overridden, in_command="KEY=VALUE")


def _file_of(loader: Any, config_path: str) -> Path | None:
    """Return the file of the configuration that the defaults list calls *config_path*."""
    found = loader.repository.load_config(config_path)
    scheme, _, root = ("" if found is None else found.path).partition("://")
    if scheme != "file":
        return None
    path = Path(root) / config_path
    return path if path.suffix == ".yaml" else path.with_name(f"{path.name}.yaml")


def _relative(path: Path) -> str:
    return os.path.relpath(path)

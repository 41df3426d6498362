"""
Programs that are told their configuration in the command: `train.py fit -c base.yaml -c large.yaml`, `train.py config/small.py`.

The files are composed as they stand there: a later one overrides what an earlier one says. LightningCLI takes parts too, `--data d.yaml`,
whose keys stand below `data`. An option of a key's name (`--data.batch_size 64`, `--bsz 64`) overrides the files.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from memplan.edits.config_file import SUFFIXES, load_config_file, settings_of
from memplan.edits.shell_file import SHELL_SUFFIXES
from memplan.errors import ConfigError, UsageError
from memplan.programs.base_files import with_bases
from memplan.programs.composed_config import KEYS_OF, ComposedConfig, Part
from memplan.programs.run_script import declared_options, imported_files, run_script, shell_script
from memplan.programs.user_program import did_you_mean

MOST_BYTES = 2**20
"""A larger file is data."""

LIGHTNING_PARTS = frozenset({"trainer", "model", "data", "optimizer", "lr_scheduler"})
"""Options of LightningCLI that take a file with the keys of that part."""


_OF_CONFIGURATION = re.compile(r"conf|cfg|setting|param|recipe|opt(ion)?s?$")
"""In the name of an option: it takes a file of settings."""

_WRITTEN = re.compile(r"save|out|dump|write|log|num_")
"""In the name of an option: the file is written, or it is none."""

_OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=")
"""A word that sets a key below another one."""


class Option(NamedTuple):
    """An option of a command, or a word without one."""

    name: str
    """Without its dashes; empty for a word that stands alone."""
    value: str
    typed: str
    """As it stands in the command."""


def composed_by_words(words: Sequence[str]) -> ComposedConfig | None:
    """Return the configuration of the files that the command *words* names; None where it names none."""
    options = list(_options(words))
    given = _python_files_given(words)
    parts, named, values = [], list[str](), dict[str, object]()
    for option in options:
        path = Path(option.value)
        if not _may_be_configuration(path) or path.suffix in SHELL_SUFFIXES or (path.suffix == ".py" and option.value not in given):
            continue
        with suppress(ConfigError):  # whatever it is, no configuration that could be written
            files = with_bases(path)
            named.append(str(path))
            for part, file in files:
                content = settings_of(file)
                package = (option.name,) if option.name in LIGHTNING_PARTS else ()
                if isinstance(content, dict):
                    _merge(values, {package[0]: content} if package else content)
                    parts.append(Part(part, package))
    if not parts:
        return None
    name = " and ".join(dict.fromkeys(named))
    return ComposedConfig(name, values, parts, dict(_overridden(options, values)), in_command="--KEY VALUE")


def _python_files_given(words: Sequence[str]) -> frozenset[str]:
    """Return the Python files that the script of a command is given, but for those that are programs themselves."""
    script = run_script(words)
    given = (option.value for option in _options(script.words if script is not None else ()) if option.value.endswith(".py"))
    return frozenset(name for name in given if os.path.isfile(name) and b"__main__" not in Path(name).read_bytes())


def fields_of_sources(words: Sequence[str]) -> list[str]:
    """
    Return where the script of a command holds the batch and the accumulation, or a Python file that it is given, or what these import.

    Nothing where they do not hold it, or several keys may be the one. What a script does with its values nobody knows who does not run it:
    such a place is told, and not taken.
    """
    found = (_fields_of_imported(path) if is_imported else _fields_of(path) for path, is_imported in _sources_of(words).items())
    return next(filter(None, found), [])


def _sources_of(words: Sequence[str]) -> dict[Path, bool]:
    """Return the script of a command, the Python files that it is given, and what these import; each with whether it is imported."""
    script, shell = run_script(words), shell_script(words)
    sources = [script.path, *map(Path, sorted(_python_files_given(words)))] if script is not None else []
    found = dict.fromkeys([shell, *sources] if shell is not None else sources, False)
    for path in (path for source in sources for path in imported_files(source)):
        found.setdefault(path, True)
    return {path: is_imported for path, is_imported in found.items() if _may_be_configuration(path)}


def _fields_of_imported(path: Path) -> list[str]:
    """Return what `_fields_of` does of a module that a script imports, but for what a class sets of its instances: there may be none."""
    fields = _fields_of(path)
    return [] if any(".self." in field for field in fields) else fields


def _fields_of(path: Path) -> list[str]:
    """Return where *path* holds the batch and the accumulation, each where that is certain; what is computed is a use of it."""
    fields = list[str]()
    with suppress(ConfigError):
        values = _written_out(load_config_file(path).to_python())
        config = ComposedConfig(str(path), values, [Part(path)], {}, in_command="")
        for variable in KEYS_OF:
            with suppress(UsageError):
                fields += (field for field in config.fields([variable]) if _is_count(values, field.rpartition(":")[2]))
    return fields if any(field.startswith("micro_batch_size=") for field in fields) else []


def _is_count(values: Mapping[str, object], key: str) -> bool:
    """Say whether *values* have a number from 1 on at *key*: 0 is how some programs say that nothing is accumulated."""
    found: object = values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return isinstance(found, int) and found >= 1


def _written_out(values: dict[str, object]) -> dict[str, object]:
    """Return *values* without those that are computed."""
    kept = {name: value for name, value in values.items() if not (isinstance(value, str) and value.startswith("${ "))}
    return {name: _written_out(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _may_be_configuration(path: Path) -> bool:
    return path.suffix in SUFFIXES and os.path.isfile(path) and path.stat().st_size <= MOST_BYTES


def unreadable_in(words: Sequence[str]) -> ConfigError | None:
    """Return why the first of the files that the command *words* names, and that may be configurations, is none; None where all are."""
    for option in _options(words):
        try:
            if _may_be_configuration(path := Path(option.value)):
                settings_of(load_config_file(path))
        except ConfigError as error:
            return error
    return None


def absent_in(words: Sequence[str]) -> ConfigError | None:
    """Return which of the scripts and configurations that the command *words* names is not there, the first; None where all are."""
    path = next((Path(option.value) for option in _options(words) if _names_absent(option)), None)
    return None if path is None else ConfigError(f"there is no such file{_meant_with(path)}", file=path)


def fields_of_files_below(words: Sequence[str]) -> list[str]:
    """Return where files hold the batch and the accumulation that a command names as seen from another folder."""
    absent = (Path(option.value) for option in _options(words) if _names_absent(option))
    return next(filter(None, (_fields_of(each) for path in absent for each in _files_below(path))), [])


def _names_absent(option: Option) -> bool:
    """Say whether *option* names a configuration that is not there, by its suffix and its own name: others name what is written."""
    name, suffix = option.name.lower(), Path(option.value).suffix
    is_read = suffix != ".json" if not name else name == "c" or bool(_OF_CONFIGURATION.search(name) and not _WRITTEN.search(name))
    return is_read and suffix in SUFFIXES and not os.path.exists(option.value)


def _files_below(path: Path) -> list[Path]:
    """Return the files named as *path* in folders of this one."""
    return sorted(Path().glob(f"*/{glob.escape(path.name)}"))


def _meant_with(path: Path) -> str:
    """Return the end of a sentence that tells which file may be meant with *path*: one of its name below, or one of a name like it."""
    below = _files_below(path)
    if below:
        return f" here, but {below[0]}"
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return did_you_mean(str(path), frozenset(str(each) for each in beside if each.suffix in SUFFIXES))


def constant_of(words: Sequence[str], name: str) -> Path | None:
    """Return the Python file of a command's that holds a count called *name*, at its top; None where none does."""
    for path in _sources_of(words):
        with suppress(ConfigError):
            if path.suffix == ".py" and _is_count(load_config_file(path).to_python(), name):
                return path
    return None


def variables_in(words: Sequence[str]) -> list[str]:
    """
    Return the command *words* with a placeholder in the place of each value that an option of a batch's or accumulation's name has.

    An option that its script declares and the command leaves out is added with one.
    """
    placed = list(words)
    script = run_script(words)
    sources = [] if script is None else [script.path, *imported_files(script.path)]
    declared = [option for source in sources for option in declared_options(source)]
    given = {_name_of(option.name) for option in _options(words)}
    for variable, names in KEYS_OF.items():
        own = next((each for name in names for each in declared if name in map(_name_of, each)), ())
        known = {*names, *map(_name_of, own)}
        if own and given.isdisjoint(known):
            placed += [next(option for option in own if _name_of(option) in names), f"{{{variable}}}"]
        for number, (word, after) in enumerate(zip_longest(words, words[1:], fillvalue="")):
            flag, equals, value = word.partition("=")
            if flag.startswith("-") and _name_of(flag) in known and (value if equals else after).isdigit():
                placed[number + (not equals)] = f"{flag}={{{variable}}}" if equals else f"{{{variable}}}"
                break
    return placed


def _options(words: Sequence[str]) -> Iterator[Option]:
    """Yield the options of a command with their values, and the words that stand alone."""
    for before, word in zip(["", *words], words, strict=False):
        flag, equals, value = word.partition("=")
        if word.startswith("-") and equals:
            yield Option(flag.lstrip("-"), value, word)
        elif before.startswith("-") and "=" not in before and not word.startswith("-") and not _OVERRIDE.match(word):
            yield Option(before.lstrip("-"), word, f"{before} {word}")
        elif not word.startswith("-") and _OVERRIDE.match(word):  # mmengine's, Hydra's
            yield Option(flag.lstrip("+"), value, word)
        elif not word.startswith("-") and _OVERRIDE.match(f"{before}=") and Path(before).suffix not in SUFFIXES:  # yacs: SOLVER.BATCH 64
            yield Option(before, word, f"{before} {word}")
        elif not word.startswith("-"):
            yield Option("", word, word)


def _overridden(options: Sequence[Option], values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the keys that an option of their name sets, and the option: by the whole name, or where it has no dot by the last part."""
    keys = list(_keys(values))
    for option in options:
        for key in keys:
            if option.name and _same(option.name) in (_same(key), _same(key.rpartition(".")[2])):
                yield key, option.typed


def _same(name: str) -> str:
    """Return *name* as it is compared: argparse takes `--train-batch` for `train_batch`, in small letters mostly."""
    return name.replace("-", "_").lower()


def _name_of(option: str) -> str:
    """Return the name of an *option* with its dashes, as it is compared."""
    name = option.lstrip("-")
    return name if len(name) == 1 else _same(name)  # -B is no -b


def _keys(values: Mapping[str, object], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _merge(into: dict[str, object], content: Mapping[str, object]) -> None:
    """Put *content* over what is there, mapping by mapping."""
    for name, value in content.items():
        there = into.get(str(name))
        if isinstance(there, dict) and isinstance(value, dict) and value.get("_delete_") is not True:  # mmengine's
            _merge(there, value)
        else:
            into[str(name)] = value

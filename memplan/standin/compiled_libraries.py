"""Libraries of our own in C: compiled once, kept in the cache, under a path that the variables of the dynamic linker can hold."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from memplan.errors import MissingError
from memplan.hardware.cache_dir import private_cache, temporary_folder


def made_once(name: str, cache: Path, fill: Callable[[Path], None]) -> Path:
    """
    Return the folder *name* of *cache*, made by *fill* where it is not there yet.

    Two processes may make it at once: each fills a folder of its own and the first to finish gives it its name. Where *cache* cannot be
    written, it is made for this process alone.
    """
    if _is_folder(cache / name):
        return cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        working = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    except OSError:
        cache = private_cache()
        if _is_folder(cache / name):
            return cache / name
        working = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        fill(working)
    except BaseException:  # Ctrl-C too: half a folder is of no use to anybody
        shutil.rmtree(working, ignore_errors=True)
        raise
    try:
        working.rename(cache / name)
    except OSError:  # another process was first
        shutil.rmtree(working)
    return cache / name


def _is_folder(path: Path) -> bool:
    """Say whether *path* is a folder that this user can see: `Path.is_dir` of some Pythons raises below a folder of another user."""
    try:
        return path.is_dir()
    except OSError:
        return False


def find_compiler() -> str:
    """Return the C compiler of this machine. Raises MissingError where there is none."""
    wanted = [os.environ.get("CC", ""), "cc", "gcc", "clang", sysconfig.get_config_var("CC") or ""]
    for name in wanted:
        found = (shutil.which(name) or shutil.which(name.split()[0])) if name.strip() else None  # "gcc -m64", "/opt/my tools/gcc"
        if found:
            return found
    raise MissingError("no C compiler to build the simulated GPU with", hint="install one (`apt install gcc`), or name it in CC")


def compile_library(compiler: str, output: Path, sources: Sequence[Path], *options: str) -> None:
    """Compile *sources* into the shared library *output*. Raises MissingError when the compiler fails."""
    command = [compiler, "-shared", "-fPIC", "-w", *options, *map(str, sources), "-o", str(output), "-ldl", "-lpthread"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = "\n".join(result.stderr.splitlines()[:5])
        raise MissingError(
            f"{compiler} could not build the simulated GPU: {said}", hint="try another compiler: CC=clang memplan rehearse …"
        )


_SEPARATORS = re.compile("[:;$]")
"""What LD_LIBRARY_PATH is split at or expanded at (ld.so(8)), and PYTHONPATH at its colon: neither can quote."""

_PRELOAD_SEPARATORS = re.compile("[:;$ ]")
"""LD_PRELOAD is split at blanks too."""


def path_for_variables(folder: Path) -> Path:
    """Return a path of *folder* that LD_LIBRARY_PATH and PYTHONPATH can hold: itself, or a link to it of this process."""
    return _linked(folder, _SEPARATORS)


def path_for_preload(folder: Path) -> Path:
    """Return a path of *folder* that LD_PRELOAD can hold: itself, or a link to it of this process."""
    return _linked(folder, _PRELOAD_SEPARATORS)


def _linked(folder: Path, separators: re.Pattern[str]) -> Path:
    if not separators.search(str(folder)):
        return folder
    link = _links(separators) / folder.name
    with contextlib.suppress(FileExistsError):  # made before
        link.symlink_to(folder.absolute())
    return link


@lru_cache
def _links(separators: re.Pattern[str]) -> Path:
    """Return a folder for links, of this process alone, whose path those variables can hold."""
    places = [place for place in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm") if not separators.search(place)]
    for place in places:
        with contextlib.suppress(OSError):
            return temporary_folder("memplan-links-", place)
    raise MissingError(
        "the path of memplan's cache has one of `:`, `;` and `$`, and so has that of every folder for temporary files",
        hint="set XDG_CACHE_HOME to a folder whose path has none of them",
    )

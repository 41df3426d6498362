"""Libraries of our own in C: compiled once, kept in the cache, under a path that the variables of the dynamic linker can hold."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from memplan.errors import MissingError
from memplan.hardware.cache_dir import private_cache, temporary_folder

LONGEST_WAIT_SECONDS = 30.0
"""For another process that compiles the same: that takes a second."""


def made_once(name: str, cache: Path, fill: Callable[[Path], None]) -> Path:
    """
    Return the folder *name* of *cache*, made by *fill* where it is not there yet.

    Of two processes that need it at once the second waits for the first. Where it cannot, each fills a folder of its own and the first to
    finish gives it its name. Where *cache* cannot be written, it is made for this process alone.
    """
    if _is_folder(cache / name):
        return cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return _made_alone(name, cache, fill)
    except OSError:
        return _made_alone(name, private_cache(), fill)


def _made_alone(name: str, cache: Path, fill: Callable[[Path], None]) -> Path:
    with _held(cache):
        return cache / name if _is_folder(cache / name) else _made(name, cache, fill)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold *folder* when no other process does; where it cannot be locked, or one that was stopped holds it, go on all the same."""
    descriptor = os.open(folder, os.O_RDONLY)
    until = time.monotonic() + LONGEST_WAIT_SECONDS
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # no such locks there
                break
        yield
    finally:
        os.close(descriptor)


def _made(name: str, cache: Path, fill: Callable[[Path], None]) -> Path:
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
    """Compile *sources* into the shared library *output*, several at once. Raises MissingError when the compiler fails."""
    common = [compiler, "-fPIC", "-w", *options]
    with tempfile.TemporaryDirectory(prefix="objects-", dir=output.parent) as folder, ThreadPoolExecutor() as pool:
        objects = [Path(folder, f"{number}.o") for number in range(len(sources))]
        commands = ([*common, "-c", str(source), "-o", str(each)] for source, each in zip(sources, objects, strict=True))
        list(pool.map(_run_compiler, commands))
        _run_compiler([*common, "-shared", *map(str, objects), "-o", str(output), "-ldl", "-lpthread"])


def _run_compiler(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = "\n".join(result.stderr.splitlines()[:5])
        raise MissingError(
            f"{command[0]} could not build the simulated GPU: {said}", hint="try another compiler: CC=clang memplan rehearse …"
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

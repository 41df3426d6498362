"""Which functions PyTorch's libraries want from CUDA, read off the libraries themselves.

pyelftools finds the tables in the ELF files; the tables, of a hundred thousand entries, are read with `struct`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile

WANTED_OF_RUNTIME = re.compile(r"(__cuda[A-Z]|cuda[A-Z]|nccl[A-Z]|cublas|cudnn|cusparse|cusolver|cufft)\w*")
NAMED_OF_DRIVER = re.compile(rb"\bcu[A-Z]\w{2,60}\b")

_ELF64_SYMBOL = struct.Struct("<IBBHQQ")
_UNDEFINED = 0


def undefined_symbols(library: Path) -> Iterator[str]:
    """Yield the names of the functions that *library* (ELF, 64 bit) wants from others."""
    return (name for name, is_defined in _symbols(library) if not is_defined)


def defined_symbols(library: Path) -> Iterator[str]:
    """Yield the names that *library* has for others."""
    return (name for name, is_defined in _symbols(library) if is_defined)


def _symbols(library: Path) -> Iterator[tuple[str, bool]]:
    with library.open("rb") as file:
        elf = ELFFile(file)
        table, names = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".dynstr")
        if table is None or names is None:
            return
        strings: bytes = names.data()
        for name, _, _, section, _, _ in _ELF64_SYMBOL.iter_unpack(table.data()):
            if name:
                yield strings[name : strings.index(b"\0", name)].decode(), section != _UNDEFINED


def runtime_functions(libraries: list[Path]) -> set[str]:
    """Return the functions of the CUDA runtime and its libraries that *libraries* want."""
    return {name for library in libraries for name in undefined_symbols(library) if WANTED_OF_RUNTIME.fullmatch(name)}


def driver_functions(libraries: list[Path]) -> set[str]:
    """Return every name that looks like a function of the driver and stands in *libraries*: they are looked up by name at run time."""
    return {match.decode() for library in libraries for match in NAMED_OF_DRIVER.findall(_read_only_data(library))}


def functions_in_sources(sources: list[Path]) -> set[str]:
    """
    Return every name that looks like a function of the driver in C files that are compiled at run time (Triton's).

    With `_v2` too: to some of them cuda.h gives that name when they are compiled (`#define cuMemFree cuMemFree_v2`).
    """
    names = {match.decode() for source in sources for match in NAMED_OF_DRIVER.findall(source.read_bytes())}
    return names | {f"{name}_v2" for name in names}


def _read_only_data(library: Path) -> bytes:
    with library.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".rodata")
        data: bytes = section.data() if section is not None else b""
        return data

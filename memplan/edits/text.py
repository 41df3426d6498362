"""The text of a file that belongs to someone else: read whole, as UTF-8, with its byte order mark set aside."""

from __future__ import annotations

from pathlib import Path

from memplan.errors import ConfigError, reason_of

BOM = "\ufeff"


def read_whole(path: Path) -> bytes:
    """Return the bytes of *path*. Raises ConfigError where it cannot be read or is no regular file."""
    try:
        if path.exists() and not path.is_file():  # a named pipe among the files of a folder would be waited for without end
            raise ConfigError("is not a regular file", file=path, hint="a configuration is read from files")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {reason_of(error)}", file=path, hint="check the path and its permissions") from error


def decode(path: Path, data: bytes) -> str:
    """Return the text of *data*, the content of *path*, without a byte order mark. Raises ConfigError where it is not UTF-8."""
    try:
        return data.decode("utf-8").removeprefix(BOM)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError("is not UTF-8", file=path, line=line, hint="save the file as UTF-8") from error


def encode(text: str, *, like: bytes) -> bytes:
    """Return the bytes of *text*, with a byte order mark where *like* has one."""
    bom = BOM if like.startswith(BOM.encode()) else ""
    return (bom + text).encode("utf-8")

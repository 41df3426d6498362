"""
Does what a list of file operations says, in the working folder, and prints what each returned or how it failed: a line of JSON for each.

    python file_operations.py '[["write", "a", "text"], ["list", "."]]'

What is printed must not depend on where the files really are: no numbers of files or disks, no times.
"""

import glob
import json
import os
import shutil
import sys
from pathlib import Path


def write(path, text):
    with open(path, "w") as file:
        return file.write(text)


def append(path, text):
    with open(path, "a") as file:
        file.write(text)
        return file.tell()


def change(path, text):
    with open(path, "r+") as file:
        file.write(text)
        file.seek(0)
        return file.read()


def create(path, text):
    with open(path, "x") as file:
        return file.write(text)


def read(path):
    with open(path) as file:
        return file.read()


def listing(path):
    return sorted((entry.name, entry.is_dir(), entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in os.scandir(path))


def listing_of_descriptor(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return sorted(os.listdir(descriptor))
    finally:
        os.close(descriptor)


def status(path):
    found = os.stat(path)
    return oct(found.st_mode), found.st_size if not os.path.isdir(path) else None


def tree(path):
    return sorted((os.path.relpath(folder, path), sorted(names), sorted(files)) for folder, names, files in os.walk(path))


def write_in(folder, name):
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        file = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=descriptor)
        os.write(file, b"in")
        os.close(file)
        return sorted(os.listdir(descriptor)), os.stat(name, dir_fd=descriptor).st_size
    finally:
        os.close(descriptor)


def go_and_write(folder, name):
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        try:
            Path(name).write_text("gone")
            return os.path.basename(os.getcwd()), sorted(os.listdir("."))
        finally:
            os.fchdir(before)
    finally:
        os.close(before)


def read_through(path):
    """A file that is held open while another takes its name."""
    with open(path) as file:
        Path(path + ".new").write_text("new")
        os.replace(path + ".new", path)
        return file.read(), Path(path).read_text()


OPERATIONS = {
    "write": write,
    "append": append,
    "change": change,
    "create": create,
    "read": read,
    "list": listing,
    "list_descriptor": listing_of_descriptor,
    "stat": status,
    "lstat": lambda path: oct(os.lstat(path).st_mode),
    "exists": lambda path: (os.path.exists(path), os.path.lexists(path), os.path.isdir(path), os.path.islink(path)),
    "access": lambda path: (os.access(path, os.R_OK), os.access(path, os.W_OK)),
    "mkdir": os.mkdir,
    "makedirs": lambda path: os.makedirs(path, exist_ok=True),
    "unlink": os.unlink,
    "rmdir": os.rmdir,
    "rmtree": shutil.rmtree,
    "rename": os.rename,
    "replace": os.replace,
    "move": lambda a, b: os.path.basename(shutil.move(a, b) or ""),
    "copy": lambda a, b: os.path.basename(shutil.copy2(a, b)),
    "copytree": lambda a, b: os.path.basename(shutil.copytree(a, b, symlinks=True)),
    "symlink": os.symlink,
    "link": os.link,
    "readlink": os.readlink,
    "realpath": lambda path: os.path.relpath(os.path.realpath(path)),
    "truncate": os.truncate,
    "chmod": os.chmod,
    "utime": lambda path: os.utime(path, ns=(10**9, 10**9)) or os.stat(path).st_mtime_ns,
    "glob": lambda pattern: sorted(glob.glob(pattern, recursive=True)),
    "tree": tree,
    "write_in": write_in,
    "go_and_write": go_and_write,
    "read_through": read_through,
}


def snapshot(path="."):
    """Everything below *path*: names, kinds, permissions, contents."""
    found = {}
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        mode = oct(entry.stat(follow_symlinks=False).st_mode)
        if entry.is_symlink():
            found[entry.name] = "link", os.readlink(entry.path)
        elif entry.is_dir():
            found[entry.name] = mode, snapshot(entry.path)
        else:
            found[entry.name] = mode, read(entry.path), os.lstat(entry.path).st_nlink
    return found


def main(operations):
    for name, *arguments in operations:
        try:
            outcome = OPERATIONS[name](*arguments)
        except OSError as error:
            outcome = type(error).__name__, error.errno
        except (shutil.Error, UnicodeError) as error:
            outcome = type(error).__name__
        print(json.dumps([name, arguments, outcome]))
    print(json.dumps(snapshot()))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

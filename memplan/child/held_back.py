"""
What would leave a rehearsal and does not pass the C library, where `programs/overlay.py` holds files back: a rehearsal's weights are zeros.

Loaded at the start of every Python that a rehearsed script starts, so with as few imports as can be. The functions of huggingface_hub that
change a repository answer as they do after a success, without the network; downloads work as ever. safetensors (0.8) calls the kernel
itself to give a file its name: it does so in the scratch folder, and the C library brings the file from there.
"""

import functools
import os
import sys
import tempfile
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_COMMITS = ("create_commit", "upload_file", "upload_folder", "delete_file", "delete_files", "delete_folder")
_NOTHING = (
    *("preupload_lfs_files", "upload_large_folder", "delete_repo", "move_repo", "super_squash_history"),
    *("update_repo_visibility", "update_repo_settings", "create_branch", "delete_branch", "create_tag", "delete_tag"),
)


def hold_back() -> None:
    """Change these packages when they are imported, where a rehearsal holds files back."""
    if "MEMPLAN_OVERLAY" not in os.environ:
        return
    if any(type(finder).__name__ == _AfterImport.__name__ for finder in sys.meta_path):  # by its name: the hook loads this file by another
        return
    sys.meta_path.insert(0, _AfterImport())
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])


class _AfterImport(MetaPathFinder):
    """Finds the modules as the other finders do, and changes each when it has been loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in _CHANGES:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # those in front have been asked, and may ask this one again
        others = (finder for finder in behind if hasattr(finder, "find_spec"))
        spec: Any = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _CHANGES[fullname](module)

        spec.loader.exec_module = exec_module
        return spec


def _change_hub(module: Any) -> None:
    """Replace the methods of HfApi in *module*, and the functions that are those of one HfApi."""

    def commit(_: Any, *arguments: Any, **options: Any) -> Any:
        message = options.get("commit_message") or "held back by memplan"
        repository = options.get("repo_id", arguments[0] if arguments and isinstance(arguments[0], str) else "repository")
        url = f"{module.constants.ENDPOINT}/{repository}/commit/{'0' * 40}"  # CommitInfo reads no other endpoint
        return module.CommitInfo(commit_url=url, commit_message=message, commit_description="", oid="0" * 40)

    def repository(api: Any, repo_id: str, **options: Any) -> Any:
        kind = options.get("repo_type")
        return module.RepoUrl(f"{api.endpoint}/{kind + 's/' if kind in ('dataset', 'space') else ''}{repo_id}", endpoint=api.endpoint)

    def nothing(api: Any, *arguments: Any, **options: Any) -> None:
        del api, arguments, options

    answers = dict.fromkeys(_COMMITS, commit) | {"create_repo": repository} | dict.fromkeys(_NOTHING, nothing)
    for name, answer in answers.items():
        if hasattr(module.HfApi, name):
            setattr(module.HfApi, name, _told_once(answer))
            if hasattr(module, name):
                setattr(module, name, getattr(module.api, name))


_told: list[str] = []


def _told_once(answer: Any) -> Any:
    def held_back(api: Any, *arguments: Any, run_as_future: bool = False, **options: Any) -> Any:
        if not _told:
            _told.append("told")
            print("memplan: uploads to the Hugging Face Hub are held back in a rehearsal", file=sys.stderr)
        if run_as_future:
            return api.run_as_future(answer, api, *arguments, **options)
        return answer(api, *arguments, **options)

    return held_back


def _change_safetensors(module: Any) -> None:
    """Have files written in the scratch folder of the rehearsal, and brought from there to where they belong."""
    serialize_file = module.serialize_file

    @functools.wraps(serialize_file)
    def serialize(tensors: Any, filename: Any, *arguments: Any, **options: Any) -> Any:
        with tempfile.TemporaryDirectory(dir=os.environ["MEMPLAN_OVERLAY"]) as folder:
            made = Path(folder, "file")
            result = serialize_file(tensors, made, *arguments, **options)
            made.replace(filename)
        return result

    module.serialize_file = serialize


_CHANGES = {"huggingface_hub.hf_api": _change_hub, "safetensors._safetensors_rust": _change_safetensors}

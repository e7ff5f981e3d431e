"""The other files of a checkpoint to prune: those copied, those left out, and those that stop the work.

The author of the checkpoint chose its files, so none is trusted to be what its name says. A link may lead to the user's
own files, which would then be published along. All are checked before any work is done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from slidesparse.base.typed_json import MAX_BYTES, load_json, parse_json
from slidesparse.base.whole_file import read_whole, readable_name, replace_file
from slidesparse.errors import CheckpointError, InputError

Links = Literal["refuse", "copy", "skip"]
"""Treatment of links out of the source: an error, a copy of the target, or only a report of their names."""

WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|h5|keras|msgpack|onnx|ot|gguf|ggml|tflite|mlmodel|pb|distcp|nemo|engine)"
    r"(\.index(\.\w+)?\.json)?$|\.onnx[._]?data|\.ckpt\.|\.gguf\."
    r"|^(hf_quant|quant|quantize|adapter)_config\.json$",
    re.IGNORECASE,
)
"""Names of files of any library with weights, their index or their quantisation. Servers follow a left-over
hf_quant_config.json."""

CODE = re.compile(r"\.(py|pyc|pyd|so|dll|dylib|pkl|pickle|joblib)$", re.IGNORECASE)
"""Names of files with code."""

CODE_KEY = "auto_map"
"""Key under which JSON files name classes of Python files, here or in any model of a hub."""


@dataclass(frozen=True)
class SourceFile:
    """A file to copy: its name there, the file itself after all links, and its size."""

    name: Path
    path: str
    n_bytes: int


@dataclass(frozen=True)
class SourceFiles:
    """The other files of a source.

    Attributes:
        copied: Files to copy.
        not_copied: Names of files with code, or with other copies of the weights and their descriptions.
        links: Names of links that lead out of the source, or nowhere, and are left out.
    """

    copied: tuple[SourceFile, ...]
    not_copied: tuple[str, ...]
    links: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all files to copy."""
        return sum(file.n_bytes for file in self.copied)

    def set_aside(self, name: str, mark: str) -> tuple[SourceFiles, str | None]:
        """Rename one of the files; return the files and its new name, None where there is no such file."""
        names = {str(file.name) for file in self.copied}
        if name not in names:
            return self, None
        new = Path(name)
        while str(new) in names:
            new = new.with_suffix(f".{mark}{new.suffix}")
        copied = [replace(file, name=new) if str(file.name) == name else file for file in self.copied]
        return replace(self, copied=tuple(copied)), str(new)

    def copy_to(self, folder: Path) -> None:
        """Copy the contents of the files into a folder, without entries that name code."""
        for file in self.copied:
            target = folder / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.path, target)
            content = _json(target)
            if (without := without_code(content)) != content:
                replace_file(target, json.dumps(without, indent=2, ensure_ascii=False))


def survey(folder: Path, rewritten: Collection[str], links: Links | None = "refuse") -> SourceFiles:
    """Check all files of a source, before anything is done with them.

    Names that begin with a dot are passed over: ``.git``, ``.cache``. Weights in folders that ``modules.json`` names
    (the ``2_Dense`` of a sentence encoder) are other parts of the model, and copied; all others are duplicates.

    Args:
        folder: The checkpoint.
        rewritten: Names of the files that pruning writes anew: config.json, the index, the shards.
        links: Treatment of links out of the folder; None: a command without ``--links`` refuses them. A hub's cache,
            whose snapshots link to its blobs, has none.

    Raises:
        CheckpointError: A link leads out and is refused, or leads nowhere or to a folder; or an entry is no file, or
            cannot be read.
    """
    inside, modules = _own_folders(folder), _modules(folder)
    copied: list[SourceFile] = []
    not_copied: list[str] = []
    skipped: list[str] = []
    for name in _names(folder):
        is_rewritten, path = str(name) in rewritten, os.path.realpath(folder / name)
        if not is_rewritten and _is_left_out(name, modules):
            not_copied.append(readable_name(name))
            continue
        if os.path.islink(folder / name) and (error := _refused_link(folder / name, path, links, inside)) is not None:
            if links != "skip" or is_rewritten:
                raise error
            skipped.append(readable_name(name))
            continue
        if not os.path.isfile(path) or not os.access(path, os.R_OK):
            got = "no permission" if os.path.isfile(path) else "no file"
            raise CheckpointError(f"{folder / name} cannot be copied", got=got)
        content = _json(Path(path))
        if content != without_code(content):
            not_copied.append(f"{CODE_KEY} of {readable_name(name)}")
        if not is_rewritten:
            copied.append(SourceFile(name, path, os.path.getsize(path)))
    return SourceFiles(tuple(copied), tuple(sorted(not_copied)), tuple(skipped))


def _names(folder: Path) -> list[Path]:
    """Return the names of all entries but folders; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise CheckpointError(f"{error.filename} cannot be read", got=error.strerror) from error

    names = []
    for where, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        names += [Path(where, name).relative_to(folder) for name in (*links, *files) if not name.startswith(".")]
    return sorted(names)


def _own_folders(folder: Path) -> list[str]:
    """Return the allowed targets of links: the checkpoint's own folder, and the blobs of a hub's cache beside it."""
    top = os.path.realpath(folder)
    above, name = os.path.split(os.path.dirname(top))
    return [top, os.path.join(above, "blobs")] if name == "snapshots" else [top]


def _is_left_out(name: Path, modules: list[Path]) -> bool:
    """Return whether a file has code or other copies of the weights."""
    if CODE.search(name.name) is not None:
        return True
    return WEIGHTS.search(name.name) is not None and not any(module in name.parents for module in modules)


def _refused_link(link: Path, path: str, links: Links | None, inside: list[str]) -> CheckpointError | None:
    """Return the error for a link to a path that is not followed, else None."""
    remedy = "remove it, or leave it out with --links skip"
    if not os.path.exists(path):
        why = "a link that leads nowhere"
    elif os.path.isdir(path):
        why = "a link to a folder"
    elif links == "copy" or any(os.path.commonpath((path, own)) == own for own in inside):
        return None
    else:
        why, remedy = "a link out of the source", "copy what is there with --links copy, or leave it out with skip"
    return CheckpointError(f"{link} is {why}", got=path, remedy=remedy if links else "put a copy in its place")


def without_code(value: Any) -> Any:
    """Remove the entries of a JSON value that name code; a token of that name, whose value is a number, stays."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if key != CODE_KEY or not isinstance(one, dict)}
        return {key: without_code(one) for key, one in kept.items()}
    return [without_code(one) for one in value] if isinstance(value, list) else value


def _json(path: Path) -> Any:
    """Read a JSON file that may name code; None for all other files."""
    if path.suffix.lower() != ".json":
        return None
    try:
        content = read_whole(path, MAX_BYTES)
        return parse_json(content, str(path), non_finite=True) if re.search(rb"auto_map|\\u00[567]", content) else None
    except InputError:  # no JSON, so no program reads it
        return None


def _modules(folder: Path) -> list[Path]:
    """Return the folders that a sentence encoder's ``modules.json`` names."""
    try:
        listed = load_json(folder / "modules.json")
    except (FileNotFoundError, InputError):
        return []
    paths = [one.get("path") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [Path(path) for path in paths if isinstance(path, str) and Path(path).parts]

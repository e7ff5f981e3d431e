"""The other files of a checkpoint that is pruned: which are copied, which are not, and which stop the work.

Whoever made the checkpoint chose its files, so none is believed to be what its name says. A link may lead to the user's
own files, which then would be in a folder that is given on; a pipe is waited for; a device has no end. All of that is
looked at before any work is done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from slidesparse.base.typed_json import MAX_BYTES, load_json, parse_json
from slidesparse.base.whole_file import NEW_FILE, kind_of, read_regular, readable_name, replace_file, require_no_holes
from slidesparse.errors import CheckpointError, InputError

Links = Literal["refuse", "copy", "skip"]
"""What happens to links that lead out of the source: an error, copies of what is there, or nothing but their names."""

MAX_FILES = 100_000
"""Most files and folders of a source. A link that leads far away, or to and fro, brings more."""

WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|h5|keras|msgpack|onnx|ot|gguf|ggml|tflite|mlmodel|pb|distcp|nemo|engine)"
    r"(\.index(\.\w+)?\.json)?$|\.onnx[._]?data|\.ckpt\.|\.gguf\."
    r"|^(hf_quant|quant|quantize|adapter)_config\.json$",
    re.IGNORECASE,
)
"""Names of files that hold weights, the index of them, or how other weights are quantised, in the form of any library.
Servers go by a left-over hf_quant_config.json."""

TEXTS = (".json", ".jinja", ".jsonl", ".model", ".tiktoken", ".txt")
"""Ends of the names of files that libraries read whole."""

CODE = re.compile(r"\.(py|pyc|pyd|so|dll|dylib|pkl|pickle|joblib)$", re.IGNORECASE)
"""Names of files that a program may run."""

CODE_KEY = "auto_map"
"""Key under which JSON files name classes of Python files, here or in any model of a hub."""


@dataclass(frozen=True)
class SourceFile:
    """A file to copy: its name there, the file itself after all links, and its status when it was looked at."""

    name: Path
    path: str
    status: os.stat_result


@dataclass(frozen=True)
class SourceFiles:
    """The other files of a source.

    Attributes:
        copied: Files to copy.
        not_copied: Names of files with code or other copies of the weights, and of what describes those.
        links: Names of links that lead out of the source, or nowhere, and are left out.
    """

    copied: tuple[SourceFile, ...]
    not_copied: tuple[str, ...]
    links: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all files to copy."""
        return sum(file.status.st_size for file in self.copied)

    def set_aside(self, name: str, mark: str) -> tuple[SourceFiles, str | None]:
        """Return the files with one of them under another name, and that name; None where there is no such file."""
        names = {str(file.name) for file in self.copied}
        if name not in names:
            return self, None
        new = Path(name)
        while str(new) in names:
            new = new.with_suffix(f".{mark}{new.suffix}")
        copied = [replace(file, name=new) if str(file.name) == name else file for file in self.copied]
        return replace(self, copied=tuple(copied)), str(new)

    def copy_to(self, folder: Path) -> None:
        """Copy the files into a folder, with times and permissions; a CheckpointError where one has changed since."""
        for file in self.copied:
            target = folder / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # of a run that was killed
            _copy(file, target)
            said = _json(target)
            if (without := without_code(said)) != said:
                replace_file(target, json.dumps(without, indent=2, ensure_ascii=False))


def survey(folder: Path, rewritten: Collection[str], links: Links = "refuse") -> SourceFiles:
    """Look at all files of a source, before anything is done with them.

    Names that begin with a dot are passed over: ``.git``, ``.cache``. Weights in folders that ``modules.json`` names
    (the ``2_Dense`` of a sentence encoder) are other parts of the model, and copied; all others are duplicates.

    Args:
        folder: The checkpoint.
        rewritten: Names of the files that pruning makes anew: config.json, the index, the shards.
        links: What to do with links that lead out of the folder. Those of a hub's cache, whose snapshots are links to
            its blobs, do not.

    Raises:
        CheckpointError: A link leads out and is not to be followed, or leads nowhere or back to a folder above it; or
            there is a pipe, a socket, a device, a file with large holes, or one that cannot be read; or too many files.
    """
    return _Survey(folder, rewritten, links).files()


class _Survey:
    def __init__(self, folder: Path, rewritten: Collection[str], links: Links) -> None:
        self.folder, self.rewritten, self.links = folder, rewritten, links
        self.top = os.path.realpath(folder)
        self.inside = [self.top]
        above, name = os.path.split(os.path.dirname(self.top))
        if name == "snapshots":  # a hub's cache
            self.inside.append(os.path.join(above, "blobs"))
        self.modules = _modules(folder)
        self.copied: list[SourceFile] = []
        self.not_copied: list[str] = []
        self.skipped: list[str] = []

    def files(self) -> SourceFiles:
        for name, entry in self._entries():
            status = os.stat(entry)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{self.folder / name} cannot be copied", got=kind_of(status.st_mode))
            if not os.access(entry, os.R_OK):
                raise CheckpointError(f"{self.folder / name} cannot be read", got="no permission")
            said = _json(Path(entry))
            if said != without_code(said):
                self.not_copied.append(f"{CODE_KEY} of {readable_name(name)}")
            if len(name.parts) == 1 and str(name) in self.rewritten:
                continue
            try:
                require_no_holes(Path(entry))
            except InputError as error:
                raise CheckpointError(str(error)) from error
            self.copied.append(SourceFile(name, entry, status))
        self.copied.sort(key=lambda file: file.name)
        return SourceFiles(tuple(self.copied), tuple(sorted(self.not_copied)), tuple(sorted(self.skipped)))

    def _entries(self) -> Iterator[tuple[Path, str]]:
        """Yield the name and the real path of everything but folders, weights, code, and links to be left out."""
        folders = [(Path(), self.top, frozenset({self.top}))]
        seen = 0
        while folders:
            within, folder, above = folders.pop()
            for entry in _listed(folder):
                seen += 1
                if seen > MAX_FILES:
                    raise CheckpointError(f"{self.folder} has too many files", needed=f"at most {MAX_FILES}")
                name = within / entry.name
                if self._is_left_out(name) and not entry.is_dir(follow_symlinks=False):
                    self.not_copied.append(readable_name(name))
                    continue
                path = self._followed(name, entry, above) if entry.is_symlink() else entry.path
                if path is not None and os.path.isdir(path):
                    folders.append((name, path, above | {path}))
                elif path is not None:
                    yield name, path

    def _is_left_out(self, name: Path) -> bool:
        if len(name.parts) == 1 and str(name) in self.rewritten:
            return False
        if CODE.search(name.name) is not None:
            return True
        return WEIGHTS.search(name.name) is not None and not any(module in name.parents for module in self.modules)

    def _followed(self, name: Path, entry: os.DirEntry[str], above: frozenset[str]) -> str | None:
        """Return where a link leads, or None for one that is left out; refuse the others."""
        path = os.path.realpath(entry.path)
        if not os.path.exists(entry.path):
            why, remedy = "a link that leads nowhere", "remove it, or leave it out with --links skip"
        elif path in above:
            why, remedy = "a link to a folder above it", "remove it, or leave it out with --links skip"
        elif self.links == "copy" or any(os.path.commonpath((path, inside)) == inside for inside in self.inside):
            return path
        else:
            why, remedy = "a link out of the source", "copy what is there with --links copy, or leave it out with skip"
        if self.links == "skip" and str(name) not in self.rewritten:
            self.skipped.append(readable_name(name))
            return None
        raise CheckpointError(f"{self.folder / name} is {why}", got=path, remedy=remedy)


def without_code(said: Any) -> Any:
    """Return a value of JSON without what names code; a token of that name, whose value is a number, stays."""
    if isinstance(said, dict):
        kept = {key: one for key, one in said.items() if key != CODE_KEY or not isinstance(one, dict)}
        return {key: without_code(one) for key, one in kept.items()}
    return [without_code(one) for one in said] if isinstance(said, list) else said


def _json(path: Path) -> Any:
    """Return what a JSON file says that may name code; None for all other files."""
    if path.suffix.lower() != ".json":
        return None
    try:
        content = read_regular(path, MAX_BYTES)
        return parse_json(content, str(path), non_finite=True) if re.search(rb"auto_map|\\u00[567]", content) else None
    except InputError:  # no JSON, and so nothing that anybody reads
        return None


def _listed(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((one for one in entries if not one.name.startswith(".")), key=lambda one: one.name)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read", got=error.strerror) from error


def _modules(folder: Path) -> list[Path]:
    """Return the folders that a sentence encoder's ``modules.json`` names."""
    try:
        listed = load_json(folder / "modules.json")
    except (FileNotFoundError, InputError):
        return []
    paths = [one.get("path") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [Path(path) for path in paths if isinstance(path, str) and Path(path).parts]


def _copy(file: SourceFile, target: Path) -> None:
    reading = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(reading, "rb") as source:
        status, before = os.fstat(reading), file.status
        same = (status.st_size, status.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        if not stat.S_ISREG(status.st_mode) or not same:
            raise CheckpointError(f"{file.path} changed while the source was copied", remedy="run again")
        with open(os.open(target, NEW_FILE, status.st_mode & 0o777), "wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    os.utime(target, ns=(before.st_mtime_ns, before.st_mtime_ns))

"""A Hugging Face checkpoint in a local folder: its config, its shards, and one tensor at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.paths import usable_path
from slidesparse.checkpoints.marker import check_quantisation
from slidesparse.errors import CheckpointError, library_errors
from slidesparse.files.json_files import read_json
from slidesparse.files.stored import Stored
from slidesparse.files.tensor_reader import TensorReader

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")

NEEDED = "a folder with config.json and weights in safetensors"

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
PICKLES = (".bin", ".pt", ".pth", ".distcp")
"""Ends of the names of weights that are no safetensors."""


class Checkpoint:
    """A Hugging Face checkpoint in a local folder.

    Attributes:
        path: The folder.
        config: config.json.
        shards: File name -> tensor name -> type and shape, in file order.
        files: Tensor name -> file name.

    Raises:
        CheckpointError: The folder, config.json, the index or a shard is missing, damaged or inconsistent; or there are
            two sets of weights; or config.json has a quantisation that the weights do not have, or that we would follow
            in part.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = usable_path(path, "checkpoint folder")
        try:
            is_folder = self.path.is_dir()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read", got=error.strerror) from error
        if not is_folder:
            raise _no_folder(self.path)
        if not os.path.lexists(self.path / "config.json"):
            raise _lacks_file(self.path, f"{self.path / 'config.json'} is missing", "fetch it")
        self.config = read_json(self.path / "config.json")
        index_path, inside = self.path / INDEX_FILE, frozenset(os.listdir(self.path))
        promised: dict[str, str] = {}
        if INDEX_FILE in inside:
            promised = read_json(index_path).get("weight_map") or {}
            if not isinstance(promised, dict) or not promised:
                raise CheckpointError(f"{index_path} has no weight_map")
            for name in promised.values():  # shards are written under these names: no other folder
                if not isinstance(name, str) or re.fullmatch(r"[^/\0]+\.safetensors", name) is None:
                    raise CheckpointError(f"shard name in {index_path}", got=repr(name), needed="NAME.safetensors")
        elif SINGLE_FILE not in inside:
            raise _lacks_weights(self.path, f"{self.path} has no {SINGLE_FILE} and no {INDEX_FILE}")
        names = sorted(set(promised.values())) or [SINGLE_FILE]
        _refuse_other_sets(self.path, names, inside)
        self.readers = {name: TensorReader(self.path / name) for name in names}
        self.shards: dict[str, dict[str, Stored]] = {name: reader.stored for name, reader in self.readers.items()}
        self.files: dict[str, str] = {}
        for name, reader in self.readers.items():
            for tensor in reader.stored:
                if tensor in self.files:
                    raise CheckpointError(f"{tensor} is in two shards", got=f"{self.files[tensor]} and {name}")
                self.files[tensor] = name
        for tensor, name in promised.items():
            if tensor not in self.readers[name].stored:
                raise CheckpointError(f"the index names {tensor} in {name}, which does not hold it")
        check_quantisation(self.config, {self.stored(name).dtype for name in self.files if self.stored(name).shape[1:]})

    def stored(self, name: str) -> Stored:
        """Return the type and shape of a tensor."""
        return self.shards[self._file(name)][name]

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor."""
        return self.readers[self._file(name)].tensor(name, device)

    def part(self, name: str, index: int, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one index of a tensor's first dimension."""
        return self.readers[self._file(name)].part(name, index, device)

    def _file(self, name: str) -> str:
        if name not in self.files:
            raise CheckpointError(f"{self.path} holds no {name}")
        return self.files[name]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.n_bytes for shard in self.shards.values() for stored in shard.values())


def generation_settings(checkpoint: Checkpoint) -> Any | None:
    """Return a checkpoint's settings of generation, None where it has none; a CheckpointError for unusable ones."""
    from transformers import GenerationConfig

    path = checkpoint.path / GENERATION_FILE
    if not path.exists():
        return None
    with library_errors(CheckpointError, f"{path} cannot be used", remedy="correct or remove it"):
        return GenerationConfig.from_dict(read_json(path))


def _refuse_other_sets(folder: Path, names: list[str], inside: Collection[str]) -> None:
    """Refuse a second set of weights: one program would read this one, another that, or both."""
    what = f"{folder} holds two sets of weights"
    for adapter in filter(inside.__contains__, ADAPTER_FILES):
        raise _unmerged(what, adapter, "one, since adapters are added to it only where PEFT is installed")
    shards = sorted(filter(SHARD.fullmatch, inside)) if names == [SINGLE_FILE] else [INDEX_FILE]
    if SINGLE_FILE in inside and shards:
        got = f"{SINGLE_FILE}, which transformers reads, and {shards[0]}, which vLLM and SGLang read"
        raise CheckpointError(what, got=got, needed="one", remedy="remove what is not meant")


def _unmerged(what: str, found: str, needed: str = NEEDED) -> CheckpointError:
    """Return the error for an adapter, by one of its files."""
    remedy = "merge it into its model first: PEFT's merge_and_unload(), then save_pretrained(); or remove it"
    return CheckpointError(what, got=f"an adapter that is not merged ({found})", needed=needed, remedy=remedy)


def _no_folder(path: Path) -> CheckpointError:
    if not path.exists():
        return CheckpointError(f"no checkpoint folder at {path}", needed="a local folder")
    if path.suffix == ".gguf":
        return _gguf(path)
    return CheckpointError(f"no checkpoint folder at {path}", got="a file", needed=NEEDED, remedy="give its folder")


def _lacks_file(folder: Path, what: str, remedy: str) -> CheckpointError:
    """Return the error for a folder without a file of every checkpoint, by its other files."""
    names = sorted(file.name for file in folder.iterdir())
    if ADAPTER_FILES[0] in names:
        return _unmerged(f"{folder} is no model", ADAPTER_FILES[0])
    if any(name.endswith(".gguf") for name in names):
        return _gguf(folder)
    return CheckpointError(what, needed=NEEDED, remedy=remedy)


def _lacks_weights(folder: Path, what: str) -> CheckpointError:
    pickled = any(file.suffix in PICKLES for file in folder.iterdir())
    remedy = "convert the weights to safetensors first: transformers' from_pretrained(), then save_pretrained()"
    if others := sorted(file.name for file in folder.glob("*.safetensors")):
        what += f", but {', '.join(others[:3])}"
        remedy = f"fetch {INDEX_FILE}, or rename the weights to {SINGLE_FILE}"
    return _lacks_file(folder, what, remedy if pickled or others else "fetch the weights")


def _gguf(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read", got="GGUF", needed=NEEDED, remedy="start from the checkpoint that it was made of"
    )

"""A Hugging Face checkpoint in a local folder: its config, its shards, and one tensor at a time."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import torch

from slidesparse.base.paths import usable_path
from slidesparse.base.whole_file import kind_of, require_no_holes
from slidesparse.errors import CheckpointError, InputError, SlideSparseWarning
from slidesparse.files.json_files import read_json
from slidesparse.files.marker import is_bitnet, quantisation_words, source_quantisation
from slidesparse.files.quantisation_keys import refuse_other_places, refuse_unknown_keys
from slidesparse.files.stored import Stored
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.wrapped_names import refuse_adapter, unwrapped, wrappers

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

TEXTS = (".json", ".jinja", ".jsonl", ".model", ".tiktoken", ".txt")
"""Ends of the names of files that libraries read whole."""


NEEDED = "a folder with config.json and weights in safetensors"

SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")

FLOATS = frozenset({"BF16", "F16", "F32", "F64"})

ADAPTER_FILE = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_FILE, "adapter_model.safetensors", "adapter_model.bin")
PICKLES = (".bin", ".pt", ".pth")
"""Ends of the names of weights that are no safetensors."""

INNER = ("*/config.json", "snapshots/*/config.json")
"""Where a model lies in the folder that people name: one deeper, or as the cache of a hub keeps it."""


class Checkpoint:
    """A Hugging Face checkpoint in a local folder.

    Attributes:
        path: The folder.
        config: config.json.
        shards: File name -> tensor name -> type and shape, in file order.
        files: Tensor name -> file name.
        wrappers: What was removed from all names, as :func:`slidesparse.files.wrapped_names.wrappers` returns it.

    Raises:
        CheckpointError: The folder, config.json, the index or a shard is missing, damaged or inconsistent; or there are
            two sets of weights, or an adapter beside them; or a quantisation that the weights do not have, or with keys
            that we do not follow.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = usable_path(path, "checkpoint folder")
        try:
            is_folder = self.path.is_dir()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read", got=error.strerror) from error
        if not is_folder:
            raise _no_folder(self.path)
        _refuse_endless_files(self.path)
        if not os.path.lexists(self.path / "config.json"):
            raise _lacks_file(self.path, f"{self.path / 'config.json'} is missing", "fetch it")
        self.config = read_json(self.path / "config.json")
        promised = self._promised()
        names = sorted(set(promised.values())) or [SINGLE_FILE]
        self._refuse_other_sets(names)
        self.readers = {name: TensorReader(self.path / name) for name in names}
        for tensor, name in promised.items():
            if tensor not in self.readers[name].stored:
                raise CheckpointError(f"the index names {tensor} in {name}, which does not hold it")
        self.wrappers = wrappers(tensor for reader in self.readers.values() for tensor in reader.stored)
        if self.wrappers:
            for reader in self.readers.values():
                reader.rename(lambda name: unwrapped(name, self.wrappers))
            found = " and ".join(self.wrappers.values())
            warnings.warn(f"{found} in names of tensors of {self.path} is left out", SlideSparseWarning, stacklevel=2)
        self.shards = {name: reader.stored for name, reader in self.readers.items()}
        self.files: dict[str, str] = {}
        for name, tensors in self.shards.items():
            for tensor in tensors:
                if tensor in self.files:
                    raise CheckpointError(f"{tensor} is in two shards", got=f"{self.files[tensor]} and {name}")
                self.files[tensor] = name
        self._check_quantisation()

    def _promised(self) -> dict[str, str]:
        """Return what the index says, tensor -> file; nothing where there is none, and the one file."""
        path = self.path / INDEX_FILE
        if not path.exists():
            if not (self.path / SINGLE_FILE).exists():
                raise _lacks_weights(self.path, f"{self.path} has no {SINGLE_FILE} and no {INDEX_FILE}")
            return {}
        promised = read_json(path).get("weight_map") or {}
        if not isinstance(promised, dict) or not promised:
            raise CheckpointError(f"{path} has no weight_map")
        for name in promised.values():  # shards are written under these names: no other folder
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(f"shard name in {path}", got=repr(name), needed="NAME.safetensors")
        return promised

    def _refuse_other_sets(self, names: list[str]) -> None:
        """Refuse weights beside those of some files, of which programs would take the others, or both."""
        inside = sorted(os.listdir(self.path))
        # Without an index servers read all files; with one, transformers reads the single file all the same.
        others = [name for name in inside if SHARD.fullmatch(name)] if names == [SINGLE_FILE] else [SINGLE_FILE]
        if others := [name for name in others if name in inside]:
            indexed = f"the {len(names)} files of {INDEX_FILE}, which vLLM and SGLang read"
            single = f"{SINGLE_FILE}, which transformers reads"
            both = f"{single}, and {', '.join(others[:3])}, which vLLM and SGLang read too"
            raise CheckpointError(
                f"{self.path} holds two sets of weights",
                got=both if names == [SINGLE_FILE] else f"{single}, and {indexed}",
                needed="one",
                remedy="remove the one that is not meant",
            )
        if (named := self.config.get("transformers_weights")) not in (None, INDEX_FILE, *names):
            what = f"transformers_weights of {self.path}/config.json"
            raise CheckpointError(what, got=f"{named!r:.80}", needed="no such key, which servers pass over")
        refuse_adapter(self.path, [name for name in ADAPTER_FILES if name in inside])

    def _check_quantisation(self) -> None:
        """Refuse what config.json says of a quantisation, where the weights have none or we would pass over a part."""
        refuse_other_places(self.config)
        value = source_quantisation(self.config)
        types = {one.dtype for tensors in self.shards.values() for one in tensors.values() if len(one.shape) > 1}
        if value and types <= FLOATS and not is_bitnet(self.config):
            raise CheckpointError(
                "quantisation of the source",
                got=f"{quantisation_words(self.config)} in config.json, and all weights in {' and '.join(sorted(types))}",
                remedy="remove quantization_config from config.json, which is of other weights",
            )
        refuse_unknown_keys(value)

    def stored(self, name: str) -> Stored:
        """Return the type and shape of a tensor."""
        return self.shards[self._file(name)][name]

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor."""
        return self.readers[self._file(name)].tensor(name, device)

    def part(self, name: str, index: int, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one part of a tensor: what it holds at an index of its first dimension."""
        return self.readers[self._file(name)].part(name, index, device)

    def _file(self, name: str) -> str:
        if name not in self.files:
            raise CheckpointError(f"{self.path} holds no {name}")
        return self.files[name]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.n_bytes for shard in self.shards.values() for stored in shard.values())


def _refuse_endless_files(folder: Path) -> None:
    """Refuse a folder with pipes, devices, or texts that promise far more than they hold.

    A library that looks for a tokenizer would wait for a pipe, and read the others until memory ends.

    Raises:
        CheckpointError: There is one, or the folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not os.path.exists(entry.path):
                    continue  # a link that leads nowhere
                status = entry.stat()
                if (kind := kind_of(status.st_mode)) in ("a pipe", "a device"):
                    raise CheckpointError(f"{entry.path} cannot be read", got=kind, needed="a file")
                if kind == "a file" and entry.name.endswith(TEXTS):
                    require_no_holes(Path(entry.path))
    except InputError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read", got=error.strerror) from error


def _no_folder(path: Path) -> CheckpointError:
    """Return the error for a path that is no folder."""
    if not path.exists():
        return CheckpointError(f"no checkpoint folder at {path}", needed="a local folder")
    if path.suffix == ".gguf":
        return _gguf(path)
    return CheckpointError(f"no checkpoint folder at {path}", got="a file", needed=NEEDED)


def _lacks_file(folder: Path, what: str, remedy: str) -> CheckpointError:
    """Return the error for a folder without a file that every checkpoint has, by what it holds in its place."""
    names = sorted(file.name for file in folder.iterdir())
    if ADAPTER_FILE in names:
        return CheckpointError(
            f"{folder} is no model",
            got=f"an adapter ({ADAPTER_FILE})",
            needed=NEEDED,
            remedy="merge it into its model first: PEFT's merge_and_unload(), then save_pretrained()",
        )
    if any(name.endswith(".gguf") for name in names):
        return _gguf(folder)
    if "config.json" not in names:
        inner = next((found.parent for place in INNER for found in sorted(folder.glob(place))), None)
        remedy = remedy if inner is None else f"name {inner}, which has one"
    return CheckpointError(what, needed=NEEDED, remedy=remedy)


def _lacks_weights(folder: Path, what: str) -> CheckpointError:
    """Return the error for a folder without safetensors."""
    pickled = any(file.suffix in PICKLES for file in folder.iterdir())
    return _lacks_file(folder, what, "convert the weights to safetensors first" if pickled else "fetch the weights")


def _gguf(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read", got="GGUF", needed=NEEDED, remedy="start from the checkpoint that it was made of"
    )

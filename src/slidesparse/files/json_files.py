"""Read and write the JSON objects of a checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slidesparse.base.typed_json import load_json
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import CheckpointError, InputError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a CheckpointError where the file is missing or holds anything else."""
    try:
        value = load_json(path, non_finite=True)  # configs of Mamba models hold Infinity
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except InputError as error:
        raise CheckpointError.of(error) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}", got=type(value).__name__, needed="a JSON object")
    return value


def write_index(path: Path, shards: Mapping[str, Iterable[str]], n_bytes: int) -> None:
    """Write the index of a checkpoint, from file name -> its tensors, and their bytes in all."""
    weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    write_json(path, {"metadata": {"total_size": n_bytes}, "weight_map": weight_map})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object as :func:`slidesparse.base.whole_file.replace_file` does, and wait until it is on disk."""
    replace_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

"""Read and write the JSON objects of a checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slidesparse.base.typed_json import load_json
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import CheckpointError, InputError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file is missing or holds anything else.
    """
    try:
        value = load_json(path, non_finite=True)  # configs of Mamba models hold Infinity
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except InputError as error:
        raise CheckpointError.of(error) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}", got=type(value).__name__, needed="a JSON object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object as :func:`slidesparse.base.whole_file.replace_file` does, and wait until it is on disk."""
    replace_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

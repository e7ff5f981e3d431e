"""Explain what was given in place of a checkpoint, and what to do: an adapter, a GGUF file, a single shard."""

from __future__ import annotations

from pathlib import Path

from slidesparse.errors import CheckpointError

NEEDED = "a folder with config.json and weights in safetensors"

ADAPTER_FILE = "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth")
"""Ends of the names of weights that are no safetensors."""

INNER = ("*/config.json", "snapshots/*/config.json")
"""Where a model lies in the folder that people name: one deeper, or as the cache of a hub keeps it."""


def no_folder(path: Path) -> CheckpointError:
    """Return the error for a path that is no folder."""
    if not path.exists():
        return CheckpointError(f"no checkpoint folder at {path}", needed="a local folder")
    if path.suffix == ".gguf":
        return _gguf(path)
    return CheckpointError(f"no checkpoint folder at {path}", got="a file", needed=NEEDED)


def lacks_file(folder: Path, what: str, remedy: str) -> CheckpointError:
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


def lacks_weights(folder: Path, what: str) -> CheckpointError:
    """Return the error for a folder without safetensors."""
    pickled = any(file.suffix in PICKLES for file in folder.iterdir())
    return lacks_file(folder, what, "convert the weights to safetensors first" if pickled else "fetch the weights")


def _gguf(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read", got="GGUF", needed=NEEDED, remedy="start from the checkpoint that it was made of"
    )

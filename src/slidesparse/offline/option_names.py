"""Names of options as a user writes them, for messages on the options of an earlier run."""

from __future__ import annotations

AS_WRITTEN = {
    "texts": "--text or --self-chats",
    "layers": "--layer",
    "bos": "--no-bos",
    "file": "--calibration",
    "more": "--calibration",
}
"""Fields of options whose names are not those of the command line."""


def as_written(field: str) -> str:
    """Return the command line's name of a field of options.

    >>> as_written("lm_head"), as_written("layers")
    ('--lm-head', '--layer')
    """
    return AS_WRITTEN.get(field, f"--{field.replace('_', '-')}")

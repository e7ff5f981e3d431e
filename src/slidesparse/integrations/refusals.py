"""Refuse options of a server that sparse layers cannot follow, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from slidesparse.errors import UnsupportedError

RANDOM = "random weights, which follow no pattern"
SAVED = "tensors as another engine held them, which sparse layers do not have"


def refuse_load_format(load_format: object, brought: Mapping[str, str], serve_dense: str) -> None:
    """Refuse a ``--load-format`` unsuited to sparse layers; ``brought``: format -> its contents in place of weights.

    ``serve_dense`` is the remedy without sparse layers.
    """
    if str(load_format) in brought:
        raise UnsupportedError(
            f"--load-format {load_format} with sparse layers",
            got=brought[str(load_format)],
            needed="the checkpoint that slidesparse prune wrote",
            remedy=f"leave the option out, or {serve_dense}",
        )


def refuse_offloading(sizes: Mapping[str, float], serve_dense: str) -> None:
    """Refuse to keep weights in host memory; ``sizes``: the server's option -> its value, 0 or less where off."""
    for option, size in sizes.items():
        if size > 0:
            raise UnsupportedError(
                f"{option} with sparse layers",
                got=size,
                needed="0, since packed weights are made on the GPU and stay there",
                remedy=f"leave the option out, or {serve_dense}",
            )

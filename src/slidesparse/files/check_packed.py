"""Check the tensors of a packed file that hold one layer, before a packed weight is made of them.

Kernels read these tensors by address: one that is too short would be read past its end, and groups in another order
would multiply other activations.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.stored import STORED_NAMES, Stored
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.support import check_ascending

KINDS = ("values", "code", "dense", "groups")


def check_packed_layer(
    stored: Mapping[str, Stored], groups: torch.Tensor | None, pattern: Pattern, weight: Stored, name: str
) -> None:
    """Refuse the stored form of a layer that is not one of a weight like ``weight`` under ``pattern``.

    Args:
        stored: Kind (``values``, ``code``, ``dense``, ``groups``) -> type and shape, of those that the file has.
        groups: The slid groups, as stored; None where the file has none.
        pattern: The pattern that the marker says.
        weight: Type and shape [out, in] of the checkpoint's weight.
        name: The layer.

    Raises:
        CheckpointError: A tensor is missing, superfluous, or of wrong type or shape, or the groups are not ascending.
    """
    out, columns = weight.shape
    total = pattern.groups(columns)
    slid = groups.numel() if groups is not None else total if "values" in stored else 0
    if groups is not None:
        _check_groups(groups, total, name)
    code = torch.uint8 if pattern.codes <= 256 else torch.int16
    needed: dict[str, Stored] = {}
    if slid:
        needed["values"] = Stored(weight.dtype, (out, slid * pattern.keep))
        needed["code"] = Stored(STORED_NAMES[code], (out, slid))
    if slid < total:
        needed["dense"] = Stored(weight.dtype, (out, (total - slid) * pattern.group))
    if 0 < slid < total:
        needed["groups"] = Stored(STORED_NAMES[torch.int32], (slid,))
    for kind in KINDS:
        if stored.get(kind) != needed.get(kind):
            raise CheckpointError(
                f"packed {kind} of {name}",
                got=_text(stored.get(kind)),
                needed=_text(needed.get(kind)),
                remedy="remove the packed file and pack again",
            )
    if slid < pattern.following(total) or (pattern == DENSE and slid):
        raise CheckpointError(
            f"packed groups of {name}",
            got=f"{slid} of {total}",
            needed=f"{pattern.following(total)}, as {pattern} has it",
            remedy="remove the packed file and pack again",
        )


def _check_groups(groups: torch.Tensor, total: int, name: str) -> None:
    try:
        check_ascending(groups.flatten().long(), total, name)
    except InputError as error:
        raise CheckpointError(f"packed {error}", remedy="remove the packed file and pack again") from error


def _text(stored: Stored | None) -> str:
    return "none" if stored is None else f"{stored.dtype} {list(stored.shape)}"

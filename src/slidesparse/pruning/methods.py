"""The pruning methods by name."""

from __future__ import annotations

from slidesparse.base.arguments import shown
from slidesparse.errors import InputError
from slidesparse.pruning.base import Pruner
from slidesparse.pruning.magnitude import Magnitude
from slidesparse.pruning.sparsegpt import SparseGPT
from slidesparse.pruning.wanda import Wanda

METHODS: dict[str, type[Pruner]] = {one.name: one for one in (Magnitude, SparseGPT, Wanda)}


def get_pruner(name: str) -> Pruner:
    """Return the method of that name.

    Raises:
        InputError: The name is unknown.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise InputError("unknown pruning method", got=shown(name), needed=f"one of {', '.join(METHODS)}")
    return METHODS[name]()

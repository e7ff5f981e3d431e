"""Pruning to a pattern: what each removal costs, and the mask that removes the least."""

from slidesparse.prune.base import METHODS, Linears, Pruner, get_pruner, register
from slidesparse.prune.magnitude import Magnitude
from slidesparse.prune.mask import prune_mask, prune_masks

__all__ = ["METHODS", "Linears", "Magnitude", "Pruner", "get_pruner", "prune_mask", "prune_masks", "register"]

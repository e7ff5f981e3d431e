"""Pruning to a pattern: the cost of every removal, and the mask that costs least."""

from slidesparse.prune.base import METHODS, Linears, Pruner, get_pruner, register_pruner
from slidesparse.prune.gram import output_error, rounding_error
from slidesparse.prune.magnitude import Magnitude
from slidesparse.prune.mask import prune_mask
from slidesparse.prune.round_outputs import RoundForOutputs
from slidesparse.prune.sparsegpt import SparseGPT
from slidesparse.prune.wanda import Wanda

__all__ = [
    "METHODS",
    "Linears",
    "Magnitude",
    "Pruner",
    "RoundForOutputs",
    "SparseGPT",
    "Wanda",
    "get_pruner",
    "output_error",
    "prune_mask",
    "register_pruner",
    "rounding_error",
]

"""Pruning to a pattern: costs of removal, and the mask of least cost."""

from slidesparse.pruning.base import Linears, Pruner
from slidesparse.pruning.gram import output_error, rounding_error
from slidesparse.pruning.magnitude import Magnitude
from slidesparse.pruning.mask import prune_mask
from slidesparse.pruning.methods import METHODS, get_pruner
from slidesparse.pruning.round_outputs import RoundForOutputs
from slidesparse.pruning.sparsegpt import SparseGPT
from slidesparse.pruning.wanda import Wanda

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
    "rounding_error",
]

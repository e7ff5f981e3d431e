"""Matrix multiplication of lifted activations by packed weights: one contract, several backends."""

from slidesparse.gemm.base import Backend, Layout, Operand, Problem
from slidesparse.gemm.select import BACKENDS, Choice, get_backend, select

__all__ = ["BACKENDS", "Backend", "Choice", "Layout", "Operand", "Problem", "get_backend", "select"]

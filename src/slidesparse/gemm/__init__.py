"""Matrix multiplication of lifted activations by packed weights: one interface, several backends."""

from slidesparse.gemm.backend import Backend, Operand, Problem
from slidesparse.gemm.select import BACKENDS, Choice, choose, get_backend
from slidesparse.lifting.layout import Layout

__all__ = ["BACKENDS", "Backend", "Choice", "Layout", "Operand", "Problem", "choose", "get_backend"]

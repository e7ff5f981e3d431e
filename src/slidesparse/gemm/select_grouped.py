"""Choose what multiplies tokens by the weights of their experts."""

from __future__ import annotations

from slidesparse.gemm.backend import Problem
from slidesparse.gemm.grouped import GroupedProduct, TorchExperts
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.grouped import HopperExperts


def grouped_product(problem: Problem) -> GroupedProduct | str:
    """Return the fastest grouped product for experts, or why none of a GPU's can run them; the definition on a CPU.

    Args:
        problem: The weight of one expert.
    """
    if problem.device.type == "cpu":
        return TorchExperts()
    reason = Hopper().why_not(problem)
    return HopperExperts() if reason is None else f"the grouped product cannot run them: {reason}"

"""The choice of the grouped GEMM for the experts of a mixture."""

from __future__ import annotations

from slidesparse.gemm.backend import Problem
from slidesparse.gemm.grouped import GroupedProduct
from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.grouped import HopperExperts


def grouped_product(problem: Problem) -> GroupedProduct | str:
    """Return the grouped product for experts, on a CPU the definition; or the reason why none runs on this GPU.

    Args:
        problem: The weight of one expert.
    """
    if problem.device.type == "cpu":
        return GroupedProduct()
    reason = (Hopper() if problem.slid else HopperSixBits()).why_not(problem)
    return HopperExperts() if reason is None else f"the grouped product cannot run them: {reason}"

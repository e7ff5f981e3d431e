"""Checks of results before they are timed: the time of a wrong result means nothing."""

from __future__ import annotations

import torch

from slidesparse.errors import SlideSparseError

TOLERANCE = 1e-2
"""Relative error, ``|y - reference| / |reference|``, of a right result: rounding to bf16 costs 2e-3, a bf16
intermediate and FP8 tensor cores' short accumulators as much again; a wrong scale, index or tile costs 0.1 and more."""

CHECKED_ROWS = 128
"""Rows checked at either end of the output; those of large problems lie past 2^31 elements."""

WRONG = "WRONG RESULT"


class WrongResult(SlideSparseError):
    """A kernel computed a wrong result, so its time means nothing."""


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``|result - reference| / |reference|`` over all elements; NaN when a result holds NaN."""
    wide, exact = result.to(torch.float64), reference.to(torch.float64)
    return float(torch.linalg.vector_norm(wide - exact) / torch.linalg.vector_norm(exact))


def require_right(error: float, tolerance: float = TOLERANCE) -> None:
    """Raise a WrongResult for a relative error above the tolerance, or NaN."""
    if not error <= tolerance:
        raise WrongResult(WRONG, got=f"relative error {error:.2g}", needed=f"at most {tolerance:g}")


def ends(tensor: torch.Tensor) -> torch.Tensor:
    """Return the first and last :data:`CHECKED_ROWS` rows."""
    if tensor.shape[0] <= 2 * CHECKED_ROWS:
        return tensor
    return torch.cat([tensor[:CHECKED_ROWS], tensor[-CHECKED_ROWS:]])

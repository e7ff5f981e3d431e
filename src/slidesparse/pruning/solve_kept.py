"""Least-squares values of kept weights for a fixed mask.

SparseGPT's sweep goes from left to right: a weight that it has passed no longer changes, whatever is removed after it.
For a fixed mask the best values solve a least-squares problem. With ``H = G + damping``, a dense row ``w`` and
its kept columns ``S``, the row ``v`` that is zero outside of ``S`` and has the least ``(v - w) H (v - w)^T`` satisfies
``(H (v - w))_S = 0``. The damping pulls towards the dense row, as that of SparseGPT does.

Every row keeps other columns and so has a system of its own. All are solved together by conjugate gradients (Hestenes
and Stiefel, 1952) with the diagonal of ``H`` as preconditioner: an iteration is one product of all rows with ``G``,
zeroed on removed columns.
"""

from __future__ import annotations

import torch

ITERATIONS = 25
"""Most products with the gram matrix after the first."""

TOLERANCE = 1e-3
"""Share of its first residual, in the norm of the preconditioner, at which a row is done."""

AT_ONCE = 2**27
"""Weights solved at a time, with nine float32 matrices of this size: 5 GB."""


def solve_kept(dense: torch.Tensor, pruned: torch.Tensor, gram: torch.Tensor, damping: float) -> torch.Tensor:
    """Return a pruned weight with least-squares values in place of its non-zeros.

    Args:
        dense: float32 [out, in], the weight before pruning.
        pruned: float32 [out, in], the first iterate. Its zeros stay.
        gram: float32 [in, in].
        damping: Added to the diagonal of ``gram``, which makes it positive definite.

    Returns:
        float32 [out, in]. Optimal rows keep their bits.
    """
    rows = max(AT_ONCE // dense.shape[1], 1)
    solved = torch.empty_like(pruned)
    for target, begin, solution in zip(dense.split(rows), pruned.split(rows), solved.split(rows), strict=True):
        solution.copy_(_solved(target, begin, gram, damping))
    return solved


def _solved(target: torch.Tensor, begin: torch.Tensor, gram: torch.Tensor, damping: float) -> torch.Tensor:
    kept = begin != 0
    inverse = 1.0 / (gram.diagonal() + damping)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return torch.addmm(rows, rows, gram, beta=damping).mul_(kept)

    solution, residual = begin.clone(), product(target - begin)
    direction = residual * inverse
    size = (residual * direction).sum(1, keepdim=True)
    goal = TOLERANCE**2 * size
    for _ in range(ITERATIONS):
        going = size > goal
        if not bool(going.any()):
            break
        ahead = product(direction)
        curvature = (direction * ahead).sum(1, keepdim=True)
        # A row that is done, or whose step is lost in float32, stays.
        step = torch.where(going & (curvature > 0), size / curvature, 0.0)
        solution.addcmul_(direction, step)
        residual.addcmul_(ahead, step, value=-1)
        scaled = residual * inverse
        last, size = size, (residual * scaled).sum(1, keepdim=True)
        direction.mul_(torch.where(going, size / last, 0.0)).add_(scaled)
    return solution


def better_rows(dense: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``first`` or ``second``, whichever has outputs nearer to the dense ones.

    Args:
        dense: [out, in], any float type.
        first: [out, in], in its stored type, so that its rounding counts.
        second: Like ``first``.
        gram: float32 [in, in].
    """
    nearer = _row_errors(dense, second, gram) < _row_errors(dense, first, gram)
    return torch.where(nearer, second, first)


def _row_errors(dense: torch.Tensor, weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return ``(v - w) G (v - w)^T`` for each row: float32 [out, 1], NaN for a row with NaN or Inf."""
    difference = weight.to(torch.float32) - dense.to(torch.float32)
    return ((difference @ gram) * difference).sum(1, keepdim=True)

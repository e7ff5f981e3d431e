"""Solve for the kept weights again once it is known which weights stay.

SparseGPT's sweep goes from left to right: a weight that it has passed no longer changes, whatever is removed after it.
For a fixed mask the best values are those of a least-squares problem. With ``H = G + damping``, a dense row ``w`` and
its kept columns ``S``, the row ``v`` that is zero outside of ``S`` and has the least ``(v - w) H (v - w)^T`` satisfies
``(H (v - w))_S = 0``. The damping pulls towards the dense row, as that of SparseGPT does.

Every row keeps other columns, so there is a system for each row. All are solved together by conjugate gradients
(Hestenes and Stiefel, 1952) with the diagonal of ``H`` as preconditioner: an iteration is one product of all rows with
``G``, of which the part on removed columns is set to zero.
"""

from __future__ import annotations

import torch

ITERATIONS = 25
"""The most products with the gram matrix after the first."""

TOLERANCE = 1e-3
"""A row is done when its residual, in the norm of the preconditioner, is this share of what it was at first."""

AT_ONCE = 2**27
"""Weights that are solved for at a time. There are nine float32 matrices of this size, so 5 GB."""


def solve_kept(dense: torch.Tensor, pruned: torch.Tensor, gram: torch.Tensor, damping: float) -> torch.Tensor:
    """Return a pruned weight with the best values in place of its non-zeros, as far as the iterations go.

    Args:
        dense: float32 [out, in], the weight before pruning.
        pruned: float32 [out, in], where the solution begins. Its zeros stay.
        gram: float32 [in, in].
        damping: What is added to the diagonal of ``gram``; with it the matrix is positive definite.

    Returns:
        float32 [out, in]. Rows that are the best already keep their bits.
    """
    rows = max(AT_ONCE // dense.shape[1], 1)
    solved = torch.empty_like(pruned)
    for wanted, begin, found in zip(dense.split(rows), pruned.split(rows), solved.split(rows), strict=True):
        found.copy_(_solved(wanted, begin, gram, damping))
    return solved


def _solved(wanted: torch.Tensor, begin: torch.Tensor, gram: torch.Tensor, damping: float) -> torch.Tensor:
    kept = begin != 0
    inverse = 1.0 / (gram.diagonal() + damping)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return torch.addmm(rows, rows, gram, beta=damping).mul_(kept)

    found, residual = begin.clone(), product(wanted - begin)
    direction = residual * inverse
    size = (residual * direction).sum(1, keepdim=True)
    goal = TOLERANCE**2 * size
    for _ in range(ITERATIONS):
        going = size > goal
        if not bool(going.any()):
            break
        ahead = product(direction)
        curvature = (direction * ahead).sum(1, keepdim=True)
        # A row that is done, or whose next step float32 cannot tell, stays where it is.
        step = torch.where(going & (curvature > 0), size / curvature, 0.0)
        found.addcmul_(direction, step)
        residual.addcmul_(ahead, step, value=-1)
        scaled = residual * inverse
        last, size = size, (residual * scaled).sum(1, keepdim=True)
        direction.mul_(torch.where(going, size / last, 0.0)).add_(scaled)
    return found


def better_rows(dense: torch.Tensor, first: torch.Tensor, second: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return each row of ``second`` whose outputs are nearer to the dense ones than those of ``first``, or ``first``'s.

    Args:
        dense: [out, in], any float type.
        first: [out, in], in the type in which it is stored, so that its rounding counts.
        second: The same.
        gram: float32 [in, in].
    """
    nearer = _row_errors(dense, second, gram) < _row_errors(dense, first, gram)
    return torch.where(nearer, second, first)


def _row_errors(dense: torch.Tensor, weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return ``(v - w) G (v - w)^T`` for each row: float32 [out, 1]. NaN for a row that holds no number."""
    difference = weight.to(torch.float32) - dense.to(torch.float32)
    return ((difference @ gram) * difference).sum(1, keepdim=True)

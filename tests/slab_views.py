"""Activations in slabs, as their kernels see them."""

from __future__ import annotations

import math

import torch

from slidesparse.lifting.layout import Slabs, check_slabs


def slab_view(x: torch.Tensor, slabs: Slabs) -> torch.Tensor:
    """Return the slabs of activations [M, K'] that were made for this layout: a view of :meth:`Slabs.shape`.

    Raises:
        InputError: See :func:`check_slabs`.
    """
    tokens, k_packed = x.shape
    shape = slabs.shape(tokens, k_packed, x.element_size())
    check_slabs(x, math.prod(shape) * x.element_size())
    return x.as_strided(shape, (shape[1] * shape[2], shape[2], 1))

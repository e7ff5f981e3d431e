"""Linears in a row on the Hopper kernel: launch after launch, and one piece of memory for all that passes between them.

What one link writes only the next one reads, so it need be no tensor. Beside the last product and the last residual a
chain allocates one workspace, however long it is::

    lifted values and scales | products but the last | residuals but the last

Every link uses the first two parts again. Kernels of a stream run in turn: quantise + lift has read the product of the
link before when the GEMM behind it writes over that, and the GEMM has read the lifted values when the next link lifts.
A kernel may start early (programmatic dependent launch), but before it writes it waits for all in front of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from weakref import ref

import torch

from slidesparse.base.torch_private import empty_here
from slidesparse.gemm.chain import Placed
from slidesparse.gemm.hopper.linear import HopperLinear, Weight
from slidesparse.kernels.triton_launcher import ALIGNMENT
from slidesparse.layout import SLAB_BYTES

if TYPE_CHECKING:
    from slidesparse.kernels.lift import Read  # needs Triton

Weights: TypeAlias = list[tuple[Weight, int | None, int | None]]
"""Of every link: its weight, and where the gain of its norm and its index of pairs stand."""

Places: TypeAlias = list[tuple[int, int, torch.dtype]]
"""Address, bytes and type of tensors."""


class Stage(NamedTuple):
    """One of them, as it is launched.

    Attributes:
        linear: What it launches.
        placed: Where its tensors stand.
        ends: Its product is the chain's.
        total_start: Where in the workspace its new residual stands; None where it gives none, or the chain's.
    """

    linear: HopperLinear
    placed: Placed
    ends: bool
    total_start: int | None


class HopperChain:
    """One number of tokens through several weights; see :class:`slidesparse.gemm.backend.ChainCall`.

    Args:
        links: Two or more linears, each of which takes what the one before it gives, and the places of their tensors.
    """

    __slots__ = ("_adding", "_known", "_lift", "_out", "_own", "_product_start", "_ready", "_stages", "_workspace")

    def __init__(self, links: Sequence[tuple[HopperLinear, Placed]]) -> None:
        linears, adding = [linear for linear, _ in links], [i for i, (_, placed) in enumerate(links) if placed.adds]
        self._lift, self._out = linears[0].lift, linears[-1].out
        self._adding = [linears[i].lift for i in adding]
        tokens, width = self._lift.tokens, self._lift.source.itemsize
        self._product_start = _rounded(max(linear.workspace for linear in linears))
        end = self._product_start + _rounded(width * tokens * max(linear.out for linear in linears[:-1]))
        total_starts = {}
        for i in adding[:-1]:
            total_starts[i], end = end, end + _rounded(width * tokens * linears[i].lift.columns.columns)
        self._workspace, last = end, len(links) - 1
        self._stages = [Stage(*link, i == last, total_starts.get(i)) for i, link in enumerate(links)]
        self._own = itemgetter(*(place for _, placed in links for place in placed.read))
        self._known = _known(tuple((linear.reads, placed) for linear, placed in links))
        self._ready = False

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """See :class:`slidesparse.gemm.backend.ChainCall`."""
        lift, own, total = self._lift, self._own(tensors), residual
        if not lift.takes(x) or not (self._ready or self._can_launch()):
            return None
        weights = self._known.find(own) or self._find(tensors, own)
        if weights is None:
            return None
        residual_at: int | None = None
        residual_stride, last_total_at = 0, None
        if self._adding:
            if residual is None or not self._adding[0].takes(residual):
                return None
            residual_at, residual_stride = residual.data_ptr(), residual.stride()[0]
        x_at, x_stride = x.data_ptr(), x.stride()[0]
        if not lift.can_launch(x_at, residual_at, None, None, x_stride, residual_stride):
            return None
        if self._adding:
            total = empty_here(*self._adding[0].shape, lift.source)
            last_total_at = total.data_ptr()
        workspace, y = empty_here(1, self._workspace, torch.uint8), empty_here(lift.tokens, self._out, lift.source)
        start = workspace.data_ptr()
        for (linear, placed, ends, total_start), (weight, gain_at, pairs_at) in zip(self._stages, weights, strict=True):
            read: Read = (x_at, None, gain_at, pairs_at, x_stride, 0)
            total_at = None
            if placed.adds:
                read = (x_at, residual_at, gain_at, pairs_at, x_stride, residual_stride)
                total_at = last_total_at if total_start is None else start + total_start
                residual_at, residual_stride = total_at, linear.lift.columns.columns
            x_at, x_stride = y.data_ptr() if ends else start + self._product_start, linear.out
            linear.launch(read, total_at, start, weight, x_at, placed.eps)
        return y, total

    def _find(self, tensors: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> Weights | None:
        """Check the weights, and remember them."""
        found = []
        for linear, placed, _, _ in self._stages:
            form, scale_w, bias, gain = placed.of(tensors)
            weight, pairs = linear.find(form, scale_w, bias), form[1]
            if weight is None or linear.lift.refusal_of_weights(pairs, gain) is not None:
                return None
            gain_at, pairs_at = 0 if gain is None else gain.data_ptr(), pairs.data_ptr()  # 0: an empty one is nowhere
            if (gain_at | pairs_at) % ALIGNMENT:
                return None
            found.append((weight, gain_at or None, pairs_at or None))
        self._known.add(own, found)
        return found

    def _can_launch(self) -> bool:
        """Every kernel is compiled, and takes what the link before it gives: asked until it is so."""
        linears = [stage.linear for stage in self._stages]
        fit = all(after.lift.shape[1] == before.out for before, after in pairwise(linears))
        fit = fit and all(after.shape == before.shape for before, after in pairwise(self._adding))
        strides = (0, *(linear.out for linear in linears[:-1]))
        self._ready = fit and all(
            linear.lift.can_launch(0, None, None, None, stride, linear.lift.columns.columns)
            for linear, stride in zip(linears, strides, strict=True)
        )
        return self._ready


class Known:
    """Weights of chains of one kind that were checked: a check of all of them takes as long as several launches.

    Tensors are known as long as they are the same objects, with the same bytes of the same type at the same addresses.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], tuple[Places, Weights, list[ref[torch.Tensor]]]] = {}

    def find(self, tensors: Sequence[torch.Tensor]) -> Weights | None:
        """What :meth:`add` was told of these."""
        found = self._found.get(tuple(map(id, tensors)))
        return found[1] if found is not None and found[0] == _places(tensors) else None

    def add(self, tensors: Sequence[torch.Tensor], weights: Weights) -> None:
        """Remember them until one of them is gone, since another object may get its number then."""
        key = tuple(map(id, tensors))
        watched = [ref(tensor, lambda _: self._found.pop(key, None)) for tensor in tensors]
        self._found[key] = _places(tensors), weights, watched


@lru_cache(maxsize=4096)
def _known(kind: object) -> Known:
    """One for all numbers of tokens."""
    return Known()


def _places(tensors: Sequence[torch.Tensor]) -> Places:
    return [(tensor.data_ptr(), tensor.nbytes, tensor.dtype) for tensor in tensors]


def _rounded(n_bytes: int) -> int:
    """Up, so that what stands behind it begins at a multiple of 16, and of more."""
    return -(-n_bytes // SLAB_BYTES) * SLAB_BYTES

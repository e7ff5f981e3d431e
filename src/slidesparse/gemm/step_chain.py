"""Chains of linears on weights in steps: launch after launch, with one workspace between them.

Only the next linear reads the product of a linear, so it need not be a tensor. Besides the last product and the last
residual, a chain allocates one workspace, whatever its length::

    lifted values and scales | products but the last | residuals but the last

All linears share the first two parts. Kernels of a stream run in turn: the lift has read the previous product when the
next GEMM overwrites it, and the GEMM has read the lifted values when the next linear lifts. A kernel may start early
(programmatic dependent launch), but waits for all earlier kernels before it writes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple
from weakref import ref

import torch

from slidesparse.base.log import log_once
from slidesparse.base.torch_private import empty_here
from slidesparse.base.triton_launcher import ALIGNMENT
from slidesparse.gemm.backend import OneByOne, Products
from slidesparse.gemm.launch import WeightAddresses
from slidesparse.gemm.spec import Slots
from slidesparse.gemm.step_linear import StepLinear
from slidesparse.lifting.addresses import LiftInputs
from slidesparse.lifting.layout import SLAB_BYTES


class ChainedLinear(NamedTuple):
    """One linear of a chain, with its places in the workspace.

    Attributes:
        linear: Its runner.
        slots: The slots of its tensors.
        ends: Whether its product is the chain's result.
        residual_start: Offset of its new residual in the workspace; None without one, and where the chain
            returns it.
    """

    linear: StepLinear
    slots: Slots
    ends: bool
    residual_start: int | None


class CheckedWeight(NamedTuple):
    """The checked addresses of a chain's weight.

    Attributes:
        weight: Addresses for the GEMM.
        norm_weight: Address of the weight of its norm; None without one.
    """

    weight: WeightAddresses
    norm_weight: int | None


class StepChain:
    """Runs several linears for one number of tokens; see :data:`slidesparse.gemm.backend.ChainRunner`.

    Args:
        linears: Two or more linears, each on the product of the one before it, with the slots of their tensors.
        backend: Name of their backend.
    """

    __slots__ = (
        *("_adding", "_backend", "_known", "_lift", "_linears", "_one_by_one", "_out", "_own", "_product_start"),
        *("_ready", "_workspace_bytes"),
    )

    def __init__(self, linears: Sequence[tuple[StepLinear, Slots]], backend: str) -> None:
        runners, adding = [runner for runner, _ in linears], [i for i, (_, slots) in enumerate(linears) if slots.adds]
        self._backend, self._one_by_one = backend, OneByOne(linears)
        self._lift, self._out = runners[0].lift, runners[-1].out
        self._adding = [runners[i].lift for i in adding]
        tokens, item_bytes = self._lift.tokens, self._lift.source.itemsize
        self._product_start = _rounded(max(runner.workspace_bytes for runner in runners))
        end = self._product_start + _rounded(item_bytes * tokens * max(runner.out for runner in runners[:-1]))
        residual_starts = {}
        for i in adding[:-1]:
            residual_starts[i], end = end, end + _rounded(item_bytes * tokens * runners[i].lift.order.in_features)
        self._workspace_bytes, last = end, len(linears) - 1
        self._linears = [ChainedLinear(*pair, i == last, residual_starts.get(i)) for i, pair in enumerate(linears)]
        self._own = itemgetter(*(slot for _, slots in linears for slot in slots.read))
        self._known = _known(tuple((runner.kind, slots) for runner, slots in linears))
        self._ready = False

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> Products:
        """See :data:`slidesparse.gemm.backend.ChainRunner`."""
        weights = self._weights(tensors) if self._ready or self._can_launch() else None
        if weights is None or not self._takes(x, residual):
            self._log_one_by_one(weights)
            return self._one_by_one(x, residual, tensors)
        return self._launch(x, residual, weights)

    def _launch(self, x: torch.Tensor, residual: torch.Tensor | None, weights: Sequence[CheckedWeight]) -> Products:
        lift, residual_out, last_residual_at = self._lift, residual, None
        residual_at, residual_stride = (None, 0) if residual is None else (residual.data_ptr(), residual.stride()[0])
        if self._adding:
            residual_out = empty_here(*self._adding[0].shape, lift.source)
            last_residual_at = residual_out.data_ptr()
        y = empty_here(lift.tokens, self._out, lift.source)
        workspace = empty_here(1, self._workspace_bytes, torch.uint8)
        start, x_at, x_stride = workspace.data_ptr(), x.data_ptr(), x.stride()[0]
        for (linear, slots, ends, residual_start), (weight, norm_weight) in zip(self._linears, weights, strict=True):
            residual_out_at = None
            if slots.adds:
                inputs = LiftInputs(x_at, residual_at, norm_weight, x_stride, residual_stride)
                residual_out_at = last_residual_at if residual_start is None else start + residual_start
                residual_at, residual_stride = residual_out_at, linear.lift.order.in_features
            else:
                inputs = LiftInputs(x_at, None, norm_weight, x_stride, 0)
            x_at, x_stride = y.data_ptr() if ends else start + self._product_start, linear.out
            linear.launch(inputs, residual_out_at, start, weight, x_at, slots.eps)
        return y, residual_out

    def _takes(self, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
        lift, stride, at = self._lift, 0, None
        if not lift.is_here() or not lift.is_rows(x):
            return False
        if self._adding:
            if residual is None or not self._adding[0].is_rows(residual):
                return False
            at, stride = residual.data_ptr(), residual.stride()[0]
        return lift.can_launch(LiftInputs(x.data_ptr(), at, None, x.stride()[0], stride))

    def _weights(self, tensors: Sequence[torch.Tensor]) -> Sequence[CheckedWeight] | None:
        """Return the checked weights; None where a kernel cannot read one of them."""
        own = self._own(tensors)
        return self._known.find(own) or self._check(tensors, own)

    def _check(self, tensors: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> Sequence[CheckedWeight] | None:
        checked = []
        for linear, slots, _, _ in self._linears:
            picked = slots.pick(tensors)
            weight, norm_weight = linear.weight_addresses(picked), picked.norm_weight
            if weight is None or linear.lift.refusal_of_norm_weight(norm_weight) is not None:
                return None
            norm_at = None if norm_weight is None else norm_weight.data_ptr()
            if (norm_at or 0) % ALIGNMENT:
                return None
            checked.append(CheckedWeight(weight, norm_at))
        self._known.add(own, checked)
        return checked

    def _can_launch(self) -> bool:
        """Return whether every kernel is compiled and can read the product before it; called until it is True."""
        # A residual between linears has rows as long as the product that is added to it.
        strides = (0, *(chained.linear.out for chained in self._linears[:-1]))
        self._ready = self._fits() and all(
            chained.linear.lift.can_launch(LiftInputs(0, None, None, stride, 0))
            for chained, stride in zip(self._linears, strides, strict=True)
        )
        return self._ready

    def _fits(self) -> bool:
        linears = [chained.linear for chained in self._linears]
        fit = all(after.lift.shape[1] == before.out for before, after in pairwise(linears))
        return fit and all(after.shape == before.shape for before, after in pairwise(self._adding))

    def _log_one_by_one(self, weights: Sequence[CheckedWeight] | None) -> None:
        if not self._fits():
            reason = "a linear does not take as many columns as the one before it gives"
        elif not self._ready and all(chained.linear.lift.launcher.ready for chained in self._linears):
            reason = f"a product between two linears has rows that are no multiple of {ALIGNMENT} numbers"
        elif not self._ready:
            return  # this call compiles its kernels
        elif weights is None:
            reason = "a weight, scale, bias or norm weight is not as its kernel reads it"
        else:
            reason = "activations or residual are not aligned rows on the current device"
        log_once(f"slidesparse: {self!r} run one by one: {reason}", logging.WARNING)

    def __repr__(self) -> str:
        sizes = f"{self._lift.order.in_features} -> {self._out}"
        return f"a chain of {len(self._linears)} linears on {self._backend} ({sizes})"


class KnownWeights:
    """A cache of checked weights for chains of one kind: a check takes as long as several launches.

    Its keys are objects with their addresses, types, shapes and strides. Contents are not compared: kernels read them
    anew on every launch.
    """

    def __init__(self) -> None:
        self._checked: dict[tuple[int, ...], tuple[list[object], Sequence[CheckedWeight], list[ref[torch.Tensor]]]] = {}

    def find(self, tensors: Sequence[torch.Tensor]) -> Sequence[CheckedWeight] | None:
        """Return the weights that :meth:`add` stored for these tensors, or None."""
        entry = self._checked.get(tuple(map(id, tensors)))
        return entry[1] if entry is not None and entry[0] == _places(tensors) else None

    def add(self, tensors: Sequence[torch.Tensor], weights: Sequence[CheckedWeight]) -> None:
        """Store checked weights until one of the tensors is gone, since another object may then get its id."""
        key = tuple(map(id, tensors))
        watched = [ref(tensor, lambda _: self._checked.pop(key, None)) for tensor in tensors]
        self._checked[key] = _places(tensors), weights, watched


@lru_cache(maxsize=4096)
def _known(kind: object) -> KnownWeights:
    """Return the cache of a kind of chain, the same for all numbers of tokens."""
    return KnownWeights()


def _places(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]


def _rounded(n_bytes: int) -> int:
    """Round up to 128 bytes, a slab's row, which aligns the next part of the workspace."""
    return -(-n_bytes // SLAB_BYTES) * SLAB_BYTES

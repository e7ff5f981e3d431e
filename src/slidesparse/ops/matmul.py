"""A product with a packed weight, without a layer."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from slidesparse import ops
from slidesparse.base.arguments import require_kind
from slidesparse.errors import InputError
from slidesparse.gemm.backend import Problem
from slidesparse.gemm.select import choose, get_backend
from slidesparse.ops.inference_only import no_backward
from slidesparse.weights.packed import PackedWeight, check_scale
from slidesparse.weights.quant import FLOATS, QUANTISED
from slidesparse.weights.support import checked_bias, require_dense


class _Prepared(NamedTuple):
    """A weight in the layout of a backend."""

    backend: str
    column_map: torch.Tensor
    order: list[int]
    operand: list[torch.Tensor]


_PREPARED: WeakKeyDictionary[PackedWeight, dict[str, _Prepared]] = WeakKeyDictionary()
"""Packed weight -> ``backend`` as requested -> the weight in its layout."""


def matmul(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Product of activations and a packed weight, ``y = x W^T + bias``: two kernels, without a layer.

    For an INT8 or FP8 weight the first kernel quantises each token; the second sums in int32 or float32, applies both
    scales and the bias in float32, and rounds once (:mod:`slidesparse.gemm.backend`).

    The first call brings a weight into the backend's layout, which stays in memory as long as ``packed`` does: change
    no tensor of ``packed`` after it. In a model, and under ``torch.compile``, use
    :class:`~slidesparse.SlideLinear`: it keeps one copy of the weight and takes less host time a call.

    Args:
        x: [..., in], bfloat16, float16 or float32; the weight's type where that is not in 8 bits.
        packed: The weight [out, in], from :func:`slidesparse.pack`; an INT8 or FP8 one with its scale.
        bias: [out], float, or None.
        out_dtype: bfloat16, float16 or float32; None: the type of ``x``.
        backend: The name of a backend, or ``auto``: the fastest measured sparse kernel for such a weight, else the
            first that runs on this device, else the reference.

    Returns:
        [..., out] in ``out_dtype``.

    Raises:
        InputError: Shapes, types or devices that do not fit each other.
        UnsupportedError: The backend cannot run here, or writes no such type; in a backward pass, always.

    >>> import slidesparse as ss
    >>> weight = torch.tensor([[5.0, 0, 7, 1, 0, 2, 0, 3]])
    >>> packed = ss.pack(weight, "6:8")
    >>> ss.matmul(torch.ones(4, 8), packed, torch.tensor([0.5])).tolist()
    [[18.5], [18.5], [18.5], [18.5]]
    """
    require_kind(packed, PackedWeight, "weight of matmul", "a PackedWeight, which slidesparse.pack makes")
    require_kind(backend, str, "backend of matmul", "a text")
    require_kind(out_dtype, (torch.dtype, type(None)), "out_dtype of matmul", "a type of torch")
    out_dtype = _checked(x, packed, out_dtype)
    bias = None if bias is None else checked_bias(bias, packed.shape[0], "bias of matmul")
    name, column_map, order, operand = _prepared(packed, backend)

    def multiply(tokens: torch.Tensor) -> torch.Tensor:
        scale_x = None
        if packed.dtype in QUANTISED:
            lifted, scale_x = ops.quantize_lift(tokens, column_map, packed.dtype, name, order)
        else:
            lifted = ops.lift(tokens, column_map, name, order)
        y: torch.Tensor = ops.gemm(lifted, scale_x, operand, packed.scale, bias, packed.shape[0], out_dtype, name)
        return y

    tokens = x.reshape(-1, packed.shape[1])
    y = no_backward(multiply, tokens) if torch.is_grad_enabled() else multiply(tokens)
    return y.view(*x.shape[:-1], packed.shape[0])


def _checked(x: torch.Tensor, packed: PackedWeight, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the type of the product, after checks of activations and types."""
    require_dense(x, "activations of matmul")
    types = FLOATS if packed.dtype in QUANTISED else (packed.dtype,)
    if x.shape[-1:] != packed.shape[1:] or x.dtype not in types or x.device != packed.device:
        raise InputError(
            "activations of matmul",
            got=f"{list(x.shape)} {x.dtype} on {x.device}",
            needed=f"[..., {packed.shape[1]}] {' or '.join(map(str, types))} on {packed.device}",
        )
    if out_dtype not in (None, *FLOATS):
        raise InputError("out_dtype of matmul", got=out_dtype, needed=" or ".join(map(str, FLOATS)))
    return x.dtype if out_dtype is None else out_dtype


def _prepared(packed: PackedWeight, backend: str) -> _Prepared:
    known = _PREPARED.setdefault(packed, {})
    if backend not in known:
        check_scale(packed)
        name = choose(Problem.of(packed), backend, "none").backends[0]
        chosen = get_backend(name)
        order = chosen.layout.order(packed)
        numbers = [] if order is None else order.numbers
        known[backend] = _Prepared(name, chosen.layout.column_map(packed), numbers, list(chosen.prepare(packed)))
    return known[backend]

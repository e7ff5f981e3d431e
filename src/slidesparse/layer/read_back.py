"""Read a weight back from a layer that can only multiply by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from slidesparse.errors import SlideSparseError, UnsupportedError
from slidesparse.weights.quant import QUANTISED

AT_ONCE = 1024
"""Columns of a weight that one product returns."""


@torch.no_grad()
def read_back(
    multiply: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a weight [out, in] on the CPU, zeros in place, bit for bit except for the sign of zeros.

    Multiplying by the rows of an identity matrix gives the columns of the weight: every sum has one non-zero term. A 1
    is quantised to ``127 * (1 / 127)``, or ``448 * (1 / 448)`` in FP8, so the products are off by a few float32
    roundings, and the nearest value of the type is the weight. On the meta device nothing is multiplied.

    ``multiply`` takes activations [M, in] to products [M, out], without scales of channels and without bias.

    Raises:
        UnsupportedError: The layer cannot multiply where it is now.
    """
    in_features = shape[1]
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    weight = torch.empty(shape, dtype=dtype, device="cpu")
    source = torch.float32 if dtype in QUANTISED else dtype
    try:
        # Not under autocast, which would round the products.
        whole = _whole_float32() if source == torch.float32 else nullcontext()
        with whole, torch.autocast(device.type, enabled=False):
            for start in range(0, in_features, AT_ONCE):
                end = min(start + AT_ONCE, in_features)
                rows = torch.zeros(end - start, in_features, dtype=source, device=device)
                rows.diagonal(start).fill_(1)
                products = multiply(rows)
                exact = products.round() if dtype == torch.int8 else products
                weight[:, start:end] = exact.to(dtype).T.cpu()
    except SlideSparseError as error:
        raise UnsupportedError(
            "cannot read a SlideLinear's weight back", got=error, remedy="copy the checkpoint folder instead"
        ) from error
    return weight


@contextmanager
def _whole_float32() -> Iterator[None]:
    """Keep products of float32 in float32, where a user allowed TF32 by either of torch's two interfaces."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # allowed by the newer interface, which the older one refuses to read
        backends: Any = torch.backends
        with _ieee(backends.cuda.matmul), _ieee(backends.mkldnn.matmul):
            yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _ieee(matmul: Any) -> Iterator[None]:
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before

"""E2M1, the 4-bit float: a sign, two bits of exponent and one of mantissa; its codes, and two of them to a byte.

Source: OCP Microscaling Formats (MX) 1.0, section 5.3.3. Code ``c`` of 0 to 7 is the ``c``-th of the magnitudes 0, 0.5,
1, 1.5, 2, 3, 4, 6; bit 3 is the sign. There is no Inf and no NaN. Code 8 is -0: it is read, and never written.
"""

from __future__ import annotations

import torch

from slidesparse.errors import InputError
from slidesparse.weights.support import is_finite, require_dense

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7."""

MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between code ``i`` and code ``i + 1``."""

SIGN = 8
"""The sign bit of a code; alone it is -0."""


def encode(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return the codes of the values nearest to ``x / scale``; ties go to the even code, and what is too large to 6.

    Nothing is divided: ``|x|`` is compared with ``midpoint * scale``, which float64 holds exactly for scales of up to
    50 significant bits. So each code is rounded once. Whatever rounds to zero becomes +0.

    Args:
        x: [...], any float type.
        scale: float64, of a shape that broadcasts to that of ``x``, at least 0; 1 when None. A scale of 0 gives 0.

    Returns:
        uint8 like ``x``, each 0 to 15.

    Raises:
        InputError: ``x`` is no float tensor, or holds NaN or Inf.

    >>> encode(torch.tensor([0.25, 0.75, -1.0, -0.1, 100.0])).tolist()
    [0, 2, 10, 0, 7]
    """
    require_dense(x, "values for FP4")
    if not x.is_floating_point() or not is_finite(x):
        raise InputError("values for FP4", got=f"{x.dtype}, or NaN or Inf among them", needed="finite floats")
    unit = torch.ones((), dtype=torch.float64, device=x.device) if scale is None else scale.to(torch.float64)
    size = x.to(torch.float64).abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for lower, midpoint in enumerate(MIDPOINTS):
        limit = midpoint * unit
        code += size > limit if lower % 2 == 0 else size >= limit
    code = torch.where(unit > 0, code, 0)
    return torch.where((x < 0) & (code != 0), code | SIGN, code)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of codes: uint8 [...], each 0 to 15 -> float64 like them; code 8 gives -0.0."""
    table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=torch.float64, device=codes.device)
    return table[codes.long()]


def pack_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Return pairs of codes as bytes: uint8 [..., K], K even -> uint8 [..., K / 2].

    The earlier column is in the low four bits, as in ``torch.float4_e2m1fn_x2`` and in the ``weight_packed`` of NVFP4
    checkpoints (compressed-tensors, ``pack_fp4_to_uint8``).

    Raises:
        InputError: K is odd.

    >>> [hex(pair) for pair in pack_bytes(torch.tensor([1, 15, 0, 7], dtype=torch.uint8))]
    ['0xf1', '0x70']
    """
    check_even(codes)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_bytes(pairs: torch.Tensor) -> torch.Tensor:
    """Return the codes of pairs: uint8 [..., n] -> uint8 [..., 2n]; the inverse of :func:`pack_bytes`."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)


def without_negative_zeros(pairs: torch.Tensor) -> torch.Tensor:
    """Return pairs with every -0 as +0, so that a pair of zeros is the byte 0: uint8 [...]."""
    codes = unpack_bytes(pairs)
    return pack_bytes(torch.where(codes == SIGN, 0, codes))


def check_even(columns: torch.Tensor, name: str = "values for FP4") -> None:
    """Refuse a tensor whose columns do not come in pairs."""
    if columns.shape[-1] % 2:
        raise InputError(
            f"{name} do not come in pairs", got=f"{columns.shape[-1]} columns", needed="an even number of columns"
        )

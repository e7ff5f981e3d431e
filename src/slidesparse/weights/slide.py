"""Sliding of weights and lifting of activations: the readable definition, in torch, for any device.

A group of ``2N`` columns keeps exactly ``2N - 2`` entries: every non-zero, and the first zeros. Only two positions
``a < b`` are left out, the last two zeros of the group, and everything else follows from them::

    6:8 group     w = [ 5  0  7  1  0  2  0  3 ]     zeros at 1, 4, 6; left out: a = 4, b = 6
    kept          values = [ 5  0  7  1  2  3 ]      entry i is at position i + (i >= a) + (i + 1 >= b)
    windows       0: 5 0 | 1: 7 1 | 2: 2 3           window j takes entries 2j and 2j+1, never more than two
    slid (2:4)    [5 0 . .] [7 1 . .] [. 2 . 3]      window j shows positions 2j .. 2j+3

Entry ``i`` lies at position ``p_i`` with ``i <= p_i <= i + 2``, since only two positions are left out; that is always
inside window ``floor(i/2)``, at 2:4 index ``p_i - 2 floor(i/2)``. No search and no greedy loop: the packed values are
the kept values in order, and the index is a comparison.
"""

from __future__ import annotations

import torch

from slidesparse.errors import InputError
from slidesparse.weights.pattern import DENSE, STRIDE, WINDOW, WINDOW_KEEP, Pattern
from slidesparse.weights.support import INT_VIEW, as_bits, check_k_offset, grouped, is_nonzero, require_dense

# -- the two positions left out of a group, and the code that names them -------------------------------------------


def left_out(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last two zeros of every group: [..., 2N] -> (a, b), each int8 [...], a < b.

    Each group must have at least two zeros (``support.check_pattern``).
    """
    zero = ~is_nonzero(groups)
    a = b = torch.full(groups.shape[:-1], -1, dtype=torch.int8, device=groups.device)
    for position in range(groups.shape[-1]):  # walk all groups at once, remembering the two zeros seen last
        here = zero[..., position]
        a, b = torch.where(here, b, a), torch.where(here, position, b)
    return a, b


def encode_group(a: torch.Tensor, b: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Return the group code, the rank ``b(b-1)/2 + a`` of the pair: uint8 while ``C(2N, 2) <= 256``, else int16."""
    dtype = torch.uint8 if pattern.codes <= 256 else torch.int16
    wide_b = b.to(torch.int16)
    return (wide_b * (wide_b - 1) // 2 + a).to(dtype)


def decode_group(code: torch.Tensor, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two positions of a group code: the inverse of :func:`encode_group`.

    Raises:
        InputError: A code is no pair of this pattern's positions.
    """
    for extreme in (int(code.min()), int(code.max())) if code.numel() else ():
        if not 0 <= extreme < pattern.codes:
            raise InputError(f"group code of {pattern}", got=extreme, needed=f"0 to {pattern.codes - 1}")
    pairs = [(a, b) for b in range(pattern.group) for a in range(b)]
    table = torch.tensor(pairs, dtype=torch.int8, device=code.device)
    a, b = table[code.long()].unbind(-1)
    return a, b


# -- compress: a group's kept values and its code ------------------------------------------------------------------


def compress(groups: torch.Tensor, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kept values and the code of every group; -0.0 becomes +0.0.

    Args:
        groups: [out, n, 2N], any supported type, at most ``2N - 2`` non-zeros in each group.
        pattern: The pattern of the groups.

    Returns:
        values [out, n * keep] in the weight's type, and code [out, n] (see :func:`encode_group`).
    """
    a, b = left_out(groups)
    bits = torch.where(is_nonzero(groups), as_bits(groups), 0)
    entry = torch.arange(pattern.keep, dtype=torch.int8, device=groups.device)
    before_a, before_b = entry < a.unsqueeze(-1), entry + 1 < b.unsqueeze(-1)
    values = torch.where(before_a, bits[..., :-2], torch.where(before_b, bits[..., 1:-1], bits[..., 2:]))
    return values.flatten(-2).view(groups.dtype), encode_group(a, b, pattern)


def decompress(values: torch.Tensor, code: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Return the groups again: values [out, n * keep], code [out, n] -> groups [out, n, 2N]."""
    a, b = (position.unsqueeze(-1) for position in decode_group(code, pattern))
    kept = as_bits(values).unflatten(-1, (-1, pattern.keep))
    padded = torch.nn.functional.pad(kept, (2, 2))
    at = torch.arange(pattern.group, dtype=torch.int8, device=values.device)
    shifted = torch.where(at < a, padded[..., 2:], torch.where(at < b, padded[..., 1:-1], padded[..., :-2]))
    return torch.where((at == a) | (at == b), 0, shifted).view(values.dtype)


# -- the 2:4 form --------------------------------------------------------------------------------------------------


def window_indices(code: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Return the 2:4 index of every kept value in its window: code [out, n] -> uint8 [out, n * keep], each 0 to 3."""
    a, b = (position.unsqueeze(-1) for position in decode_group(code, pattern))
    entry = torch.arange(pattern.keep, dtype=torch.int8, device=code.device)
    index = (entry % WINDOW_KEEP) + (entry >= a) + (entry + 1 >= b)
    return index.to(torch.uint8).flatten(-2)


def metadata(code: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Return the metadata nibble of every window, ``index0 | index1 << 2``: code [out, n] -> uint8 [out, n * (N - 1)].

    The encoding of ``mma.sp`` and ``wgmma.mma_async.sp`` for 4-wide windows (PTX ISA, "Sparse matrix storage"); legal
    nibbles are 4, 8, C, 9, D, E.
    """
    first, second = window_indices(code, pattern).unflatten(-1, (-1, WINDOW_KEEP)).unbind(-1)
    nibble: torch.Tensor = first | second << 2
    return nibble


def expand(values: torch.Tensor, code: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Write the kept values into their windows, as the 2:4 matrix [out, n * 4(N-1)] with its zeros in place."""
    windows = as_bits(values).unflatten(-1, (-1, WINDOW_KEEP))
    index = window_indices(code, pattern).unflatten(-1, (-1, WINDOW_KEEP))
    slid = torch.zeros(*windows.shape[:-1], WINDOW, dtype=windows.dtype, device=values.device)
    slid.scatter_(-1, index.long(), windows)
    return slid.flatten(-2).view(values.dtype)


# -- activations ---------------------------------------------------------------------------------------------------


def lift(x: torch.Tensor, pattern: Pattern | str, k_offset: int = 0) -> torch.Tensor:
    """Copy the four columns of every window: the paper's Psi, index remapping without arithmetic.

    Args:
        x: [..., K], int8, float8_e4m3fn, bfloat16, float16 or float32.
        pattern: The pattern of the weight.
        k_offset: Position inside its group of column 0 (a tensor-parallel shard may start anywhere).

    Returns:
        [..., groups * 4(N-1)], in the column order of a slid weight.

    >>> lift(torch.arange(8.0), "6:8").view(3, 4).tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0], [4.0, 5.0, 6.0, 7.0]]
    """
    pattern = Pattern.parse(pattern)
    check_k_offset(pattern, k_offset)
    if pattern == DENSE:
        raise InputError("lift needs a pattern that slides", got=pattern, needed="such as 6:8")
    require_dense(x, "activations")
    if x.dim() == 0:
        raise InputError("activations", got="a single number", needed="[..., K]")
    if x.dtype not in INT_VIEW:
        raise InputError("cannot lift this type", got=x.dtype, needed="int8, fp8 e4m3, bf16, fp16 or fp32")
    groups = grouped(_to_copy(x), pattern, k_offset)
    windows = groups.unfold(-1, WINDOW, STRIDE)
    return _as_type(windows.flatten(-3), x.dtype)


def _to_copy(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits; the floats themselves where autograd records, as bits have no gradient."""
    followed = torch.is_grad_enabled() and x.requires_grad and x.dtype != torch.float8_e4m3fn
    return x if followed else as_bits(x)


def _as_type(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits if bits.dtype == dtype else bits.view(dtype)


def gather(x: torch.Tensor, column_map: torch.Tensor) -> torch.Tensor:
    """Copy input columns to packed columns: [..., K] -> [..., K'], ``out[..., c] = x[..., column_map[c]]``.

    Args:
        x: [..., K], a type that :func:`lift` takes.
        column_map: int64 [K'], each an input column or -1 for zero (padding).
    """
    bits = _to_copy(x)
    zero = torch.zeros(*bits.shape[:-1], 1, dtype=bits.dtype, device=x.device)
    return _as_type(torch.cat([bits, zero], -1)[..., column_map], x.dtype)

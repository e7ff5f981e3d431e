"""The non-zeros of a weight, and the patterns that they satisfy.

All functions read the *bits* of a weight, which serves every type: a value is zero if all of its bits except the sign
are zero (FP8 and float weights may have -0.0).
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
import torch.nn.functional as F

from slidesparse.base.arguments import require_integer, require_kind, shown
from slidesparse.errors import InputError, PatternViolation
from slidesparse.weights.pattern import MAX_GROUP, Pattern

INT_VIEW = {
    torch.int8: torch.int8,
    torch.float8_e4m3fn: torch.int8,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}
"""Weight type that can be packed -> the integer type of the same width that moves its bits."""

PATTERNS = tuple(Pattern(group - 2, group) for group in range(4, MAX_GROUP + 1, 2))
"""2:4, 4:6, ... 30:32, the sparsest first."""


def as_bits(weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor as integers of the same width, without a copy."""
    bits = INT_VIEW[weight.dtype]
    return weight if weight.dtype == bits else weight.view(bits)


def with_contiguous_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with contiguous columns, as kernels read it: itself, or a copy. Rows may have any stride."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def is_nonzero(weight: torch.Tensor) -> torch.Tensor:
    """Return bool, like ``weight``: True where a value is neither +0 nor -0."""
    if weight.dtype == torch.int8:
        return weight != 0
    return (as_bits(weight) << 1) != 0


def value_bits(weight: torch.Tensor) -> int:
    """Return the bits that every value of a weight needs: 6 for INT8 multiples of 4, else those of its type.

    ``slidesparse prune --rounding 6bit`` makes such weights. On a GPU this waits for the device.
    """
    narrow = weight.dtype == torch.int8 and not bool((weight & 3).any())
    return 6 if narrow else 8 * weight.itemsize


def require_dense(tensor: object, name: str) -> None:
    """Raise an InputError, with ``name``, for anything but a strided tensor: lists, NumPy arrays, sparse tensors."""
    require_kind(tensor, torch.Tensor, name, "a tensor")
    if isinstance(tensor, torch.Tensor) and (tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized):
        raise InputError(name, got=f"{tensor.layout} {tensor.dtype}", needed="a tensor in strided memory")


def check_form(weight: torch.Tensor, name: str = "weight") -> None:
    """Raise an InputError for a tensor that cannot be a weight by its form: of another rank or type, or with K = 0."""
    require_dense(weight, name)
    if weight.dim() != 2:
        raise InputError(f"{name} has the wrong rank", got=list(weight.shape), needed="[out, in]")
    if weight.dtype not in INT_VIEW:
        types = ", ".join(str(t).removeprefix("torch.") for t in INT_VIEW)
        raise InputError(f"{name} has an unsupported type", got=weight.dtype, needed=f"one of {types}")
    if weight.shape[1] == 0:
        raise InputError(f"{name} has no input columns", got=list(weight.shape), needed="[out, in] with in > 0")


def check_weight(weight: torch.Tensor, name: str = "weight") -> None:
    """Raise an InputError for a tensor that cannot be a weight: by :func:`check_form`, on the meta device, NaN, Inf."""
    check_form(weight, name)
    if weight.is_meta:
        raise InputError(f"{name} has no values", got="a tensor on the meta device", needed="one on cpu or cuda")
    if not is_finite(weight):
        bad = weight.numel() - int(torch.isfinite(weight.to(torch.float32)).sum())
        raise InputError(f"{name} holds NaN or Inf", got=f"{bad} such values", needed="finite weights")


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of any type holds neither NaN nor Inf.

    No temporary: minimum and maximum are NaN if a number is, and ``isfinite`` takes 40 times as long on a CPU. e4m3fn
    has no Inf, and its NaNs are 0x7F and 0xFF: the largest signed and the largest unsigned byte.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    if tensor.dtype == torch.float8_e4m3fn:
        positive, negative = tensor.view(torch.int8).max() == 0x7F, tensor.view(torch.uint8).max() == 0xFF
        return not bool(positive | negative)
    if tensor.element_size() == 1:  # torch has no minimum of 8-bit floats
        tensor = tensor.to(torch.float32)
    low, high = tensor.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def is_vector(
    vector: torch.Tensor, length: int, device: torch.device, types: Container[torch.dtype] | None = None
) -> bool:
    """Return whether a kernel can read ``length`` numbers by address: device, strides and type fit."""
    right = vector.numel() == length and vector.is_contiguous() and vector.device == device
    return right and (types is None or vector.dtype in types)


def check_vector(
    name: str,
    vector: torch.Tensor | None,
    length: int,
    device: torch.device,
    types: tuple[torch.dtype, ...] | None = None,
) -> None:
    """Raise an InputError for a vector that a kernel cannot read by address; None passes.

    Args:
        name: The vector's name and its reader: ``token scales for accumulators``.
        vector: A tensor of any shape.
        length: The number of elements.
        device: The device.
        types: The types; None: any.
    """
    if vector is not None and not is_vector(vector, length, device, types):
        kind = "" if types is None else f" {' or '.join(map(str, types))}"
        raise InputError(
            name,
            got=f"{list(vector.shape)} {vector.dtype} on {vector.device}, strides {vector.stride()}",
            needed=f"{length}{kind} numbers on {device}, contiguous",
        )


def checked_bias(bias: torch.Tensor, out_features: int, name: str) -> torch.Tensor:
    """Return a bias [out] as kernels read it: contiguous, and without a gradient.

    Raises:
        InputError: It has another shape, or no floats.
    """
    require_dense(bias, name)
    if bias.shape != (out_features,) or not bias.is_floating_point():
        raise InputError(name, got=f"{list(bias.shape)} {bias.dtype}", needed=f"floats [{out_features}]")
    return bias.detach().contiguous()


def check_k_offset(pattern: Pattern, k_offset: int) -> None:
    """Raise an InputError for a ``k_offset`` that is no position inside a group."""
    require_integer(k_offset, f"k_offset of {pattern}")
    if not 0 <= k_offset < pattern.group:
        raise InputError(f"k_offset of {pattern}", got=k_offset, needed=f"0 to {pattern.group - 1}")


def grouped(columns: torch.Tensor, pattern: Pattern, k_offset: int = 0, fill: float = 0) -> torch.Tensor:
    """Cut the last dimension into aligned groups: [..., K] -> [..., groups, 2N].

    Columns of ``fill`` pad both ends: ``k_offset`` in front (the shard starts inside a group), and the rest of the last
    group at the end.
    """
    length = columns.shape[-1]
    groups = pattern.groups(length, k_offset)
    back = groups * pattern.group - k_offset - length
    if k_offset or back:
        columns = F.pad(columns, (k_offset, back), value=fill)
    return columns.reshape(*columns.shape[:-1], groups, pattern.group)


def group_counts(weight: torch.Tensor, pattern: Pattern, k_offset: int = 0) -> torch.Tensor:
    """Return the number of non-zeros in every group: [out, in] -> uint8 [out, groups]."""
    return grouped(is_nonzero(weight), pattern, k_offset).sum(-1, dtype=torch.uint8)


def check_pattern(weight: torch.Tensor, pattern: Pattern | str, k_offset: int = 0, *, name: str = "weight") -> None:
    """Check that a weight [out, in] has at most ``keep`` non-zeros in every group of every row.

    Raises:
        PatternViolation: With the first group that has more, and the number of such groups.
    """
    pattern = Pattern.parse(pattern)
    counts = group_counts(weight, pattern, k_offset)
    bad = (counts > pattern.keep).nonzero()
    if len(bad):
        row, group = (int(i) for i in bad[0])
        raise PatternViolation(name, pattern, row, group, int(counts[row, group]), len(bad))


def tightest_pattern(
    weight: torch.Tensor, candidates: Iterable[Pattern] = PATTERNS, k_offset: int = 0
) -> Pattern | None:
    """Return the candidate of smallest density that a weight [out, in] satisfies (smaller group on a tie), or None.

    Each is tried: a weight may satisfy 4:6 and violate 8:10, since their groups overlap.

    Raises:
        InputError: The weight is malformed or holds NaN or Inf, or ``k_offset`` is no position in a candidate's group.
    """
    check_weight(weight)
    if isinstance(candidates, str | torch.Tensor) or not isinstance(candidates, Iterable):
        raise InputError("candidates", got=shown(candidates), needed="a list of patterns")
    patterns = list(map(Pattern.parse, candidates))
    for pattern in patterns:
        check_k_offset(pattern, k_offset)
    return find_pattern(weight, k_offset, patterns)


def find_pattern(weight: torch.Tensor, start: int, candidates: Iterable[Pattern] = PATTERNS) -> Pattern | None:
    """Return :func:`tightest_pattern` of a shard that begins at column ``start`` of the whole weight."""
    check_weight(weight)
    by_density = sorted(candidates, key=lambda pattern: (pattern.density, pattern.group))
    return next((pattern for pattern in by_density if satisfies(weight, pattern, start % pattern.group)), None)


def satisfies(weight: torch.Tensor, pattern: Pattern, k_offset: int = 0) -> bool:
    """Return whether a weight [out, in] satisfies a pattern."""
    return not bool((group_counts(weight, pattern, k_offset) > pattern.keep).any())

"""Which columns must share a scale, so that sliding over pairs changes no scale.

A sparse instruction reads one scale for each *vector* of lifted columns, 32 in NVFP4 and 64 in MXFP4. Lifting copies
columns, so a vector holds copies of columns from more than one block, and one column may have copies in two vectors::

    6:8 over pairs, NVFP4, in columns: a group has 16 and lifts to 24, three windows of 8; a vector has 32
    group               |       0       |       1       |       2       |       3       |    64 columns
    windows, lifted     |0 |1 |2 |3 |4 |5 |6 |7 |8 |9 |10|11|                                96 columns
    vectors             |     0     |     1     |     2     |                             3 scales

Windows 3 and 4 are of group 1 and share two pairs, and are in vectors 0 and 1. The dense product has one scale for
each column, so both vectors need that one. Such overlaps join all windows of a group, hence all vectors that have
windows of it. They end where a group and a vector end together: after ``lcm(lifted group, vector)`` lifted columns, the
*span*. All columns of a span must have one scale. For activations nothing less will do. A weight is in one vector only,
so weights could do with less; but which vector that is depends on the zeros, and the rule must not.

A block that crosses from one span into the next joins the two. So an ordinary tensor of the format lines up if its
scales are equal throughout ``lcm(span, block)`` columns, and :func:`lift_scale` refuses any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch

from slidesparse.errors import InputError
from slidesparse.fp4.scales import Fp4Format, Fp4Tensor
from slidesparse.weights.pattern import STRIDE, WINDOW, Pattern


@dataclass(frozen=True)
class Span:
    """The columns that sliding ties to one scale.

    Attributes:
        groups: Groups of pairs, as many as lift to whole vectors.
        columns: Their columns.
        lifted: Their lifted columns.
        vectors: The scales that an instruction reads for these.
        shared: Columns throughout which the scales of an ordinary tensor must be equal: whole spans and whole blocks.
    """

    groups: int
    columns: int
    lifted: int
    vectors: int
    shared: int


def span(pattern: Pattern | str, fp4: Fp4Format) -> Span:
    """Return the span of a uniform pattern over pairs in a format.

    Raises:
        InputError: The pattern is partial or dense: its groups are moved, and no span is whole.

    >>> from slidesparse.fp4.scales import NVFP4
    >>> span("6:8", NVFP4)
    Span(groups=4, columns=64, lifted=96, vectors=3, shared=64)
    """
    pattern = uniform(pattern)
    group, lifted_group = 2 * pattern.group, 2 * pattern.slid_group
    lifted = lcm(lifted_group, fp4.vector)
    groups = lifted // lifted_group
    columns = groups * group
    return Span(groups, columns, lifted, lifted // fp4.vector, lcm(columns, fp4.block))


def uniform(pattern: Pattern | str) -> Pattern:
    """Return a pattern over pairs, refusing those that are not uniform."""
    pattern = Pattern.parse(pattern)
    if not pattern.is_uniform:
        raise InputError("patterns over pairs are uniform", got=pattern, needed=f"one such as {pattern.uniform}")
    return pattern


def lifted_pairs(pattern: Pattern, fp4: Fp4Format, pairs: int) -> torch.Tensor:
    """Return the pair that feeds every lifted pair, -1 where none does: int64, whole vectors."""
    groups = torch.arange(pattern.groups(pairs)).view(-1, 1, 1) * pattern.group
    windows = torch.arange(pattern.windows).view(-1, 1) * STRIDE
    source = (groups + windows + torch.arange(WINDOW)).flatten()
    source = torch.where(source < pairs, source, -1)
    return torch.nn.functional.pad(source, (0, -len(source) % (fp4.vector // 2)), value=-1)


def lift_scale(tensor: Fp4Tensor, pattern: Pattern | str, name: str = "weight") -> torch.Tensor:
    """Return the scale of every vector of lifted columns: [rows, vectors] in the format's type.

    Args:
        tensor: A weight or activations, not lifted yet.
        pattern: Uniform, over pairs.
        name: The tensor's name in error messages.

    Raises:
        InputError: A vector would need two scales. Nothing is rounded again to make it fit.
    """
    pattern, fp4 = uniform(pattern), tensor.format
    require_unlifted(tensor, name)
    source = lifted_pairs(pattern, fp4, tensor.pairs.shape[1]).to(tensor.pairs.device)
    # Padding multiplies by zero. It takes the scale of the last column, so that it never asks for a second one.
    column = 2 * torch.where(source < 0, tensor.pairs.shape[1] - 1, source)
    bits = tensor.scale.view(torch.uint8)[:, column // tensor.block].unflatten(-1, (-1, fp4.vector // 2))
    scale = bits[..., 0]
    mixed = (bits != scale.unsqueeze(-1)).any(-1).nonzero()
    if len(mixed):
        row, vector = (int(i) for i in mixed[0])
        shared = span(pattern, fp4).shared
        raise InputError(
            f"scales of {name} do not line up with {pattern} over pairs in {fp4.name}",
            got=f"{len(bits[row, vector].unique())} scales for the {fp4.vector} lifted columns of row {row},"
            f" vector {vector} ({len(mixed)} such vectors)",
            needed=f"one scale for each {shared} columns",
            remedy=f"quantise with share={shared}",
        )
    lifted: torch.Tensor = scale.contiguous().view(fp4.scale_dtype)
    return lifted


def unlift_scale(scale: torch.Tensor, pattern: Pattern, fp4: Fp4Format, columns: int) -> torch.Tensor:
    """Return the scale of every block: the inverse of :func:`lift_scale`.

    Args:
        scale: [rows, vectors].
        pattern: Uniform, over pairs.
        fp4: The format.
        columns: K of the tensor that was lifted.
    """
    pair = torch.arange(0, columns // 2, fp4.block // 2, device=scale.device)
    group, position = pair // pattern.group, pair % pattern.group
    window = (position // STRIDE).clamp(max=pattern.windows - 1)
    lifted = group * pattern.slid_group + window * WINDOW + position - window * STRIDE
    bits = scale.view(torch.uint8)[:, lifted // (fp4.vector // 2)]
    return bits.contiguous().view(fp4.scale_dtype)


def require_unlifted(tensor: Fp4Tensor, name: str) -> None:
    """Refuse a tensor that was lifted already."""
    if tensor.block != tensor.format.block:
        raise InputError(
            f"{name} is lifted already",
            got=f"a scale for each {tensor.block} columns",
            needed=f"one for each {tensor.format.block}",
        )

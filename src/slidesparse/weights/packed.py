"""PackedWeight: a weight in the canonical packed form, which packing makes and unpacking reverses.

A packed weight is a sequence of *segments* over the input's column groups, and one column map. A uniform pattern is one
2:4 segment; a partial pattern is a dense segment (the groups that keep everything) followed by a 2:4 segment. The form
is neutral: a backend reorders it once into the operand that its kernel reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch

from slidesparse.base.arguments import require_integer, require_kind, shown
from slidesparse.errors import InputError
from slidesparse.weights.pattern import DENSE, STRIDE, WINDOW, Pattern
from slidesparse.weights.slide import compress, decompress, expand, gather, metadata
from slidesparse.weights.support import (
    INT_VIEW,
    as_bits,
    check_ascending,
    check_form,
    check_groups,
    check_k_offset,
    check_share,
    check_weight,
    following_groups,
    grouped,
    is_nonzero,
    require_dense,
    value_bits,
)

MAX_MULTIPLE = 2**31
"""Largest multiple to which packed columns are padded."""

INDEX_TYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)
"""Types in which column groups may be given."""


@dataclass(frozen=True)
class Segment:
    """Consecutive columns of a packed weight, all of one kind.

    Attributes:
        kind: ``"dense"`` or ``"2:4"``.
        groups: Column groups of the input that it holds, in packed order: int64 [n].
        values: Dense: [out, n * 2N]. 2:4: the kept values in order, [out, n * (2N - 2)].
        code: 2:4 only: the group code, [out, n]; metadata and positions derive from it.
    """

    kind: Literal["dense", "2:4"]
    groups: torch.Tensor
    values: torch.Tensor
    code: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Segment:
        """Return the same segment on another device."""
        code = None if self.code is None else self.code.to(device)
        return replace(self, groups=self.groups.to(device), values=self.values.to(device), code=code)


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in] in packed form.

    Attributes:
        pattern: The pattern that it follows.
        shape: ``(out, in)`` of the weight, before any padding.
        k_offset: Position inside its group of input column 0.
        segments: See :class:`Segment`; empty ones are left out.
        scale: Weight scale, float32 [out], or None for an unquantised weight.
    """

    pattern: Pattern
    shape: tuple[int, int]
    k_offset: int
    segments: tuple[Segment, ...]
    scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for part in self.segments if isinstance(self.segments, tuple) and self.segments else (self.segments,):
            require_kind(part, Segment, "part of a PackedWeight", "what slidesparse.pack makes")
        require_kind(self.pattern, Pattern, "pattern of a PackedWeight", "a Pattern")

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return self.segments[0].values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.segments[0].values.device

    @property
    def bits(self) -> int:
        """Bits in which every value of a slid group can be kept: see :func:`slidesparse.weights.support.value_bits`."""
        return max(value_bits(one.values if one.kind == "2:4" else one.values[:0]) for one in self.segments)

    @property
    def n_bytes(self) -> int:
        """Bytes of values and 2:4 metadata (two bits a kept value), as sparse MMA reads them; without scales."""
        return sum(
            s.values.numel() * s.values.element_size() + (s.values.numel() // 4 if s.kind == "2:4" else 0)
            for s in self.segments
        )

    def to(self, device: torch.device | str) -> PackedWeight:
        """Return the same weight on another device.

        Raises:
            InputError: There is no such device.
        """
        try:
            device = torch.empty(0, device=torch.device(device)).device
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # the last one of a torch without CUDA
            raise InputError("device", got=shown(device), needed="one that torch has here") from error
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, segments=tuple(s.to(device) for s in self.segments), scale=scale)

    def unpack(self) -> torch.Tensor:
        """Return the weight [out, in], bit for bit except for the sign of zeros: the inverse of packing."""
        out, columns = self.shape
        n, size = self.pattern.groups(columns, self.k_offset), self.pattern.group
        whole = torch.zeros(out, n, size, dtype=as_bits(self.segments[0].values).dtype, device=self.device)
        for segment in self.segments:
            if segment.code is None:
                groups = segment.values.unflatten(-1, (-1, size))
            else:
                groups = decompress(segment.values, segment.code, self.pattern)
            whole[:, segment.groups] = as_bits(groups)
        return whole.flatten(1)[:, self.k_offset : self.k_offset + columns].contiguous().view(self.dtype)

    def columns(self) -> torch.Tensor:
        """Return the matrix that multiplies lifted activations, zeros in place: [out, K'], with 2:4 segments in 2:4."""
        parts = [s.values if s.code is None else expand(s.values, s.code, self.pattern) for s in self.segments]
        return torch.cat([as_bits(part) for part in parts], -1).view(self.dtype)

    def metadata(self) -> torch.Tensor | None:
        """Return the metadata nibbles of the 2:4 segment, uint8 [out, n * (N - 1)], or None when all is dense."""
        codes = [s.code for s in self.segments if s.code is not None]
        return metadata(codes[0], self.pattern) if codes else None

    def column_map(self, multiple: int = 1) -> torch.Tensor:
        """Return the input column that feeds every packed column, -1 where none does: int64 [K'].

        Args:
            multiple: Each segment is padded at its end to a multiple of this many columns, as a backend asks. In the
                padding both weight and activation are 0.
        """
        require_integer(multiple, "multiple of packed columns")
        if not 1 <= multiple <= MAX_MULTIPLE:
            raise InputError("multiple of packed columns", got=multiple, needed=f"1 to {MAX_MULTIPLE}")
        size, device = self.pattern.group, self.device
        window_starts = torch.arange(0, size - WINDOW + 1, STRIDE, device=device)
        within = {
            "dense": torch.arange(size, device=device),
            "2:4": (window_starts.unsqueeze(-1) + torch.arange(WINDOW, device=device)).flatten(),
        }
        parts = []
        for segment in self.segments:
            columns = (segment.groups.unsqueeze(-1) * size + within[segment.kind]).flatten() - self.k_offset
            columns = torch.where((columns >= 0) & (columns < self.shape[1]), columns, -1)
            parts.append(torch.nn.functional.pad(columns, (0, -len(columns) % multiple), value=-1))
        return torch.cat(parts)

    def lift(self, x: torch.Tensor) -> torch.Tensor:
        """Lift activations [..., in] -> [..., K'], which :meth:`columns` multiplies.

        Raises:
            InputError: They have another size or a type that cannot be lifted.
        """
        require_dense(x, "activations")
        if x.shape[-1:] != self.shape[1:] or x.dtype not in INT_VIEW:
            raise InputError("activations", got=f"{list(x.shape)} {x.dtype}", needed=f"[..., {self.shape[1]}]")
        return gather(x, self.column_map())


def common_bits(weights: Iterable[PackedWeight]) -> int:
    """Return the bits in which every value of 8-bit weights can be kept: 6, or 8 if any weight needs them."""
    return 6 if all(packed.bits == 6 for packed in weights) else 8


class Shard(NamedTuple):
    """A weight that is to be packed, or a shard of one.

    Attributes:
        weight: [out, in], with any row stride; :func:`slidesparse.weights.support.check_form` has accepted it.
        pattern: The pattern that it is to follow.
        k_offset: Position inside its group of column 0.
        name: The weight's name in error messages.
    """

    weight: torch.Tensor
    pattern: Pattern
    k_offset: int
    name: str


ValuesAndCode: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The kept values [out, n * (2N - 2)], and the group codes [out, n]."""


class Packer(Protocol):
    """The part of packing that reads a weight's bits. All packers return the same bits and raise the same errors."""

    def following(self, shard: Shard) -> torch.Tensor:
        """Return ``support.following_groups`` of a shard, int64 [n], on the CPU, where their number is needed.

        Raises:
            InputError: The weight holds NaN or Inf.
        """
        ...

    def copy(self, shard: Shard, groups: torch.Tensor) -> torch.Tensor:
        """Copy groups, side by side, -0.0 as +0.0, with zeros where the weight ends inside one: [out, n * 2N]."""
        ...

    def compress(self, shard: Shard, groups: torch.Tensor | None, *, checked: bool) -> ValuesAndCode:
        """Return ``slide.compress`` of ascending groups (None: all); ``checked``: :meth:`following` found these.

        Raises:
            PatternViolation: One of them violates the pattern.
            InputError: One of them holds NaN or Inf.
        """
        ...


class TorchPacker:
    """A :class:`Packer` in torch, the definition, for any device."""

    def following(self, shard: Shard) -> torch.Tensor:
        """See :class:`Packer`."""
        check_weight(shard.weight, shard.name)
        return following_groups(shard.weight, shard.pattern, shard.k_offset).cpu()

    def copy(self, shard: Shard, groups: torch.Tensor) -> torch.Tensor:
        """See :class:`Packer`."""
        kept = _by_group(shard)[:, groups].view(shard.weight.dtype)
        return torch.where(is_nonzero(kept), as_bits(kept), 0).flatten(1).view(shard.weight.dtype)

    def compress(self, shard: Shard, groups: torch.Tensor | None, *, checked: bool) -> ValuesAndCode:
        """See :class:`Packer`."""
        if not checked:
            check_weight(shard.weight, shard.name)
            check_groups(shard.weight, shard.pattern, groups, k_offset=shard.k_offset, name=shard.name)
        by_group = _by_group(shard)
        chosen = by_group if groups is None else by_group[:, groups]
        return compress(chosen.view(shard.weight.dtype), shard.pattern)


def _by_group(shard: Shard) -> torch.Tensor:
    """Return the bits of a shard by column groups: [out, groups, 2N]."""
    return grouped(as_bits(shard.weight), shard.pattern, shard.k_offset)


TORCH = TorchPacker()


def pack_segments(
    weight: torch.Tensor,
    pattern: Pattern | str,
    *,
    scale: torch.Tensor | None = None,
    k_offset: int = 0,
    groups: torch.Tensor | None = None,
    checked: bool = False,
    name: str = "weight",
    packer: Packer = TORCH,
) -> PackedWeight:
    """Slide and compress a weight.

    Args:
        weight: [out, in], int8, float8_e4m3fn, bfloat16, float16 or float32, zeros in place.
        pattern: The pattern that it is to follow.
        scale: Weight scale [out] or [out, 1], kept as float32 [out].
        k_offset: Position inside its group of column 0: ``shard_start % group`` for a shard.
        groups: The column groups to slide, ascending; the others stay dense. None: all groups for a uniform pattern;
            for a partial one those that follow it by their zeros, which must be at least its share. A shard of a
            partial weight has a share of its own: pass ``support.following_groups(shard, pattern, k_offset)``.
        checked: :func:`slidesparse.weights.packing.slid_groups` returned these groups: the weight is not checked again.
        name: The weight's name in error messages.
        packer: Reads the weight's bits; :func:`slidesparse.weights.packing.pack` chooses one by the device.

    Raises:
        PatternViolation: When a group that should follow the pattern does not. Nothing is ever dropped.
        InputError: When the weight, the scale or an argument is malformed.

    >>> w = torch.tensor([[5, 0, 7, 1, 0, 2, 0, 3]], dtype=torch.int8)
    >>> packed = pack_segments(w, "6:8")
    >>> packed.segments[0].values.tolist(), packed.columns().tolist()
    ([[5, 0, 7, 1, 2, 3]], [[5, 0, 0, 0, 7, 1, 0, 0, 0, 2, 0, 3]])
    >>> torch.equal(packed.unpack(), w)
    True
    """
    pattern = Pattern.parse(pattern)
    check_form(weight, name)
    check_k_offset(pattern, k_offset)
    out, columns = weight.shape
    total, shard = pattern.groups(columns, k_offset), Shard(weight, pattern, k_offset, name)
    if groups is not None:
        require_dense(groups, f"column groups of {name}")
        if groups.dim() != 1 or groups.dtype not in INDEX_TYPES:
            got = f"{list(groups.shape)} {groups.dtype}"
            raise InputError(f"column groups of {name}", got=got, needed="whole numbers [n]")
        slid = groups.to("cpu", torch.int64)
        check_ascending(slid, total, name)
        if not checked:  # compressing finds NaN and Inf in the slid groups alone
            packer.following(shard)
    elif pattern == DENSE:
        check_weight(weight, name)
        slid = torch.arange(0, device="cpu")  # others set a default device
    elif pattern.is_uniform:
        slid = torch.arange(total, device="cpu")
    elif k_offset:
        raise InputError(
            f"a shard of {pattern} has a share of its own",
            remedy="pass groups=following_groups(shard, pattern, k_offset)",
        )
    else:
        slid, checked = packer.following(shard), True
        check_share(slid.numel(), total, pattern, name)
    slid_there, segments = slid.to(weight.device, non_blocking=True), []
    if slid.numel() < total:
        # On the CPU, as slid is: every answer from a GPU would be one more to wait for.
        stays = torch.ones(total, dtype=torch.bool, device="cpu").index_fill_(0, slid, False)
        dense = stays.nonzero().flatten().to(weight.device, non_blocking=True)
        segments.append(Segment("dense", dense, packer.copy(shard, dense)))
    if slid.numel():
        chosen = slid_there if segments else None
        kept = packer.compress(shard, chosen, checked=checked)
        segments.append(Segment("2:4", slid_there, *kept))
    return PackedWeight(pattern, (out, columns), k_offset, tuple(segments), _channel_scale(scale, out, name))


def _channel_scale(scale: torch.Tensor | None, out: int, name: str) -> torch.Tensor | None:
    if scale is None:
        return None
    require_dense(scale, f"scale of {name}")
    if not scale.is_floating_point():
        raise InputError(f"scale of {name}", got=scale.dtype, needed="floats")
    if scale.numel() != out:
        raise InputError(
            f"scale of {name}", got=list(scale.shape), needed=f"one scale a channel, [{out}] or [{out}, 1]"
        )
    return scale.detach().reshape(out).to(torch.float32).contiguous()  # kernels read it by address

"""PackedWeight: a weight in the canonical packed form, with packing and unpacking.

Packing keeps the ``2N - 2`` values of every group, and a code of the two positions that it leaves out. The form is
neutral: a backend reorders it once into the operand that its kernel reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from slidesparse.base.arguments import require_integer, require_kind, shown
from slidesparse.errors import InputError
from slidesparse.weights.pattern import DENSE, STRIDE, WINDOW, Pattern
from slidesparse.weights.quant import QUANTISED
from slidesparse.weights.slide import compress, decompress, expand, gather, metadata
from slidesparse.weights.support import (
    INT_VIEW,
    as_bits,
    check_form,
    check_k_offset,
    check_pattern,
    check_weight,
    grouped,
    is_nonzero,
    require_dense,
    value_bits,
    with_contiguous_columns,
)

MAX_MULTIPLE = 2**31
"""Largest multiple to which packed columns are padded."""


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight:
    """A weight [out, in] in packed form.

    Attributes:
        pattern: Its pattern.
        shape: ``(out, in)`` of the weight, before any padding.
        k_offset: Position inside its group of input column 0.
        values: Kept values of every group in order, [out, n * (2N - 2)]; all columns of a dense weight, in groups of 4.
        code: Group codes, [out, n], which determine metadata and positions; None for a dense weight.
        scale: Weight scale, float32 [out], or None for an unquantised weight.
    """

    pattern: Pattern
    shape: tuple[int, int]
    k_offset: int
    values: torch.Tensor
    code: torch.Tensor | None
    scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, part in (("values", self.values), ("code", self.values if self.code is None else self.code)):
            require_dense(part, f"{name} of a PackedWeight")
        require_kind(self.pattern, Pattern, "pattern of a PackedWeight", "a Pattern")

    def __repr__(self) -> str:
        return f"PackedWeight({self.pattern}, shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.values.device

    @property
    def slid(self) -> bool:
        """Whether the weight is in 2:4 form, and not dense."""
        return self.code is not None

    @property
    def form(self) -> Pattern:
        """The pattern of its columns in memory: its own, or ``DENSE`` where it is packed dense."""
        return self.pattern if self.slid else DENSE

    @property
    def bits(self) -> int:
        """Bits that every value needs: see :func:`slidesparse.weights.support.value_bits`."""
        return value_bits(self.values)

    @property
    def n_bytes(self) -> int:
        """Bytes of values and 2:4 metadata (two bits a kept value), as sparse MMA reads them; without scales."""
        return self.values.nbytes + (self.values.numel() // 4 if self.slid else 0)

    def to(self, device: torch.device | str) -> PackedWeight:
        """Return the same weight on another device.

        Raises:
            InputError: There is no such device.
        """
        try:
            device = torch.empty(0, device=torch.device(device)).device
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # the last one of a torch without CUDA
            raise InputError("device", got=shown(device), needed="one that torch has here") from error
        code, scale = (None if part is None else part.to(device) for part in (self.code, self.scale))
        return replace(self, values=self.values.to(device), code=code, scale=scale)

    def unpack(self) -> torch.Tensor:
        """Return the weight [out, in], bit for bit except for the sign of zeros: the inverse of packing, a copy."""
        groups = (
            self.values.clone() if self.code is None else decompress(self.values, self.code, self.pattern).flatten(1)
        )
        return groups[:, self.k_offset : self.k_offset + self.shape[1]].contiguous()

    def columns(self) -> torch.Tensor:
        """Return the matrix for lifted activations, zeros in place: [out, K'], in 2:4 form unless dense."""
        return self.values.clone() if self.code is None else expand(self.values, self.code, self.pattern)

    def metadata(self) -> torch.Tensor | None:
        """Return the metadata nibbles, uint8 [out, n * (N - 1)], or None for a dense weight."""
        return None if self.code is None else metadata(self.code, self.pattern)

    def column_map(self, multiple: int = 1) -> torch.Tensor:
        """Return the input column of every packed column, -1 for padding: int64 [K'].

        Args:
            multiple: Columns are padded at the end to a multiple of this number, for a backend. In the padding both
                weight and activation are 0.
        """
        require_integer(multiple, "multiple of packed columns")
        if not 1 <= multiple <= MAX_MULTIPLE:
            raise InputError("multiple of packed columns", got=multiple, needed=f"1 to {MAX_MULTIPLE}")
        size, device = self.form.group, self.device
        starts = torch.arange(0, size - WINDOW + 1, STRIDE, device=device)
        within = (starts.unsqueeze(-1) + torch.arange(WINDOW, device=device)).flatten()
        groups = torch.arange(self.form.groups(self.shape[1], self.k_offset), device=device)
        columns = (groups.unsqueeze(-1) * size + within).flatten() - self.k_offset
        columns = torch.where((columns >= 0) & (columns < self.shape[1]), columns, -1)
        return torch.nn.functional.pad(columns, (0, -len(columns) % multiple), value=-1)

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
    """Return the bits that every value of 8-bit weights needs: 6, or 8 if any weight needs 8."""
    return 6 if all(packed.bits == 6 for packed in weights) else 8


def check_scale(packed: PackedWeight) -> None:
    """Raise an InputError for an INT8 or FP8 weight without a scale, or another weight with one."""
    if (packed.scale is not None) != (packed.dtype in QUANTISED):
        raise InputError(
            f"a packed {packed.dtype} weight {'without' if packed.scale is None else 'with'} a scale",
            needed="a scale for int8 and fp8, none for other types",
        )


class Shard(NamedTuple):
    """A weight that is to be packed, or a shard of one.

    Attributes:
        weight: [out, in], with any row stride; :func:`slidesparse.weights.support.check_form` has accepted it.
        pattern: The pattern to check and pack by.
        k_offset: Position inside its group of column 0.
        name: The weight's name in error messages.
    """

    weight: torch.Tensor
    pattern: Pattern
    k_offset: int
    name: str

    def by_rows(self) -> Shard:
        """Return the shard with contiguous columns, as kernels read it."""
        return self._replace(weight=with_contiguous_columns(self.weight))


class Packer:
    """The part of packing that reads a weight's bits: the definition, in torch, for any device.

    All packers return the same bits and raise the same errors.
    """

    def check(self, shard: Shard) -> None:
        """Check that a shard satisfies its pattern.

        Raises:
            PatternViolation: It does not.
            InputError: It holds NaN or Inf.
        """
        check_weight(shard.weight, shard.name)
        check_pattern(shard.weight, shard.pattern, shard.k_offset, name=shard.name)

    def compress(self, shard: Shard, *, checked: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``slide.compress`` of all groups; :meth:`check` runs first, unless ``checked``."""
        if not checked:
            self.check(shard)
        return compress(_by_group(shard).view(shard.weight.dtype), shard.pattern)


def _by_group(shard: Shard) -> torch.Tensor:
    """Return the bits of a shard by column groups: [out, groups, 2N]."""
    return grouped(as_bits(shard.weight), shard.pattern, shard.k_offset)


TORCH = Packer()


def pack_by(
    weight: torch.Tensor,
    pattern: Pattern | str,
    *,
    scale: torch.Tensor | None = None,
    k_offset: int = 0,
    checked: bool = False,
    name: str = "weight",
    packer: Packer = TORCH,
) -> PackedWeight:
    """Slide and compress a weight.

    Args:
        weight: [out, in], int8, float8_e4m3fn, bfloat16, float16 or float32, zeros in place.
        pattern: The pattern to check and pack by.
        scale: Weight scale [out] or [out, 1], kept as float32 [out].
        k_offset: Position inside its group of column 0: ``shard_start % group`` for a shard.
        checked: Skip the check: :func:`slidesparse.weights.packing.check` has accepted the weight.
        name: The weight's name in error messages.
        packer: Reads the weight's bits; :func:`slidesparse.weights.packing.pack` chooses one by the device.

    Raises:
        PatternViolation: The weight does not satisfy the pattern. No value is ever dropped.
        InputError: The weight, the scale or an argument is malformed.

    >>> w = torch.tensor([[5, 0, 7, 1, 0, 2, 0, 3]], dtype=torch.int8)
    >>> packed = pack_by(w, "6:8")
    >>> packed.values.tolist(), packed.columns().tolist()
    ([[5, 0, 7, 1, 2, 3]], [[5, 0, 0, 0, 7, 1, 0, 0, 0, 2, 0, 3]])
    >>> torch.equal(packed.unpack(), w)
    True
    """
    pattern = Pattern.parse(pattern)
    check_form(weight, name)
    check_k_offset(pattern, k_offset)
    shard, code = Shard(weight, pattern, k_offset, name), None
    if pattern != DENSE:
        values, code = packer.compress(shard, checked=checked)
    else:
        if not checked:
            check_weight(weight, name)
        bits = _by_group(shard).flatten(1)
        values = torch.where(is_nonzero(bits.view(weight.dtype)), bits, 0).view(weight.dtype)  # -0 becomes +0
    out, columns = weight.shape
    return PackedWeight(pattern, (out, columns), k_offset, values, code, _channel_scale(scale, out, name))


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

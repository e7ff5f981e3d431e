"""Theory of the sliding-window decomposition, in plain Python.

The input columns of a weight are cut into groups of ``2N``. A row satisfies the pattern ``(2N - 2):2N`` if each group
has two zeros or more. Then ``N - 1`` windows of 4 columns at stride 2 cover a group::

    group of 6:8   | 0  1  2  3  4  5  6  7 |
    window 0         [--------]
    window 1               [--------]
    window 2                     [--------]

Each window holds two non-zeros, the 2:4 form that Sparse Tensor Cores run, so the windows hold ``2N - 2`` together:
exactly ``keep``. Non-zeros come first in the notation: 6:8 keeps 6. Other tools put the number of zeros first.

Source of the construction: the paper, section "Solution: Sliding Window Decomposition" and its appendix.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from slidesparse.base.arguments import require_integer, shown
from slidesparse.errors import InputError

WINDOW = 4
STRIDE = 2
WINDOW_KEEP = 2
MAX_GROUP = 32

StorageForm = Literal["dense", "2:4", "code-byte", "code-bits", "counts"]

COUNTED = range(2, 8)
"""Numbers of windows for which counts replace metadata: a nibble is smaller for one, and 4 bits count to seven."""

_SYNTAX = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")
_NEEDED = f"keep:group with group even, 4 <= group <= {MAX_GROUP} and keep = group - 2 (2:4, 4:6, 6:8, ...)"


@dataclass(frozen=True, order=True)
class Pattern:
    """A sparsity pattern: the most non-zeros of every group.

    Args:
        keep: Non-zeros allowed in a group, ``2N - 2``. ``DENSE`` alone keeps all 4 of 4, and has one window a group.
        group: Columns of a group, ``2N``, from 4 to 32.

    Raises:
        InputError: The numbers are no such pattern.

    >>> p = Pattern.parse("6:8")
    >>> p.windows, str(p.expansion), str(p.ideal_speedup)
    (3, '3/2', '4/3')
    """

    keep: int
    group: int

    def __post_init__(self) -> None:
        require_integer(self.keep, "keep of a pattern")
        require_integer(self.group, "group of a pattern")
        slides = not self.group % 2 and 4 <= self.group <= MAX_GROUP and self.keep == self.group - 2
        if not slides and not self.keep == self.group == WINDOW:
            raise InputError("not a sliding pattern", got=f"{self.keep}:{self.group}", needed=_NEEDED)

    @classmethod
    def parse(cls, text: str | Pattern) -> Pattern:
        """Read ``"6:8"`` or ``"dense"``; a Pattern passes through unchanged.

        Raises:
            InputError: The text is anything else: ``6_8`` and ``6:8:10`` are errors.
        """
        if isinstance(text, Pattern):
            return text
        if isinstance(text, str) and text == "dense":
            return DENSE
        match = _SYNTAX.fullmatch(text) if isinstance(text, str) else None
        keep, group = map(int, match.groups()) if match else (0, 0)
        if keep == group:  # 4:4 is DENSE, which has a name
            raise InputError("not a pattern", got=shown(text), needed=f"{_NEEDED}, or dense")
        return cls(keep, group)

    def __str__(self) -> str:
        return "dense" if self == DENSE else f"{self.keep}:{self.group}"

    @property
    def windows(self) -> int:
        """Number of windows of a group, ``N - 1``."""
        return self.group // 2 - 1

    def window(self, j: int) -> range:
        """Return the group positions of window ``j``, ``2j .. 2j+3``."""
        require_integer(j, f"window of {self}")
        if not 0 <= j < self.windows:
            raise InputError(f"no such window of {self}", got=j, needed=f"0 to {self.windows - 1}")
        return range(STRIDE * j, STRIDE * j + WINDOW)

    @property
    def slid_group(self) -> int:
        """Columns of a group after sliding, ``4(N - 1)``."""
        return WINDOW * self.windows

    @property
    def expansion(self) -> Fraction:
        """Columns after lifting over columns before, the paper's gamma: ``2 - 2/N``."""
        return Fraction(self.slid_group, self.group)

    @property
    def density(self) -> Fraction:
        """Non-zeros allowed, over all weights."""
        return Fraction(self.keep, self.group)

    @property
    def sparsity(self) -> Fraction:
        """Zeros guaranteed, over all weights."""
        return 1 - self.density

    @property
    def ideal_speedup(self) -> Fraction:
        """Speedup over dense if 2:4 runs at twice the dense rate: ``N/(N-1)`` (Corollary 1.2)."""
        return 1 / self.density

    @property
    def codes(self) -> int:
        """Number of ways to leave out two positions of a group, ``C(2N, 2)``: the values of a group code."""
        return math.comb(self.group, 2)

    def bytes_per_weight(self, form: StorageForm, bits: int = 8) -> Fraction:
        """Return the bytes of one weight of ``bits`` bits, metadata included, scales excluded.

        Args:
            form: ``dense``; ``2:4`` (kept values with two bits of index each, for sparse MMA); ``code-byte`` (kept
                values, and a group code in whole bytes); ``code-bits`` (the same in the fewest bits); ``counts`` (the
                kept entries before each left-out position, for most 8-bit weights of the Hopper kernel).
            bits: Width of a value.
        """
        require_integer(bits, "bits of a value")
        index_bits: dict[str, int] = {
            "2:4": 2 * self.keep,
            "code-byte": 8 * math.ceil((self.codes - 1).bit_length() / 8),
            "code-bits": (self.codes - 1).bit_length(),
            "counts": 2 * self.keep.bit_length(),
        }
        if not isinstance(form, str) or form not in ("dense", *index_bits):
            raise InputError("unknown storage form", got=shown(form), needed=f"dense, {', '.join(index_bits)}")
        if form == "dense" or self == DENSE:
            return Fraction(bits, 8)
        return Fraction(self.keep * bits + index_bits[form], 8 * self.group)

    def groups(self, columns: int, k_offset: int = 0) -> int:
        """Return the number of groups of ``columns`` input columns, the first at position ``k_offset`` of its group."""
        try:
            return -(-(k_offset + columns) // self.group)
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            # Not checked before: a size that torch traces is a number too.
            raise InputError(
                "columns and k_offset", got=f"{shown(columns)} and {shown(k_offset)}", needed="whole numbers"
            ) from error


DENSE = Pattern(WINDOW, WINDOW)
"""An ordinary dense weight: its groups keep everything."""

"""The general theory: whether a sparse source fits into windows of some hardware; for ours it always does."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from slidesparse.errors import InputError


@dataclass(frozen=True)
class Decomposition:
    """The windows of a ``keep:group`` source on ``hw_keep:hw_window`` hardware, and whether they suffice.

    Attributes:
        starts: First position of each window.
        expansion: Columns after lifting over columns before.
        counterexample: A support (positions of non-zeros) that no assignment to windows can hold, or None.
    """

    keep: int
    group: int
    hw_keep: int
    hw_window: int
    starts: tuple[int, ...]
    expansion: Fraction
    counterexample: tuple[int, ...] | None

    @property
    def feasible(self) -> bool:
        """True when every support of the source fits into the windows."""
        return self.counterexample is None

    @property
    def speedup(self) -> Fraction:
        """Speed-up over dense on hardware whose gain is ``hw_window/hw_keep``; meaningful when feasible."""
        return Fraction(self.hw_window, self.hw_keep) / self.expansion

    @property
    def bound(self) -> Fraction:
        """No decomposition of this source is faster than ``group/keep`` (the paper's Theorem 3)."""
        return Fraction(self.group, self.keep)


def decompose(keep: int, group: int, hw_keep: int = 2, hw_window: int = 4) -> Decomposition:
    """Slide a ``keep:group`` source over ``hw_keep:hw_window`` hardware and decide whether every support fits.

    Windows start every ``hw_window - hw_keep`` positions (the paper's stride); a last window that would pass the end
    of the group is moved back to end there. The paper's Theorem 2 asks only for ``windows * hw_keep >= keep``. That is
    not enough. On 1:4 hardware a 2:7 source has two windows with room for two in all; but window 1 begins at position
    3, so weights at positions 0 and 1 compete for window 0, which has room for one. Hall's condition decides: for every
    set of windows, the positions that only these cover must not hold more non-zeros than they have room for. Windows
    are intervals, so runs of neighbouring windows suffice (a set with gaps splits into runs, and one of these fails on
    its own if the set does).

    Args:
        keep: Non-zeros of the source in a group.
        group: Columns of the source's group.
        hw_keep: Non-zeros that the hardware allows in a window.
        hw_window: Columns of a window.

    Raises:
        InputError: When a number is out of range, or the source already satisfies the hardware's pattern.

    >>> decompose(6, 8).feasible
    True
    >>> decompose(2, 7, 1, 4).counterexample
    (0, 1)
    """
    if not (0 < hw_keep < hw_window <= group and 0 < keep <= group):
        raise InputError(
            "cannot slide this source",
            got=f"{keep}:{group} on {hw_keep}:{hw_window}",
            needed="0 < keep <= group and 0 < hardware keep < hardware window <= group",
        )
    if Fraction(keep, group) < Fraction(hw_keep, hw_window):
        raise InputError(
            f"{keep}:{group} is sparser than the hardware's {hw_keep}:{hw_window}",
            needed="a source at least as dense as the hardware's pattern",
        )
    stride = hw_window - hw_keep
    last = group - hw_window
    starts = (*range(0, last, stride), last)
    return Decomposition(
        keep=keep,
        group=group,
        hw_keep=hw_keep,
        hw_window=hw_window,
        starts=starts,
        expansion=Fraction(len(starts) * hw_window, group),
        counterexample=_hall_violator(keep, group, hw_keep, hw_window, starts),
    )


def _hall_violator(
    keep: int, group: int, hw_keep: int, hw_window: int, starts: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the smallest support that overfills a run of neighbouring windows, or None."""
    covering = [[w for w, start in enumerate(starts) if start <= p < start + hw_window] for p in range(group)]
    for length in range(1, len(starts) + 1):
        room = length * hw_keep
        for first in range(len(starts) - length + 1):
            confined = [p for p in range(group) if first <= covering[p][0] and covering[p][-1] < first + length]
            if min(keep, len(confined)) > room:
                return tuple(confined[: room + 1])
    return None

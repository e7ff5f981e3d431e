"""The speed-up of all linears of a model in one line, by the times that chose their backends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from slidesparse.gemm import Choice
from slidesparse.gemm.speed import MEASURED_HERE

TOKENS = (16, 64, 256, 1024, 4096, 16384)
"""Numbers of tokens in the line, from a decoding step to long prompts, where every linear has a time."""


class LoadedLinear(NamedTuple):
    """A loaded linear's [out, in], and :attr:`slidesparse.gemm.select.Choice.times`; empty where no times chose."""

    shape: tuple[int, ...]
    times: Mapping[int, tuple[float, float]]

    @classmethod
    def of(cls, weight: torch.Tensor, choice: Choice | None) -> LoadedLinear:
        """Return a linear from its weight and the choice of its backends, or None."""
        return cls(tuple(weight.shape), {} if choice is None else choice.times)


def describe_gain(linears: Collection[LoadedLinear]) -> list[str]:
    """Return a line with the time of all linears over that of dense ones; none without times.

    A linear without times runs dense, and counts with dense's times of its shape, where another one has them.
    """
    dense = {one.shape: {m: (us, us) for m, (_, us) in one.times.items()} for one in linears if one.times}
    known = [times for one in linears if (times := one.times or dense.get(one.shape))]
    tokens = [m for m in TOKENS if known and all(m in times for times in known)]
    if not tokens:
        return []
    shares = [sum(times[m][0] for times in known) / sum(times[m][1] for times in known) for m in tokens]
    first, *more = zip(shares, tokens, strict=True)
    parts = "{:.2f} of dense's time for {} tokens".format(*first), *("{:.2f} for {}".format(*one) for one in more)
    who, end = "the linears", ""
    if len(known) < len(linears):
        who, end = f"{len(known)} of {len(linears)} linears", "; the others have no times"
    return [f"slidesparse: by times {MEASURED_HERE} {who} take {', '.join(parts)}{end}"]

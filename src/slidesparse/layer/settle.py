"""Settle what becomes of a loaded weight: it runs sparse on some backends, or dense for a reason.

A server loads and shards a weight by its own code, and hands it to :func:`settle`. The weight is checked once, the
backends are chosen once, and only what runs sparse is packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from slidesparse.gemm import Choice, Problem, choose
from slidesparse.gemm.select import Fallback, get_backend
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.packing import check, pack, pack_checked
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.support import find_pattern, value_bits


@dataclass(frozen=True)
class RunsSparse:
    """A weight that runs sparse.

    Attributes:
        packed: The packed weight.
        choice: Its backends, for :class:`slidesparse.layer.linear.SlideLinear`.
    """

    packed: PackedWeight
    choice: Choice

    @property
    def reason(self) -> str:
        """Pattern, backends, and why these, in one line."""
        offset = f", from position {self.packed.k_offset} of a group" if self.packed.k_offset else ""
        return f"{self.packed.pattern}: {self.choice.describe()}{offset}; {self.choice.reason}"


@dataclass(frozen=True)
class RunsDense:
    """A weight that runs dense, and is not packed, for a reason of one line.

    ``pattern`` is the one that it has, None where it satisfies none; ``choice`` that of backends by which it is dense,
    None where it has no group that could run sparse.
    """

    reason: str
    pattern: Pattern | None
    choice: Choice | None = None


class Tuner(Protocol):
    """Measures a kind of layer before its backends are chosen: :class:`slidesparse.tuning.at_load.LoadTuner`."""

    def wants(self, problem: Problem, backend: str, fallback: Fallback) -> bool: ...  # noqa: D102

    def measure(self, problem: Problem, packed: PackedWeight, fallback: Fallback) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class Chooser:
    """Chooses the backends of a model's layers.

    Attributes:
        backend: ``auto`` or a backend's name, for weights that are slid; others get what ``auto`` gives.
        fallback: What ``auto`` does where no accelerated backend can run: see :mod:`slidesparse.gemm.select`.
        tuner: Measures a layer first where this machine has no times of its kind; None: a prior decides.
    """

    backend: str = "auto"
    fallback: Fallback = "dense"
    tuner: Tuner | None = None

    def __post_init__(self) -> None:
        if self.backend != "auto":
            get_backend(self.backend)  # raises where there is none of the name

    def choose(self, packed: PackedWeight) -> Choice:
        """Choose the backends of a weight that is packed already.

        Raises:
            UnsupportedError: The backend that was named cannot run it.
        """
        return self.choose_first(Problem.of(packed), lambda: packed)[0]

    def choose_first(self, problem: Problem, pack_it: Callable[[], PackedWeight]) -> tuple[Choice, PackedWeight | None]:
        """Choose the backends of a weight that is not packed yet; return it, too, if it was packed to be measured."""
        packed = None
        if self.tuner is not None and self.tuner.wants(problem, self.backend, self.fallback):
            packed = pack_it()
            self.tuner.measure(problem, packed, self.fallback)
        return self.choose_unmeasured(problem), packed

    def choose_unmeasured(self, problem: Problem) -> Choice:
        """Choose the backends of a weight without measuring it first."""
        return choose(problem, self.backend if problem.slid else "auto", self.fallback)


def settle(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    pattern: Pattern | None,
    chooser: Chooser,
    *,
    start: int = 0,
    name: str = "weight",
) -> RunsSparse | RunsDense:
    """Check a loaded weight, choose its backends, and pack it where it is to run sparse.

    Args:
        weight: [out, columns of this rank], int8, float8_e4m3fn, bfloat16, float16 or float32, zeros in place.
        scale: Weight scale [out] or [out, 1] of an 8-bit weight, or None.
        pattern: The pattern that the checkpoint claims; None: the tightest one that the weight satisfies.
        chooser: Chooses the backends.
        start: Column of the whole weight at which this rank's columns begin.
        name: The weight's name in error messages.

    Raises:
        PatternViolation: The weight does not satisfy the pattern that the checkpoint claims.
        InputError: It is malformed, or holds NaN or Inf.
        UnsupportedError: The backend that was named cannot run it.
    """
    pattern = find_pattern(weight, start) if pattern is None else pattern
    if pattern is None:
        return RunsDense("its weight satisfies no pattern", None)
    if pattern == DENSE:
        return RunsDense("as the checkpoint says", pattern)
    k_offset = start % pattern.group
    check(weight, pattern, k_offset=k_offset, name=name)
    pack_it = partial(pack_checked, weight, pattern, scale=scale, k_offset=k_offset, name=name)
    out, columns = weight.shape
    problem = Problem(pattern, weight.dtype, out, columns, weight.device, bits=value_bits(weight))
    choice, packed = chooser.choose_first(problem, pack_it)
    if choice.backends == ("dense",):
        return RunsDense(f"{pattern}; {choice.reason}", pattern, choice)
    return RunsSparse(pack_it() if packed is None else packed, choice)


def pack_dense(
    weight: torch.Tensor, scale: torch.Tensor | None, pattern: Pattern = DENSE, *, name: str = "weight"
) -> PackedWeight:
    """Return a weight that runs dense as SlideLinear takes it: nothing is slid, and the layer keeps the pattern."""
    packed_by = pack if pattern == DENSE else pack_checked  # of any other pattern settle has read the weight
    return replace(packed_by(weight, DENSE, scale=scale, name=name), pattern=pattern)

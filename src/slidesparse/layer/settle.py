"""The outcome of a loaded weight: sparse on some backends, or dense for a reason.

A server loads and shards a weight by its own code, and passes it to :func:`settle`, which checks it once, chooses
backends once, and packs only what runs sparse.
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
class RunsPacked:
    """A weight that runs in 2:4 form, in six bits, or dense by a kernel of ours.

    Attributes:
        packed: The packed weight.
        choice: Its backends, for :class:`slidesparse.layer.linear.SlideLinear`.
    """

    packed: PackedWeight
    choice: Choice

    @property
    def how(self) -> str:
        """Its form in a word or three."""
        return "sparse" if self.packed.slid else f"dense in {'six' if self.packed.bits == 6 else 'eight'} bits"

    @property
    def reason(self) -> str:
        """Pattern, backends, and why these, in one line."""
        offset = f", from position {self.packed.k_offset} of a group" if self.packed.k_offset else ""
        return f"{self.packed.pattern}: {self.choice.describe()}{offset}; {self.choice.reason}"


@dataclass(frozen=True)
class RunsDense:
    """A weight that runs dense and is not packed, with a reason of one line.

    ``pattern`` is its pattern, None without one; ``choice`` the choice of the dense backend, None if it was not made.
    """

    reason: str
    pattern: Pattern | None
    choice: Choice | None = None


class Tuner(Protocol):
    """Interface of :class:`slidesparse.tuning.at_load.LoadTuner`: measures a kind of layer before the choice."""

    def wants(self, problem: Problem, backend: str, fallback: Fallback) -> bool: ...  # noqa: D102

    def measure(self, problem: Problem, packed: PackedWeight, fallback: Fallback) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class Chooser:
    """Chooses the backends of a model's layers.

    Attributes:
        backend: ``auto`` or a backend's name, for slid weights and those of its bits; others get what ``auto`` gives.
        fallback: The rule of ``auto`` where sparsity does not pay: see :mod:`slidesparse.gemm.select`.
        tuner: Measures kinds of layers without times of this machine first; None: no layer is measured.
    """

    backend: str = "auto"
    fallback: Fallback = "dense"
    tuner: Tuner | None = None

    def __post_init__(self) -> None:
        if self.backend != "auto":
            get_backend(self.backend)  # raises for an unknown name

    def choose(self, packed: PackedWeight) -> Choice:
        """Choose the backends of a packed weight.

        Raises:
            UnsupportedError: The named backend cannot run it.
        """
        return self.choose_first(Problem.of(packed), lambda: packed)[0]

    def choose_first(self, problem: Problem, pack_it: Callable[[], PackedWeight]) -> tuple[Choice, PackedWeight | None]:
        """Choose the backends of an unpacked weight; also return it packed, if it was measured."""
        packed = None
        if self.tuner is not None and self.tuner.wants(problem, self.backend, self.fallback):
            packed = pack_it()
            self.tuner.measure(problem, packed, self.fallback)
        return self.choose_unmeasured(problem), packed

    def choose_unmeasured(self, problem: Problem) -> Choice:
        """Choose the backends of a weight without a measurement."""
        named = problem.slid or (self.backend != "auto" and get_backend(self.backend).bits == problem.bits)
        return choose(problem, self.backend if named else "auto", self.fallback)


def settle(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    pattern: Pattern | None,
    chooser: Chooser,
    *,
    start: int = 0,
    name: str = "weight",
) -> RunsPacked | RunsDense:
    """Check a loaded weight, choose its backends, and pack it if it runs packed.

    Args:
        weight: [out, columns of this rank], int8, float8_e4m3fn, bfloat16, float16 or float32, zeros in place.
        scale: Weight scale [out] or [out, 1] of an 8-bit weight, or None.
        pattern: The pattern in the checkpoint; None: the tightest one that the weight satisfies.
        chooser: Chooses the backends.
        start: First column of this rank in the whole weight.
        name: The weight's name in error messages.

    Raises:
        PatternViolation: The weight does not satisfy the checkpoint's pattern.
        InputError: It is malformed, or holds NaN or Inf.
        UnsupportedError: The named backend cannot run it.
    """
    known = find_pattern(weight, start) if pattern is None else pattern
    form = known or DENSE
    k_offset, slid = start % form.group, form != DENSE
    if slid:
        check(weight, form, k_offset=k_offset, name=name)
    out, columns = weight.shape
    problem = Problem(form, weight.dtype, out, columns, weight.device, slid, value_bits(weight))
    as_it_is = RunsDense("its weight satisfies no pattern" if known is None else "as the checkpoint says", known)
    if not problem.has_forms:
        return as_it_is
    pack_it = partial(pack_checked, weight, form, scale=scale, k_offset=k_offset if slid else 0, name=name)
    choice, packed = chooser.choose_first(problem, pack_it)
    if choice.backends == ("dense",):
        if slid or choice.able:
            return RunsDense(f"{form}; {choice.reason}", known, choice)
        return replace(as_it_is, reason=f"{as_it_is.reason}; {choice.reason}")
    return RunsPacked(pack_it() if packed is None else packed, choice)


def pack_dense(
    weight: torch.Tensor, scale: torch.Tensor | None, pattern: Pattern = DENSE, *, name: str = "weight"
) -> PackedWeight:
    """Pack a dense weight for SlideLinear: nothing is slid, and the layer keeps the pattern."""
    packed_by = pack if pattern == DENSE else pack_checked  # of any other pattern settle has read the weight
    return replace(packed_by(weight, DENSE, scale=scale, name=name), pattern=pattern)

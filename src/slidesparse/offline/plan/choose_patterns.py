"""Choose a pattern for every set of linears: the least damage at a given speed, share of zeros or memory.

Each set gets one pattern, such that the sum of the damages is smallest and the sum of the costs stays within a budget:
an integer programme, solved exactly by SciPy's HiGHS. What a set costs in time is a :class:`StepTime`'s to say; where
there are several, for several loads, each has a budget of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from slidesparse.base.other_libraries import need
from slidesparse.base.readable_size import readable_size
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.weights.pattern import COUNTED, DENSE, Pattern, StorageForm

TIME_LIMIT_S = 60.0
"""Seconds after which the solver gives up; it takes milliseconds on the models that we know."""


@dataclass(frozen=True)
class PatternChoice:
    """A pattern that a set may get, and how much worse the model predicts then, in a unit that adds up."""

    pattern: Pattern
    damage: float


@dataclass(frozen=True)
class PlanSet:
    """Linears that share a pattern, and the patterns that they may get.

    Attributes:
        names: The linears.
        shapes: [out, in] of each; of experts the rows of all of a layer.
        choices: One for every pattern; dense among them.
        reached: The share of the rows that a token is multiplied by: of experts those to which it is routed.
        bits: Bits of a kept value in memory, 6 or 8.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    choices: tuple[PatternChoice, ...]
    reached: Fraction = Fraction(1)
    bits: int = 8

    @property
    def of_experts(self) -> bool:
        """Whether they are experts, of which a token is routed to some."""
        return self.reached != 1

    def n_bytes(self, pattern: Pattern) -> Fraction:
        """Return the bytes of all of them with a pattern (:func:`modelled_bytes`)."""
        sizes = (modelled_bytes(pattern, *shape, experts=self.of_experts, bits=self.bits) for shape in self.shapes)
        return sum(sizes, Fraction(0))


def modelled_cost(pattern: Pattern, out: int, columns: int, mma_gain: Fraction) -> Fraction:
    """Return the dense multiply-adds a token that take as long as a packed weight's product, padding included.

    >>> modelled_cost(Pattern.parse("6:8"), 10, 64, Fraction(2))
    Fraction(480, 1)
    """
    groups = pattern.groups(columns)
    following = 0 if pattern == DENSE else pattern.following(groups)
    rest = max(columns - following * pattern.group, 0)
    return out * (Fraction(following * pattern.slid_group) / mma_gain + rest)


class StepTime(Protocol):
    """What a step of the model takes at one load, in a unit of its own."""

    @property
    def name(self) -> str:
        """The load."""

    @property
    def rest(self) -> float:
        """What no pattern changes."""

    @property
    def rest_before(self) -> float:
        """The same of the dense model that a speed-up is over."""

    def of(self, one: PlanSet, pattern: Pattern) -> float:
        """Return what a set takes with a pattern."""


@dataclass(frozen=True)
class Multiplies:
    """The time of the matrix products alone, in dense multiply-adds a token: quantising and attention are left out.

    Attributes:
        mma_gain: How much faster a 2:4 multiply is than a dense one of the same size: 2 on hardware that reaches its
            ideal, and about 1.6 on Hopper.
    """

    mma_gain: Fraction = Fraction(2)
    name: str = "matrix products"
    rest: float = 0.0
    rest_before: float = 0.0

    def of(self, one: PlanSet, pattern: Pattern) -> float:
        """See :class:`StepTime`."""
        return float(one.reached * sum(modelled_cost(pattern, *shape, self.mma_gain) for shape in one.shapes))


def least_zeros(pattern: Pattern, columns: int) -> int:
    """Return the least number of zeros of a row: two in each group that follows the pattern, less the last padding.

    The last group's padding is zero too, and is left out first.

    >>> least_zeros(Pattern.parse("4:6"), 320)  # 53 whole groups, and two columns more
    106
    """
    if pattern == DENSE:
        return 0
    groups = pattern.groups(columns)
    padding = groups * pattern.group - columns
    left_out = pattern.group - pattern.keep
    return max(pattern.following(groups) * left_out - min(padding, left_out), 0)


def modelled_bytes(pattern: Pattern, out: int, columns: int, *, experts: bool = False, bits: int = 8) -> Fraction:
    """Return the bytes of an 8-bit weight: in 2:4 form with its metadata, those of experts with counts.

    Kept values may have 6 bits in memory; groups and weights that are dense have 8 in any case.

    >>> pattern = Pattern.parse("6:8")
    >>> float(modelled_bytes(pattern, 1, 64)), float(modelled_bytes(pattern, 1, 64, experts=True))
    (60.0, 54.0)
    >>> float(modelled_bytes(pattern, 1, 64, bits=6)), float(modelled_bytes(pattern, 1, 64, experts=True, bits=6))
    (48.0, 42.0)
    """
    form: StorageForm = "counts" if experts and pattern.windows in COUNTED else "2:4"
    following = pattern.uniform.bytes_per_weight(form, bits)
    return out * columns * (pattern.share * following + (1 - pattern.share))


@dataclass(frozen=True)
class Target:
    """The target of a plan; exactly one of the three is given.

    Attributes:
        speedup: Speed-up over dense, at every load.
        sparsity: Share of zeros, from 0 to 1.
        gigabytes: Size of the treated linears' weights in memory (:func:`modelled_bytes`), in 1e9 bytes.
    """

    speedup: float | None = None
    sparsity: float | None = None
    gigabytes: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise InputError(
                "target of a plan", got=", ".join(given) or "none", needed="one of speedup, sparsity, memory"
            )
        (value,) = given.values()
        if not value > 0 or (self.sparsity is not None and value >= 1) or (self.speedup is not None and value < 1):
            raise InputError(
                "target of a plan",
                got=value,
                needed="a positive number; a sparsity is less than 1, a speed-up at least 1",
            )


@dataclass(frozen=True)
class Plan:
    """A pattern for every linear.

    Attributes:
        patterns: Linear -> pattern.
        damage: Sum of the damages of all sets.
        speedups: Load -> speed-up over dense.
        sparsity: Least share of zeros.
        gigabytes: Size in memory (:func:`modelled_bytes`), in 1e9 bytes.
        has_experts: Whether some of the patterns are those of experts.
        basis: What measured speed-ups rest on, in words; empty where they are modelled.
        together: Damage of all sets pruned together; None where it was not measured.
        kept_type: Type of the checkpoint, where it has experts that cannot be quantised as they are stored; else None.
    """

    patterns: Mapping[str, Pattern]
    damage: float
    speedups: Mapping[str, float]
    sparsity: float
    gigabytes: float
    has_experts: bool = False
    basis: tuple[str, ...] = ()
    together: float | None = None
    kept_type: str | None = None

    @property
    def speedup(self) -> float:
        """The least of the speed-ups."""
        return min(self.speedups.values())


Times = Sequence[StepTime]
"""One for each load."""


def choose_patterns(sets: Sequence[PlanSet], target: Target, times: Times = (Multiplies(),)) -> Plan:
    """Return the plan of least damage that reaches a target; see :func:`require_reachable`."""
    require_reachable(sets, target, times)
    damages = [[choice.damage for choice in one.choices] for one in sets]
    return _make_plan(sets, _solve(damages, _limits(sets, target, times)), times)


def require_reachable(sets: Sequence[PlanSet], target: Target, times: Times = (Multiplies(),)) -> None:
    """Raise an InputError for a target that no choice reaches: costs are known before any damage is."""
    for limit in _limits(sets, target, times):
        least = [min(range(len(cost)), key=cost.__getitem__) for cost in limit.costs]
        if sum(cost[i] for cost, i in zip(limit.costs, least, strict=True)) > limit.budget * (1 + 1e-9):
            best = _make_plan(sets, least, times)
            at = "".join(f" for {name}" for name in best.speedups if len(times) > 1 and name == limit.name)
            speed = best.speedups.get(limit.name, best.speedup)
            raise InputError(
                "no choice of patterns reaches the target",
                got=f"at best {speed:.3f}x{at}, {best.sparsity:.1%} zeros, {readable_size(best.gigabytes * 1e9)}",
                remedy="ask for less, or allow sparser patterns",
            )


@dataclass(frozen=True)
class _Limit:
    """What every choice of every set costs, and the most that all may cost together."""

    name: str
    costs: list[list[float]]
    budget: float


def _limits(sets: Sequence[PlanSet], target: Target, times: Times) -> list[_Limit]:
    """Return what the target limits: the time at each load, what is left of the numbers, or the bytes."""

    def limit(name: str, cost: Callable[[PlanSet, Pattern], float], budget: Callable[[float], float]) -> _Limit:
        costs = [[float(cost(one, choice.pattern)) for choice in one.choices] for one in sets]
        return _Limit(name, costs, budget(sum(float(cost(one, DENSE)) for one in sets)))

    def left(one: PlanSet, pattern: Pattern) -> int:
        return sum(out * (columns - least_zeros(pattern, columns)) for out, columns in one.shapes)

    speedup, sparsity, gigabytes = target.speedup, target.sparsity, target.gigabytes
    if speedup is not None:

        def within(time: StepTime) -> Callable[[float], float]:
            return lambda dense: (time.rest_before + dense) / speedup - time.rest

        return [limit(time.name, time.of, within(time)) for time in times]
    if sparsity is not None:
        return [limit("zeros", left, lambda dense: dense * (1 - sparsity))]
    assert gigabytes is not None
    return [limit("memory", lambda one, pattern: float(one.n_bytes(pattern)), lambda _: gigabytes * 1e9)]


def _solve(damages: Sequence[Sequence[float]], limits: Sequence[_Limit]) -> list[int]:
    """Return the index of the choice that each set gets.

    The solver may stop a millionth of the unit of damage short of the best, and damages of one model differ by more
    than that. So the unit shrinks to what the last answer costs, until that is not less than the unit; a single choice
    that costs more cannot be part of the best one.
    """
    unit = max(map(max, damages))
    while True:
        chosen = _solve_in_units(damages, limits, unit)
        total = sum(damage[i] for damage, i in zip(damages, chosen, strict=True))
        if total >= unit or total == 0:
            return chosen
        unit = total


def _solve_in_units(damages: Sequence[Sequence[float]], limits: Sequence[_Limit], unit: float) -> list[int]:
    import numpy as np

    optimize, sparse = (need(f"scipy.{part}", 'pip install "slidesparse[plan]"') for part in ("optimize", "sparse"))
    starts = np.cumsum([0, *map(len, damages)])
    flat_damages = np.concatenate([np.asarray(damage, dtype=float) for damage in damages])
    one_each = sparse.lil_array((len(damages), starts[-1]))
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        one_each[row, begin:end] = 1
    allowed = flat_damages <= unit
    solution = optimize.milp(
        np.where(allowed, flat_damages, 0.0) / max(unit, 1e-300),
        integrality=np.ones(starts[-1]),
        bounds=optimize.Bounds(0, allowed.astype(float)),
        constraints=[
            optimize.LinearConstraint(one_each.tocsr(), 1, 1),
            *(
                optimize.LinearConstraint(np.concatenate(one.costs)[None] / one.budget, -np.inf, 1 + 1e-9)
                for one in limits
            ),
        ],
        options={"mip_rel_gap": 0.0, "time_limit": TIME_LIMIT_S},
    )
    if solution.status != 0:  # an answer that is not proved to be the best does not count
        raise UnsupportedError(
            "the solver did not find the best plan", got=solution.message, remedy="offer fewer patterns (--patterns)"
        )
    return [int(solution.x[begin:end].argmax()) for begin, end in itertools.pairwise(starts)]


def _make_plan(sets: Sequence[PlanSet], chosen: Sequence[int], times: Times) -> Plan:
    taken = [(one, one.choices[i]) for one, i in zip(sets, chosen, strict=True)]
    weights = [(choice.pattern, shape) for one, choice in taken for shape in one.shapes]
    total = sum(out * columns for _, (out, columns) in weights)

    def speedup(time: StepTime) -> float:
        dense, sparse = sum(time.of(one, DENSE) for one in sets), sum(time.of(o, c.pattern) for o, c in taken)
        return (time.rest_before + dense) / (time.rest + sparse)

    return Plan(
        patterns={name: choice.pattern for one, choice in taken for name in one.names},
        damage=sum(choice.damage for _, choice in taken),
        speedups={time.name: speedup(time) for time in times},
        sparsity=sum(out * least_zeros(pattern, columns) for pattern, (out, columns) in weights) / total,
        gigabytes=float(sum(one.n_bytes(choice.pattern) for one, choice in taken)) / 1e9,
        has_experts=any(one.of_experts for one in sets),
    )

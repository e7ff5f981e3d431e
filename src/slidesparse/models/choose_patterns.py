"""Choose a pattern for every set of linears: the least damage at a given speed, share of zeros or memory.

Each set gets one pattern, such that the sum of the damages is smallest and the sum of the costs stays within a budget:
an integer programme, solved exactly by SciPy's HiGHS.

The speed is modelled: a multiply costs ``out * packed columns``, and those in 2:4 form cost ``1 / mma_gain`` of a dense
one. ``mma_gain`` is 2 on hardware that reaches its ideal and about 1.6 on Hopper. Quantising, lifting and attention are
left out, so the speed-up is that of the matrix products alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.pattern import DENSE, Pattern

TIME_LIMIT_S = 60.0
"""Seconds after which the solver gives up; it takes milliseconds on the models that we know."""


@dataclass(frozen=True)
class PatternChoice:
    """A pattern that a set may get.

    Attributes:
        pattern: The pattern.
        damage: How much worse the model predicts, in any unit that adds up; 0 for dense.
    """

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
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    choices: tuple[PatternChoice, ...]
    reached: Fraction = Fraction(1)


def modelled_cost(pattern: Pattern, out: int, columns: int, mma_gain: Fraction) -> Fraction:
    """Return the dense multiply-adds a token that take as long as a packed weight's product, padding included.

    >>> modelled_cost(Pattern.parse("6:8"), 10, 64, Fraction(2))
    Fraction(480, 1)
    """
    groups = pattern.groups(columns)
    following = 0 if pattern == DENSE else pattern.following(groups)
    rest = max(columns - following * pattern.group, 0)
    return out * (Fraction(following * pattern.slid_group) / mma_gain + rest)


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


def modelled_bytes(pattern: Pattern, out: int, columns: int) -> Fraction:
    """Return the bytes of a weight in 8 bits, in 2:4 form with its metadata."""
    return out * columns * pattern.bytes_per_weight("2:4")


@dataclass(frozen=True)
class Target:
    """The target of a plan; exactly one of the three is given.

    Attributes:
        speedup: Modelled speed-up over dense, of all treated linears together.
        sparsity: Share of zeros, from 0 to 1.
        gigabytes: Size of the treated linears' weights in 8 bits and 2:4 form, in 1e9 bytes.
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

    def cost(self, pattern: Pattern, out: int, columns: int, mma_gain: Fraction) -> float:
        """Return the share of the budget that a weight takes, in the budget's unit."""
        if self.speedup is not None:
            return float(modelled_cost(pattern, out, columns, mma_gain))
        if self.sparsity is not None:
            return float(out * (columns - least_zeros(pattern, columns)))
        return float(modelled_bytes(pattern, out, columns))

    def budget(self, dense: float) -> float:
        """Return the most that all weights may take, when dense ones take ``dense``."""
        if self.speedup is not None:
            return dense / self.speedup
        if self.sparsity is not None:
            return dense * (1 - self.sparsity)
        assert self.gigabytes is not None
        return self.gigabytes * 1e9


@dataclass(frozen=True)
class Plan:
    """A pattern for every linear.

    Attributes:
        patterns: Linear -> pattern.
        damage: Sum of the damages of all sets.
        speedup: Modelled speed-up over dense.
        sparsity: Least share of zeros.
        gigabytes: Size in 8 bits and 2:4 form, in 1e9 bytes.
        has_experts: Whether some of the patterns are those of experts.
    """

    patterns: Mapping[str, Pattern]
    damage: float
    speedup: float
    sparsity: float
    gigabytes: float
    has_experts: bool = False


def choose_patterns(sets: Sequence[PlanSet], target: Target, mma_gain: Fraction = Fraction(2)) -> Plan:
    """Return the plan of least damage that reaches a target.

    Args:
        sets: The sets, with the patterns to choose from.
        target: The speed-up, share of zeros or size to reach.
        mma_gain: How much faster a 2:4 multiply is than a dense one of the same size.

    Raises:
        InputError: Even the sparsest choices do not reach it; the error says what they reach.
    """
    require_reachable(sets, target, mma_gain)
    costs, budget = _costs(sets, target, mma_gain)
    damages = [[choice.damage for choice in one.choices] for one in sets]
    return _make_plan(sets, _solve(damages, costs, budget), mma_gain)


def require_reachable(sets: Sequence[PlanSet], target: Target, mma_gain: Fraction = Fraction(2)) -> None:
    """Refuse a target that no choice reaches: costs are known before any damage is.

    Raises:
        InputError: Even the sparsest choices do not reach it; the error says what they reach.
    """
    costs, budget = _costs(sets, target, mma_gain)
    least = [min(range(len(cost)), key=cost.__getitem__) for cost in costs]
    if sum(cost[i] for cost, i in zip(costs, least, strict=True)) > budget * (1 + 1e-9):
        best = _make_plan(sets, least, mma_gain)
        raise InputError(
            "no choice of patterns reaches the target",
            got=f"at best {best.speedup:.3f}x, {best.sparsity:.1%} zeros, {best.gigabytes:.3f} GB",
            remedy="ask for less, or allow sparser patterns",
        )


def _costs(sets: Sequence[PlanSet], target: Target, mma_gain: Fraction) -> tuple[list[list[float]], float]:
    """Return the cost of every choice of every set, and the most that all may cost together."""

    def cost(one: PlanSet, pattern: Pattern) -> float:
        share = float(one.reached) if target.speedup is not None else 1.0
        return share * sum(target.cost(pattern, *shape, mma_gain) for shape in one.shapes)

    costs = [[cost(one, choice.pattern) for choice in one.choices] for one in sets]
    dense = sum(cost(one, DENSE) for one in sets)
    return costs, target.budget(dense)


def _solve(damages: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float) -> list[int]:
    """Return the index of the choice that each set gets.

    The solver may stop a millionth of the unit of damage short of the best, and damages of one model differ by more
    than that. So the unit shrinks to what the last answer costs, until that is not less than the unit; a single choice
    that costs more cannot be part of the best one.
    """
    unit = max(map(max, damages))
    while True:
        chosen = _solve_in_units(damages, costs, budget, unit)
        total = sum(damage[i] for damage, i in zip(damages, chosen, strict=True))
        if total >= unit or total == 0:
            return chosen
        unit = total


def _solve_in_units(
    damages: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float, unit: float
) -> list[int]:
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import lil_array
    except ImportError as error:
        raise UnsupportedError("SciPy is not installed", remedy='pip install "slidesparse[plan]"') from error
    starts = np.cumsum([0, *map(len, damages)])
    flat_costs = np.concatenate([np.asarray(cost, dtype=float) for cost in costs])
    flat_damages = np.concatenate([np.asarray(damage, dtype=float) for damage in damages])
    one_each = lil_array((len(damages), starts[-1]))
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        one_each[row, begin:end] = 1
    allowed = flat_damages <= unit
    solution = milp(
        np.where(allowed, flat_damages, 0.0) / max(unit, 1e-300),
        integrality=np.ones(starts[-1]),
        bounds=Bounds(0, allowed.astype(float)),
        constraints=[
            LinearConstraint(one_each.tocsr(), 1, 1),
            LinearConstraint(flat_costs[None] / budget, -np.inf, 1 + 1e-9),
        ],
        options={"mip_rel_gap": 0.0, "time_limit": TIME_LIMIT_S},
    )
    if solution.status != 0:  # an answer that is not proved to be the best does not count
        raise UnsupportedError(
            "the solver did not find the best plan",
            got=solution.message,
            remedy="offer fewer patterns (--patterns)",
        )
    return [int(solution.x[begin:end].argmax()) for begin, end in itertools.pairwise(starts)]


def _make_plan(sets: Sequence[PlanSet], chosen: Sequence[int], mma_gain: Fraction) -> Plan:
    taken = [(one, one.choices[i]) for one, i in zip(sets, chosen, strict=True)]
    weights = [(choice.pattern, shape) for one, choice in taken for shape in one.shapes]
    reached = [(choice.pattern, shape, one.reached) for one, choice in taken for shape in one.shapes]
    total = sum(out * columns for _, (out, columns) in weights)
    dense = sum(share * modelled_cost(DENSE, *shape, mma_gain) for _, shape, share in reached)
    sparse = sum(share * modelled_cost(pattern, *shape, mma_gain) for pattern, shape, share in reached)
    return Plan(
        patterns={name: choice.pattern for one, choice in taken for name in one.names},
        damage=sum(choice.damage for _, choice in taken),
        speedup=float(dense / sparse),
        sparsity=sum(out * least_zeros(pattern, columns) for pattern, (out, columns) in weights) / total,
        gigabytes=float(sum(modelled_bytes(pattern, *shape) for pattern, shape in weights)) / 1e9,
        has_experts=any(one.reached != 1 for one in sets),
    )

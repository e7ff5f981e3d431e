"""What rounding the inputs of linears to INT8 costs, as calibration saw it, and what may be done where that is much."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from slidesparse.models.layerwise import SetLoss

MUCH = 0.5
"""Of what pruning costs the same outputs."""

LEAST = 2e-4
"""Of the outputs' energy. Less cannot be hoped for: Gaussian inputs lose 1e-4."""


def rounding_costs(sets: Sequence[SetLoss]) -> dict[str, float]:
    """Return the linears that read one input -> what rounding it costs, where that is known."""
    return {" ".join(one.names): one.rounding for one in sets if one.rounding is not None}


def shown_names(key: str) -> str:
    """Return the linears that read one input for a sentence: as a key of JSON they have spaces between them."""
    return ", ".join(key.split(" "))


def describe_rounding(sets: Sequence[SetLoss], find_foldable: Callable[[], Collection[str] | None]) -> list[str]:
    """Return lines: the cost, and by which options it may be less.

    Args:
        sets: What pruning and rounding cost linears that read one input.
        find_foldable: Returns the linears that ``--smooth`` would help and has not; None where neither it nor
            ``--ignore`` helps. It is asked only where the cost is much.
    """
    costs = rounding_costs(sets)
    if not costs:
        return []
    worst = max(costs, key=costs.__getitem__)
    mean = sum(costs.values()) / len(costs)
    lines = [f"rounding inputs to INT8 costs: mean {mean:.2e}, worst {costs[worst]:.2e} at {shown_names(worst)}"]
    many = [one.names[0] for one in sets if (one.rounding or 0.0) >= max(MUCH * one.loss, LEAST)]
    foldable = find_foldable() if many else None
    if foldable is None:
        return lines
    folded = [name for name in many if name in foldable]
    left = [name for name in many if name not in foldable]
    if folded:
        lines.append(f"{_count(folded)}: --smooth folds outliers into weights")
    if left:
        lines.append(f"{_count(left)}: --ignore would leave such linears dense, in the type that they have")
    return lines


def _count(names: list[str]) -> str:
    inputs = "one input" if len(names) == 1 else f"{len(names)} inputs"
    return f"of {inputs} it costs more than half of what pruning does, such as that of {names[0]}"

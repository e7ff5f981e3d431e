"""What of a model gets a pattern of ``slidesparse plan``: sets of linears, and the experts of each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from slidesparse.errors import InputError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.expert_tensors import tensors_of
from slidesparse.files.meta_model import MetaModel
from slidesparse.files.stored import STORED_NAMES
from slidesparse.models.experts import Experts, experts_of_a_token, find_experts, find_routers, linears_inside
from slidesparse.models.parts import text_config
from slidesparse.models.sparsify import require_alike, sets_to_prune
from slidesparse.models.targets import find_targets, matches_entry
from slidesparse.offline.plan.choose_patterns import PatternChoice, PlanSet
from slidesparse.offline.plan.plan_options import PlanOptions
from slidesparse.offline.prune_experts import can_be_quantised
from slidesparse.offline.treated import find_treated
from slidesparse.prune import get_pruner
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import FLOATS, dtype_name

_ANY = Pattern.parse("6:8")
"""A pattern that linears may have: which one it is makes no difference to who reads what."""


@dataclass(frozen=True)
class PlannedSets:
    """Everything that gets a pattern.

    Attributes:
        sets: Linears that read one input; and the names under which the weights of all experts of a layer are pruned.
        shapes: Name -> [out, in]; of experts the rows of all of a layer.
        reached: Name of experts' weights -> the share of a layer's experts to which a token is routed.
        dense: Linears and experts that get no pattern, the ignored ones among them; without embeddings.
        kept_type: Type of the checkpoint, where it has experts that cannot be quantised as they are stored; else None.
        bits: Bits of a kept value in memory.
    """

    sets: list[list[str]]
    shapes: dict[str, tuple[int, int]]
    reached: dict[str, Fraction]
    dense: list[PlanSet]
    kept_type: str | None
    bits: int = 8

    def allowed(self, names: Sequence[str], patterns: Sequence[Pattern]) -> list[Pattern]:
        """Return those of some patterns that a set may have, without dense: those of experts are uniform."""
        return [one for one in patterns if one != DENSE and (one.is_uniform or names[0] not in self.reached)]

    def with_choices(
        self, patterns: Sequence[Pattern], damages: Mapping[tuple[str, str], float] | None = None
    ) -> list[PlanSet]:
        """Return the sets with the patterns that each may get, dense among them."""
        made = []
        for names in self.sets:
            shapes, reached = tuple(map(self.shapes.__getitem__, names)), self.reached.get(names[0], Fraction(1))
            allowed = self.allowed(names, patterns)
            choices = (PatternChoice(p, 0.0 if damages is None else damages[names[0], str(p)]) for p in allowed)
            made.append(PlanSet(tuple(names), shapes, (PatternChoice(DENSE, 0.0), *choices), reached, self.bits))
        return made


def find_sets(
    meta: MetaModel, checkpoint: Checkpoint, options: PlanOptions, run: Callable[[], object] | None
) -> PlannedSets:
    """Return what gets a pattern.

    Linears that servers would join with others that get none are an InputError.
    """
    experts = find_experts(meta.model)
    planned = _planned_experts(experts, meta, checkpoint, options)
    routers = find_routers(meta.model, experts)
    # A plan is for what is served in 8 bits, whatever type it is pruned in.
    linears = find_treated(meta, experts, routers, options.ignore, run, quantise=True).linears
    # Prune leaves dense what the plan does not name.
    everything = find_targets(meta.model, without=linears_inside(meta.model, experts)).linears
    coupled = dict.fromkeys(linears, _ANY)
    require_alike(meta.model, everything, {name: coupled.get(name, DENSE) for name in everything}, run)
    sets = _read_together(meta.model, linears, run)
    sets += [[one.layer(leaf) for leaf in one.weights] for one in planned]
    rest = {name: linear for name, linear in everything.items() if name not in linears}
    stays = (PatternChoice(DENSE, 0.0),)
    dense = [
        PlanSet(tuple(names), tuple(_shape(rest[name]) for name in names), stays)
        for names in _read_together(meta.model, rest, run)
    ]
    dense += [
        PlanSet(tuple(map(one.layer, one.weights)), tuple(map(one.rows, one.weights)), stays, _reached(one, meta.model))
        for one in experts
        if one not in planned
    ]
    shapes = {name: _shape(linear) for name, linear in linears.items()}
    shapes |= {one.layer(leaf): one.rows(leaf) for one in planned for leaf in one.weights}
    reached = {one.layer(leaf): _reached(one, meta.model) for one in planned for leaf in one.weights}
    return PlannedSets(sets, shapes, reached, dense, _kept_type(planned, meta, checkpoint), options.bits)


def _read_together(
    model: nn.Module, linears: dict[str, nn.Linear], run: Callable[[], object] | None
) -> list[list[str]]:
    """Return the sets that a calibrated method sees, whatever the method: fused layers share a pattern in any case."""
    return sets_to_prune(model, linears, dict.fromkeys(linears, _ANY), get_pruner("wanda"), run)


def _shape(linear: nn.Linear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _planned_experts(
    found: Sequence[Experts], meta: MetaModel, checkpoint: Checkpoint, options: PlanOptions
) -> list[Experts]:
    """Return the experts that get a pattern, those of a layer one together."""
    planned = []
    for one in found:
        layers = [one.layer(leaf) for leaf in one.weights]
        left = [name for name in layers if any(matches_entry(name, entry) for entry in options.ignore)]
        if left and len(left) < len(layers):
            raise InputError(
                "the experts of a layer get one pattern", got=f"--ignore of {left[0]}", needed="all or none"
            )
        if not left:
            tensors_of(one, meta, checkpoint)
            planned.append(one)
    return planned


def _kept_type(planned: Sequence[Experts], meta: MetaModel, checkpoint: Checkpoint) -> str | None:
    """Return the type of experts that ``prune`` cannot quantise as they are stored; None where there are none."""
    for one in planned:
        for name, tensor in tensors_of(one, meta, checkpoint).items():
            stored = checkpoint.stored(name)
            if not can_be_quantised(name, tensor, stored, type(meta.model).__name__):
                return next(dtype_name(dtype) for dtype in FLOATS if STORED_NAMES[dtype] == stored.dtype)
    return None


def _reached(experts: Experts, model: Any) -> Fraction:
    """Return the share of a layer's experts to which a token is routed."""
    return Fraction(min(experts_of_a_token(text_config(model.config)), experts.count), experts.count)

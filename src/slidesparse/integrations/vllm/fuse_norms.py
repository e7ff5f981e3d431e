"""Join RMSNorm and SiLU with the linear after them, in a graph that vLLM compiles.

vLLM leaves norms and activations to Inductor, which cannot fuse them into our operator: the normed activations would go
to memory in bf16 and come back to be quantised. :func:`join_norms` rewrites the graph before Inductor::

    rms_norm(x)              -> linear            by  rms_norm_linear
    fused_add_rms_norm(x, r) -> linear            by  add_rms_norm_linear
    silu(gate) * up          -> linear            by  silu_mul_linear

whose quantise-and-lift kernel computes the norm or the activation too. A value is joined if it has no other reader.
Gemma's norms, which multiply by ``1 + weight`` in float32, become operators that add the 1. Norms are operators of
vLLM's at this point (``vllm_ir``); SiLU is plain arithmetic, found by tracing vLLM's own definition of it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import fx

from slidesparse import ops
from slidesparse.base import torch_private
from slidesparse.base.counted import counted
from slidesparse.gemm.spec import parse_weight
from slidesparse.integrations.vllm import private
from slidesparse.weights.quant import QUANTISED

LINEAR = ops.linear.default
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)

NORMS = {"rms_norm": 1, "fused_add_rms_norm": 2}
"""vLLM's operators -> the number of tensors before the weight."""

JOINED = {
    ("rms_norm", False): ops.rms_norm_linear.default,
    ("rms_norm", True): ops.gemma_norm_linear.default,
    ("fused_add_rms_norm", False): ops.add_rms_norm_linear.default,
    ("fused_add_rms_norm", True): ops.add_gemma_norm_linear.default,
}
"""vLLM's operator, and whether its weight is Gemma's -> the operator that replaces it and the linear after it."""

ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)

Rule: TypeAlias = Callable[[fx.Graph, Any, Any, list[Any], dict[fx.Node, int]], str | None]


@dataclass
class Joins:
    """Joins of norms and activations with the quantised linears of one graph.

    Attributes:
        linears: Number of quantised linears.
        joined: Operator of vLLM -> number of joins with a linear.
    """

    linears: int = 0
    joined: Counter[str] = field(default_factory=Counter)

    def describe(self) -> str:
        """Describe the joins in one line.

        >>> Joins(4, Counter(fused_add_rms_norm=2, silu_and_mul=1)).describe()
        'fused 2 norms and 1 activation with linears'
        """
        norms = sum(count for name, count in self.joined.items() if name in NORMS)
        return f"fused {counted(norms, 'norm')} and {counted(self.joined.total() - norms, 'activation')} with linears"


def join_norms(graph: fx.Graph) -> Joins:
    """Rewrite a graph in place, before Inductor compiles it."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    joins = Joins()
    linear: Any
    for linear in graph.find_nodes(op="call_function", target=LINEAR):
        x, *weight = linear.args
        if parse_weight(weight[-1]).weight_dtype not in QUANTISED:
            continue
        joins.linears += 1
        source = _find_source(x)
        rules = RULES if source is not None else ()
        joined = next((name for rule in rules if (name := rule(graph, linear, source, weight, order))), None)
        if joined is not None:
            joins.joined[joined] += 1
    graph.eliminate_dead_code()
    return joins


def _find_source(x: Any) -> Any:
    """Return the node that computes ``x``, views aside, if it has no other reader."""
    while True:
        if len(x.users) != 1:
            return None
        if x.target not in VIEWS or x.meta["val"].shape != x.args[0].meta["val"].shape:
            return x
        x = x.args[0]


def _join_norm(graph: fx.Graph, linear: Any, source: Any, weight: list[Any], order: dict[fx.Node, int]) -> str | None:
    if source.target is not private.norm_operator("rms_norm") or not _is_joinable(source, NORMS["rms_norm"]):
        return None
    with graph.inserting_before(linear):
        new = _call_joined(graph, source, "rms_norm", weight)
    _replace(linear, new)
    return "rms_norm"


def _join_add_norm(
    graph: fx.Graph, linear: Any, source: Any, weight: list[Any], order: dict[fx.Node, int]
) -> str | None:
    if source.target is not operator.getitem or source.args[1] != 0:
        return None
    norm = source.args[0]
    name = "fused_add_rms_norm"
    if norm.target is not private.norm_operator(name) or not _is_joinable(norm, NORMS[name]):
        return None
    residuals = [user for user in norm.users if user is not source]
    if any(user.target is not operator.getitem or user.args[1] != 1 for user in residuals):
        return None
    # The new residual may be read before the linear, so everything moves up to the norm, if possible.
    needed = [node for node in linear.all_input_nodes if node is not linear.args[0]]
    if any(order[node] > order[norm] for node in needed):
        return None
    with graph.inserting_before(norm):
        both = _call_joined(graph, norm, name, weight)
        product, residual_out = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    both.meta["val"] = (linear.meta["val"], norm.meta["val"][1])
    residual_out.meta["val"] = norm.meta["val"][1]
    _replace(linear, product)
    for user in residuals:
        user.replace_all_uses_with(residual_out)
    return name


def _join_silu(graph: fx.Graph, linear: Any, source: Any, weight: list[Any], order: dict[fx.Node, int]) -> str | None:
    value = source.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or not isinstance(value.shape[-1], int):
        return None
    match = _silu_pattern(value.shape[-1], value.dtype).match(source)
    if not match:
        return None
    (x,) = match.kwargs.values()
    with graph.inserting_before(linear):
        new = graph.call_function(ops.silu_mul_linear.default, (x, *weight))
    _replace(linear, new)
    return "silu_and_mul"


RULES: tuple[Rule, ...] = (_join_norm, _join_add_norm, _join_silu)


def _call_joined(graph: fx.Graph, norm: Any, name: str, weight: list[Any]) -> fx.Node:
    """Insert the joined operator of a norm and the linear after it."""
    *tensors, gain, eps = norm.args[: NORMS[name] + 2]
    less_one = _gain_less_one(gain, norm.args[0].meta["val"].dtype)
    stored = gain if less_one is None else less_one
    return graph.call_function(JOINED[name, less_one is not None], (*tensors, stored, eps, *weight))


def _gain_less_one(gain: Any, dtype: torch.dtype) -> Any:
    """Return the node of ``weight`` of this type where a norm multiplies by ``1 + weight`` in float32; else None."""
    if gain.target is not torch.ops.aten.add.Tensor or gain.args[1] != 1 or gain.kwargs:
        return None
    wide = gain.args[0]
    if wide.target is not torch.ops.prims.convert_element_type.default or wide.args[1] != torch.float32:
        return None
    weight = wide.args[0]
    while weight.target in ALIASES:
        weight = weight.args[0]
    return weight if weight.meta["val"].dtype == dtype else None


def _is_joinable(norm: Any, tensors: int) -> bool:
    """Return whether a node of vLLM's, with ``tensors`` before its weight, is a norm over whole rows of a matrix.

    Its weight must be one that our kernels read.
    """
    x, gain, more = norm.args[0].meta["val"], norm.args[tensors], norm.args[tensors + 2 :]
    if gain is None or norm.kwargs or any(argument is not None for argument in more) or x.dim() != 2:
        return False
    return gain.meta["val"].dtype == x.dtype or _gain_less_one(gain, x.dtype) is not None


def _replace(old: Any, new: Any) -> None:
    new.meta["val"] = old.meta["val"]
    old.replace_all_uses_with(new)


@lru_cache(maxsize=64)
def _silu_pattern(columns: int, dtype: torch.dtype) -> Any:
    """Return the graph pattern of vLLM's ``silu(gate) * up`` of this width."""
    return torch_private.pattern_of(private.silu_and_mul(), (4, 2 * columns), dtype)

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

ACTIVATIONS = tuple(getattr(torch.ops.aten, name) for name in ("mul", "silu", "gelu", "relu"))
"""Operators that end an activation function of plain arithmetic."""

CUSTOM = ("norm", "silu", "gelu", "swiglu", "relu")
"""Parts of the names of compiled operators for norms and activations, which vLLM's ``custom_ops`` enables."""

Rule: TypeAlias = Callable[[fx.Graph, Any, Any, list[Any], dict[fx.Node, int]], str | None]


@dataclass
class Joins:
    """Joins of norms and activations with the quantised linears of one graph.

    Attributes:
        linears: Number of quantised linears.
        joined: Operator of vLLM -> number of joins with a linear.
        lost: Norm or activation, with the reason why it was not joined -> their number.
    """

    linears: int = 0
    joined: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    def describe(self) -> str:
        """Describe the joins, and the failed ones, in one line.

        >>> Joins(4, Counter(fused_add_rms_norm=2, silu_and_mul=1), Counter({"rms_norm without a gain": 1})).describe()
        'fused 2 norms and 1 activation with linears; not fused: 1 rms_norm without a gain'
        """
        norms = sum(count for name, count in self.joined.items() if name in NORMS)
        counts = f"{counted(norms, 'norm')} and {counted(self.joined.total() - norms, 'activation')}"
        lost = "; ".join(f"{count} {why_not}" for why_not, count in sorted(self.lost.items()))
        return f"fused {counts} with linears" + (f"; not fused: {lost}" if lost else "")


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
        elif (why_not := explain_loss(x)) is not None:
            joins.lost[why_not] += 1
    graph.eliminate_dead_code()
    return joins


def explain_loss(x: Any) -> str | None:
    """Return the norm or activation before a linear's input ``x`` with the reason why it was not joined, or None."""
    is_shared = len(x.users) > 1
    while x.target in VIEWS:
        x = x.args[0]
        is_shared |= len(x.users) > 1
    norm = x.args[0] if x.target is operator.getitem else x
    name = _name_prologue(norm)
    if name is None:
        return None
    if is_shared:
        return f"{name} whose result has other readers"
    if (dimensions := x.meta["val"].dim()) != 2:
        return f"{name} of {dimensions} dimensions"
    if name in NORMS:
        return f"{name} {_explain_norm(norm, NORMS[name]) or 'whose linear needs values computed after it'}"
    if "allreduce" in name:
        return f"{name}, a norm with the all-reduce before it (fuse_allreduce_rms of --compilation-config)"
    if not name.startswith("aten."):
        return f"{name} as a custom operator (custom_ops)"
    if not isinstance(x.meta["val"].shape[-1], int):
        return f"{name} whose number of columns is unknown when it is compiled"
    return f"{name} that is not silu(gate) * up"


def _name_prologue(node: Any) -> str | None:
    """Return the operator of a node that computes a norm or an activation, or seems to; else None."""
    if node.op != "call_function":
        return None
    target = node.args[0] if "auto_functionalized" in str(node.target) else node.target
    norm = next((name for name in NORMS if target is private.norm_operator(name)), None)
    if norm is not None:
        return norm
    packet = getattr(target, "overloadpacket", None)
    if packet in ACTIVATIONS:
        return str(packet)
    is_ours = getattr(target, "namespace", None) in ("slidesparse", "aten", "prims", None)
    return str(packet) if not is_ours and any(part in str(packet) for part in CUSTOM) else None


def _find_source(x: Any) -> Any:
    """Return the node that computes ``x``, views aside, if it has no other reader."""
    while True:
        if len(x.users) != 1:
            return None
        if x.target not in VIEWS or x.meta["val"].shape != x.args[0].meta["val"].shape:
            return x
        x = x.args[0]


def _join_norm(graph: fx.Graph, linear: Any, source: Any, weight: list[Any], order: dict[fx.Node, int]) -> str | None:
    if source.target is not private.norm_operator("rms_norm") or _explain_norm(source, NORMS["rms_norm"]) is not None:
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
    if (
        norm.target is not private.norm_operator("fused_add_rms_norm")
        or _explain_norm(norm, NORMS["fused_add_rms_norm"]) is not None
    ):
        return None
    residuals = [user for user in norm.users if user is not source]
    if any(user.target is not operator.getitem or user.args[1] != 1 for user in residuals):
        return None
    # The new residual may be read before the linear, so everything moves up to the norm, if possible.
    needed = [node for node in linear.all_input_nodes if node is not linear.args[0]]
    if any(order[node] > order[norm] for node in needed):
        return None
    with graph.inserting_before(norm):
        both = _call_joined(graph, norm, "fused_add_rms_norm", weight)
        product, residual_out = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    both.meta["val"] = (linear.meta["val"], norm.meta["val"][1])
    residual_out.meta["val"] = norm.meta["val"][1]
    _replace(linear, product)
    for user in residuals:
        user.replace_all_uses_with(residual_out)
    return "fused_add_rms_norm"


def _join_silu(graph: fx.Graph, linear: Any, source: Any, weight: list[Any], order: dict[fx.Node, int]) -> str | None:
    value = source.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or not isinstance(value.shape[-1], int):
        return None
    pattern = _silu_pattern(value.shape[-1], value.dtype)
    match = pattern and pattern.match(source)
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


def _explain_norm(norm: Any, tensors: int) -> str | None:
    """Return the reason why our kernels do not support a node of vLLM's norm, with ``tensors`` before its weight.

    None for a norm over whole rows of a matrix, with a weight that they read.
    """
    x, gain, more = norm.args[0].meta["val"], norm.args[tensors], norm.args[tensors + 2 :]
    if gain is None:
        return "without a gain"
    if norm.kwargs or any(argument is not None for argument in more):
        return "over a part of each row"
    if x.dim() != 2:
        return f"of {x.dim()} dimensions"
    if gain.meta["val"].dtype != x.dtype and _gain_less_one(gain, x.dtype) is None:
        return f"with a gain in {gain.meta['val'].dtype} for activations in {x.dtype}"
    return None


def _replace(old: Any, new: Any) -> None:
    new.meta["val"] = old.meta["val"]
    old.replace_all_uses_with(new)


@lru_cache(maxsize=64)
def _silu_pattern(columns: int, dtype: torch.dtype) -> Any:
    """Return the graph pattern of vLLM's ``silu(gate) * up`` of this width; None in a vLLM without a definition."""
    native = private.silu_and_mul()
    return native and torch_private.pattern_of(native, (4, 2 * columns), dtype)

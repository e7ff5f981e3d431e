"""Join consecutive linears into one operator, in a graph that vLLM compiles.

After :mod:`slidesparse.integrations.vllm.fuse_norms` a decoder layer is four operators of ours between two attentions,
and each is the only reader of the one before it. For batches larger than vLLM's CUDA graphs the host calls every
operator through PyTorch's dispatcher: with one chain (:mod:`slidesparse.gemm.spec`) it does so once.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from slidesparse import ops
from slidesparse.gemm.spec import LinearSpec, parse_chain, parse_weight
from slidesparse.gemm.spec import chain_text as format_chain
from slidesparse.lifting.prologue import ADDING, NORMS, Prologue

PROLOGUES: dict[Any, Prologue] = {
    ops.linear.default: "none",
    ops.rms_norm_linear.default: "rms_norm",
    ops.add_rms_norm_linear.default: "add_rms_norm",
    ops.gemma_norm_linear.default: "gemma_norm",
    ops.add_gemma_norm_linear.default: "add_gemma_norm",
    ops.silu_mul_linear.default: "silu_mul",
}
"""Our operators -> their prologues."""


class GraphLinear(NamedTuple):
    """One of our linears in a graph: its operator's node, its tensors in a LinearSpec's order, and its ``spec``.

    ``product`` is ``node``, or the first of its two results; ``residual_out`` the second, None where nothing reads it.
    """

    node: fx.Node
    product: fx.Node
    residual_out: fx.Node | None
    tensors: list[Any]
    spec: LinearSpec

    @property
    def adds(self) -> bool:
        """Whether it adds a residual, its second argument."""
        return self.spec.prologue in ADDING


def join_chains(graph: fx.Graph) -> int:
    """Rewrite a graph in place; return the number of linears in chains."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    linears = {linear.node: linear for linear in map(_read_linear, list(graph.nodes)) if linear is not None}
    joined = 0
    while linears:
        chain = [linears.pop(next(iter(linears)))]
        while (follower := _find_follower(chain, linears, order)) is not None:
            chain.append(linears.pop(follower))
        if len(chain) > 1 and any(linear.adds for linear in chain):
            _replace(graph, chain)
            joined += len(chain)
    graph.eliminate_dead_code()
    return joined


def find_linears(graph: fx.Graph) -> list[tuple[torch.device, LinearSpec]]:
    """Return all linears of a graph, in chains or alone, with their devices."""
    linears = []
    for node in graph.nodes:
        if node.target is ops.chain.default:
            linears += [(node.args[0].meta["val"].device, spec) for spec in parse_chain(node.args[-1])]
        elif (linear := _read_linear(node)) is not None:
            linears.append((node.args[0].meta["val"].device, linear.spec))
    return linears


def _read_linear(node: Any) -> GraphLinear | None:
    prologue = PROLOGUES.get(node.target)
    if prologue is None:
        return None
    *before, tensors, scale_w, bias, weight = node.args
    gain, eps = before[-2:] if prologue in NORMS else (None, 0.0)
    product, residual_out = node, None
    if prologue in ADDING:
        results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        product, residual_out = results.get(0), results.get(1)
        if product is None or len(results) != len(node.users):
            return None
    own = [tensor for tensor in (scale_w, bias, gain) if tensor is not None]
    spec = LinearSpec(prologue, eps, scale_w is not None, bias is not None, parse_weight(weight))
    return GraphLinear(node, product, residual_out, [*tensors, *own], spec)


def _find_follower(
    chain: list[GraphLinear], linears: dict[fx.Node, GraphLinear], order: dict[fx.Node, int]
) -> fx.Node | None:
    """Return the next linear of a chain: the only reader of its product, and of its residual if it adds one."""
    readers = list(chain[-1].product.users)
    if len(readers) != 1 or readers[0] not in linears:
        return None
    after, adding = linears[readers[0]], [linear for linear in chain if linear.adds]
    x, *rest = after.node.args
    others: list[fx.Node] = []
    fx.map_arg(rest, others.append)
    if x is not chain[-1].product or x in others:
        return None
    if not adding:
        return after.node
    residual_out = adding[-1].residual_out
    readers = [] if residual_out is None else list(residual_out.users)
    if after.adds:
        return after.node if readers == [after.node] else None
    # The chain's operator takes the position of its last linear, so nothing before that may read the new residual. A
    # reader without a position is an earlier chain, whose linears still read the residual too, and have positions.
    return after.node if all(order[reader] > order[after.node] for reader in readers if reader in order) else None


def _replace(graph: fx.Graph, chain: list[GraphLinear]) -> None:
    last, adding = chain[-1], [linear for linear in chain if linear.adds]
    tensors = [tensor for linear in chain for tensor in linear.tensors]
    text = format_chain([linear.spec for linear in chain])
    arguments = (chain[0].node.args[0], adding[0].node.args[1], tensors, text)
    with graph.inserting_before(last.node):
        both = graph.call_function(ops.chain.default, arguments)
        product, residual_out = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    product.meta["val"], residual_out.meta["val"] = last.product.meta["val"], adding[-1].node.meta["val"][1]
    both.meta["val"] = (product.meta["val"], residual_out.meta["val"])
    last.product.replace_all_uses_with(product)
    if adding[-1].residual_out is not None:
        adding[-1].residual_out.replace_all_uses_with(residual_out)

"""Make linears that stand in a row one operator, in the graph that vLLM compiles.

After :mod:`slidesparse.integrations.vllm.fuse_norms` a decoder layer is four operators of ours between two attentions,
and each is the only one to read the result of the one before it. Beyond the batches that vLLM keeps CUDA graphs for,
the host calls each, through PyTorch's dispatcher: as one chain (:mod:`slidesparse.gemm.chain`) it does so once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx

from slidesparse import ops
from slidesparse.gemm.chain import Link, links_to_text, parse_links
from slidesparse.gemm.spec import parse_switch
from slidesparse.kernels.lift_variant import NORMS

FIRSTS = {
    ops.linear.default: "none",
    ops.rms_norm_linear.default: "rms_norm",
    ops.add_rms_norm_linear.default: "add_rms_norm",
    ops.silu_mul_linear.default: "silu_mul",
}
"""Our operators, and what each of them does before it multiplies."""


Unite: TypeAlias = Callable[[Sequence[Link]], Sequence[Link]]


class Part(NamedTuple):
    """A linear in a graph.

    Attributes:
        node: Its operator.
        product: What holds its product: itself, or the first of two results.
        total: What holds the new residual, where it gives one that is read.
        tensors: Its tensors, as :class:`slidesparse.gemm.chain.Link` orders them.
        link: The rest of it.
    """

    node: fx.Node
    product: fx.Node
    total: fx.Node | None
    tensors: list[Any]
    link: Link

    @property
    def adds(self) -> bool:
        """It adds a residual, its second argument."""
        return self.link.first == "add_rms_norm"


def join(graph: fx.Graph, unite: Unite = list) -> int:
    """Rewrite a graph in place.

    Args:
        graph: With our operators.
        unite: What becomes of a chain's links.

    Returns:
        How many linears stand in chains now.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    parts = {part.node: part for part in map(_part, list(graph.nodes)) if part is not None}
    joined = 0
    while parts:
        chain = [parts.pop(next(iter(parts)))]
        while (follower := _follower(chain, parts, order)) is not None:
            chain.append(parts.pop(follower))
        if len(chain) > 1 and any(part.adds for part in chain):
            _replace(graph, chain, unite)
            joined += len(chain)
    graph.eliminate_dead_code()
    return joined


def links_of(graph: fx.Graph) -> list[tuple[torch.device, Link]]:
    """All linears of a graph, in chains or alone, and where each runs."""
    found = []
    for node in graph.nodes:
        if node.target is ops.chain.default:
            found += [(node.args[0].meta["val"].device, link) for link in parse_links(node.args[-1])]
        elif (part := _part(node)) is not None:
            found.append((node.args[0].meta["val"].device, part.link))
    return found


def _part(node: Any) -> Part | None:
    first = FIRSTS.get(node.target)
    if first is None:
        return None
    *before, tensors, scale_w, bias, switch = node.args
    gain, eps = before[-2:] if first in NORMS else (None, 0.0)
    product, total = node, None
    if first == "add_rms_norm":
        results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        product, total = results.get(0), results.get(1)
        if product is None or len(results) != len(node.users):
            return None
    own = [tensor for tensor in (scale_w, bias, gain) if tensor is not None]
    link = Link(first, eps, scale_w is not None, bias is not None, parse_switch(switch))
    return Part(node, product, total, [*tensors, *own], link)


def _follower(chain: list[Part], parts: dict[fx.Node, Part], order: dict[fx.Node, int]) -> fx.Node | None:
    """The linear that may be the chain's next link: the only reader of its result, and of its residual if it adds."""
    readers = list(chain[-1].product.users)
    if len(readers) != 1 or readers[0] not in parts:
        return None
    after, adding = parts[readers[0]], [part for part in chain if part.adds]
    x, *rest = after.node.args
    others: list[fx.Node] = []
    fx.map_arg(rest, others.append)
    if x is not chain[-1].product or x in others:
        return None
    if not adding:
        return after.node
    total = adding[-1].total
    readers = [] if total is None else list(total.users)
    if after.adds:
        return after.node if readers == [after.node] else None
    # The operator stands where its last link does: what reads the new residual must come behind it. A reader without a
    # place is a chain that was made before; what it was made of still reads too, and stands no later.
    return after.node if all(order[reader] > order[after.node] for reader in readers if reader in order) else None


def _replace(graph: fx.Graph, chain: list[Part], unite: Unite) -> None:
    last, adding = chain[-1], [part for part in chain if part.adds]
    tensors, links = [tensor for part in chain for tensor in part.tensors], unite([part.link for part in chain])
    arguments = (chain[0].node.args[0], adding[0].node.args[1], tensors, links_to_text(links))
    with graph.inserting_before(last.node):
        both = graph.call_function(ops.chain.default, arguments)
        product, total = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    product.meta["val"], total.meta["val"] = last.product.meta["val"], adding[-1].node.meta["val"][1]
    both.meta["val"] = (product.meta["val"], total.meta["val"])
    last.product.replace_all_uses_with(product)
    if adding[-1].total is not None:
        adding[-1].total.replace_all_uses_with(total)

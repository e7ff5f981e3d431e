"""Join RMSNorm and SiLU with the linear behind them, in the graph that vLLM compiles.

vLLM leaves norms and activations to Inductor, which cannot look into our operator: the normed activations would go to
memory in bf16 and come back to be quantised. This pass sees the graph before Inductor does and replaces::

    rms_norm(x)              -> linear            by  rms_norm_linear
    fused_add_rms_norm(x, r) -> linear            by  add_rms_norm_linear
    silu(gate) * up          -> linear            by  silu_mul_linear

whose quantise-and-lift kernel does the norm or the activation on the way. Only a value that nothing else reads is
joined. Norms are operators of vLLM's at this point (``vllm_ir``); SiLU is plain arithmetic, found by tracing vLLM's own
definition of it.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from slidesparse import layout as columns
from slidesparse import ops
from slidesparse.base import torch_private
from slidesparse.gemm import chain, speed
from slidesparse.gemm import spec as switch
from slidesparse.integrations.vllm import LOGGER, host_bound, private
from slidesparse.integrations.vllm import fuse_chains as chains
from slidesparse.integrations.vllm.host_bound import unite
from slidesparse.integrations.vllm.status import Ledger
from slidesparse.quant import QUANTISED

KEY = private.POST_PASS
InductorPass: Any = private.inductor_pass()

PARTS = (chains, host_bound, ops, chain, speed, switch, columns)
SOURCES = [Path(file) for file in (__file__, *(part.__file__ for part in PARTS)) if file is not None]
"""This pass, the operators that it puts into graphs, and the texts and numbers that are arguments of theirs."""

LINEAR = ops.linear.default
ADD_RMS_NORM = ops.add_rms_norm_linear.default
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)

log = logging.getLogger(LOGGER)


class FusionPass(InductorPass):
    """The pass, as vLLM runs it; :mod:`slidesparse.integrations.vllm.fuse_chains` goes on where it ends.

    Args:
        ledger: What became of the layers. It is a part of the key under which vLLM keeps compiled graphs, since these
            hold what was chosen for each layer.
        fuse: False: change nothing, and only be a part of that key.
        graphed: Most tokens that vLLM has a CUDA graph for.
    """

    def __init__(self, ledger: Ledger, fuse: bool, graphed: int) -> None:
        self.ledger, self.fuse, self.graphed = ledger, fuse, graphed

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        if self.fuse:
            found, linked = fuse(graph), chains.join(graph, self._unite)
            log.debug("slidesparse joined %s, and %d linears in chains", dict(found), linked)
            self._rehearse(graph)

    def _unite(self, links: Sequence[chain.Link]) -> list[chain.Link]:
        united, last = unite(links, self.ledger.speeds, self.graphed)
        if united != list(links):
            line = "slidesparse: linears in a row stay on one backend from %d to %d tokens: the host is the slower side"
            _tell_once(line, self.graphed + 1, last)
        return united

    def _rehearse(self, graph: fx.Graph) -> None:
        if self.ledger.rehearsal is not None:
            with torch_private.outside_tracing():
                for device, link in chains.links_of(graph):
                    self.ledger.rehearsal.lift(link.first, link.weight, device)

    def uuid(self) -> str:
        """A key for caches: all choices, and the sources of what a compiled graph holds."""
        outcomes = {name: outcome.text for name, outcome in self.ledger.outcomes.items()}
        united = {"graphed": self.graphed, "speeds": sorted(map(str, self.ledger.speeds.items()))}
        source = [path.read_text(encoding="utf-8") for path in SOURCES]
        key: str = self.hash_dict({"source": source, "fuse": self.fuse, "outcomes": outcomes, "united": united})
        return key


@lru_cache  # a model has as many chains as layers
def _tell_once(line: str, *values: int) -> None:
    log.info(line, *values)


def install(compilation_config: Any, ledger: Ledger, fuse: bool) -> None:
    """Give vLLM the pass; a second call does nothing, and a user's own pass stays."""
    passes = compilation_config.inductor_compile_config
    fuse = fuse and torch_private.can_match_graphs()
    if KEY not in passes:
        passes[KEY] = FusionPass(ledger, fuse, max(compilation_config.cudagraph_capture_sizes or [0]))
    elif not isinstance(passes[KEY], FusionPass):
        log.warning("slidesparse: norms and activations are not joined with linears, since %s is taken", KEY)


def fuse(graph: fx.Graph) -> Counter[str]:
    """Rewrite a graph in place.

    Returns:
        How often each operator was put in.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    found: Counter[str] = Counter()
    linear: Any
    for linear in graph.find_nodes(op="call_function", target=LINEAR):
        x, *weight = linear.args
        if switch.parse_switch(weight[-1]).weight_dtype not in QUANTISED:
            continue
        source = _only_source(x)
        if source is None:
            continue
        for rule in RULES:
            joined = rule(graph, linear, source, weight, order)
            if joined is not None:
                found[joined] += 1
                break
    graph.eliminate_dead_code()
    return found


def _only_source(x: Any) -> Any:
    """What computes ``x``, views aside, if its result has no other reader."""
    while True:
        if len(x.users) != 1:
            return None
        if x.target not in VIEWS or x.meta["val"].shape != x.args[0].meta["val"].shape:
            return x
        x = x.args[0]


def _behind_norm(graph: fx.Graph, linear: Any, source: Any, weight: list[Any], order: dict[fx.Node, int]) -> str | None:
    if source.target is not private.norm_operator("rms_norm") or not _plain(source, 1):
        return None
    with graph.inserting_before(linear):
        new = graph.call_function(ops.rms_norm_linear.default, (*source.args[:3], *weight))
    _replace(linear, new)
    return "rms_norm"


def _behind_add_norm(
    graph: fx.Graph, linear: Any, source: Any, weight: list[Any], order: dict[fx.Node, int]
) -> str | None:
    if source.target is not operator.getitem or source.args[1] != 0:
        return None
    norm = source.args[0]
    if norm.target is not private.norm_operator("fused_add_rms_norm") or not _plain(norm, 2):
        return None
    # The new residual may be read before the linear, so everything moves up to the norm, if it can.
    needed = [node for node in linear.all_input_nodes if node is not linear.args[0]]
    if any(order[node] > order[norm] for node in needed):
        return None
    with graph.inserting_before(norm):
        both = graph.call_function(ADD_RMS_NORM, (*norm.args[:4], *weight))
        product, total = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    both.meta["val"] = (linear.meta["val"], norm.meta["val"][1])
    total.meta["val"] = norm.meta["val"][1]
    _replace(linear, product)
    for user in [user for user in norm.users if user is not source]:
        user.replace_all_uses_with(total)
    return "fused_add_rms_norm"


def _behind_silu(graph: fx.Graph, linear: Any, source: Any, weight: list[Any], order: dict[fx.Node, int]) -> str | None:
    value = source.meta["val"]
    pattern = _silu_pattern(value.shape[-1], value.dtype)
    match = pattern and pattern.match(source)
    if not match or value.dim() != 2:
        return None
    (x,) = match.kwargs.values()
    with graph.inserting_before(linear):
        new = graph.call_function(ops.silu_mul_linear.default, (x, *weight))
    _replace(linear, new)
    return "silu_and_mul"


RULES = (_behind_norm, _behind_add_norm, _behind_silu)


def _plain(norm: Any, tensors: int) -> bool:
    """A norm over whole rows of a matrix, with a gain of their type: what our kernels do."""
    gain, more = norm.args[tensors], norm.args[tensors + 2 :]
    if gain is None or norm.kwargs or any(argument is not None for argument in more):
        return False
    x: torch.Tensor = norm.args[0].meta["val"]
    return x.dim() == 2 and bool(gain.meta["val"].dtype == x.dtype)


def _replace(old: Any, new: Any) -> None:
    new.meta["val"] = old.meta["val"]
    old.replace_all_uses_with(new)


@lru_cache(maxsize=64)
def _silu_pattern(columns: int, dtype: torch.dtype) -> Any:
    """What vLLM's ``silu(gate) * up`` with so many columns becomes in a graph."""
    native = private.silu_and_mul()
    return native and torch_private.pattern_of(native, (4, 2 * columns), dtype)

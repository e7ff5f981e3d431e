"""Where the host is the slower side, a chain of linears stays on one backend.

``auto`` picks for each layer what the GPU runs fastest, so some links of a chain may run dense and others not. Beyond
the batches that vLLM keeps CUDA graphs for, the host launches kernel by kernel, and changing the backend costs it more
than all the rest of a link: a dense link makes tensors of its own and goes through PyTorch's dispatcher once more, and
each part of the chain around it is a chain of its own. As long as the GPU has done the whole chain before the host has
launched it and what stands around it, the few microseconds that a dense link saves the GPU are worth nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slidesparse.gemm.chain import Link
from slidesparse.gemm.speed import DENSE, LayerSpeed

HOST_US = 85.0
"""What a linear costs the host in vLLM, a quarter of a decoder layer with its attention and all else.

Llama-3.2-1B (16 layers, vLLM 0.22) takes 6.4 ms for 1024 tokens where no link runs dense and 7.9 where one of four
does, some 2 of them before and behind the layers (results/h200/vllm/one-backend.txt)."""


def unite(links: Sequence[Link], speeds: Mapping[str, LayerSpeed], graphed: int) -> list[Link]:
    """The links with new routes: one backend while the host is the slower side.

    Args:
        links: Of a chain.
        speeds: Switch of a weight, as text -> what was measured of it.
        graphed: Most tokens that vLLM has a CUDA graph for.

    Returns:
        The same links where nothing is known of one of them, or where they have no packed form in common.
    """
    layers = [speeds[text] for link in links if (text := link.weight.to_text()) in speeds]
    packed = set.intersection(*({form.backend for form in link.weight.forms} - {DENSE} for link in links))
    if len(layers) < len(links) or len(packed) != 1:
        return list(links)
    (backend,) = packed
    last = _waits_for_the_host(links, layers, backend, graphed)
    if last == graphed:
        return list(links)
    return [replace(link, weight=link.weight.through(backend, graphed + 1, last)) for link in links]


def describe(united: Sequence[Link], graphed: int) -> str:
    """For people: what :func:`unite` has changed."""
    backend = united[0].weight.pick(graphed + 1)[0].backend
    ends = [route.first - 1 for link in united for route in link.weight.routes if route.first > graphed + 1]
    to = f" to {min(ends)}" if ends else " on"
    return f"slidesparse: linears in a row all run on {backend} from {graphed + 1}{to} tokens: the host is slower there"


def _waits_for_the_host(links: Sequence[Link], layers: Sequence[LayerSpeed], backend: str, graphed: int) -> int:
    """Most tokens, of those that were measured, for which the GPU is done before the host."""
    last = graphed
    for tokens in sorted(set.intersection(*(set(layer.tokens) for layer in layers))):
        if tokens <= graphed:
            continue
        both = list(zip(links, layers, strict=True))
        now = [layer.at(link.weight.pick(tokens)[0].backend, tokens) for link, layer in both]
        then = [layer.at(backend, tokens) for layer in layers]
        if None in (*now, *then) or sum(us for us in now if us) > HOST_US * len(links):
            break
        last = tokens
    return last

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

HOST_US = 75.0
"""What a chain may take the GPU, a link: less than the host needs for a decoder layer, a quarter of it.

Llama-3.2-1B in vLLM 0.22 takes 7.9 ms for 1024 tokens where one link of four runs dense, about 2 of them before and
behind its 16 layers: 370 us a layer. The GPU has some 50 of them to do that are no linear, so 80 are left for each of
four; a quicker host needs less (results/h200/vllm/one-backend.txt)."""


def unite(links: Sequence[Link], speeds: Mapping[str, LayerSpeed], graphed: int) -> tuple[list[Link], int]:
    """New routes for the links of a chain: one backend while the host is the slower side.

    Args:
        links: Of a chain.
        speeds: Switch of a weight, as text -> what was measured of it.
        graphed: Most tokens that vLLM has a CUDA graph for.

    Returns:
        The links, and up to how many tokens they stay on one backend. They are the same, up to ``graphed``, where
        nothing is known of one of them, or where they have no packed form in common.
    """
    layers = [speeds[text] for link in links if (text := link.weight.to_text()) in speeds]
    packed = set.intersection(*({form.backend for form in link.weight.forms} - {DENSE} for link in links))
    if len(layers) < len(links) or len(packed) != 1:
        return list(links), graphed
    (backend,) = packed
    last = _waits_for_the_host(layers, backend, graphed)
    if last == graphed:
        return list(links), graphed
    return [replace(link, weight=link.weight.through(backend, graphed + 1, last)) for link in links], last


def _waits_for_the_host(layers: Sequence[LayerSpeed], backend: str, graphed: int) -> int:
    """Most tokens, of those that were measured, for which the GPU has done them on this backend before the host has."""
    last = graphed
    for tokens in sorted(set.intersection(*(set(layer.tokens) for layer in layers))):
        if tokens > graphed:
            times = [layer.at(backend, tokens) for layer in layers]
            if None in times or sum(us for us in times if us) > HOST_US * len(layers):
                break
            last = tokens
    return last

"""Keep a chain of linears on one backend while the host, not the GPU, limits the speed.

``auto`` chooses for each linear the backend that is fastest on the GPU, so a chain may hold sparse and dense linears.
For batches larger than vLLM's CUDA graphs the host launches kernel by kernel. There a change of the backend costs it
more than the rest of a linear: a dense linear allocates its own tensors, passes PyTorch's dispatcher once more, and
splits the chain into pieces with a call each. While the GPU finishes the whole chain before the host has launched it,
the microseconds that a dense linear saves on the GPU are lost, so the chain stays on one backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slidesparse.gemm.spec import LinearSpec
from slidesparse.gemm.speed import DENSE_FORM, LayerSpeed

HOST_US = 75.0
"""Host time of one linear of a chain, in microseconds: a quarter of a decoder layer's.

Llama-3.2-1B in vLLM 0.22 takes 7.9 ms for 1024 tokens where one linear of four runs dense, about 2 of them before and
after its 16 layers: 370 us a layer. Some 50 of these the GPU spends on kernels that are no linears, so 80 are left for
each of the four; a faster host needs less (results/h200/vllm/one-backend.txt)."""


def keep_one_backend(
    linears: Sequence[LinearSpec], speeds: Mapping[str, LayerSpeed], graphed: int, host_us: float = HOST_US
) -> tuple[list[LinearSpec], int]:
    """Route all linears of a chain through one backend while the host is slower than the GPU.

    Args:
        linears: The linears of a chain.
        speeds: Spec of a weight, as text -> its measured times.
        graphed: Tokens of vLLM's largest CUDA graph, up to which nothing changes.
        host_us: Host time of one linear in microseconds; 0 changes nothing.

    Returns:
        The linears, and the most tokens for which they stay on one backend: unchanged, with ``graphed``, where one of
        them has no measured times, or where they do not share exactly one packed form.
    """
    layers = [speeds[text] for linear in linears if (text := linear.weight.text) in speeds]
    packed = set.intersection(*({form.backend for form in linear.weight.forms} - {DENSE_FORM} for linear in linears))
    if len(layers) < len(linears) or len(packed) != 1:
        return list(linears), graphed
    (backend,) = packed
    last = _find_last_host_bound(layers, backend, graphed, host_us)
    if last == graphed:
        return list(linears), graphed
    return [replace(linear, weight=linear.weight.through(backend, graphed + 1, last)) for linear in linears], last


def _find_last_host_bound(layers: Sequence[LayerSpeed], backend: str, graphed: int, host_us: float) -> int:
    """Return the largest measured number of tokens for which the GPU runs the chain faster than the host launches."""
    last = graphed
    for tokens in sorted(set.intersection(*(set(layer.tokens) for layer in layers))):
        if tokens > graphed:
            times = [layer.at(backend, tokens) for layer in layers]
            if None in times or sum(us for us in times if us) > host_us * len(layers):
                break
            last = tokens
    return last

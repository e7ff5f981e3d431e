"""Let attention between CUDA graphs split its work as it would without them.

A captured grid cannot follow the batch. So for every batch up to the largest graph vLLM lets FlashAttention 3 split the
keys of a request into as many as 32 parts (``v1/attention/backends/flash_attn.py``). The sums of all parts lie in
memory, 32 float32 numbers for each of the queries, and one more kernel adds them. Graphs that hold attention need that:
those of decoding steps, with as many tokens as there are sequences. Attention of prompts runs between graphs and does
not. With graphs of 2048 tokens it would take a gigabyte of a 7B model all the same, which vLLM does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from slidesparse.integrations.vllm.graph_sizes import decoding_tokens, mixed_graphs, takes_larger_graphs
from slidesparse.integrations.vllm.private import attention_builder


@functools.lru_cache  # once a process
def cut_less_between_graphs() -> None:
    """Limit the batches whose attention is split for a graph's sake, in engines of our models."""
    owner = attention_builder()
    if owner is not None:
        owner.__init__ = _bounded(owner.__init__)


def _bounded(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def make_bounded(self: Any, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        config, largest = self.vllm_config, self.max_cudagraph_size
        if largest and takes_larger_graphs(config) and mixed_graphs(config.compilation_config) != "FULL":
            self.max_cudagraph_size = min(largest, decoding_tokens(config))

    return make_bounded

"""Capture CUDA graphs beyond vLLM's largest one, for batches in which the host would be slower than the GPU.

vLLM captures batches of up to 512 tokens and launches larger ones kernel by kernel. A loaded server mostly runs 300 to
2000 tokens a step. On an H200 the host takes some 0.7 ms a decoder layer for that. The GPU takes less for a layer of
Qwen2.5-7B up to about 1024 tokens at 6:8, and up to 2048 at 2:4: there graphs of 1024 to 2048 tokens save 4 % of a
mixed load, and a third of the longest waits between tokens. At 6:8 they gain nothing with a fast host
(docs/log/served-models.md). The slower the host, the more they gain.

A user's own setting (``--compilation-config`` with ``max_cudagraph_capture_size`` or ``cudagraph_capture_sizes``)
comes first, and ``{"slidesparse": {"graphs": "vllm"}}`` leaves all sizes to vLLM.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from slidesparse.base.log import log_once
from slidesparse.integrations import NAME
from slidesparse.integrations.vllm import LOGGER
from slidesparse.integrations.vllm.options import Options
from slidesparse.integrations.vllm.private import attention_builder, vllm_config_class
from slidesparse.models.config_keys import MARKER_KEY

HOST_BOUND = 480_000_000_000
"""Tokens times weights of a decoder layer up to which the host may be the slower one: 2048 of Qwen2.5-7B on an H200."""

MOST = 4096
"""Tokens of the largest graph, whatever the model: all graphs of a start-up share 15 seconds with measuring."""

PER_OCTAVE = 16
"""Graphs an octave: a batch is padded to the next one, by 3 % at most on average."""

UNASKED = (
    f"slidesparse: %s is pruned, but served dense. For BF16 and FP16 vLLM asks no plugin by itself:"
    f' add --quantization {NAME}, or for a draft "quantization": "{NAME}" in --speculative-config'
)

log = logging.getLogger(LOGGER)


def layer_weights(text_config: Any) -> int | None:
    """Return the number of weights in the linears of a dense decoder layer; None where a size is unknown.

    >>> from types import SimpleNamespace
    >>> layer_weights(SimpleNamespace(hidden_size=3584, intermediate_size=18944, num_attention_heads=28,
    ...     num_key_value_heads=4)) // 10**6
    233
    """
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    known: list[Any] = [getattr(text_config, name, None) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in known):
        return None
    hidden, intermediate, heads = known
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    head = getattr(text_config, "head_dim", None) or hidden // heads
    return int(3 * hidden * intermediate + 2 * hidden * head * (heads + kv_heads))


def sizes_beyond(last: int, tokens: int) -> list[int]:
    """Return the sizes of graphs after vLLM's last one, up to a number of tokens.

    >>> sizes_beyond(512, 640), len(sizes_beyond(512, 2048))
    ([544, 576, 608, 640], 32)
    """
    sizes: list[int] = []
    size = max(last, PER_OCTAVE)
    while True:
        size += max(8, (1 << (size.bit_length() - 1)) // PER_OCTAVE)
        if size > tokens:
            return sizes
        sizes.append(size)


def sizes_for(text_config: Any, gpus: int, batch: int, last: int) -> list[int]:
    """Return the useful sizes of graphs beyond vLLM's largest one; none where the layer's size is unknown.

    ``gpus`` share a layer; ``batch`` and ``last`` are the tokens of vLLM's largest batch and of its own largest graph.
    """
    weights = layer_weights(text_config)
    if weights is None:
        return []
    return sizes_beyond(last, min(HOST_BOUND // max(1, weights // gpus), MOST, batch))


def wanted_sizes(vllm_config: Any) -> list[int]:
    """Return the sizes to add to a configuration."""
    own = vllm_config.compilation_config.cudagraph_capture_sizes
    if not own or vllm_config.speculative_config is not None:  # its sizes are multiples of the draft's
        return []
    if mixed_graphs(vllm_config.compilation_config) != "PIECEWISE":  # no graphs of prompts, or a user's, with attention
        return []
    gpus, batch = vllm_config.parallel_config.tensor_parallel_size, vllm_config.scheduler_config.max_num_batched_tokens
    return sizes_for(vllm_config.model_config.hf_text_config, gpus, batch, own[-1])


def mixed_graphs(compilation_config: Any) -> str:
    """Return vLLM's capture mode for batches with prompts: ``PIECEWISE``, between attentions; ``FULL``; or ``NONE``."""
    return str(compilation_config.cudagraph_mode.mixed_mode())


def decoding_tokens(vllm_config: Any) -> int:
    """Return the tokens of the largest decoding step: one of each sequence, and those of its draft."""
    draft = vllm_config.speculative_config
    tokens: int = 1 + (draft.num_speculative_tokens if draft is not None else 0)
    return tokens * int(vllm_config.scheduler_config.max_num_seqs)


def capture_more() -> None:
    """Add larger graphs to vLLM's configuration of our models; called once a process.

    On a GPU every configuration sets its sizes, so pruned models that vLLM serves dense are noticed here too.
    """
    owner = vllm_config_class()
    owner._set_cudagraph_sizes = _with_more(owner._set_cudagraph_sizes)


def _with_more(set_sizes: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(set_sizes)
    def set_more(self: Any) -> None:
        warn_if_unasked(self.model_config)
        compilation = self.compilation_config
        given = compilation.max_cudagraph_capture_size, compilation.cudagraph_capture_sizes
        set_sizes(self)
        if given != (None, None) or not takes_larger_graphs(self):
            return
        more = wanted_sizes(self)
        if more:
            compilation.cudagraph_capture_sizes = [*compilation.cudagraph_capture_sizes, *more]
            compilation.max_cudagraph_capture_size = None
            set_sizes(self)  # as if a user had set them
            log.info(
                "slidesparse: CUDA graphs for batches of up to %d tokens, %d more than vLLM's", more[-1], len(more)
            )

    return set_more


def warn_if_unasked(model_config: Any) -> None:
    """Warn of a model with our marker that vLLM loads without any quantisation method.

    vLLM calls methods only for checkpoints with a ``quantization_config``, which BF16 and FP16 ones lack.
    """
    if model_config is None or model_config.quantization is not None:
        return
    if getattr(model_config.hf_config, MARKER_KEY, None) is not None:
        log_once(UNASKED % model_config.model, logging.WARNING, log)


def takes_larger_graphs(vllm_config: Any) -> bool:
    """Return whether an engine is ours, and its graphs are not left to vLLM."""
    model = vllm_config.model_config
    if model is None or model.quantization != NAME:
        return False
    return Options.parse(vllm_config.additional_config).graphs == "auto"


@functools.lru_cache  # once a process
def cut_less_between_graphs() -> None:
    """Limit the batches whose attention is split for a graph's sake, in engines of our models.

    A captured grid cannot follow the batch. So for every batch up to the largest graph vLLM lets FlashAttention 3 split
    the keys of a request into as many as 32 parts (``v1/attention/backends/flash_attn.py``). The sums of all parts lie
    in memory, 32 float32 numbers for each query, and one more kernel adds them. Graphs with attention need that: those
    of decoding steps, with as many tokens as there are sequences. Attention of prompts runs between graphs and does
    not. With graphs of 2048 tokens the sums would still take a gigabyte for a 7B model, which vLLM does not count.
    """
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

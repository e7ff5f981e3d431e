"""Names of vLLM outside its interface for plugins; no other module uses such names.

That interface is the registry of methods, their base classes, linear layers and their methods, compressed-tensors'
schemes, the current configuration and the platform. All other names are imported when they are first needed;
:func:`require_names` finds at registration whether a release has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from slidesparse.base.python_stack import with_room

POST_PASS = "post_grad_custom_post_pass"
"""The key of another's pass in vLLM's configuration of Inductor."""

LOOPS = (
    ("vllm.v1.engine.core", "EngineCoreProc", "run_busy_loop"),
    ("vllm.v1.engine.core", "DPEngineCoreProc", "run_busy_loop"),
    ("vllm.v1.executor.multiproc_executor", "WorkerProc", "worker_busy_loop"),
)
"""Module, class and method of each serving loop: that of an engine on one GPU, and that of each worker on several GPUs.
The scheduler of several GPUs has no model and stays as it is. Each loop begins after the model is loaded."""


def require_names() -> None:
    """Look all names up that compiling and capturing need; an ImportError or AttributeError in a vLLM without them."""
    inductor_pass()
    silu_and_mul()
    for name in ("rms_norm", "fused_add_rms_norm"):
        norm_operator(name)
    getattr(vllm_config_class(), "_set_cudagraph_sizes")  # noqa: B009 # the lookup is the purpose


def inductor_pass() -> Any:
    """Return the base class of passes over a compiled graph, by which vLLM's cache of graphs knows our choices."""
    from vllm.compilation.passes.inductor_pass import InductorPass

    return InductorPass


def silu_and_mul() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return vLLM's definition of ``silu(gate) * up`` in plain torch."""
    from vllm.model_executor.layers.activation import SiluAndMul

    native: Callable[[torch.Tensor], torch.Tensor] = SiluAndMul.forward_native
    return native


def norm_operator(name: str) -> Any:
    """Return one of vLLM's operators for norms."""
    import vllm.ir.ops  # noqa: F401 # defines them

    return getattr(torch.ops.vllm_ir, name).default


def vllm_config_class() -> Any:
    """Return the class of vLLM's configuration, whose method sets the sizes of CUDA graphs."""
    from vllm.config.vllm import VllmConfig

    return VllmConfig


def attention_builder() -> Any:
    """Return the class that prepares batches for FlashAttention 3, with the limit of splits for a graph's sake.

    None without a Hopper GPU.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() and current_platform.is_device_capability(90)):
        return None
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    return FlashAttentionMetadataBuilder


def reads_weight_itself(layer: object) -> bool:
    """Return whether a linear reads its own ``weight``, without its method.

    ``DeepSeekV2FusedQkvAProjLinear`` does in BF16 at DeepSeek-V3's sizes; a layer that lacks the name does not.
    """
    return bool(getattr(layer, "_use_min_latency_gemm", False))


@contextmanager
def given_back_workspace() -> Iterator[None]:
    """Free the memory that vLLM's kernels allocate in a block for all layers to share.

    vLLM would keep it (``v1/worker/workspace.py``): for 16384 tokens of Qwen3-30B-A3B's experts a gigabyte, of no use
    once they are packed. Layers that need it allocate it again.
    """
    manager = getattr(sys.modules.get("vllm.v1.worker.workspace"), "_manager", None)
    shared: list[torch.Tensor | None] = getattr(manager, "_current_workspaces", [])
    before = list(shared)
    try:
        yield
    finally:
        shared[:] = before


@lru_cache(maxsize=1)
def add_stack_room() -> None:
    """Make the imported :data:`LOOPS` of this process start on a large chunk of stack.

    Whether a loop happens to run at the end of a chunk (:mod:`slidesparse.base.python_stack`) depends on every frame
    above it, and our model's frames differ from stock vLLM's: one of them holds the weights of all layers as variables.
    Room around every step, not around the loop, would cost 0.1 ms a step.
    """
    for module, name, loop in LOOPS:
        owner: Any = getattr(sys.modules.get(module), name, None)
        if hasattr(owner, loop):
            setattr(owner, loop, with_room(getattr(owner, loop)))

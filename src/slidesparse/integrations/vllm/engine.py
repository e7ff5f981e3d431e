"""Prepare an engine for one of our models, once, before the model's first layer is built."""

from __future__ import annotations

from typing import Any

from slidesparse.integrations.vllm.attention import cut_less_between_graphs
from slidesparse.integrations.vllm.graph_pass import install_pass
from slidesparse.integrations.vllm.graph_sizes import graphed_tokens
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.private import add_stack_room
from slidesparse.integrations.vllm.refused import require_supported


def prepare_engine(vllm_config: Any, serve_dense: str) -> ModelState:
    """Create a model's state, and change what its process does with the model.

    The changes: vLLM's compilation gets our graph pass, attention between larger graphs is not split for their sake,
    and busy loops get room on Python's stack, once a process however many models it holds.

    Raises:
        InputError: An unknown option.
        UnsupportedError: An option of vLLM's that sparse layers cannot follow.
    """
    require_supported(vllm_config, serve_dense)
    state = ModelState.create(vllm_config)
    install_pass(vllm_config.compilation_config, state, graphed_tokens(vllm_config))
    cut_less_between_graphs()
    add_stack_room()
    return state

"""State shared by the layers of one model and the pass over its graphs."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from slidesparse.base.device import mostly_free
from slidesparse.base.torch_private import can_match_graphs
from slidesparse.integrations import NAME
from slidesparse.integrations.vllm import LOGGER
from slidesparse.integrations.vllm.options import Options, find_misplaced
from slidesparse.integrations.vllm.status import ModelStatus
from slidesparse.integrations.warmup import WarmUp
from slidesparse.layer.linear import SlideLinear
from slidesparse.layer.settle import Chooser
from slidesparse.tuning.at_load import LoadTuner

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM's environment variable for results that do not depend on the batch."""

NOT_INVARIANT = "left to vLLM: VLLM_BATCH_INVARIANT is set, and only INT8 products are the same in every batch"

STOCK_COMPILE = 1
"""vLLM's ``CompilationMode`` in which its runner calls ``torch.compile`` without options of Inductor's."""

COMPARED = ("dflash", "dspark", "eagle", "eagle3")
"""vLLM's kinds of drafts on hidden states that may have an output embedding of their own."""

MISPLACED = "slidesparse: %s is ignored outside of the key slidesparse in --additional-config: write '%s'"

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
"""Types in which 6:8 takes a tenth longer than dense on prompts (results/h100/serve/qwen2.5-7b-bf16.jsonl), so that
dense copies are worth their memory where there is plenty."""

log = logging.getLogger(LOGGER)


@dataclass
class ModelState:
    """Options, outcomes and choices of one model.

    Attributes:
        options: The user's options; ``fuse`` is off where the model is not compiled.
        status: The outcome of every layer.
        tuner: Measures a layer of each kind when it is loaded; None with ``tune`` off or without a model.
        warmup: Runs a layer of each kind when it is loaded; None for layers that are built without a model.
        specs: Name of a layer on our operators -> the spec of its weight, as text: everything that a compiled graph
            keeps of the weight (sizes, column order, backends).
        adapters: The engine may put LoRA adapters around layers.
        batch_invariant: Results of a request must not depend on its batch.
        heads_compared: See :func:`compares_heads`.
        room: Whether there is room for dense copies of :data:`SIXTEEN_BITS`; None: not checked yet.
    """

    options: Options = field(default_factory=Options)
    status: ModelStatus = field(default_factory=ModelStatus)
    tuner: LoadTuner | None = None
    warmup: WarmUp | None = None
    specs: dict[str, str] = field(default_factory=dict)
    adapters: bool = False
    batch_invariant: bool = False
    heads_compared: bool = False
    room: bool | None = None

    @classmethod
    def create(cls, vllm_config: Any) -> ModelState:
        """Read the user's options (:meth:`Options.parse`) and the model's largest batch from vLLM's configuration."""
        options = Options.parse(vllm_config.additional_config)
        log.info("slidesparse: %s", options)
        misplaced = find_misplaced(vllm_config.additional_config)
        if misplaced:
            log.warning(MISPLACED, ", ".join(misplaced), json.dumps({NAME: misplaced}, default=str))
        why_not = why_not_joined(vllm_config)
        if options.fuse and why_not is not None:
            log.info("slidesparse: no norm or activation is fused with a linear: %s", why_not)
            options = replace(options, fuse=False)
        model = vllm_config.model_config
        if model is None:
            return cls(options)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        status = ModelStatus(part=vllm_config.parallel_config.pipeline_parallel_size > 1)
        state = cls(options, status, options.tuner(most, model.dtype, log), WarmUp(most, model.dtype))
        state.adapters, state.batch_invariant = vllm_config.lora_config is not None, is_batch_invariant()
        state.heads_compared = compares_heads(vllm_config)
        return state

    def why_left(self, dtype: torch.dtype) -> str | None:
        """Return the reason to leave weights of a type to vLLM, or None.

        Tiles and splits of a product depend on the number of tokens, and so does the order of sums in FP8 and floats.
        """
        return NOT_INVARIANT if self.batch_invariant and dtype != torch.int8 else None

    def chooser_of(self, weight: torch.Tensor) -> Chooser:
        """Return the chooser of a linear's backends; the first linear in 16 bits decides on dense copies for all."""
        fallback = self.options.fallback
        if fallback == "dense" and weight.dtype in SIXTEEN_BITS:
            if self.room is None:
                self.room = mostly_free(weight.device)
            fallback = "fastest" if self.room else fallback
        return Chooser(self.options.backend, fallback, self.tuner)

    def add_layer(self, name: str, layer: SlideLinear) -> None:
        """Keep the spec of a packed layer."""
        self.specs[name] = layer.spec

    def cache_key(self) -> dict[str, object]:
        """Return all parts of this state that a compiled graph depends on, for JSON."""
        return {
            "options": asdict(self.options),
            "outcomes": {name: outcome.text for name, outcome in self.status.outcomes.items()},
            "specs": self.specs,
        }


def is_batch_invariant() -> bool:
    """Return whether :data:`BATCH_INVARIANT` is set, as vLLM reads it."""
    return bool(int(os.environ.get(BATCH_INVARIANT, "0")))


def compares_heads(vllm_config: Any) -> bool:
    """Return whether vLLM may compare the output embeddings of model and draft by their weights, to share one.

    Its second runner does so after loading (``v1/worker/gpu/spec_decode``); the first only checks for weights.
    """
    draft = vllm_config.speculative_config
    return draft is not None and draft.method in COMPARED and bool(vllm_config.use_v2_model_runner)


def why_not_joined(vllm_config: Any) -> str | None:
    """Return the reason why no graph of the model can be rewritten, or None where vLLM compiles it with Inductor."""
    if vllm_config.model_config is None:
        return "layers are built without a model"
    if vllm_config.model_config.enforce_eager:
        return "the model runs eagerly (--enforce-eager)"
    if vllm_config.compilation_config.mode == 0 or vllm_config.compilation_config.backend == "eager":
        return "the model is not compiled (--compilation-config)"
    if vllm_config.compilation_config.mode == STOCK_COMPILE:
        return "vLLM compiles it without passes over its graphs (mode of --compilation-config)"
    if is_batch_invariant():
        return "VLLM_BATCH_INVARIANT is set, and a fused norm sums in another order where tokens are few"
    if not can_match_graphs():
        return "this torch has another interface for patterns in graphs"
    return None

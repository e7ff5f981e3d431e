"""Tied parameters, decided by a checkpoint's tensors: its config may tie some that differ.

transformers compares stored tensors that are tied, and ties only equal ones. vLLM and SGLang trust the config and skip
the output embedding. So a new checkpoint's config agrees with its tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slidesparse.base.log import log_once
from slidesparse.base.traced_tensor import Origin, replay
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.tensor_names import TensorNames
from slidesparse.models.parts import text_config


def settle_ties(model: Any, names: TensorNames, checkpoint: Checkpoint) -> TensorNames:
    """Return the names with ties of equal tensors; differing ones get parameters of their own in the model."""
    origins = names.origins
    pairs = {name: other for name, other in model.all_tied_weights_keys.items() if {name, other} <= origins.keys()}
    untied = [name for name, other in pairs.items() if not _equal(origins[name], origins[other], checkpoint)]
    for name in untied:
        text = f"{name} differs from {pairs[name]}, and {checkpoint.path}/config.json ties them: both are kept, as in"
        log_once(f"{text} transformers; vLLM and SGLang go by config.json", logging.WARNING)
        place, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(place), leaf, nn.Parameter(torch.empty_like(model.get_parameter(name))))
    tied = {name: other for name, other in pairs.items() if name not in untied}
    return replace(names, tied={**names.tied, **tied}, untied=tuple(untied))


def _equal(one: Origin, other: Origin, checkpoint: Checkpoint) -> bool:
    a, b = replay(one, checkpoint.tensor), replay(other, checkpoint.tensor)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))  # floats of 8 bits have no equal


def config_as_stored(config: Mapping[str, Any], model: Any, names: TensorNames) -> dict[str, Any]:
    """Return config.json without a tie of differing tensors.

    The key stays where it ties other parameters, and in encoder-decoders: T5 scales its outputs by it.
    """
    if not names.untied or names.tied or getattr(model.config, "is_encoder_decoder", False):
        return dict(config)
    text, no_tie = text_config(model.config), {"tie_word_embeddings": False}
    parts = [key for key in getattr(model.config, "sub_configs", ()) if getattr(model.config, key, None) is text]
    return {**config, **{key: {**config[key], **no_tie} for key in parts if key in config}, **no_tie}

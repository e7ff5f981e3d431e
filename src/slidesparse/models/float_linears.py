"""Find the linears that vLLM keeps in a float type: it builds them without scales."""

from __future__ import annotations

from torch import nn

from slidesparse.models.parts import output_embedding, text_config

MODEL_TYPES = frozenset(
    {
        *("bamba", "bloom", "chameleon", "dory", "falcon_h1", "falcon_mamba", "gpt_bigcode", "gpt_oss", "jamba"),
        *("mamba", "mamba2", "minimax", "nemotron_h", "opt", "persimmon", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen3_next", "zamba2"),
    }
)
"""Models whose ``ParallelLMHead`` has no quant_config in vLLM 0.22.1 or in 0.33.0 (model_executor/models)."""

HEAD_IN_FLOATS = "an output embedding that vLLM, or one of its releases, holds in floats"

TASKS = ("Classification", "QuestionAnswering", "MultipleChoice", "Prediction")
"""Ends of the names of classes whose heads answer with scores."""

HEAD_OF_TASK = "a head of scores, which vLLM holds in floats"

LINEARS = ("in_proj", "x_proj", "dt_proj", "out_proj")
"""The linears of a mixer of Mamba's first version (vLLM's model_executor/layers/mamba/mamba_mixer.py makes all without
a quant_config). Mixers of the second version have neither ``x_proj`` nor ``dt_proj``."""

IN_FLOATS = "a part of a first Mamba mixer, which vLLM holds in floats"


def float_heads(model: nn.Module) -> dict[str, str]:
    """Return the output embedding of a transformers model, with the reason, where vLLM cannot read it in 8 bits."""
    if getattr(text_config(getattr(model, "config", None)), "model_type", None) not in MODEL_TYPES:
        return {}
    head = output_embedding(model)
    return {name: HEAD_IN_FLOATS for name, module in model.named_modules() if module is head}


def heads_of_tasks(model: nn.Module) -> dict[str, str]:
    """Return the linears of a classifier's head, with the reason: whatever their size, vLLM builds them without scales.

    They are all linears of such a class of transformers that are not in its base model
    (vLLM's model_executor/models/adapters.py, and bert.py, roberta.py and modernbert.py).
    """
    base = getattr(model, "base_model", model)
    if base is model or not type(model).__name__.endswith(TASKS):
        return {}
    inside = {id(one) for one in base.modules()}
    linears = ((name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear))
    return {name: HEAD_OF_TASK for name, one in linears if id(one) not in inside}


def linears_of_float_mixers(model: nn.Module) -> dict[str, str]:
    """Return the linears of first Mamba mixers, each with the reason to keep it in floats.

    >>> mixer = nn.ModuleDict({leaf: nn.Linear(64, 64) for leaf in LINEARS})
    >>> list(linears_of_float_mixers(nn.ModuleDict({"mixer": mixer})))
    ['mixer.in_proj', 'mixer.x_proj', 'mixer.dt_proj', 'mixer.out_proj']
    """
    return {
        f"{name}.{leaf}".removeprefix("."): IN_FLOATS
        for name, module in model.named_modules()
        if all(isinstance(getattr(module, leaf, None), nn.Linear) for leaf in LINEARS)
        for leaf in LINEARS
    }

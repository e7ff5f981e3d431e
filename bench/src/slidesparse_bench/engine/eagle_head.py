"""The draft of EAGLE-3 with random weights, as published ones are stored, and how servers are told to use it.

A random draft is as fast as a trained one, and the target takes none of its tokens. So each server is told how many
to take in the mean, by the switch that it has for its own benchmarks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slidesparse_bench.served_records import SGLANG

STEPS = 3
"""Tokens of a draft."""


def write_eagle_head(folder: Path, target: dict[str, Any], device: torch.device, words: int = 32000) -> None:
    """Write the draft of a model.

    Args:
        folder: To make.
        target: The model's config.json; it has at least four layers.
        device: Device on which the weights are drawn.
        words: Tokens that it knows, the first of the model's and fewer than those.
    """
    hidden, inner = target["hidden_size"], target["intermediate_size"]
    q, kv = (target[f"num_{kind}_heads"] * target["head_dim"] for kind in ("attention", "key_value"))
    sizes = {"self_attn.q_proj": (q, 2 * hidden), "self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, inner)}
    sizes |= {f"self_attn.{name}_proj": (kv, 2 * hidden) for name in "kv"}
    sizes |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    shapes: dict[str, tuple[int, ...]] = {f"midlayer.{name}": size for name, size in sizes.items()}
    shapes |= {"fc": (hidden, 3 * hidden), "lm_head": (words, hidden)}
    dice, bf16 = torch.Generator(device).manual_seed(4), torch.bfloat16
    drawn: dict[str, Any] = {"generator": dice, "device": device, "dtype": bf16}
    tensors = {f"{name}.weight": torch.randn(shape, **drawn) * shape[1] ** -0.5 for name, shape in shapes.items()}
    norms = ("norm", *(f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=bf16, device=device) for name in norms}
    tensors["d2t"] = torch.zeros(words, dtype=torch.long)  # what is added to a draft's token for the model's
    tensors["t2d"] = torch.arange(target["vocab_size"]) < words
    last = target["num_hidden_layers"] - 2
    read = {"eagle_aux_hidden_state_layer_ids": [0, last // 2, last]}
    config = {name: value for name, value in target.items() if not name.endswith(("_config", "layer_types"))}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    # SGLang and older runners of vLLM look for the layers in `eagle_config`, its newest runner beside it.
    config |= {"eagle_config": read | {"use_aux_hidden_state": True}, "draft_vocab_size": words, **read}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})


def eagle_settings(server: str, draft: Path, accepted: float | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return arguments of an engine, and variables of its environment.

    ``accepted`` is how many tokens a step gives in the mean, the model's own among them; vLLM takes it from 0.33 on.
    None: as they are accepted.
    """
    if server == SGLANG:
        settings = {"algorithm": "EAGLE3", "num_steps": STEPS, "eagle_topk": 1, "num_draft_tokens": STEPS + 1}
        forced = {"SGLANG_SIMULATE_ACC_LEN": str(accepted), "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
        settings["draft_model_path"] = str(draft)
        return {f"speculative_{name}": value for name, value in settings.items()}, forced if accepted else {}
    config: dict[str, Any] = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": STEPS}
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": accepted}
    return {"speculative_config": config | (synthetic if accepted else {})}, {}

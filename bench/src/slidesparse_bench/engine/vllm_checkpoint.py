"""Write checkpoints of real shapes and random weights, dense and pruned, for engines that are only timed.

Weights are Gaussian with standard deviation ``in ** -0.5``, so that activations keep their size and the GPU draws its
usual power: dummy weights near zero raise the clocks. The pruned checkpoints are prunings of the dense one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slidesparse.checkpoints.marker import Marker
from slidesparse.errors import InputError
from slidesparse.models.config_keys import MARKER_KEY, quantization_config
from slidesparse.pruning import prune_mask
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import Rounding, quantize_weight
from slidesparse_bench.engine.four_bits import four_bit_config, four_bit_tensors
from slidesparse_bench.known_models import MODELS

HEAD = 128

LM_HEAD = "+lm_head"
"""Ends the name of a model whose output embedding is stored as its linears are, by ``prune --lm-head``."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer, each with gate, up and down.

    Attributes:
        experts: Their number.
        chosen: Experts of a token.
        inner: Rows of gate and of up.
    """

    experts: int
    chosen: int
    inner: int


@dataclass(frozen=True)
class Architecture:
    """The parameters of a decoder, besides the shapes of its linears.

    Attributes:
        model_type: The model's code in vLLM: ``qwen2`` (biases on q, k and v), ``llama`` or ``qwen3_moe``.
        layers: Decoder layers.
        heads: Query heads.
        vocabulary: Rows of the embeddings.
        head_columns: Columns of a head.
        mixture: The experts of each layer; None for a dense model.
        attention: Of a mixture, (out, in) of q, k and v together, and of the linear after attention.
        lm_head: The output embedding is stored as linears are. Otherwise it is in BF16.
        linears: (out, in) as :data:`MODELS` has them, of a dense model that is not among those.
    """

    model_type: str
    layers: int
    heads: int
    vocabulary: int
    head_columns: int = HEAD
    mixture: Mixture | None = None
    attention: tuple[tuple[int, int], ...] = ()
    lm_head: bool = False
    linears: tuple[tuple[int, int], ...] = ()

    def sizes(self, model: str) -> tuple[tuple[int, int], ...]:
        """Return (out, in) of every linear of a layer that is read as one, experts one by one."""
        if self.mixture is None:
            return self.linears or MODELS[model.removesuffix(LM_HEAD)]
        hidden, inner = self.attention[0][1], self.mixture.inner
        return (*self.attention, *((2 * inner, hidden), (hidden, inner)) * self.mixture.experts)


ARCHITECTURES = {
    "Llama-3.2-1B": Architecture("llama", 16, 32, 128256, 64),
    "Llama-3.2-3B": Architecture("llama", 28, 24, 128256),
    "Llama-3-8B": Architecture("llama", 32, 32, 128256),
    "Qwen2.5-7B": Architecture("qwen2", 28, 28, 152064),
    "Qwen2.5-14B": Architecture("qwen2", 48, 40, 152064),
    "Qwen2.5-32B": Architecture(
        "qwen2", 64, 40, 152064, linears=((7168, 5120), (5120, 5120), (55296, 5120), (5120, 27648))
    ),
    "BitNet-2B": Architecture("llama", 30, 20, 128256),  # its shapes; SiLU in place of its squared ReLU
    "Qwen3-30B-A3B": Architecture(
        "qwen3_moe", 48, 32, 151936, mixture=Mixture(128, 8, 768), attention=((5120, 2048), (2048, 4096))
    ),
}

ARCHITECTURES |= {
    f"{name}{LM_HEAD}": replace(ARCHITECTURES[name], lm_head=True) for name in ("Llama-3-8B", "Qwen2.5-7B")
}

CLASSES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
"""Code of a model -> its class."""


def model_config(model: str, layers: int | None = None) -> dict[str, Any]:
    """Return config.json of a model, with fewer layers if asked for.

    Raises:
        InputError: An unknown model.
    """
    if model not in ARCHITECTURES:
        raise InputError("unknown model", got=repr(model), needed=", ".join(ARCHITECTURES))
    kind = ARCHITECTURES[model]
    (qkv, hidden), _, (gate_up, _), *_ = kind.sizes(model)
    return {
        "architectures": [CLASSES[kind.model_type]],
        "model_type": kind.model_type,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_size": hidden,
        "head_dim": kind.head_columns,
        "intermediate_size": gate_up // 2,
        "num_hidden_layers": layers or kind.layers,
        "num_attention_heads": kind.heads,
        "num_key_value_heads": (qkv // kind.head_columns - kind.heads) // 2,
        "vocab_size": kind.vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **_mixture_config(kind.mixture),
    }


def _mixture_config(mixture: Mixture | None) -> dict[str, Any]:
    if mixture is None:
        return {}
    return {
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.chosen,
        "moe_intermediate_size": mixture.inner,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    dtype: torch.dtype,
    pattern: Pattern,
    device: torch.device,
    rounding: Rounding = "absmax",
    lm_head: bool = False,
    four_bits: str | None = None,
) -> None:
    """Write a checkpoint that servers load, the same weights on every call.

    Args:
        folder: To make.
        config: From :func:`model_config`.
        dtype: torch.int8, torch.float8_e4m3fn, or torch.bfloat16 for one that is not quantised.
        pattern: The pattern; with ``DENSE`` nothing is pruned, or marked unless it has six bits.
        device: Device on which the weights are drawn.
        rounding: How weights are rounded.
        lm_head: Whether the output embedding is stored as linears are.
        four_bits: ``w4a8`` or ``w4a16`` in place of the type; nothing is pruned then.
    """
    folder.mkdir(parents=True)
    writer = _Writer(folder, dtype, pattern, torch.Generator(device).manual_seed(0), rounding, four_bits)
    for index in range(config["num_hidden_layers"]):
        writer.save(f"layer-{index:03d}.safetensors", _layer(writer, config, f"model.layers.{index}"))
    hidden, rows, experts = config["hidden_size"], config["vocab_size"], config.get("num_experts", 0)
    ends = {
        "model.embed_tokens.weight": writer.gaussian(rows, hidden) * hidden**0.5,
        **(writer.linears({"lm_head": rows}, hidden) if lm_head else {"lm_head.weight": writer.gaussian(rows, hidden)}),
        "model.norm.weight": writer.gain(hidden),
    }
    writer.save("ends.safetensors", ends)
    index_file = {"metadata": {}, "weight_map": writer.files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file), encoding="utf-8")
    extra: dict[str, Any] = {}
    mixtures = [f"model.layers.{index}.mlp" for index in range(config["num_hidden_layers"]) if experts]
    alone = [*([] if lm_head else ["lm_head"]), *(f"{mixture}.gate" for mixture in mixtures)]
    if four_bits is not None:
        extra["quantization_config"] = four_bit_config(four_bits, alone)
    elif dtype != torch.bfloat16:
        extra["quantization_config"] = quantization_config(dtype, alone, "lm_head" if lm_head else None)
    if pattern != DENSE or rounding == "6bit":
        leaves = ("gate_proj", "up_proj", "down_proj")
        treated = {f"{mixture}.experts.*.{leaf}": pattern for mixture in mixtures for leaf in leaves}
        extra[MARKER_KEY] = Marker(pattern, tuple(alone), experts=treated).to_config()
    (folder / "config.json").write_text(json.dumps(config | extra), encoding="utf-8")


def _layer(writer: _Writer, config: dict[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    bias = config["model_type"] == "qwen2"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    rows = {f"{attention}.q_proj": q, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv}
    tensors = writer.linears(rows, hidden, bias)
    tensors |= writer.linears({f"{attention}.o_proj": hidden}, q)
    experts = config.get("num_experts", 0)
    if experts:
        inner = config["moe_intermediate_size"]
        tensors[f"{mlp}.gate.weight"] = writer.gaussian(experts, hidden)
        tensors |= {f"{attention}.{name}_norm.weight": writer.gain(config["head_dim"]) for name in ("q", "k")}
    for name in [f"{mlp}.experts.{expert}" for expert in range(experts)] or [mlp]:
        tensors |= writer.linears({f"{name}.gate_proj": inner, f"{name}.up_proj": inner}, hidden)
        tensors |= writer.linears({f"{name}.down_proj": hidden}, inner)
    norms = ("input_layernorm", "post_attention_layernorm")
    return tensors | {f"{prefix}.{norm}.weight": writer.gain(hidden) for norm in norms}


@dataclass
class _Writer:
    folder: Path
    dtype: torch.dtype
    pattern: Pattern
    generator: torch.Generator
    rounding: Rounding
    four_bits: str | None

    def __post_init__(self) -> None:
        self.files: dict[str, str] = {}

    def gaussian(self, rows: int, columns: int) -> torch.Tensor:
        device = self.generator.device
        weight = torch.randn(rows, columns, generator=self.generator, device=device, dtype=torch.bfloat16)
        return weight.mul_(columns**-0.5)

    def gain(self, columns: int) -> torch.Tensor:
        return 1 + 0.1 * self.gaussian(columns, 1).flatten()

    def linears(self, rows: dict[str, int], columns: int, bias: bool = False) -> dict[str, torch.Tensor]:
        """Return linears of one input, pruned together.

        Args:
            rows: Name of each -> its rows.
            columns: Of all.
            bias: Whether they have one.
        """
        weight = self.gaussian(sum(rows.values()), columns)
        if self.pattern != DENSE:
            weight = weight * prune_mask(weight, self.pattern)
        tensors: dict[str, torch.Tensor] = {}
        for name, part in zip(rows, weight.split(list(rows.values())), strict=True):
            if self.four_bits is not None:
                tensors |= {f"{name}.{kind}": tensor for kind, tensor in four_bit_tensors(part).items()}
            elif self.dtype == torch.bfloat16:
                tensors[f"{name}.weight"] = part
            else:
                values, scale = quantize_weight(part, self.dtype, rounding=self.rounding)
                tensors[f"{name}.weight"] = values
                tensors[f"{name}.weight_scale"] = scale.reshape(-1, 1)
            if bias:
                tensors[f"{name}.bias"] = self.gaussian(len(part), 1).flatten() * 0.02
        return tensors

    def save(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(self.folder / file))
        self.files |= dict.fromkeys(tensors, file)

"""Store experts that share a tensor as one tensor each, the only form in which servers read scales of experts.

A hub has the experts of a layer as ``[experts, 2 * inner, hidden]``, gate above up, or transposed. Where the stock
loader of vLLM also reads one tensor an expert, its name and the split into gate and up follow from the architecture.
Source: ``load_weights`` of ``qwen3_5.py``, ``qwen3_vl_moe.py`` and ``llama4.py`` in vLLM. gpt-oss is missing, since its
loader takes experts of one tensor, in a float type or MXFP4. Granite and Gemma 4 are missing, since releases look for
other names (vLLM #50037, #52706, #55911), or lost them for a while (#54047).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from slidesparse.base.traced_tensor import TracedTensor


@dataclass(frozen=True)
class SingleExperts:
    """Names of the experts of one tensor when each has tensors of its own.

    Attributes:
        shared: End of the name of the tensor with all experts.
        parts: Ends of an expert's names, ``{}`` for its number; they share the rows of its weight.
        transposed: Whether the shared tensor is [experts, in, out]; a tensor of one expert is always [out, in].
    """

    shared: str
    parts: tuple[str, ...]
    transposed: bool = False

    def names(self, tensor: str, expert: int) -> list[str]:
        """Return the names of one expert's tensors.

        >>> SingleExperts(".experts.up", (".experts.{}.up.weight",)).names("layers.0.experts.up", 3)
        ['layers.0.experts.3.up.weight']
        """
        return [tensor.removesuffix(self.shared) + part.format(expert) for part in self.parts]


def _projections(around: str, *, transposed: bool) -> tuple[SingleExperts, ...]:
    def part(leaf: str) -> str:
        return f".{around}.experts.{{}}.{leaf}.weight"

    return (
        SingleExperts(f".{around}.experts.gate_up_proj", (part("gate_proj"), part("up_proj")), transposed),
        SingleExperts(f".{around}.experts.down_proj", (part("down_proj"),), transposed),
    )


SINGLE: Mapping[str, tuple[SingleExperts, ...]] = {
    "Qwen3_5MoeForCausalLM": _projections("mlp", transposed=False),
    "Qwen3_5MoeForConditionalGeneration": _projections("mlp", transposed=False),
    "Qwen3VLMoeForConditionalGeneration": _projections("mlp", transposed=True),
    "Llama4ForCausalLM": _projections("feed_forward", transposed=True),
    "Llama4ForConditionalGeneration": _projections("feed_forward", transposed=True),
}
"""Class of transformers -> its experts' tensors."""


def single_experts(architecture: str, tensor: str) -> SingleExperts | None:
    """Return the single names of a tensor's experts; None where vLLM does not read them so."""
    return next((one for one in SINGLE.get(architecture, ()) if tensor.endswith(one.shared)), None)


def joined(architecture: str, state: Mapping[str, TracedTensor]) -> dict[str, torch.Tensor]:
    """Join single experts of a state to the tensors that transformers knows.

    Where an expert is missing the joined tensor is too short or missing, which later checks report.
    """
    result: dict[str, torch.Tensor] = dict(state)
    for one in SINGLE.get(architecture, ()):
        first = one.parts[0].format(0)
        for begin in [name.removesuffix(first) for name in state if name.endswith(first)]:
            shared = f"{begin}{one.shared}"
            experts: list[torch.Tensor] = []
            while result.keys() >= {*(names := one.names(shared, len(experts)))}:
                experts.append(torch.cat([result.pop(name) for name in names]))
            if experts:
                stacked = torch.stack(experts)
                result[shared] = stacked.transpose(1, 2) if one.transposed else stacked
    return result

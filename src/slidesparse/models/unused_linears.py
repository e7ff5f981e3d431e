"""Ignore-list entries for linears of a checkpoint that its class in transformers does not use.

Examples are the multi-token prediction heads of DeepSeek-V3, GLM-4 and Qwen3-Next. They are copied in their float type,
and vLLM runs them as drafts. There every linear that the list does not name counts as one of 8 bits.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping

AS_LAYERS = re.compile(r"model\.(?:mtp_block|mtp_layers)\.(\d+)\.(.+)")
"""Names of ERNIE 4.5 and MiMo for drafts that vLLM builds as layers after the model's last one."""


def entries_for_unused(
    shapes: Mapping[str, tuple[int, ...]], used: Iterable[str] = (), layers: int | None = None
) -> list[str]:
    r"""Return entries of an ignore list of compressed-tensors for tensors that no linear of the model has.

    Args:
        shapes: Tensor -> its shape. Only matrices of linears get entries; experts of a layer share one.
        used: Tensors that the model has. A layer of experts with some of them gets no common entry.
        layers: Number of layers of the model, where it is known. vLLM numbers some drafts from there on.

    >>> entries_for_unused({"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,)})
    ['mtp.fc']
    >>> print(*entries_for_unused({f"mtp.experts.{i}.up_proj.weight": (96, 64) for i in range(4)}))
    re:mtp\.experts\..*
    >>> entries_for_unused({"model.mtp_block.0.mlp.up_proj.weight": (96, 64)}, layers=28)
    ['model.mtp_block.0.mlp.up_proj', 'model.layers.28.mlp.up_proj']
    """
    entries = list(dict.fromkeys(_entries(shapes, {_experts_of(name) for name in used})))
    return entries + names_as_layers(entries, layers)


def names_as_layers(names: Iterable[str], layers: int | None) -> list[str]:
    """Return vLLM's own names of the linears of drafts that it builds as layers after the model's last."""
    if layers is None:
        return []
    drafts = map(AS_LAYERS.fullmatch, names)
    return [f"model.layers.{layers + int(draft[1])}.{draft[2]}" for draft in drafts if draft]


def _entries(shapes: Mapping[str, tuple[int, ...]], shared: Container[str | None]) -> Iterator[str]:
    for name, shape in shapes.items():
        experts = _experts_of(name)
        if experts is not None and experts not in shared:
            yield rf"re:{re.escape(experts)}\..*"
        elif len(shape) == 2 and name.endswith(".weight"):
            yield name.removesuffix(".weight")


def _experts_of(name: str) -> str | None:
    found = re.match(r"(.+\.experts)\.", name)
    return None if found is None else found[1]

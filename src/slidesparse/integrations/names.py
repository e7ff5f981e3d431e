"""Map a server's layers to those of a checkpoint, with their patterns and the start of each shard.

A server fuses layers (``qkv_proj`` is ``q_proj``, ``k_proj`` and ``v_proj``) and has its own names; the marker has the
checkpoint's. This module needs neither a server nor a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slidesparse.checkpoints.marker import Marker
from slidesparse.checkpoints.quantisation_keys import DEFAULTS
from slidesparse.errors import CheckpointError, UnsupportedError
from slidesparse.gemm.grouped import grouped_patterns
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.models.targets import read_as_matrix
from slidesparse.weights.pattern import Pattern

COMPRESSED_TENSORS = "compressed-tensors"
"""The quantisation method of our checkpoints, which is served dense without a plugin."""

OURS: Mapping[str, Mapping[str, Any]] = {
    "weights": {"num_bits": 8, "symmetric": True, "dynamic": False, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "symmetric": True, "dynamic": True},
}
"""Values of a config group that every scheme of ours has."""

W8A8 = "compressed-tensors in INT8 or FP8, with one scale a channel of weights and a dynamic one a token"

LEFT_ALONE = "left alone when the checkpoint was pruned"

READ_AS_MATRIX = "latent attention reads its weight as a matrix"


def require_w8a8(quantization: Mapping[str, Any], option: str, remedy: str) -> None:
    """Raise an UnsupportedError for a quantised checkpoint of whose layers none can be ours; ``option`` asks for it.

    Where some can, the server runs the others (:func:`why_not_w8a8`).
    """
    method, groups = quantization.get("quant_method"), quantization.get("config_groups")
    if method != COMPRESSED_TENSORS:
        found = [f"quant_method {method!r:.40}"]
    else:
        found = [_why_foreign(group) for group in groups.values()] if isinstance(groups, Mapping) else []
    if all(found):
        got = "; ".join(dict.fromkeys(found)) or "no config_groups"
        raise UnsupportedError(f"{option} for this quantisation", got=got, needed=W8A8, remedy=remedy)


def _why_foreign(group: Any) -> str:
    """Return the first value of a config group that no scheme of ours has; empty without one."""
    for part, needed in OURS.items():
        values = group.get(part) if isinstance(group, Mapping) else None
        if not isinstance(values, Mapping):
            return f"no {part}"
        for key, one in {**DEFAULTS, **values}.items():
            if one != needed.get(key, one):
                return f"{part} with {key} {one!r:.40}"
    return ""


def why_not_w8a8(scheme: Any, w8a8: tuple[type[Any], ...]) -> str | None:
    """Return the reason why a server's scheme cannot be ours; None for one of ``w8a8``, INT8 and FP8, that can."""
    if not isinstance(scheme, w8a8):
        return f"{type(scheme).__name__} is neither INT8 nor FP8 W8A8"
    if scheme.strategy != "channel" or scheme.is_static_input_scheme:
        return "weights need one scale a channel and activations one a token"
    if not getattr(scheme, "input_symmetric", True):
        return "asymmetric activations"
    return None


@dataclass(frozen=True)
class NamedLayer:
    """A layer of a server, before its weight is known.

    ``pattern`` is the checkpoint's; None: find the tightest that the weight satisfies.
    """

    name: str
    pattern: Pattern | None


DOWN = ("down_proj", "w2")
"""Checkpoints' names of an expert's down projection; all others are gate and up."""

JOINED = "gate_up_proj"
"""Checkpoints' name of gate and up as one weight."""


@dataclass(frozen=True)
class NamedExperts:
    """The experts of a layer of a server, before their weights are known.

    Attributes:
        name: The layer's name in the server.
        patterns: The checkpoint's patterns of gate and up, and of down; text: the reason why these cannot run sparse;
            None: find the tightest that the weights satisfy.
    """

    name: str
    patterns: tuple[Pattern, Pattern] | str | None


def list_parts(name: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the checkpoint's names of the layers that a server fuses.

    >>> list_parts("model.layers.0.self_attn.qkv_proj", {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})[1]
    'model.layers.0.self_attn.k_proj'
    """
    parent, _, leaf = name.rpartition(".")
    return [f"{parent}.{part}" if parent else part for part in fused.get(leaf, [leaf])]


def why_left(name: str) -> str | None:
    """Return the reason why a layer keeps its dense weight, whatever its mark; None for a layer that need not.

    >>> why_left("model.layers.0.self_attn.kv_b_proj")
    'latent attention reads its weight as a matrix'
    """
    return READ_AS_MATRIX if read_as_matrix(name) else None


def find_layer(marker: Marker | None, name: str, fused: Mapping[str, Sequence[str]]) -> NamedLayer | None:
    """Return a layer with its marked pattern; None: it was left alone when the model was pruned.

    Parts of a fused layer with different patterns, or with and without one, are a CheckpointError.
    """
    if marker is None:
        return NamedLayer(name, None)
    parts = list_parts(name, fused)
    patterns = {part: None if part in marker.ignore else marker.pattern_of(part) for part in parts}
    if len(set(patterns.values())) > 1:
        raise CheckpointError(
            f"the parts of {name}, which the server runs as one layer",
            got=", ".join(f"{part.rpartition('.')[2]} {pattern or 'left alone'}" for part, pattern in patterns.items()),
            needed="one pattern",
            remedy="prune them alike, or serve it dense",
        )
    pattern = patterns[parts[0]]
    return None if pattern is None else NamedLayer(name, pattern)


def marked_experts(marker: Marker | None, name: str) -> NamedExperts | None:
    """Return the experts of a layer with their marked patterns; None: they were left alone.

    >>> marker = Marker(Pattern(6, 8), experts={"a.experts.*.w1": Pattern(6, 8), "a.experts.*.w3": Pattern(6, 8)})
    >>> marked_experts(marker, "a.experts").patterns
    'not all of them were pruned to one pattern'
    """
    if marker is None:
        return NamedExperts(name, None)
    prefix = f"{name}."
    patterns = {weight.rpartition(".")[2]: p for weight, p in marker.experts.items() if weight.startswith(prefix)}
    if not patterns:
        return None
    down = {pattern for leaf, pattern in patterns.items() if leaf in DOWN}
    gate_up = [pattern for leaf, pattern in patterns.items() if leaf not in DOWN]
    both = len(gate_up) == 2 or JOINED in patterns
    return NamedExperts(name, grouped_patterns(set(gate_up) if both else set(), down))


def rename_layers(marker: Marker, rename: Callable[[list[str]], list[str]]) -> Marker:
    """Return the marker with a server's names, by its mapper's ``apply_list``; unmapped names stay."""

    def new(name: str) -> str:
        return next(iter(rename([name])), None) or name

    layers = {new(name): pattern for name, pattern in marker.layers.items()}
    experts = {new(name): pattern for name, pattern in marker.experts.items()}
    return replace(marker, ignore=tuple(map(new, marker.ignore)), layers=layers, experts=experts)


def shard_start(name: str, columns: int, in_features: int, rank: int | None, size: int | None) -> int:
    """Return the first column of a tensor-parallel rank's shard of a layer in the whole weight.

    ``rank`` of ``size`` ranks with equal shards; an UnsupportedError where they are not.

    >>> shard_start("o_proj", 1792, 3584, 1, 2), shard_start("o_proj", 3584, 3584, 1, 2)
    (1792, 0)
    """
    if columns == in_features:
        return 0
    if rank is None or size is None or size * columns != in_features:
        raise UnsupportedError(
            f"{name}: a shard whose place in the whole weight is unknown",
            got=f"{columns} of {in_features} columns on rank {rank} of {size}",
            needed="equal shards, and the layer's rank",
            remedy="serve on one GPU, or dense, without the plugin",
        )
    return rank * columns


def require_marker(config: object) -> Marker | None:
    """Return the marker of a Hugging Face config object, or None; a CheckpointError where it cannot be read."""
    return Marker.from_config({MARKER_KEY: getattr(config, MARKER_KEY, None)})

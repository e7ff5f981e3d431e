"""What is ours: which checkpoints, which of their layers, and where a shard's columns stand in the whole weight.

vLLM fuses layers (``qkv_proj`` is ``q_proj``, ``k_proj`` and ``v_proj``) and names them by its own modules; the marker
names the layers of the checkpoint. Everything that relates the two is here, and needs neither vLLM nor a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.marker import KEY, Marker
from slidesparse.gemm.select import BACKENDS, Fallback
from slidesparse.models.targets import read_as_matrix
from slidesparse.pattern import Pattern

OPTIONS = "slidesparse"
"""The key of ``--additional-config`` that holds our options."""

METHODS = ("compressed-tensors", "slidesparse")


@dataclass(frozen=True)
class Options:
    """What a user may say: ``--additional-config '{"slidesparse": {"backend": "cusparselt"}}'``.

    Attributes:
        backend: ``auto`` or a backend's name, for every layer.
        fallback: What ``auto`` does where sparsity does not pay: see :mod:`slidesparse.gemm.select`.
        fuse: Join RMSNorm and SiLU with the quantisation behind them in compiled models.
    """

    backend: str = "auto"
    fallback: Fallback = "dense"
    fuse: bool = True

    @classmethod
    def parse(cls, additional_config: object) -> Options:
        """Read vLLM's ``additional_config``; without our key, the defaults.

        Raises:
            InputError: An unknown key or value.
        """
        given = additional_config.get(OPTIONS, {}) if isinstance(additional_config, Mapping) else {}
        known = set(cls.__dataclass_fields__)
        if not isinstance(given, Mapping) or given.keys() - known:
            raise InputError(f"{OPTIONS} in --additional-config", got=repr(given), needed=f"keys {sorted(known)}")
        options = cls(**given)
        if options.backend != "auto" and options.backend not in BACKENDS:
            raise InputError(
                "backend in --additional-config", got=repr(options.backend), needed=f"auto, {', '.join(BACKENDS)}"
            )
        if options.fallback not in ("dense", "none"):
            raise InputError("fallback in --additional-config", got=repr(options.fallback), needed="dense or none")
        if not isinstance(options.fuse, bool):
            raise InputError("fuse in --additional-config", got=repr(options.fuse), needed="true or false")
        return options


def claims(quantization: Mapping[str, Any], user_choice: str | None, marker: object) -> bool:
    """Whether a checkpoint with a ``quantization_config`` is ours.

    Ours are marked ones, unless the user names another method, and any compressed-tensors one on request.

    Args:
        quantization: Its ``quantization_config``.
        user_choice: What ``--quantization`` says, or None.
        marker: The value of ``slidesparse_config``, or None.
    """
    if quantization.get("quant_method") != METHODS[0] or user_choice not in (None, METHODS[1]):
        return False
    return user_choice is not None or marker is not None


@dataclass(frozen=True)
class Claim:
    """What is known of a layer before its weight is.

    Attributes:
        name: The layer's name in vLLM.
        pattern: What the checkpoint says; None: find the tightest that the weight satisfies.
    """

    name: str
    pattern: Pattern | None


def members(name: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The checkpoint's layers behind one of vLLM.

    >>> members("model.layers.0.self_attn.qkv_proj", {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})[1]
    'model.layers.0.self_attn.k_proj'
    """
    parent, _, leaf = name.rpartition(".")
    return [f"{parent}.{part}" if parent else part for part in fused.get(leaf, [leaf])]


def left_to_vllm(name: str) -> str | None:
    """Why a layer of vLLM keeps its dense weight, whatever the marker says of it; None: nothing stands against ours.

    >>> left_to_vllm("model.layers.0.self_attn.kv_b_proj")
    'left to vLLM, whose latent attention reads its weight as a matrix'
    """
    return "left to vLLM, whose latent attention reads its weight as a matrix" if read_as_matrix(name) else None


def claim(marker: Marker | None, name: str, fused: Mapping[str, Sequence[str]]) -> Claim | None:
    """What the marker says of a layer of vLLM; None: it was left alone when the model was pruned.

    Raises:
        CheckpointError: The parts of a fused layer carry different patterns, or only some of them any.
    """
    if marker is None:
        return Claim(name, None)
    parts = members(name, fused)
    patterns = {part: None if part in marker.ignore else marker.pattern_of(part) for part in parts}
    if len(set(patterns.values())) > 1:
        raise CheckpointError(
            f"the parts of {name}, which vLLM runs as one layer",
            got=", ".join(f"{part.rpartition('.')[2]} {pattern or 'left alone'}" for part, pattern in patterns.items()),
            needed="one pattern",
            remedy="prune them alike, or serve dense with --quantization compressed-tensors",
        )
    pattern = patterns[parts[0]]
    return None if pattern is None else Claim(name, pattern)


def renamed(marker: Marker, names: Mapping[str, str | None]) -> Marker:
    """The marker with the layers' names as vLLM has them; None drops a name that has no place there."""

    def new(name: str) -> str:
        return names.get(name) or name

    layers = {new(name): pattern for name, pattern in marker.layers.items()}
    return replace(marker, ignore=tuple(map(new, marker.ignore)), layers=layers)


def shard_start(shard_columns: int, columns: int, rank: int) -> int:
    """The column of the whole weight at which a shard begins.

    Args:
        shard_columns: Columns of this rank's weight.
        columns: Columns of the whole weight.
        rank: Tensor-parallel rank.

    >>> shard_start(1792, 3584, 1), shard_start(3584, 3584, 1)
    (1792, 0)
    """
    return 0 if shard_columns == columns else rank * shard_columns


def require_marker(config: object) -> Marker | None:
    """The marker of a Hugging Face config object, or None.

    Raises:
        CheckpointError: It is there and cannot be read.
    """
    return Marker.from_config({KEY: getattr(config, KEY, None)})

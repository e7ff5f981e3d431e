"""Read two keys of a checkpoint's config.json: ``slidesparse_config`` and ``quantization_config``.

A checkpoint of ours is an ordinary compressed-tensors one with our key added at the top, which other programs ignore::

    "slidesparse_config": {
      "version": 1,
      "pattern": "6:8",
      "ignore": ["lm_head"],
      "layers": {"model.layers.0.mlp.down_proj": "8:10"}
    }

``ignore`` lists every linear that was left alone. ``layers`` lists exceptions to ``pattern``, by exact name; a layer
that is quantised but not pruned is ``"dense"``. Unknown keys and versions are errors: a reader that skips them would
compute something else than the writer meant.

A mixture of experts has version 2 and one key more, ``experts``, which names all experts that were treated::

    "experts": {"model.layers.0.mlp.experts.*.gate_proj": "6:8", ...}

Its names are those of the checkpoint's tensors without ``.weight``, with ``*`` in the place of an expert's number; a
tensor that holds all experts of a layer has its own name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slidesparse.base.typed_json import decode
from slidesparse.errors import CheckpointError, InputError
from slidesparse.models.config_keys import (
    EXPERTS_VERSION,
    LINEAR,
    MARKER_KEY,
    MARKER_VERSION,
    head_target,
    marker_config,
)
from slidesparse.weights.pattern import Pattern

_HEAD = re.compile(re.escape(head_target("NAME")).replace("NAME", r"\w+"))
"""What :func:`slidesparse.models.config_keys.head_target` returns, of any name."""

FROM_FLOAT = "start from the model as it was before it was quantised"


@dataclass(frozen=True)
class _Stored:
    """The value of the key."""

    version: int
    pattern: str
    ignore: tuple[str, ...]
    layers: dict[str, str]


@dataclass(frozen=True)
class _StoredWithExperts(_Stored):
    """The value of the key, of a mixture whose experts were treated."""

    experts: dict[str, str]


@dataclass(frozen=True)
class Marker:
    """The sparsity of a checkpoint.

    Attributes:
        pattern: The common pattern.
        ignore: Linears that were left alone, by exact name.
        layers: Exact name -> pattern, where it is not the common one.
        experts: Name of experts' weights -> pattern, of all that were treated.
    """

    pattern: Pattern
    ignore: tuple[str, ...] = ()
    layers: Mapping[str, Pattern] = field(default_factory=dict)
    experts: Mapping[str, Pattern] = field(default_factory=dict)

    def pattern_of(self, name: str) -> Pattern:
        """Return the pattern of a treated layer."""
        return self.layers.get(name, self.pattern)

    def to_config(self) -> dict[str, Any]:
        """Return the value of the key, ready for JSON."""
        return marker_config(self.pattern, self.ignore, self.layers, self.experts)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Marker | None:
        """Read the key from a whole config.json, None where there is none; a CheckpointError where it is no marker."""
        value = config.get(MARKER_KEY)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise CheckpointError(MARKER_KEY, got=type(value).__name__, needed="an object")
        kinds: dict[object, type[_Stored]] = {MARKER_VERSION: _Stored, EXPERTS_VERSION: _StoredWithExperts}
        version = value.get("version")
        if type(version) is not int or version not in kinds:
            raise CheckpointError(
                f"version of {MARKER_KEY}",
                got=repr(version),
                needed=" or ".join(map(str, kinds)),
                remedy="upgrade slidesparse" if type(version) is int else "make the checkpoint again with prune",
            )
        try:
            stored: _Stored = decode(kinds[version], dict(value), "marker")
            exceptions = {name: Pattern.parse(text) for name, text in stored.layers.items()}
            experts = {name: Pattern.parse(text) for name, text in getattr(stored, "experts", {}).items()}
            return cls(Pattern.parse(stored.pattern), stored.ignore, exceptions, experts)
        except InputError as error:
            raise CheckpointError(f"{MARKER_KEY}: {error}") from error

    @classmethod
    def require(cls, config: Mapping[str, Any], path: object) -> Marker:
        """Read the key, which must be there, as :meth:`from_config`; the error names the checkpoint's ``path``."""
        marker = cls.from_config(config)
        if marker is None:
            raise CheckpointError(
                f"{path} has no {MARKER_KEY}",
                remedy="make one with: slidesparse prune SRC DST --pattern 6:8 --dtype int8",
            )
        return marker


def source_quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``quantization_config`` of a config.json (``compression_config`` in old files), or an empty one.

    Raises:
        CheckpointError: It is no object, or its ``ignore`` is no list of names.
    """
    value = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(value, Mapping):
        raise CheckpointError("quantization_config", got=type(value).__name__, needed="an object")
    ignore = value.get("ignore")
    if ignore is not None and not (isinstance(ignore, list) and all(isinstance(entry, str) for entry in ignore)):
        raise CheckpointError("ignore of quantization_config", got=repr(ignore)[:80], needed="a list of names")
    return value


def is_bitnet(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a BitNet model, whose master has weights in a float type."""
    return source_quantisation(config).get("quant_method") == "bitnet"


def quantisation_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the weight type of a compressed-tensors W8A8 checkpoint, or None for one that is not quantised.

    Raises:
        CheckpointError: The scheme is one that we do not treat, or there is a ``sparsity_config`` (vLLM refuses those).
    """
    value = source_quantisation(config)
    if not value:
        return None
    if value.get("sparsity_config"):
        raise CheckpointError(
            "the checkpoint has a sparsity_config, which vLLM no longer loads",
            remedy="remove the key when its format is dense, else start from the uncompressed checkpoint",
        )

    def other(what: str, got: str, needed: str = "none, or compressed-tensors W8A8 with one group") -> CheckpointError:
        return CheckpointError(f"quantisation {what}of the source", got=got[:300], needed=needed, remedy=FROM_FLOAT)

    method, groups = value.get("quant_method"), value.get("config_groups") or {}
    if method != "compressed-tensors":
        words = [str(word)[:80] for word in (method, value.get("quant_algo")) if word is not None]
        raise other("", " ".join(words) or "no quant_method")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        found = f"{len(groups)} config groups" if isinstance(groups, Mapping) else f"config groups {groups!r:.80}"
        raise other("", f"{method}, {found}")
    (group,) = (_object(value, "a config group") for value in groups.values())
    weights, activations = (_object(group.get(key) or {}, key) for key in ("weights", "input_activations"))
    keys = ("num_bits", "type", "strategy", "symmetric")
    scheme = {
        "targets": _without_head(group.get("targets")),
        "weights": tuple(weights.get(key) for key in keys),
        "activations": tuple(activations.get(key) for key in (*keys, "dynamic")),
    }
    for kind, dtype in (("int", torch.int8), ("float", torch.float8_e4m3fn)):
        as_needed = {"weights": (8, kind, "channel", True), "activations": (8, kind, "token", True, True)}
        if scheme == {"targets": [LINEAR], **as_needed}:
            return dtype
    needed = "8-bit symmetric channel-wise weights and dynamic per-token activations on all Linear layers"
    raise other("scheme ", str(scheme), needed)


def _without_head(targets: Any) -> Any:
    """Return a group's targets without the output embedding that :func:`quantization_config` names besides linears."""
    if isinstance(targets, list) and len(targets) == 2 and _HEAD.fullmatch(str(targets[1])):
        return targets[:1]
    return targets


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} of quantization_config", got=f"{value!r:.80}", needed="an object")
    return value
